"""What a `quantization_config` says of each weight: its scheme, or that it is not converted.

Sources: transformers' utils/quantization_config.py and should_convert_module (fp8, mxfp8, mxfp4),
https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py and utils/match.py
(config groups, targets, ignore), https://github.com/NVIDIA/Model-Optimizer,
modelopt/torch/export/convert_hf_config.py (quant_algo, exclude_modules, quantized_layers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
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

Groups = Iterator[tuple[tuple[str, ...], "Scheme"]]

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


def maker_method(config: Mapping[str, Any]) -> str | None:
    """Return the method of a config.json that its maker quantized with.

    None for a 16-bit checkpoint and for bitsandbytes, whose folders are read elsewhere.
    """
    own = maker_config(config)
    return None if own is None else _method(own)


def maker_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a config.json, or that of its text model."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping) and place.get("quantization_config"):
            return _parse(_Mapping, place["quantization_config"])
    return None


def _method(own: Mapping[str, Any]) -> str | None:
    method = str(own.get("quant_method") or "").lower()
    if method.startswith("bitsandbytes") or own.get("load_in_4bit") or own.get("load_in_8bit"):
        return None
    if method.startswith(MODELOPT):  # modelopt_fp4 and others are names of vLLM
        return MODELOPT
    if not method and ("quant_algo" in own or own.get("quant_library") == MODELOPT):
        return MODELOPT
    return method or "no quant_method"


class MakerConfig:
    """A `quantization_config` of a method that is read.

    Raises:
        CheckpointError: The method, or a setting of it, is not read; the message names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method = _method(config) or "bitsandbytes"
        if self.method not in METHODS:
            raise _unread(self.method, f"read are {', '.join(METHODS)}")
        inner = config.get("quantization")
        inner = config if inner is None else _parse(_Mapping, inner, "quantization")
        self._ignored = tuple(_names({**config, **inner}))
        self._by_name: dict[str, Scheme] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Scheme]] = []
        self._default: Scheme | None = None
        groups: Groups = iter(())  # MXFP4 has one layout
        if self.method == COMPRESSED:
            groups = _compressed_groups(config)
        elif self.method == MODELOPT:
            groups = _modelopt_groups(inner)
        elif self.method != MXFP4:
            groups = iter([((), _fp8_scheme(config, self.method))])
        for targets, scheme in groups:
            for target in targets or ("Linear",):
                if target.startswith("re:"):
                    self._by_pattern.append((_pattern(target), scheme))
                elif re.fullmatch(r"[A-Z]\w*", target):
                    self._default = self._default or scheme
                else:
                    self._by_name.setdefault(target, scheme)
        if self.method == COMPRESSED:
            self._ignored_patterns = [_pattern(n) for n in self._ignored if n.startswith("re:")]

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raise where a pattern of the configuration may run for ever on these modules' names."""
        patterns = [pattern.pattern for pattern, _ in self._by_pattern]
        if self.method == COMPRESSED:
            patterns += [pattern.pattern for pattern in self._ignored_patterns]
        elif self.method != MODELOPT:
            patterns += [_SKIPPED.format(name) for name in self._ignored]
        check_patterns(patterns, modules, "quantization_config")

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weights; None where no group is for it.

        A group that names the module goes before one whose pattern it matches, and that before one
        of a class, such as Linear, which modules on disk are not told by.
        """
        if module in self._by_name:
            return self._by_name[module]
        matches = (scheme for pattern, scheme in self._by_pattern if pattern.match(module))
        return next(matches, self._default)

    def is_ignored(self, module: str) -> bool:
        """Whether the configuration says that a module is not converted."""
        if self.method == COMPRESSED:
            return module in self._ignored or any(p.match(module) for p in self._ignored_patterns)
        if self.method == MODELOPT:
            return any(
                fnmatchcase(module, name) or module.startswith(f"{name}.") for name in self._ignored
            )
        return any(_skips(name, module) for name in self._ignored)


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        yield from _parse(list[str], config.get(key) or (), key)


_SKIPPED = r"(?:{})(?:(?<=\.)|(?=\.|$))"


def _skips(name: str, module: str) -> bool:
    if module.endswith(name):
        return True
    try:
        return re.match(_SKIPPED.format(name), module) is not None
    except re.error:
        return False


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


# fp8 and mxfp8


def _fp8_scheme(config: Mapping[str, Any], method: str) -> Scheme:
    if "weight_block_size" not in config:  # transformers takes 128 x 128, vLLM one for a tensor
        blocks: tuple[Block, ...] = ((1, 32),) if method == MXFP8 else ((128, 128), TENSOR, CHANNEL)
        return Scheme(FLOAT, 8, blocks, "no weight_block_size")
    size = config["weight_block_size"]
    blocks = (TENSOR, CHANNEL) if size is None else (_parse(_Pair, size, "weight_block_size"),)
    return Scheme(FLOAT, 8, blocks, f"weight_block_size {size}")


# compressed-tensors


@checked(frozen=True)
class _CompressedWeights:
    type: Literal["int", "float"] = "int"
    num_bits: Literal[4, 8] = 8
    symmetric: Literal[True] | None = None
    # "weight", or "static", stores columns in order
    actorder: Literal["weight", "static", False] | None = None
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: Annotated[int, Field(strict=True)] | None = None
    block_structure: _Pair | None = None


@checked(frozen=True)
class _CompressedGroup:
    weights: _Mapping | None = None
    targets: list[str] | None = None


@checked(frozen=True)
class _Compressed:
    config_groups: dict[str, _CompressedGroup] | None = None
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
        if group.weights:
            scheme = _compressed_scheme(group.weights, f"config_groups.{name}.weights")
            yield tuple(group.targets or ()), scheme


def _compressed_scheme(settings: Mapping[str, Any], place: str) -> Scheme:
    size = settings.get("block_structure")
    if isinstance(size, str):
        size = [int(n) if n.isdigit() else n for n in size.split("x")]
    given = {**settings, "block_structure": size, "type": str(settings.get("type", INT)).lower()}
    weights: _CompressedWeights = _parse(_CompressedWeights, given, place)
    kind, bits, asked = weights.type, weights.num_bits, weights.group_size
    per = "tensor" if asked is None else "channel" if asked == -1 else "group"
    strategy = weights.strategy or per
    if strategy == "tensor_group" and (kind, bits) != (FLOAT, 4):  # NVFP4's, whose scales nest
        raise _unread(f"{place}.strategy {strategy!r}", f"of {bits} bits of type {kind}")
    if strategy == "block":
        block: Block = _parse(_Pair, weights.block_structure, f"{place}.block_structure")
    elif strategy in ("group", "tensor_group"):
        block = (1, _parse(_Size, asked, f"{place}.group_size"))
    else:
        block = CHANNEL if strategy == "channel" else TENSOR
    setting = f"{place} ({kind}, {bits} bits, {strategy} {'' if asked is None else asked}".rstrip()
    return Scheme(kind, bits, (block,), f"{setting})", strategy == "tensor_group")


# modelopt

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
        place = f"quantized_layers.{module}.quant_algo"
        yield (module,), _modelopt_scheme(entry.get("quant_algo"), entry, place)
    algorithm = config.get("quant_algo")
    if not layers or str(algorithm).upper() != "MIXED_PRECISION":
        yield (), _modelopt_scheme(algorithm, config, "quant_algo")


def _modelopt_scheme(algorithm: Any, entry: Mapping[str, Any], place: str) -> Scheme:
    name = str(algorithm).upper()
    if name in _FP4_ALGORITHMS:
        size = _parse(_Size, entry.get("group_size") or 16, f"{place}, group_size")
        return Scheme(FLOAT, 4, ((1, size),), f"{place} {name}", nested=True)
    if name in _FP8_ALGORITHMS:
        return Scheme(FLOAT, 8, _FP8_ALGORITHMS[name], f"{place} {name}")
    raise _unread(f"{place} {algorithm!r:.80}", "it is not known")
