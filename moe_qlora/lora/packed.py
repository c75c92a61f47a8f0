"""Whether a model's experts are packed, asked before LoRA is made for what is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from ..checkpoint import rounding
from ..detection.detect import detect
from ..errors import ConfigError
from ..layout import ExpertParam, human_bytes, listed, name_pattern, unwrapped_name
from ..packing.format import packed_nbytes
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from .names import base_model


def check_packed(model: nn.Module, *, unpacked_ok: bool, stacklevel: int) -> list[ExpertParam]:
    """Warn that experts are not packed, where none is, or raise where a config asks for it.

    A config on the model that names them in `llm_int8_skip_modules` leaves them in 16 bit on
    purpose. Returns all expert weights of the model, to which the warning need not have applied.
    """
    model = base_model(model)
    layout = detect(model)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    try:
        settings = None if config is None else CodecSettings.from_config(config)
    except ConfigError:  # of a method that packs otherwise
        settings = None
    experts = list(layout.experts)
    if unpacked_ok or not experts:
        return experts
    unpacked = experts
    if settings is not None:
        with warnings.catch_warnings():  # of skip patterns, which the load has said
            warnings.simplefilter("ignore")
            unpacked = weights_to_pack(model, layout, config, settings)
    if not unpacked:
        return experts
    message = (
        f"{len(unpacked)} expert weights are not packed ({patterns(p.name for p in unpacked)})"
    )
    how = "call moe_qlora.quantize_experts(model), or load the model under moe_qlora.enabled()"
    meant = "pass unpacked_ok=True where they are to stay as they are"
    if settings is not None:
        raise ConfigError(
            f"{message}, and the model's quantization_config asks for {settings.kind}: {how}; or "
            f"{meant}."
        )
    advice = f"{how} with a BitsAndBytesConfig; {meant}."
    warnings.warn(f"{message}: {advice}", UserWarning, stacklevel=stacklevel + 1)
    return experts


def warn_of_unpacked(model: nn.Module, adapter: Path, *, stacklevel: int) -> None:
    """Warn where experts are plain, and the adapter's note says that it was trained on packed."""
    noted = rounding.from_note(adapter)
    if noted is None:
        return
    plain = {
        unwrapped_name(name): weight
        for name, weight in model.named_parameters()
        if unwrapped_name(name) in noted.experts
    }
    if not plain:
        return
    now = human_bytes(sum(weight.nbytes for weight in plain.values()))
    then = sum(packed_nbytes(tuple(weight.shape), noted.settings) for weight in plain.values())
    warnings.warn(
        f"{len(plain)} expert weights ({patterns(plain)}) are not packed and take {now}, and "
        f"{adapter} was trained on packed ones ({noted.settings.describe()}, {human_bytes(then)}): "
        "load the model under moe_qlora.enabled() with a BitsAndBytesConfig, or call "
        "moe_qlora.quantize_experts(model, config) first; pass unpacked_ok=True where they are to "
        "stay as they are.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def patterns(names: Iterable[str]) -> str:
    """Return names for a message, those of many layers as one: `layers.*.mlp.experts.down_proj`."""
    return listed(list(dict.fromkeys(name_pattern(name) for name in names)))
