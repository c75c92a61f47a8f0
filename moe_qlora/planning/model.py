"""A model's blocks and what they hold; a model on the meta device, packed and with adapters.

A block is what a device map places whole: a module of a class that the model lists as not to be
split (a decoder layer), any other module without such layers inside (an embedding, the head), and
each parameter or buffer outside of all of these.

A meta model is packed the way the model would be: by transformers' own replacement of Linear layers
(so that its skips are followed: `llm_int8_skip_modules`, the head, tied weights), by this package's
storage for experts, and adapted as by this package's `get_peft_model`. What it holds can then be
counted rather than estimated. Of layers that are alike but for their place the first and the last
stay, since what is alive when they run differs; the rest are emptied, and counted as the last.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig

from ..checkpoint.manifest import read_manifest
from ..checkpoint.prequantized import codes_of_source, describe_plain, maker_method
from ..checkpoint.rows import kept_dtypes
from ..detection.detect import detect
from ..errors import ConfigError, did_you_mean
from ..experts import forward
from ..kernels.limits import cdiv
from ..kernels.weights import PackedWeight
from ..layout import ModelLayout, base_model, dtype_name
from ..lora.config import top_k_of
from ..lora.model import get_peft_model
from ..lora.targets import names_expert, unfit_linears
from ..models import named
from ..packing import decoders, parametrize
from ..packing.bnb4bit import NF4
from ..packing.codecs import codec_of
from ..packing.selection import weights_to_pack
from ..packing.settings import FLOAT_DTYPES, CodecSettings
from ..world import world
from . import attention
from .budget import Block, BlockTensor, Settings
from .choice import ALIGNMENT

DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
ATTENTION, EXPERTS, ALL_LINEAR = "attention", "experts", "all-linear"

_DEFAULT = CodecSettings(NF4.kind, True, compute_dtype=torch.bfloat16)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_LISTED = 12  # names of Linear layers in an error, at most
_PLACES = {"layer_idx", "layer_number", "layer_id", "block_idx", "layer_index", "training"}


class PackedPart(NamedTuple):
    """One packed weight: of a Linear layer, or of experts."""

    module: str  # Full name of its module
    leaf: str  # Its name there
    linear: bool
    weight: PackedWeight


def packed_parts(model: nn.Module) -> Iterator[PackedPart]:
    """Yield everything of a model that is packed: experts, then Linear layers."""
    for name, module, leaf in parametrize.iter_packed(model):
        yield PackedPart(name, leaf, False, parametrize.read_packed(module, leaf))
    for name, layer in model.named_modules():
        if parametrize.is_packed_linear(layer):
            linear: Any = layer
            if decoders.has_codes(linear):
                weight = decoders.read_linear(linear)
            else:  # It is packed when it comes to a GPU
                own, shape = linear.weight, (linear.out_features, linear.in_features)
                kind = decoders.linear_kind(linear)
                empty: Any = None
                weight = PackedWeight(
                    own, empty, None, 0, None, shape, kind, torch.float16, owner=own
                )
            yield PackedPart(name, "weight", True, weight)


def known_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that are there in a step before it begins."""
    statistics = (tensor for part in packed_parts(model) for tensor in part.weight.statistics)
    return [*model.parameters(), *model.buffers(), *statistics]


def slot_nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in a slot of `choice.py`, each aligned."""
    return sum(cdiv(tensor.nbytes, ALIGNMENT) * ALIGNMENT for tensor in tensors)


def blocks_of(model: Any, parts: Sequence[PackedPart]) -> tuple[Block, ...]:
    """Return what each block holds; a tied tensor counts where it is first."""
    packed = {id(part.weight.owner): part for part in parts}
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    top_k, seen, blocks = top_k_of(model) or 1, set[int](), []
    for name, unit in units_of(model):
        tensors = {id(t): t for t in tensors_in(unit) if id(t) not in seen}
        seen |= tensors.keys()
        held = [packed[key] for key in tensors if key in packed]
        # Statistics may be buffers or parameters of the block as well.
        counted = {t.untyped_storage()._cdata for part in held for t in part.weight.statistics}
        others = [
            tensor
            for key, tensor in tensors.items()
            if key not in packed and tensor.untyped_storage()._cdata not in counted
        ]
        experts = [part.weight for part in held if not part.linear]
        linears = unit.modules() if isinstance(unit, nn.Module) else ()
        plain = {id(m.weight): m.weight for m in linears if isinstance(m, nn.Linear)}
        frozen = (w for key, w in plain.items() if key not in packed and not w.requires_grad)
        active = sum(weight.numel() for weight in frozen)
        active += sum(part.weight.numel for part in held if part.linear)
        active += sum(w.numel * min(top_k, w.experts) // w.experts for w in experts)
        block = Block(
            name,
            (*(t for part in held for t in _packed_tensors(part)), *map(_other_tensor, others)),
            # A layer is of a class not to be split; without these, an item of a ModuleList.
            layer=world().stock_class(unit).__name__ in classes
            or (not classes and name.rpartition(".")[0] in lists),
            slot=sum(slot_nbytes((w.codes, *decoders.bits_of(w).values())) for w in experts),
            active=active,
        )
        blocks.append(block)
    return tuple(blocks)


def _other_tensor(whole: Tensor) -> BlockTensor:
    part, tensor = "trained" if whole.requires_grad else "other", _local(whole)
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else 0
    return BlockTensor(part, rows, row, tensor.itemsize, isinstance(whole, nn.Parameter))


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that FSDP2 has sharded."""
    return getattr(tensor, "_local_tensor", tensor)


