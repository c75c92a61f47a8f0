"""The source of a plan's model (a folder, a configuration or a model), and how it is packed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig

from ..checkpoint.manifest import read_manifest
from ..checkpoint.prequantized import (
    codes_of_source,
    describe_plain,
    described_method,
)
from ..checkpoint.prequantized.config import MXFP4
from ..detection.detect import detect
from ..errors import ConfigError
from ..layout import dtype_name
from ..models import named
from ..packing.bnb4bit import NF4
from ..packing.mxfp4 import kept_settings
from ..packing.settings import CodecSettings, why_not_packed
from . import attention, meta_model
from .blocks import packed_parts
from .meta_model import Skeleton, nbytes_of, skeleton_of

_DEFAULT = CodecSettings(NF4.kind, True, compute_dtype=torch.bfloat16)


@dataclass(frozen=True)
class ModelSource:
    """Where meta models come from."""

    label: str  # The model's name
    config: Any  # None where it has none
    build: Callable[[], nn.Module]  # Returns a new copy of the model on meta
    quantization: Any  # A `BitsAndBytesConfig`, None where nothing more is packed
    linears: bool  # Whether Linear layers are packed too
    notes: tuple[str, ...] = ()  # What to know, a sentence each
    dequantizes: bool = False  # Whether a maker's codes are dequantized while they are packed
    on_disk: int | None = None  # Bytes of the folder that these lie in, where there is one
    # Settings of expert weights in native codes of the checkpoint, by name
    native: Mapping[str, CodecSettings] = field(default_factory=dict)
    skeleton: Callable[[], Skeleton] | None = None  # Where layers may be packed and run for others

    @property
    def nbytes(self) -> int:
        """Bytes of the model before it is packed."""
        return nbytes_of(self.build()) if self.skeleton is None else self.skeleton().nbytes


def source_of(
    model: Any, quantization: Any, dtype: Any, trust_remote_code: bool, keep_codes: bool = False
) -> ModelSource:
    """Return the source of what `plan` is given, with its arguments of these names."""
    if isinstance(model, nn.Module):
        return _source_of_module(model, quantization)
    if not isinstance(model, (str, Path, PretrainedConfig, named.Source)):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a model, a transformers configuration, or "
            "what moe-qlora dump takes."
        )
    resolved = named.resolve(model, trust_remote_code=trust_remote_code)
    if dtype is not None and dtype_name(dtype) not in meta_model.DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; give one of {', '.join(meta_model.DTYPES)}.")

    method = described_method(resolved.config)
    codes, note = codes_of_source(resolved.config)

    def build_model() -> nn.Module:
        config = copy.deepcopy(resolved.config)
        if method is not None:
            describe_plain(config)
        if dtype is not None:
            config.dtype = meta_model.DTYPES[dtype_name(dtype)]
        kernel = attention.hold_back(config)
        source = replace(resolved, config=config)
        model: Any = named.build(source, trust_remote_code=trust_remote_code)
        if kernel is not None:
            attention.set_attention(model, kernel)
        meta_model.cast_as_loaded(model, next(model.parameters()).dtype)
        return model

    asked = bnb_config(resolved.settings if quantization is None else quantization)
    manifest = None if resolved.folder is None else read_manifest(resolved.folder)
    native = {} if manifest is None else manifest.native_codecs()
    if keep_codes and manifest is None and method == MXFP4:
        native = _native(build_model(), CodecSettings.from_config(asked))
    return ModelSource(
        resolved.label,
        resolved.config,
        build_model,
        asked,
        linears=True,
        notes=(*resolved.notes, note) if note else resolved.notes,
        dequantizes=method is not None or codes is not None,
        on_disk=None if codes is None else codes.nbytes,
        native=native,
        skeleton=None if native else cache(lambda: skeleton_of(build_model())),
    )


def _native(model: nn.Module, settings: CodecSettings) -> dict[str, CodecSettings]:
    """Return how the experts of a model of gpt-oss's kind are packed that keep MXFP4 codes."""
    native = kept_settings(settings)
    return {
        name: native
        for param in detect(model).experts
        if param.transposed and why_not_packed(param.shape, torch.bfloat16, native) is None
        for name in param.names
    }


def _source_of_module(model: nn.Module, quantization: Any) -> ModelSource:
    config: Any = getattr(model, "config", None)
    if quantization is None:
        quantization = getattr(config, "quantization_config", None)
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    packed = next(packed_parts(model), None) is not None
    asked = None if packed else bnb_config(quantization)
    label = getattr(config, "name_or_path", "") or type(model).__name__
    copy_to_meta = partial(meta_model.copy_to_meta, model)
    return ModelSource(label, config, copy_to_meta, asked, on_meta)


def bnb_config(asked: Any) -> Any:
    """Return the user's config as a `BitsAndBytesConfig`; the default one for None."""
    asked = _DEFAULT if asked is None else asked
    if isinstance(asked, CodecSettings):
        return BitsAndBytesConfig(**asked.bnb_fields())
    CodecSettings.from_config(asked)  # its errors are sentences
    if isinstance(asked, Mapping):
        return BitsAndBytesConfig.from_dict(dict(asked))
    return asked
