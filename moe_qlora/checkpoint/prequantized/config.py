"""What a `quantization_config` says of each weight: its scheme, or that it is not converted.

Sources: transformers' utils/quantization_config.py (fp8, mxfp8, mxfp4),
https://github.com/vllm-project/compressed-tensors (config groups, targets, ignore),
https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/convert_hf_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...errors import CheckpointError

FP8, MXFP8, MXFP4 = "fp8", "mxfp8", "mxfp4"
COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
METHODS = (FP8, MXFP8, MXFP4, COMPRESSED, MODELOPT)

Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)

_ADVICE = "name the model's 16-bit checkpoint instead"


@dataclass(frozen=True)
class Scheme:
    """How a group of weights is stored.

    Attributes:
        kind: "float" or "int".
        bits: Of a code.
        blocks: Rows and columns that share a scale, any of these; None is the whole dimension.
        setting: The key of the configuration that says so, for messages.
    """

    kind: str
    bits: int
    blocks: tuple[Block, ...]
    setting: str


def maker_method(config: Mapping[str, Any]) -> str | None:
    """Return the method of a config.json that its maker quantized with.

    None for a 16-bit checkpoint and for bitsandbytes, whose folders are read elsewhere.
    """
    own = maker_config(config)
    if own is None:
        return None
    method = own.get("quant_method")
    if not method:
        if own.get("load_in_4bit") or own.get("load_in_8bit"):
            return None
        from_modelopt = "quant_algo" in own or own.get("quant_library") == MODELOPT
        return MODELOPT if from_modelopt else "an unnamed method"
    method = str(method).lower()
    if method.startswith("bitsandbytes"):
        return None
    return MODELOPT if method.startswith(MODELOPT) else method


def maker_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a config.json, or that of its text model."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping) and place.get("quantization_config"):
            own = place["quantization_config"]
            if not isinstance(own, Mapping):
                raise CheckpointError(
                    f"quantization_config is {own!r:.80} in config.json, which is no JSON object."
                )
            return own
    return None


class MakerConfig:
    """A `quantization_config` of a method that is read.

    Raises:
        CheckpointError: The method, or a setting of it, is not read; the message names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method = maker_method({"quantization_config": config}) or "bitsandbytes"
        if self.method not in METHODS:
            raise CheckpointError(
                f"quantization_config says quant_method {self.method}, which is not read here "
                f"(read are {', '.join(METHODS)}): {_ADVICE}."
            )
        self.ignored = tuple(
            str(name)
            for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
            for name in config.get(key) or ()
        )
        self.groups: list[tuple[tuple[str, ...], Scheme]] = []
        if self.method == COMPRESSED:
            _check_compressed(config)
            self.groups = [*_compressed_groups(config)]
        elif self.method == MODELOPT:
            self.groups = [*_modelopt_groups(config)]
        elif self.method != MXFP4:
            self.groups = [((), _fp8_scheme(config, self.method))]

    def is_ignored(self, module: str) -> bool:
        """Whether the configuration says that a module is not converted."""
        return any(self._matches(module, pattern) for pattern in self.ignored)

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weights; None where no group is for it.

        A group that names the module goes before one whose pattern it matches, and that before one
        of a class, such as Linear, which modules on disk are not told by.
        """
        ranked = [
            (rank, number)
            for number, (targets, _) in enumerate(self.groups)
            if (rank := _rank(module, targets)) is not None
        ]
        return self.groups[min(ranked)[1]][1] if ranked else None

    def _matches(self, module: str, pattern: str) -> bool:
        if self.method == COMPRESSED:
            return _matches_name(module, pattern)
        if self.method == MODELOPT:
            return fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
        # As transformers' should_convert_module: from the start or as the end of a name.
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        try:
            start = re.match(rf"(?:{pattern}){boundary}", module)
        except re.error:
            start = None
        return start is not None or module.endswith(pattern)


def _matches_name(module: str, target: str) -> bool:
    """Whether a name or `re:` pattern of compressed-tensors is for a module."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _rank(module: str, targets: Iterable[str]) -> int | None:
    ranks = [
        1 if target.startswith("re:") else 0 for target in targets if _matches_name(module, target)
    ]
    if not ranks and (not targets or any(_is_class(target) for target in targets)):
        ranks = [2]
    return min(ranks, default=None)


