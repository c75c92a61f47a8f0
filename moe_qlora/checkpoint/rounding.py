"""Rounding of a 16-bit base through the codec that its adapter was trained on.

An adapter trained over packed weights has learnt to correct their rounding too, which the exact
weights do not have; `like_training=True` rounds the base before the adapter is merged. Which
weights were packed, and how, comes from a packed base (whose decoded weights are rounded already),
from the caller, or from the note that this package writes beside an adapter
(`moe_qlora_adapter.json`); it is never guessed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass as checked
from torch import nn

from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError
from ..layout import dtype_name, unwrapped_name
from ..models.files import read_json
from ..packing import parametrize
from ..packing.bnb4bit import NF4
from ..packing.codec import Packer
from ..packing.linear import check_linears, linear_kind
from ..packing.selection import weights_to_pack
from ..packing.settings import FLOAT_DTYPES, CodecSettings
from .reader import inside, parse_fields
from .source import Fingerprint, check_base, of_model
from .staging import replace_file

NOTE = "moe_qlora_adapter.json"
NOTE_VERSION = 1
_CPU = torch.device("cpu")
_DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}


@dataclass(frozen=True)
class Rounding:
    """Which expert weights and weights of Linear layers were packed in training, and how."""

    settings: CodecSettings
    experts: frozenset[str]
    linears: frozenset[str]
    base: Fingerprint | None = field(default=None, compare=False)  # the model; None in old notes
    # of the experts, those that keep their checkpoint's own codes, which nothing has rounded
    kept: Mapping[str, CodecSettings] = field(default_factory=dict, compare=False)
    # of the weights before they were packed, and decoded; None where that is unknown or differs
    dtype: torch.dtype | None = field(default=None, compare=False)

    def __contains__(self, name: object) -> bool:
        return (name in self.experts and name not in self.kept) or name in self.linears

    def packer(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU
    ) -> Packer:
        """Return a packer that packs this parameter as in training.

        `dtype` is the parameter's here; it is rounded to the one in training first, where that is
        known.
        """
        dtype = self.dtype or dtype
        return Packer(shape, self._linear_dtype(name) or dtype, device, self.settings)

    def decoded_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return what the packed parameter is decoded to; `dtype` is the parameter's here."""
        return dtype if self._linear_dtype(name) else self.dtype or dtype

    def _linear_dtype(self, name: str) -> torch.dtype | None:
        """Return what bitsandbytes casts this parameter to, if it is a Linear layer's."""
        return self.settings.codec.linear_dtype if name in self.linears else None


def from_config(model: nn.Module, config: Any) -> Rounding:
    """Return what a load with this config, or its dict, packs; replace the meta model's Linears."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = CodecSettings.from_config(config)
    if isinstance(config, Mapping):
        config = BitsAndBytesConfig.from_dict(dict(config))
    params = weights_to_pack(model, detect(model), config, settings)
    experts = frozenset(name for param in params for name in param.names)
    quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
    base = of_model(model)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    check_linears(model, settings)
    return Rounding(settings, experts, _packed_linears(model), base)


def from_packed(model: nn.Module) -> Rounding | None:
    """Return what of a model, maybe with PEFT's wrappers, is packed; None where no expert is."""
    packed = list(parametrize.iter_packed(model))
    if not packed:
        return None
    weights = {
        unwrapped_name(f"{owner}.{name}".lstrip(".")): parametrize.read_packed(module, name)
        for owner, module, name in packed
    }
    how = {name: CodecSettings.of(weight) for name, weight in weights.items()}
    kept = {name: settings for name, settings in how.items() if settings.codec.is_kept}
    rounded = (settings for settings in how.values() if not settings.codec.is_kept)
    settings = next(rounded, None) or _of_linears(model)
    linears = _packed_linears(model)
    dtypes = {weight.dtype for weight in weights.values()} | set(_linear_dtypes(model))
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return Rounding(settings, frozenset(how), linears, of_model(model), kept, dtype)


def _linear_dtypes(model: nn.Module) -> Iterator[torch.dtype]:
    """Yield what the weights of bitsandbytes' 4-bit Linear layers were before they were packed."""
    for module in model.modules():
        if parametrize.is_packed_linear(module):
            host: Any = module
            state = getattr(host.weight, "quant_state", None)
            if state is not None:
                yield state.dtype


