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
from typing import Any

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
            return _mapping(place["quantization_config"], "quantization_config")
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
            raise CheckpointError(
                f"quantization_config says {self.method}, which is not read here (read are "
                f"{', '.join(METHODS)}): {ADVICE}."
            )
        inner = config.get("quantization")
        inner = config if inner is None else _mapping(inner, "quantization")
        self._ignored = tuple(_names({**config, **inner}))
        self._by_name: dict[str, Scheme] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Scheme]] = []
        self._default: Scheme | None = None
        for targets, scheme in self._groups(config, inner):
            self._add(targets, scheme)
        if self.method == COMPRESSED:
            self._ignored_patterns = [_pattern(n) for n in self._ignored if n.startswith("re:")]

    def _groups(self, config: Mapping[str, Any], inner: Mapping[str, Any]) -> Groups:
        if self.method == COMPRESSED:
            return _compressed_groups(config)
        if self.method == MODELOPT:
            return _modelopt_groups(inner)
        if self.method == MXFP4:
            return iter(())
        return iter([((), _fp8_scheme(config, self.method))])

    def _add(self, targets: tuple[str, ...], scheme: Scheme) -> None:
        for target in targets or ("Linear",):
            if target.startswith("re:"):
                self._by_pattern.append((_pattern(target), scheme))
            elif re.fullmatch(r"[A-Z]\w*", target):
                self._default = self._default or scheme
            else:
                self._by_name.setdefault(target, scheme)

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
        names = config.get(key) or ()
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise CheckpointError(f"quantization_config has {key} {names!r:.80}, no list of names.")
        yield from names


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
        raise CheckpointError(
            f"quantization_config has {target!r:.80}, which is no regular expression: {error}."
        ) from error


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{place} is {value!r:.80} in config.json, which is no JSON object.")
    return value


def _size(value: Any, setting: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"quantization_config says {setting} {value!r:.80}, which is no size of a block."
        )
    return value


def _pair(value: Any, setting: str) -> Block:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise CheckpointError(
            f"quantization_config says {setting} {value!r:.80}, which is no pair of sizes."
        )
    return _size(value[0], setting), _size(value[1], setting)


def _unread(setting: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"quantization_config says {setting} {value!r:.80}, which is not read here: {ADVICE}."
    )


# fp8 and mxfp8


def _fp8_scheme(config: Mapping[str, Any], method: str) -> Scheme:
    if "weight_block_size" not in config:  # transformers takes 128 x 128, vLLM one for a tensor
        blocks: tuple[Block, ...] = ((1, 32),) if method == MXFP8 else ((128, 128), TENSOR, CHANNEL)
        return Scheme(FLOAT, 8, blocks, "no weight_block_size")
    size = config["weight_block_size"]
    blocks = (TENSOR, CHANNEL) if size is None else (_pair(size, "weight_block_size"),)
    return Scheme(FLOAT, 8, blocks, f"weight_block_size {size}")


# compressed-tensors


def _compressed_groups(config: Mapping[str, Any]) -> Groups:
    sparsity = _mapping(config.get("sparsity_config") or {}, "sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise _unread("sparsity_config.format", sparsity["format"])
    transforms = _mapping(config.get("transform_config") or {}, "transform_config")
    if transforms.get("config_groups"):
        raise _unread("transform_config.config_groups", sorted(transforms["config_groups"]))
    groups = _mapping(config.get("config_groups") or {}, "config_groups")
    for name, group in groups.items():
        place = f"config_groups.{name}"
        weights = _mapping(group, place).get("weights")
        if weights:
            targets = group.get("targets") or ()
            scheme = _compressed_scheme(_mapping(weights, place), f"{place}.weights")
            yield tuple(str(target) for target in targets), scheme


def _compressed_scheme(weights: Mapping[str, Any], place: str) -> Scheme:
    kind, bits = str(weights.get("type", INT)).lower(), weights.get("num_bits", 8)
    if weights.get("symmetric") is False:
        raise _unread(f"{place}.symmetric", False)
    # "weight", or "static", stores columns in order
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unread(f"{place}.actorder", weights["actorder"])
    if kind not in (FLOAT, INT) or bits not in (4, 8):
        raise _unread(f"{place}.num_bits", f"{bits} of type {kind}")
    asked, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if asked is None else "channel" if asked == -1 else "group"
    if strategy == "tensor_group" and (kind, bits) != (FLOAT, 4):  # NVFP4's, whose scales nest
        raise _unread(f"{place}.strategy", f"{strategy} of {bits} bits of type {kind}")
    if strategy == "block":
        size = weights.get("block_structure")
        if isinstance(size, str):
            size = [int(n) if n.isdigit() else n for n in size.split("x")]
        block = _pair(size, f"{place}.block_structure")
    elif strategy in ("group", "tensor_group"):
        block = (1, _size(asked, f"{place}.group_size"))
    elif strategy in ("channel", "tensor"):
        block = CHANNEL if strategy == "channel" else TENSOR
    else:
        raise _unread(f"{place}.strategy", strategy)
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
    layers = _mapping(config.get("quantized_layers") or {}, "quantized_layers")
    for module, layer in layers.items():
        place = f"quantized_layers.{module}"
        entry = _mapping(layer, place)
        yield (module,), _modelopt_scheme(entry.get("quant_algo"), entry, f"{place}.quant_algo")
    algorithm = config.get("quant_algo")
    if not layers or str(algorithm).upper() != "MIXED_PRECISION":
        yield (), _modelopt_scheme(algorithm, config, "quant_algo")


def _modelopt_scheme(algorithm: Any, entry: Mapping[str, Any], place: str) -> Scheme:
    name = str(algorithm).upper()
    if name in _FP4_ALGORITHMS:
        size = _size(entry.get("group_size") or 16, f"{place}, group_size")
        return Scheme(FLOAT, 4, ((1, size),), f"{place} {name}", nested=True)
    if name in _FP8_ALGORITHMS:
        return Scheme(FLOAT, 8, _FP8_ALGORITHMS[name], f"{place} {name}")
    raise _unread(place, algorithm)
