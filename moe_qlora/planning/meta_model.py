"""A model on the meta device, packed and with adapters, as training would have it.

It is packed the way the model would be: by transformers' own replacement of Linear layers (so that
its skips are followed: `llm_int8_skip_modules`, the head, tied weights), by this package's storage
for experts, and adapted as by this package's `get_peft_model`. What it holds can then be counted
rather than estimated.

A target of LoRA is "attention" (Linear layers of attention), "experts" (packed expert weights),
"all-linear" (as PEFT reads it), or the name of a module as PEFT's `target_modules` takes it: in
full, or its last parts ("q_proj", "self_attn.q_proj").

Packing and adapting a model on meta takes time by its modules, and most of these are in layers that
are alike but for their place. Of each kind the first and the last stay, since what is alive when
they run differs; the rest are emptied, and counted as the last.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig

from ..checkpoint.manifest import read_manifest
from ..checkpoint.prequantized import codes_of_source, describe_plain, maker_method
from ..detection.detect import detect
from ..errors import ConfigError, did_you_mean
from ..experts import forward
from ..layout import ModelLayout, dtype_name
from ..lora.model import get_peft_model
from ..lora.targets import names_expert, unfit_linears
from ..models import named
from ..packing import parametrize
from ..packing.bnb4bit import NF4
from ..packing.codecs import codec_of
from ..packing.decoders import check_linears, params4bit, to_quant_state
from ..packing.selection import weights_to_pack
from ..packing.settings import FLOAT_DTYPES, CodecSettings
from . import attention
from .blocks import (
    PackedPart,
    block_modules,
    blocks_of,
    packed_parts,
    tensors_in,
    units_of,
)
from .budget import Block, Settings

_DEFAULT = CodecSettings(NF4.kind, True, compute_dtype=torch.bfloat16)

DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
ATTENTION, EXPERTS, ALL_LINEAR = "attention", "experts", "all-linear"

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_LISTED = 12  # names of Linear layers in an error, at most
_PLACES = {"layer_idx", "layer_number", "layer_id", "block_idx", "layer_index", "training"}


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
    repeats: bool = False  # Whether layers may be packed and run for others


def source_of(model: Any, quantization: Any, trust_remote_code: bool = False) -> ModelSource:
    """Return the source of what `plan` is given, with its arguments of these names."""
    if isinstance(model, nn.Module):
        config: Any = getattr(model, "config", None)
        if quantization is None:
            quantization = getattr(config, "quantization_config", None)
        on_meta = all(parameter.is_meta for parameter in model.parameters())
        packed = next(packed_parts(model), None) is not None
        asked = None if packed else bnb_config(quantization)
        label = getattr(config, "name_or_path", "") or type(model).__name__
        return ModelSource(label, config, partial(copy_to_meta, model), asked, on_meta)
    if not isinstance(model, (str, Path, PretrainedConfig, named.Source)):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a model, a transformers configuration, or "
            "what moe-qlora dump takes."
        )
    resolved = named.resolve(model, trust_remote_code=trust_remote_code)
    method = maker_method(resolved.config)
    codes, note = codes_of_source(resolved.config)

    def build_model() -> nn.Module:
        config = copy.deepcopy(resolved.config)
        if method is not None:
            describe_plain(config)
        # A flash kernel would be loaded while the model is built, and nothing here computes.
        asked = config.get_text_config()._attn_implementation
        config._attn_implementation = None
        source = replace(resolved, config=config)
        model: Any = named.build(source, trust_remote_code=trust_remote_code)
        if asked is not None:
            attention.set_attention(model, asked)
        cast_as_loaded(model, next(model.parameters()).dtype)
        return model

    manifest = None if resolved.folder is None else read_manifest(resolved.folder)
    native = {} if manifest is None else manifest.native_codecs()
    return ModelSource(
        resolved.label,
        resolved.config,
        build_model,
        bnb_config(resolved.settings if quantization is None else quantization),
        linears=True,
        notes=(*resolved.notes, note) if note else resolved.notes,
        dequantizes=method is not None or codes is not None,
        on_disk=codes,
        native=native,
        repeats=not native,
    )


def bnb_config(asked: Any) -> Any:
    """Return the user's config as a `BitsAndBytesConfig`; the default one for None."""
    asked = _DEFAULT if asked is None else asked
    if isinstance(asked, CodecSettings):
        return BitsAndBytesConfig(**asked.bnb_fields())
    CodecSettings.from_config(asked)  # its errors are sentences
    if isinstance(asked, Mapping):
        return BitsAndBytesConfig.from_dict(dict(asked))
    return asked