def _is_class(target: str) -> bool:
    return re.fullmatch(r"[A-Z]\w*", target) is not None


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


def _fp8_scheme(config: Mapping[str, Any], method: str) -> Scheme:
    default = [1, 32] if method == MXFP8 else None
    size = config.get("weight_block_size", default)
    blocks = (TENSOR, CHANNEL) if size is None else (_pair(size, "weight_block_size"),)
    return Scheme("float", 8, blocks, f"weight_block_size {size}")


def _check_compressed(config: Mapping[str, Any]) -> None:
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"quantization_config says sparsity_config.format {sparsity['format']}, which is not "
            f"read here: {_ADVICE}."
        )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(
            "quantization_config has a transform_config, whose rotations are not undone here: "
            f"{_ADVICE}."
        )


def _compressed_groups(
    config: Mapping[str, Any],
) -> Iterable[tuple[tuple[str, ...], Scheme]]:
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights")
        if weights:
            place = f"config_groups.{name}.weights"
            yield tuple(group.get("targets") or ()), _compressed_scheme(weights, place)


def _compressed_scheme(weights: Mapping[str, Any], place: str) -> Scheme:
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits", 8)
    for key, bad in (("symmetric", (False,)), ("actorder", ("group", "dynamic", True))):
        if key in weights and weights[key] in bad:
            raise CheckpointError(
                f"quantization_config says {place}.{key} {weights[key]}, which is not read here: "
                f"{_ADVICE}."
            )
    if (kind, bits) not in (("float", 8), ("float", 4), ("int", 8), ("int", 4)):
        raise CheckpointError(
            f"quantization_config says {place}: {bits} bits of type {kind}, which is not read here "
            f"(read are 4 and 8 bits of float and int): {_ADVICE}."
        )
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "block":
        size = weights.get("block_structure")
        if isinstance(size, str):
            size = [int(n) if n.isdigit() else n for n in size.split("x")]
        blocks: Block = _pair(size, f"{place}.block_structure")
    elif strategy in ("group", "tensor_group"):
        blocks = (1, _size(group, f"{place}.group_size"))
    elif strategy in ("channel", "tensor"):
        blocks = CHANNEL if strategy == "channel" else TENSOR
    else:
        raise CheckpointError(
            f"quantization_config says {place}.strategy {strategy}, which is not read here: "
            f"{_ADVICE}."
        )
    return Scheme(kind, bits, (blocks,), place)


_FP8_ALGORITHMS: dict[str, tuple[Block, ...]] = {
    "FP8": (TENSOR, CHANNEL),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL,),
    "FP8_PB": ((128, 128),),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
}
_FP4_ALGORITHMS = {"NVFP4": 16, "NVFP4_W4A16": 16, "W4A16_NVFP4": 16}


def _modelopt_groups(
    config: Mapping[str, Any],
) -> Iterable[tuple[tuple[str, ...], Scheme]]:
    inner = config.get("quantization") or config
    layers = inner.get("quantized_layers") or {}
    for module, entry in layers.items():
        yield (module,), _modelopt_scheme(entry.get("quant_algo"), entry, f"{module}: quant_algo")
    algorithm = inner.get("quant_algo")
    if str(algorithm).upper() == "MIXED_PRECISION" and layers:
        return
    yield (), _modelopt_scheme(algorithm, inner, "quant_algo")


def _modelopt_scheme(algorithm: Any, entry: Mapping[str, Any], place: str) -> Scheme:
    name = str(algorithm).upper()
    if name in _FP4_ALGORITHMS:
        size = _size(entry.get("group_size") or _FP4_ALGORITHMS[name], f"{place}, group_size")
        return Scheme("float", 4, ((1, size),), f"{place} {name}")
    if name in _FP8_ALGORITHMS:
        return Scheme("float", 8, _FP8_ALGORITHMS[name], f"{place} {name}")
    known = ", ".join([*_FP8_ALGORITHMS, *_FP4_ALGORITHMS])
    raise CheckpointError(
        f"quantization_config of modelopt says {place} {algorithm}, which is not read here (read "
        f"are {known}): {_ADVICE}."
    )
