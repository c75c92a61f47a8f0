"""What a 16-bit base loses in the codec that its adapter was trained on.

An adapter trained over packed weights has learnt to correct their rounding too. Merged into the
exact weights it sits beside what it was trained for; `like_training=True` rounds the base first.
Which weights were packed, and how, comes from a packed base (whose decoded weights are rounded
already), from the caller, or from the note that this package leaves beside an adapter
(`moe_qlora_adapter.json`); it is never guessed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError
from ..packing import codec as codec_
from ..packing import parametrize
from ..packing.codec import PackedWeight, Packer
from ..packing.linear import is_packed_linear
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from .reader import read_json
from .writer import replace_file

NOTE = "moe_qlora_adapter.json"
NOTE_VERSION = 1


@dataclass(frozen=True)
class Rounding:
    """Which parameters were packed in training, and how.

    Attributes:
        settings: Of the codec.
        experts: Names of expert stacks.
        linears: Names of the weights of Linear layers.
    """

    settings: CodecSettings
    experts: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        return name in self.experts or name in self.linears

    def packer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Packer:
        """Packs this parameter as it was packed in training."""
        if self.settings.kind == "int8" and name in self.linears:
            dtype = torch.float16  # what bitsandbytes' own 8-bit Linear layers are cast to
        return Packer(shape, dtype, torch.device("cpu"), self.settings)


def finish(packer: Packer, dtype: torch.dtype) -> PackedWeight:
    """The packed stack, which decodes to `dtype`."""
    stack = packer.finish()
    if stack.dtype != dtype:
        stack.dtype = stack.state.dtype = dtype
    return stack


def from_config(model: nn.Module, config: Any) -> Rounding:
    """What a load with this `BitsAndBytesConfig` packs.

    Args:
        model: On the meta device; its Linear layers are replaced.
        config: A `BitsAndBytesConfig` or its dict.

    Raises:
        ConfigError: It cannot be followed.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = CodecSettings.from_config(config)
    if isinstance(config, Mapping):
        config = BitsAndBytesConfig.from_dict(dict(config))
    stacks = weights_to_pack(model, detect(model), config, settings)
    experts = {name for one in stacks for name in one.names}
    quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if is_packed_linear(module)
    }
    return Rounding(settings, frozenset(experts), frozenset(linears))


def from_packed(model: nn.Module) -> Rounding | None:
    """What of a packed model is packed; None where no expert is.

    Args:
        model: Without PEFT's wrappers, or with them inside.
    """
    stacks = {
        f"{owner}.{name}" if owner else name: parametrize.read_packed(module, name)
        for owner, module, name in parametrize.iter_packed(model)
    }
    if not stacks:
        return None
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if is_packed_linear(module)
    }
    settings = codec_.settings_of(next(iter(stacks.values())))
    return Rounding(settings, _plain(stacks), _plain(linears))


def _plain(names: Iterable[str]) -> frozenset[str]:
    """The names that modules had before PEFT wrapped them."""
    return frozenset(name.replace(".base_layer", "") for name in names)


def write_note(folder: Path, packed: Rounding) -> None:
    """Leave a note of what was packed in training beside an adapter."""
    settings = packed.settings.to_dict()
    codec = {key: settings[key] for key in ("kind", "double_quant", "blocksize")}
    note = {
        "format_version": NOTE_VERSION,
        "codec": codec,
        "experts": sorted(packed.experts),
        "linears": sorted(packed.linears),
    }
    replace_file(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())


def from_note(folder: Path) -> Rounding | None:
    """What the note beside an adapter says; None where there is none.

    Raises:
        CheckpointError: It is damaged, or of another format version.
    """
    file = folder / NOTE
    if not file.exists():
        return None
    note = read_json(file)
    if note.get("format_version") != NOTE_VERSION:
        raise CheckpointError(
            f"{file} has the format version {note.get('format_version')!r}; this moe_qlora reads "
            f"{NOTE_VERSION}."
        )
    try:
        settings = CodecSettings.from_dict(note["codec"])
        experts, linears = (
            frozenset(str(name) for name in note[kind]) for kind in ("experts", "linears")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}.") from error
    return Rounding(settings, experts, linears)


def choose(adapter: Path, given: Rounding | None) -> Rounding:
    """The caller's, or the note's; they must agree where there are both.

    Raises:
        ConfigError: There is neither, or they differ.
    """
    noted = from_note(adapter)
    if given is None and noted is None:
        raise ConfigError(
            f"like_training needs the codec that {adapter} was trained on, which its files do not "
            "say: pass quantization_config (--quant nf4, fp4 or int8, with --double-quant where it "
            "was used), or merge into the packed base folder."
        )
    if given is not None and noted is not None and _told(given) != _told(noted):
        raise ConfigError(
            f"quantization_config asks for {_told(given)}, and {adapter / NOTE} says that the "
            f"adapter was trained on {_told(noted)}; leave quantization_config out."
        )
    found = noted if noted is not None else given
    assert found is not None
    return found


def _told(rounding: Rounding) -> str:
    double = " with double quantization" if rounding.settings.double_quant else ""
    return rounding.settings.kind + double
