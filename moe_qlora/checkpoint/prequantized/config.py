"""What a `quantization_config` says of each weight: its scheme, or that it is not converted.

Sources: transformers' utils/quantization_config.py and should_convert_module (fp8, mxfp8, mxfp4),
https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py and utils/match.py
(config groups, targets, ignore), https://github.com/NVIDIA/Model-Optimizer,
modelopt/torch/export/convert_hf_config.py (quant_algo, exclude_modules, quantized_layers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from ...errors import CheckpointError
from ...models.files import check_patterns

FP8, MXFP8, MXFP4 = "fp8", "mxfp8", "mxfp4"
COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
METHODS = (FP8, MXFP8, MXFP4, COMPRESSED, MODELOPT)

FLOAT, INT = "float", "int"

Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)

ADVICE = "name the model's 16-bit checkpoint instead"


@dataclass(frozen=True)
class Scheme:
    """How a group of weights is stored.

    Attributes:
        kind: `FLOAT` or `INT`.
        bits: Of a code.
        blocks: Rows and columns that share a scale, any of these; None is the whole dimension.
        setting: What the configuration says, for messages.
        nested: Whether scales are FP8 and have a scale of their own, as in NVFP4.
    """

    kind: str
    bits: int
    blocks: tuple[Block, ...]
    setting: str
    nested: bool = False


Groups = Iterator[tuple[Iterable[str] | None, Scheme]]


def maker_method(config: Mapping[str, Any]) -> str | None:
    """Return the method of a config.json that its maker quantized with.

    None for a 16-bit checkpoint and for bitsandbytes, whose folders are read elsewhere.
    """
    return method_of(maker_config(config))


def maker_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a config.json, or that of its text model."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping) and place.get("quantization_config"):
            return _parse(_Mapping, place["quantization_config"])
    return None


def method_of(own: Any) -> str | None:
    """Return the method of a `quantization_config`, as `maker_method` does of a config.json."""
    own = own.to_dict() if hasattr(own, "to_dict") else own
    if not isinstance(own, Mapping) or not own:
        return None
    method = str(own.get("quant_method") or "").lower()
    if method.startswith("bitsandbytes") or own.get("load_in_4bit") or own.get("load_in_8bit"):
        return None
    unnamed = not method and ("quant_algo" in own or own.get("quant_library") == MODELOPT)
    if unnamed or method.startswith(MODELOPT):  # modelopt_fp4 and others are names of vLLM
        return MODELOPT
    return method or "no quant_method"


_SKIPPED = r"(?:{})(?:(?<=\.)|(?=\.|$))"  # transformers' should_convert_module


class MakerConfig:
    """A `quantization_config` of a method that is read.

    Raises:
        CheckpointError: The method, or a setting of it, is not read; the message names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method = method_of(config) or "bitsandbytes"
        if self.method not in METHODS:
            raise _unread(self.method, f"read are {', '.join(METHODS)}")
        inner = config.get("quantization")
        inner = config if inner is None else _parse(_Mapping, inner, "quantization")
        self._ignored: dict[str, re.Pattern[str] | None] = {}
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
            for name in _parse(list[str], {**config, **inner}.get(key) or (), key):
                pattern = None
                if self.method == COMPRESSED:
                    pattern = _pattern(name) if name.startswith("re:") else None
                else:
                    own = translate(name) if self.method == MODELOPT else _SKIPPED.format(name)
                    with suppress(re.error):
                        pattern = re.compile(own)
                self._ignored[name] = pattern
        self._by_name: dict[str, Scheme] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Scheme]] = []
        self._default: Scheme | None = None
        groups: Groups = iter(())  # MXFP4 has one layout
        if self.method == COMPRESSED:
            groups = _compressed_groups(config)
        elif self.method == MODELOPT:
            groups = _modelopt_groups(inner)
        elif self.method != MXFP4:
            groups = iter([(None, _fp8_scheme(config, self.method))])
        for targets, scheme in groups:
            for target in targets or ("Linear",):
                if target.startswith("re:"):
                    self._by_pattern.append((_pattern(target), scheme))
                elif re.fullmatch(r"[A-Z]\w*", target):
                    self._default = self._default or scheme
                else:
                    self._by_name.setdefault(target, scheme)

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raise where a pattern of the configuration may run for ever on these modules' names."""
        found = [pattern for pattern, _ in self._by_pattern]
        if self.method != MODELOPT:  # whose names are globs
            found += filter(None, self._ignored.values())
        check_patterns([one.pattern for one in found], modules, "quantization_config")

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weights; None where no group is for it.

        A group that names the module goes before one whose pattern it matches, and that before one
        of a class, such as Linear, which modules on disk are not told by.
        """
        matches = (scheme for pattern, scheme in self._by_pattern if pattern.match(module))
        return self._by_name.get(module) or next(matches, self._default)

    def is_ignored(self, module: str) -> bool:
        """Whether the configuration says that a module is not converted."""
        is_named: Callable[[str, str], bool] = {
            COMPRESSED: str.__eq__,
            MODELOPT: lambda module, name: module.startswith(f"{name}."),
        }.get(self.method, str.endswith)
        return any(
            is_named(module, name) or (pattern is not None and pattern.match(module) is not None)
            for name, pattern in self._ignored.items()
        )


def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise _unread(f"{target!r:.80}", f"no regular expression: {error}") from error


_Mapping = dict[str, Any]
_Size = Annotated[int, Field(strict=True, ge=1)]
_Pair = tuple[_Size, _Size]


def _parse(kind: Any, value: Any, place: str = "") -> Any:
    """Return a setting as a type that pydantic checks; `place` is its path in the configuration."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in (place, *first["loc"]) if part != "")
        raise _unread(f"{path} {first['input']!r:.80}".lstrip(), first["msg"]) from error


