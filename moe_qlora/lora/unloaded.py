"""A packed model that is not loaded yet, as `adapt_lora_config` needs to see it.

A LoRA config depends on names alone: those of the expert weights that a load packs. So the model is
built on the meta device, and each of these weights is replaced by a packed one without contents.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..checkpoint import rounding
from ..checkpoint.manifest import read_manifest
from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from ..models import named
from ..packing import parametrize
from ..packing.meta import blank_weight


def blank_packed_model(
    model: str | Path | PretrainedConfig, quantization_config: Any, *, trust_remote_code: bool
) -> tuple[nn.Module, rounding.Rounding]:
    """Build a model on meta, packed as a load would pack it, and say what is packed.

    A `quantization_config` of None stands for the one in the checkpoint's own config.json.
    """
    if not isinstance(model, (str, Path, PretrainedConfig)):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a built nn.Module or, of a model that is not "
            "loaded yet, its folder, hub id or configuration."
        )
    source = named.resolve(model, trust_remote_code=trust_remote_code)
    asked = quantization_config or getattr(source.config, "quantization_config", None)
    if asked is None:
        raise ConfigError(
            f"{source.label} is not loaded yet and its configuration has no quantization_config: "
            "pass the BitsAndBytesConfig that it will be loaded with as quantization_config."
        )
    new = partial(named.build, source, trust_remote_code=trust_remote_code)
    with named.quiet():
        packed = rounding.from_config(new(), asked)
    names: Collection[str] = packed.experts
    manifest = None
    if not isinstance(model, PretrainedConfig) and Path(model).is_dir():
        manifest = read_manifest(model)
        names = names if manifest is None else manifest.experts
    built: Any = new()  # `from_config` has replaced Linear layers of the first
    built.tie_weights()
    blanks: dict[nn.Parameter, PackedWeight] = {}  # tied weights share one
    for name in names:
        module, leaf = parametrize.owner_of(built, name)
        weight = module._parameters.get(leaf)
        if weight is not None:
            how = packed.settings if manifest is None else manifest.settings_of(name)
            blank = blank_weight(tuple(weight.shape), weight.dtype, how)
            parametrize.attach(module, leaf, blanks.setdefault(weight, blank))
    return built, packed