@dataclass
class MetaModel:
    """A packed model on meta, with adapters once `adapt` has been called."""

    model: Any  # The model, or the `PeftModel` around it
    base: Any  # The model itself
    layout: ModelLayout  # Its expert weights, as they are before packing
    parts: tuple[PackedPart, ...]
    unpacked: int  # Bytes of the whole model before it is packed
    names: Sequence[str]  # Of all its blocks, in order
    groups: Sequence[Sequence[str]]  # Blocks that are alike, of which two run
    emptied: Mapping[str, str]  # Layers that are empty -> the layer that each is counted as
    blocks: tuple[Block, ...] = ()  # Of the whole model with adapters, in order

    @property
    def kind(self) -> str | None:
        """The packed type, None where nothing is packed."""
        return min((part.weight.kind for part in self.parts), default=None)

    @cached_property
    def tied(self) -> list[tuple[str, str]]:
        """Pairs of blocks that hold the very same tensor, and so must share a device."""
        owner: dict[int, str] = {}
        pairs = (
            (owner.setdefault(id(tensor), name), name)
            for name, unit in units_of(self.base)
            for tensor in (unit.parameters() if isinstance(unit, nn.Module) else [unit])
        )
        return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy on meta, packed where the model is packed; nothing of it is read or moved."""
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "The model has adapters already: plan before they are put on it, or name the model's "
            "folder or configuration."
        )
    memo: dict[int, Any] = {}
    blank: Any
    alive: list[Any] = []  # the memo goes by id: nothing in it may die
    for part in packed_parts(model):
        packed = part.weight
        if packed.table is not None:  # else of codes and scales, or not packed yet
            codes: Any = packed.owner
            state = to_quant_state(packed.map(partial(torch.empty_like, device="meta")))
            empty = torch.empty_like(codes.data, device="meta")
            memo[id(codes)] = params4bit(empty, state, type(codes))
    for module in model.modules():
        int8_state = getattr(module, "state", None)
        alive += [getattr(int8_state, name, None) for name in ("CB", "SCB")]
    for tensor in (*model.parameters(), *model.buffers(), *alive):
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            blank = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, nn.Parameter):
                blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
                if hasattr(tensor, "SCB"):
                    blank.SCB, blank.CB = torch.empty_like(tensor.SCB, device="meta"), blank.data
            memo[id(tensor)] = blank
    return copy.deepcopy(model, memo)


def cast_as_loaded(model: Any, dtype: torch.dtype) -> None:
    """Give a model built in `dtype` the dtypes that transformers' loader would give it."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    if not plan:
        return
    pattern, groups, _ = build_glob_alternation(list(plan))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        match = pattern.search(name)
        if match is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(plan[groups[match.lastgroup]])


def pack(source: ModelSource, model: Any = None, *, repeats: bool = False) -> MetaModel:
    """Pack a model of a source on meta, by default a new one.

    With `repeats`, layers that are alike but for their place are emptied before.
    """
    model = source.build() if model is None else model
    unpacked, names = _nbytes(model), [name for name, _ in units_of(model)]
    groups, emptied = _empty_repeated(model) if repeats else ([], {})
    layout = detect(model)
    if (config := source.quantization) is not None:
        settings = CodecSettings.from_config(config)
        for param in weights_to_pack(model, layout, settings):
            own = (source.native[name] for name in param.names if name in source.native)
            parametrize.pack_blank(model, param, next(own, settings))
        if source.linears and hasattr(model, "all_tied_weights_keys"):
            _pack_linears(model, config, settings)
    model.requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "state") and hasattr(module.state, "threshold"):
            module.state.threshold = 0.0  # bitsandbytes' outliers have no number on meta
    parts = tuple(packed_parts(model))
    meta = MetaModel(model, model, layout, parts, unpacked, names, groups, emptied)
    codec = None if meta.kind is None else codec_of(meta.kind)
    model.is_loaded_in_8bit = codec is not None and codec.loads_in_8bit
    model.is_loaded_in_4bit = codec is not None and not codec.loads_in_8bit
    return meta


def _pack_linears(model: Any, config: Any, settings: CodecSettings) -> None:
    """Pack Linear layers through transformers' own replacement, which leaves some out."""
    from transformers import PreTrainedModel
    from transformers.integrations import replace_with_bnb_linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skips = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    dtypes = {
        name: module.weight.dtype
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and should_convert_module(name, skips)
    }
    if not dtypes:
        return  # where transformers would warn that a model "using eetq" has none
    replace_with_bnb_linear(model, modules_to_not_convert=skips, quantization_config=config)
    check_linears(model, settings)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # Jamba asks, before it reads a layer's weight
            part.config._is_quantized = True
    for name, dtype in dtypes.items():
        module = model.get_submodule(name)
        if parametrize.is_packed_linear(module):
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtype)
            parametrize.pack_blank_linear(module, dtype, settings)


