"""A packed model that is not loaded yet, as `adapt_lora_config` needs to see it.

Trainers that load the model themselves want the LoRA config first. What that config says depends on
names alone: those of the stacks that a load with the user's `BitsAndBytesConfig` packs. So the
model is built on the meta device, and each of these stacks gets a packed stand-in that holds
nothing but its shape.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .. import build
from ..checkpoint import rounding
from ..checkpoint.manifest import read_manifest
from ..errors import ConfigError
from ..packing import parametrize
from ..packing.codec import Int8State, PackedWeight


def stand_in(
    model: str | Path | PretrainedConfig, quantization_config: Any, *, trust_remote_code: bool
) -> tuple[nn.Module, rounding.Rounding]:
    """The model on meta, packed as a load would pack it, and what is packed.

    Args:
        model: A checkpoint folder, a hub id, a model type or a configuration.
        quantization_config: The `BitsAndBytesConfig` of the load, or its dict; None takes the one
            that the checkpoint's own config.json holds.
        trust_remote_code: Run model code that the checkpoint brings.

    Raises:
        CheckpointError: There is no such model.
        ConfigError: Nothing says how the model will be packed, or it cannot be followed.
    """
    if not isinstance(model, (str, Path, PretrainedConfig)):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a built nn.Module or, of a model that is not "
            "loaded yet, its folder, hub id or configuration."
        )
    if isinstance(model, PretrainedConfig):
        source = build.of_config(model)
    else:
        source = build.resolve(str(model), trust_remote_code=trust_remote_code)
    asked = quantization_config or getattr(source.config, "quantization_config", None)
    if asked is None:
        raise ConfigError(
            f"{source.label} is not loaded yet and its configuration has no quantization_config: "
            "pass the BitsAndBytesConfig that it will be loaded with as quantization_config."
        )
    with build.quiet():
        packed = rounding.from_config(
            build.build(source, trust_remote_code=trust_remote_code), asked
        )
    names: Collection[str] = packed.experts
    if not isinstance(model, PretrainedConfig) and Path(model).is_dir():
        manifest = read_manifest(model)
        names = names if manifest is None else manifest.experts
    # Anew: reading the settings above has replaced modules.
    built: Any = build.build(source, trust_remote_code=trust_remote_code)
    built.tie_weights()
    blanks: dict[nn.Parameter, PackedWeight] = {}  # tied stacks share one
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = built.get_submodule(owner)
        if leaf in module._parameters:
            weight = module._parameters[leaf]
            parametrize.attach(module, leaf, blanks.setdefault(weight, _blank(weight)))
    return built, packed


def _blank(weight: Any) -> PackedWeight:
    """A packed stack of this weight's shape; in 8 bit, where the codes have that shape too."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(weight.numel() // weight.shape[-1], device="meta")
    state = Int8State(scales, weight.shape, weight.dtype)
    return PackedWeight(codes, state, "int8", weight.shape, weight.dtype)