def _unread(setting: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"quantization_config says {setting}, which is not read here ({why}): {ADVICE}."
    )


def _fp8_scheme(config: Mapping[str, Any], method: str) -> Scheme:
    if "weight_block_size" not in config:  # transformers takes 128 x 128, vLLM one for a tensor
        blocks: tuple[Block, ...] = ((1, 32),) if method == MXFP8 else ((128, 128), TENSOR, CHANNEL)
        return Scheme(FLOAT, 8, blocks, "no weight_block_size")
    size = config["weight_block_size"]
    blocks = (TENSOR, CHANNEL) if size is None else (_parse(_Pair, size, "weight_block_size"),)
    return Scheme(FLOAT, 8, blocks, f"weight_block_size {size}")


def _sizes(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    return [int(n) if n.isdigit() else n for n in text.split("x")]


@checked(frozen=True)
class _Weights:
    type: Annotated[Literal["int", "float"], BeforeValidator(lambda v: str(v).lower())] = "int"
    num_bits: Literal[4, 8] = 8
    symmetric: Literal[True] | None = None
    # "weight", or "static", stores columns in order
    actorder: Literal["weight", "static", False] | None = None
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: Annotated[int, Field(strict=True)] | None = None
    block_structure: Annotated[_Pair | None, BeforeValidator(_sizes)] = None


@checked(frozen=True)
class _Group:
    weights: Annotated[_Weights | None, BeforeValidator(lambda v: v or None)] = None
    targets: list[str] | None = None


@checked(frozen=True)
class _Compressed:
    config_groups: dict[str, _Group] | None = None
    sparsity_config: _Mapping | None = None
    transform_config: _Mapping | None = None


def _compressed_groups(config: Mapping[str, Any]) -> Groups:
    own: _Compressed = _parse(_Compressed, config)
    for key, value in (
        ("sparsity_config.format", (own.sparsity_config or {}).get("format", "dense") or "dense"),
        ("transform_config.config_groups", (own.transform_config or {}).get("config_groups")),
    ):
        if value and value != "dense":
            raise _unread(f"{key} {value!r:.80}", "weights are stored otherwise")
    for name, group in (own.config_groups or {}).items():
        if group.weights is None:
            continue
        weights, place = group.weights, f"config_groups.{name}.weights"
        kind, bits, asked = weights.type, weights.num_bits, weights.group_size
        per = "tensor" if asked is None else "channel" if asked == -1 else "group"
        strategy = weights.strategy or per
        nested = strategy == "tensor_group"  # NVFP4's
        if nested and (kind, bits) != (FLOAT, 4):
            raise _unread(f"{place}.strategy {strategy!r}", f"of {bits} bits of type {kind}")
        if strategy == "block":
            block: Block = _parse(_Pair, weights.block_structure, f"{place}.block_structure")
        elif strategy in ("group", "tensor_group"):
            block = (1, _parse(_Size, asked, f"{place}.group_size"))
        else:
            block = CHANNEL if strategy == "channel" else TENSOR
        said = f"{place} ({kind}, {bits} bits, {strategy} {'' if asked is None else asked}"
        yield group.targets, Scheme(kind, bits, (block,), f"{said.rstrip()})", nested)


_FP8_ALGORITHMS: dict[str, tuple[Block, ...]] = {
    "FP8": (TENSOR, CHANNEL),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL,),
    "FP8_PB": ((128, 128),),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
}
_FP4_ALGORITHMS = ("NVFP4", "NVFP4_W4A16", "W4A16_NVFP4")


def _modelopt_groups(config: Mapping[str, Any]) -> Groups:
    layers = _parse(dict[str, _Mapping], config.get("quantized_layers") or {}, "quantized_layers")
    for module, entry in layers.items():
        yield (module,), _modelopt_scheme(entry, f"quantized_layers.{module}.quant_algo")
    if not layers or str(config.get("quant_algo")).upper() != "MIXED_PRECISION":
        yield None, _modelopt_scheme(config, "quant_algo")


def _modelopt_scheme(entry: Mapping[str, Any], place: str) -> Scheme:
    name = str(entry.get("quant_algo")).upper()
    if name in _FP4_ALGORITHMS:
        size = _parse(_Size, entry.get("group_size") or 16, f"{place}, group_size")
        return Scheme(FLOAT, 4, ((1, size),), f"{place} {name}", nested=True)
    if name in _FP8_ALGORITHMS:
        return Scheme(FLOAT, 8, _FP8_ALGORITHMS[name], f"{place} {name}")
    raise _unread(f"{place} {entry.get('quant_algo')!r:.80}", "it is not known")