def _packed_tensors(part: PackedPart) -> Iterator[BlockTensor]:
    """Yield codes and statistics, in rows as distributed runs have them."""
    weight, kind = part.weight, "linear" if part.linear else "experts"
    in_rows = part.linear and not codec_of(weight.kind).in_quant_state
    nbytes = _local(weight.codes).nbytes
    rows = weight.shape[0] if in_rows else nbytes
    yield BlockTensor(kind, rows, nbytes // max(1, rows), 1)
    kind = "statistics" if part.linear else "expert statistics"
    for name, bits in (decoders.bits_of(weight) if weight.statistics else {}).items():
        # Behind the offset of double quantization
        padding = 12 if name == "nested" else 0
        yield BlockTensor(kind, _local(bits).nbytes, 1, 1, name != "tables", padding)


def block_modules(model: Any) -> dict[str, nn.Module]:
    """Return the blocks that are modules, by name, in registration order."""
    return {name: unit for name, unit in units_of(model) if isinstance(unit, nn.Module)}


def tensors_in(unit: nn.Module | Tensor) -> list[Tensor]:
    """Return the parameters and buffers of a block."""
    return [unit] if isinstance(unit, Tensor) else [*unit.parameters(), *unit.buffers()]


def units_of(model: Any) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield each block by its full name, single tensors included, in registration order."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    split_paths: set[str] = set()
    for name, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList) and not classes
        if world().stock_class(module).__name__ in classes or listed:
            parts = name.split(".") + ([""] if listed else [])
            split_paths |= {".".join(parts[:end]) for end in range(len(parts))}

    def descend(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if inner in split_paths and world().stock_class(child).__name__ not in classes:
                yield from descend(inner, child)
            elif any(True for tensors in (child.parameters(), child.buffers()) for _ in tensors):
                yield inner, child

    yield from descend("", model)


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
        asked = bnb_config(quantization) if next(packed_parts(model), None) is None else None
        label = getattr(config, "name_or_path", "") or type(model).__name__
        return ModelSource(label, config, partial(copy_to_meta, model), asked, on_meta)
    if not isinstance(model, (str, Path, PretrainedConfig, named.Source)):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a model, a transformers configuration, or "
            "what moe-qlora dump takes."
        )
    resolved = named.resolve(model, trust_remote_code=trust_remote_code)
    published = maker_method(resolved.config) is not None
    codes, note = codes_of_source(resolved.config)

    def build() -> nn.Module:
        config = copy.deepcopy(resolved.config)
        if published:
            describe_plain(config)
        # A flash kernel would be loaded while the model is built, and nothing here computes.
        asked = config.get_text_config()._attn_implementation
        config._attn_implementation = None
        source = replace(resolved, config=config)
        model: Any = named.build(source, trust_remote_code=trust_remote_code)
        if asked is not None:
            attention.set_attention(model, asked)
        kept = kept_dtypes(model, next(model.parameters()).dtype)  # as the loader has them
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and (dtype := kept(name)) is not None:
                tensor.data = tensor.data.to(dtype)
        return model

    manifest = None if resolved.folder is None else read_manifest(resolved.folder)
    native = {} if manifest is None else manifest.native_codecs()
    return ModelSource(
        resolved.label,
        resolved.config,
        build,
        bnb_config(resolved.settings if quantization is None else quantization),
        linears=True,
        notes=(*resolved.notes, note) if note else resolved.notes,
        dequantizes=published or codes is not None,
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
    return BitsAndBytesConfig.from_dict(dict(asked)) if isinstance(asked, Mapping) else asked


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
            state = decoders.to_quant_state(packed.map(partial(torch.empty_like, device="meta")))
            empty = torch.empty_like(codes.data, device="meta")
            memo[id(codes)] = decoders.params4bit(empty, state, type(codes))
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


class StepModel:
    """A model that trains, with its blocks, of which steps are recorded (`step.py`)."""

    def __init__(self, model: Any) -> None:
        self.model = model  # The model, or the `PeftModel` around it
        self.base: Any = base_model(model)  # The model itself
        self.emptied: Mapping[str, str] = {}  # Layers that are empty -> what each is counted as
        self.groups = alike(block_modules(self.base))  # Blocks that are alike, of which two run
        self.parts = tuple(packed_parts(self.base))
        self.blocks = blocks_of(self.base, self.parts)  # Of the whole model, in order

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The blocks that are modules, by name."""
        emptied = {name: self.base.get_submodule(name) for name in self.emptied}
        return block_modules(self.base) | emptied

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a trained weight."""
        return max((parameter.itemsize for parameter in self.trained), default=4)


class MetaModel(StepModel):
    """A packed model on meta, with adapters once `adapt` has been called."""

    def __init__(self, source: ModelSource, model: Any = None, *, repeats: bool = False) -> None:
        """Pack a model of a source, by default a new one.

        With `repeats`, layers that are alike but for their place are emptied before.
        """
        self.model = self.base = model = source.build() if model is None else model
        # Bytes of the whole model before it is packed
        self.unpacked = sum({id(tensor): tensor.nbytes for tensor in tensors_in(model)}.values())
        self._names = [name for name, _ in units_of(model)]
        self.groups, self.emptied = _empty_repeated(model) if repeats else ([], {})
        self.layout: ModelLayout = detect(model)  # As before packing
        if (config := source.quantization) is not None:
            settings = CodecSettings.from_config(config)
            for param in weights_to_pack(model, self.layout, settings):
                own = (source.native[name] for name in param.names if name in source.native)
                parametrize.pack_blank(model, param, next(own, settings))
            if source.linears and hasattr(model, "all_tied_weights_keys"):
                _pack_linears(model, config, settings)
        model.requires_grad_(False)
        for module in model.modules():
            if hasattr(module, "state") and hasattr(module.state, "threshold"):
                module.state.threshold = 0.0  # bitsandbytes' outliers have no number on meta
        self.parts = tuple(packed_parts(model))
        codec = None if self.kind is None else codec_of(self.kind)
        model.is_loaded_in_8bit = codec is not None and codec.loads_in_8bit
        model.is_loaded_in_4bit = codec is not None and not codec.loads_in_8bit

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

    def adapt(self, settings: Settings, config: Any = None) -> None:
        """Put adapters on the model; a `LoraConfig` replaces the settings' own targets."""
        forward.activate(self.base, {part.module for part in self.parts if not part.linear})
        if config is None:
            config = lora_config_of(self.base, self.parts, settings.targets, settings.rank)
        try:
            with torch.device("meta"):  # low_cpu_mem_usage allocates first, whatever the rank
                options: Any = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
                self.model = get_peft_model(self.base, config, unpacked_ok=True, **options)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"PEFT cannot put LoRA on {settings.targets!r}: {error}") from error
        for parameter in self.trained:
            parameter.data = parameter.data.to(device="meta", dtype=DTYPES[settings.adapter_dtype])
        found = {block.name: block for block in blocks_of(self.base, self.parts)}
        found |= {name: replace(found[as_], name=name) for name, as_ in self.emptied.items()}
        self.blocks = tuple(found[name] for name in dict.fromkeys((*self._names, *found)))
        if not self.emptied:
            self.groups = alike(block_modules(self.base))


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
    decoders.check_linears(model, settings)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # Jamba asks, before it reads a layer's weight
            part.config._is_quantized = True
    for name, dtype in dtypes.items():
        module = model.get_submodule(name)
        if parametrize.is_packed_linear(module):
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtype)
            parametrize.pack_blank_linear(module, dtype, settings)


def lora_config_of(
    model: nn.Module, parts: Sequence[PackedPart], targets: str, rank: int
) -> peft.LoraConfig:
    """Return the config of LoRA on these targets of a packed model.

    A target is "attention" (Linear layers of attention), "experts" (packed expert weights),
    "all-linear" (as PEFT reads it), or the name of a module as PEFT's `target_modules` takes it: in
    full, or its last parts ("q_proj", "self_attn.q_proj").

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
            modules += _attention_linears(model, linears)
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


def _attention_linears(model: nn.Module, linears: Sequence[str]) -> list[str]:
    """Return the Linear layers that LoRA can serve in modules of attention, by class or by name."""
    unfit, found = unfit_linears(model), []
    for name in linears:
        parent = name.rpartition(".")[0]
        owners = [owner for owner in (parent, parent.rpartition(".")[0]) if owner]
        classes = [type(model.get_submodule(owner)).__name__ for owner in owners]
        if name not in unfit and any(map(_ATTENTION.search, (parent, *classes))):
            found.append(name)
    return found


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