def _of_linears(model: nn.Module) -> CodecSettings:
    """Return how the first of bitsandbytes' Linear layers is packed; nf4 where there is none."""
    for module in model.modules():
        if parametrize.is_packed_linear(module):
            host: Any = module
            state = getattr(host.weight, "quant_state", None)
            if state is None:
                return CodecSettings(linear_kind(module))
            return CodecSettings(state.quant_type, state.nested, blocksize=state.blocksize)
    return CodecSettings(NF4.kind)


def _packed_linears(model: nn.Module) -> frozenset[str]:
    """Return the names of weights that bitsandbytes' Linear layers hold."""
    return frozenset(
        unwrapped_name(f"{name}.weight")
        for name, module in model.named_modules(remove_duplicate=False)
        if parametrize.is_packed_linear(module)
    )


def _check_dtype(name: str | None) -> str | None:
    if name is not None and name not in _DTYPES:
        raise ValueError(f"no dtype of weights ({', '.join(_DTYPES)})")
    return name


@checked
class _Note:
    """The note beside an adapter."""

    format_version: int
    codec: Annotated[dict[str, Any], AfterValidator(CodecSettings.from_dict)]
    experts: list[str]
    linears: list[str]
    base: Fingerprint | None = None
    dtype: Annotated[str | None, AfterValidator(_check_dtype)] = None
    chosen_experts: dict[str, list[int]] | None = None


def write_note(
    folder: Path, packed: Rounding, chosen: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> None:
    """Write a note of what was packed in training beside an adapter.

    `chosen` are the experts with LoRA, by the name of the weight, where these are not all.
    """
    settings = packed.settings.to_dict()
    note = {
        "format_version": NOTE_VERSION,
        "codec": {key: settings[key] for key in ("kind", "double_quant", "blocksize")},
        "experts": sorted(packed.experts - packed.kept.keys()),
        "linears": sorted(packed.linears),
    }
    if packed.dtype is not None:
        note["dtype"] = dtype_name(packed.dtype)
    if packed.base is not None:
        note["base"] = asdict(packed.base)
    if chosen:
        note["chosen_experts"] = {name: list(experts) for name, experts in chosen.items()}
    replace_file(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())


def from_note(folder: Path) -> Rounding | None:
    """Return what the note beside an adapter says; None where there is none."""
    fields = _read_note(folder)
    if fields is None:
        return None
    settings: Any = fields.codec
    experts, linears = frozenset(fields.experts), frozenset(fields.linears)
    dtype = None if fields.dtype is None else _DTYPES[fields.dtype]
    return Rounding(settings, experts, linears, fields.base, dtype=dtype)


def chosen_experts(folder: Path) -> dict[str, list[int]] | None:
    """Return the experts with LoRA by the note beside an adapter; None where these are all."""
    fields = _read_note(folder)
    return None if fields is None else fields.chosen_experts


def _read_note(folder: Path) -> _Note | None:
    file = folder / NOTE
    if not file.exists():
        return None
    note = read_json(inside(folder, NOTE))
    if note.get("format_version") != NOTE_VERSION:
        raise CheckpointError(
            f"{file} has the format version {note.get('format_version')!r}; this moe_qlora reads "
            f"{NOTE_VERSION}."
        )
    return parse_fields(_Note, note, file)


def check_noted_base(adapter: Path, base: Callable[[Iterable[str]], Fingerprint]) -> None:
    """Compare the base in an adapter's note, if it has one, with one given by names of weights."""
    noted = from_note(adapter)
    if noted is not None and noted.base is not None:
        check_base(str(adapter), noted.base, base(noted.base.bits))


def choose(adapter: Path, by_config: Rounding | None) -> Rounding:
    """Return the caller's or the note's; they must agree where there are both."""
    noted = from_note(adapter)
    known = noted or by_config
    if known is None:
        raise ConfigError(
            f"like_training needs the codec that {adapter} was trained on, which its files do not "
            "say: pass quantization_config (--quant nf4, fp4 or int8, with --double-quant where it "
            "was used), or merge into the packed base folder."
        )
    if by_config is not None and noted is not None and _label(by_config) != _label(noted):
        raise ConfigError(
            f"quantization_config asks for {_label(by_config)}, and {adapter / NOTE} says that the "
            f"adapter was trained on {_label(noted)}; leave quantization_config out."
        )
    return known


def _label(rounding: Rounding) -> str:
    double = " with double quantization" if rounding.settings.double_quant else ""
    return rounding.settings.kind + double