def adapt(meta: MetaModel, settings: Settings, lora_config: Any = None) -> None:
    """Put adapters on a meta model in place.

    `lora_config`, a `LoraConfig`, replaces the settings' own targets.
    """
    forward.activate(meta.base, {part.module for part in meta.parts if not part.linear})
    config = lora_config
    if lora_config is None:
        config = lora_config_of(meta.base, meta.parts, settings.targets, settings.rank)
    try:
        with torch.device("meta"):  # low_cpu_mem_usage allocates first, whatever the rank
            options: Any = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
            meta.model = get_peft_model(meta.base, config, unpacked_ok=True, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"PEFT cannot put LoRA on {settings.targets!r}: {error}") from error
    dtype = DTYPES[settings.adapter_dtype]
    for parameter in meta.base.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device="meta", dtype=dtype)
    found = {block.name: block for block in blocks_of(meta.base, meta.parts)}
    found |= {name: replace(found[as_], name=name) for name, as_ in meta.emptied.items()}
    meta.blocks = tuple(found[name] for name in dict.fromkeys((*meta.names, *found)))
    if not meta.emptied:
        meta.groups = alike(block_modules(meta.base))


def lora_config_of(
    model: nn.Module, parts: Sequence[PackedPart], targets: str, rank: int
) -> peft.LoraConfig:
    """Return the config of LoRA on these targets of a packed model.

    Raises:
        ConfigError: A target names nothing in this model, or there are none.
    """
    experts = [f"{part.module}.{part.leaf}".lstrip(".") for part in parts if not part.linear]
    names = [name for name, _ in model.named_modules() if name]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    listed = ", ".join([leaf for leaf in leaves if leaf and not leaf.isdigit()][:_LISTED])
    allowed = f"give {ATTENTION}, {EXPERTS}, {ALL_LINEAR}, or names of modules"
    allowed += f", such as {listed}" if listed else ""
    words = [word for each in targets.split(",") if (word := each.strip())]
    modules: list[str] = []
    for word in words:
        if word == ATTENTION:
            modules += _attention_linears(model)
        elif word not in (EXPERTS, ALL_LINEAR):
            modules.append(word)
            if any(name == word or name.endswith(f".{word}") for name in names):
                continue
            # Experts that are named by a matrix of one: `get_peft_model` says how to reach them.
            probe = peft.LoraConfig(target_modules=[word])
            if not any(names_expert(probe, name) for name in experts):
                known = [ATTENTION, EXPERTS, ALL_LINEAR, *{n.rpartition(".")[2] for n in names}]
                raise ConfigError(
                    f"targets names {word!r}, which is no target and no module of this model"
                    f"{did_you_mean(word, sorted(known))}; {allowed}."
                )
    parameters = experts if EXPERTS in words else None
    if not (modules or parameters or ALL_LINEAR in words):
        raise ConfigError(f"targets={targets!r} names nothing in this model; {allowed}.")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=ALL_LINEAR if ALL_LINEAR in words else modules,
        target_parameters=parameters,
    )


def _attention_linears(model: nn.Module) -> list[str]:
    """Return the Linear layers inside modules that are attention by their class or by name.

    Those that LoRA cannot serve are left out.
    """
    names, unfit = [], unfit_linears(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in unfit:
            parent = name.rpartition(".")[0]
            owners = [owner for owner in (parent, parent.rpartition(".")[0]) if owner]
            classes = [type(model.get_submodule(owner)).__name__ for owner in owners]
            if any(map(_ATTENTION.search, (parent, *classes))):
                names.append(name)
    return names


def _empty_repeated(model: nn.Module) -> tuple[list[list[str]], dict[str, str]]:
    """Empty the repeated layers of a model on meta that nothing else holds.

    Returns:
        Groups of layers that are alike, and the layers that are empty now, with the layer that each
        is counted as.
    """
    blocks = block_modules(model)
    held = {name: [id(t) for t in tensors_in(unit)] for name, unit in units_of(model)}
    owners = Counter(key for keys in held.values() for key in keys)
    free = {name for name, keys in held.items() if all(owners[key] == 1 for key in keys)}
    groups = [group for group in alike(blocks) if free.issuperset(group)]
    emptied = {name: group[-1] for group in groups for name in group[1:-1]}
    for name in emptied:
        for content in (blocks[name]._modules, blocks[name]._parameters, blocks[name]._buffers):
            content.clear()
    return groups, emptied


def _nbytes(model: nn.Module) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors_in(model)}.values())


def alike(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return groups of three or more blocks that differ in nothing but their place, in order."""
    groups: dict[Any, list[str]] = {}
    for name, module in blocks.items():
        shapes = tuple(
            (path, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for path, tensor in (*module.named_parameters(), *module.named_buffers())
        )
        settings = tuple(
            # Wrappers of PEFT keep the full name of what they wrap.
            (path, type(part).__name__, key, str(value).replace(f"{name}.", ""))
            for path, part in module.named_modules()
            for key, value in sorted(vars(part).items())
            if isinstance(value, (bool, int, float, str)) and not (key in _PLACES or key[0] == "_")
        )
        groups.setdefault((type(module), shapes, settings), []).append(name)
    return [names for names in groups.values() if len(names) > 2]


def tells_layers_apart(targets: str, lora_config: Any, quantization: Any) -> bool:
    """True if settings may name a layer by number, so that layers may be packed differently."""
    said = getattr(quantization, "llm_int8_skip_modules", None), targets
    return lora_config is not None or re.search(r"\d", repr(said)) is not None
