"""A model's twin on the meta device, packed and with adapters, as training would have it.

A twin has every module, parameter and buffer of the model, with sizes and no contents. It is packed
the way the model would be: by transformers' own replacement of Linear layers (so that its skips are
followed: `llm_int8_skip_modules`, the head, tied weights), by this package's storage for experts,
and adapted by this package's `get_peft_model`. What it holds can then be counted rather than
estimated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import bitsandbytes as bnb
import peft
import torch
from torch import Tensor, nn

from ..detection import detect as detect_
from ..detection.detect import detect
from ..errors import ConfigError
from ..experts import forward
from ..kernels.limits import DEQUANTIZED_WEIGHT_BYTES
from ..layout import ModelLayout
from ..lora.config import top_k_of
from ..lora.model import get_peft_model
from ..packing import parametrize
from ..packing.codec import Int8State, PackedWeight, state_tensors
from ..packing.linear import is_packed_linear
from ..packing.meta import blank_like, blank_weight, pack_blank
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from .budget import Block, Settings
from .experts import ExpertsCall
from .meta_ops import decoded, experts_forward, linear_forward

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)

bnb_nn: Any = cast(Any, bnb).nn


@dataclass
class Twin:
    """A packed model on meta, with adapters once `adapt` has been called.

    Attributes:
        model: The model, or the `PeftModel` around it.
        base: The model itself.
        layout: Its expert stacks, as they are before packing.
        packed: Full names of the expert stacks that are packed.
        linears: Full names of the Linear layers that are packed.
        kind: The packed type, None where nothing is packed.
        blocks: What each block holds; with adapters once `adapt` has been called.
    """

    model: Any
    base: Any
    layout: ModelLayout
    packed: tuple[str, ...]
    linears: tuple[str, ...]
    kind: str | None
    blocks: tuple[Block, ...]


def of_module(model: nn.Module) -> nn.Module:
    """A copy on meta, packed where the model is packed; nothing of the model is read or moved.

    Raises:
        ConfigError: The model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "The model has adapters already: plan with the model that they were put on."
        )
    memo: dict[int, Any] = {}
    kept: list[Any] = []  # the memo goes by id: nothing in it may die
    for name, module, parameter in parametrize.iter_packed(model):
        del name
        stack = parametrize.read_packed(module, parameter)
        if stack.kind != "int8":
            memo[id(parametrize.original_of(module, parameter))] = blank_like(stack)
    for module in model.modules():
        weight = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        if state is not None and id(weight) not in memo:
            settings = CodecSettings(state.quant_type, state.nested, cast(Tensor, weight).dtype)
            memo[id(weight)] = parametrize.hold(
                blank_weight(tuple(state.shape), state.dtype, settings)
            )
        inner = getattr(module, "state", None)
        kept += [getattr(inner, name, None) for name in ("CB", "SCB")]
    for tensor in (*model.parameters(), *model.buffers(), *kept):
        if isinstance(tensor, Tensor) and id(tensor) not in memo:
            blank = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, nn.Parameter):
                blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
                if hasattr(tensor, "SCB"):
                    blank.SCB = torch.empty_like(tensor.SCB, device="meta")  # type: ignore[attr-defined]
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
        found = pattern.search(name)
        if found is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(plan[groups[found.lastgroup]])


def pack(model: Any, config: Any, *, linears: bool) -> Twin:
    """Pack a model on meta; what is packed already stays.

    Args:
        model: On meta.
        config: A `BitsAndBytesConfig`; None packs nothing more.
        linears: Whether its Linear layers are packed too, as `from_pretrained` does.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layout = detect(model)
    settings = None if config is None else CodecSettings.from_config(config)
    if settings is not None:
        for param in weights_to_pack(model, layout, config, settings):
            pack_blank(model, param, settings)
        if linears and hasattr(model, "all_tied_weights_keys"):
            _pack_linears(model, config, settings)
    names = [f"{name}.{leaf}".lstrip(".") for name, _, leaf in parametrize.iter_packed(model)]
    found = [name for name, module in model.named_modules() if is_packed_linear(module)]
    kinds = {parametrize.read_packed(m, leaf).kind for _, m, leaf in parametrize.iter_packed(model)}
    kinds |= {_linear_kind(model.get_submodule(name)) for name in found}
    kind = next(iter(sorted(kinds)), None)
    model.is_loaded_in_8bit = kind == "int8"
    model.is_loaded_in_4bit = kind is not None and kind != "int8"
    return Twin(model, model, layout, tuple(names), tuple(found), kind, blocks_of(model))


def _pack_linears(model: Any, config: Any, settings: CodecSettings) -> None:
    """Through transformers' own replacement, so that it leaves out what it leaves out."""
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    skips = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    before = {
        name: (module.weight, module.bias)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "bias")
    }
    replace_with_bnb_linear(model, modules_to_not_convert=skips, quantization_config=config)
    for name, module in model.named_modules():
        if not is_packed_linear(module):
            continue
        weight, bias = before[name]
        shape = (module.out_features, module.in_features)
        stack = blank_weight(shape, weight.dtype, settings)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach(), requires_grad=False)
        if settings.kind == "int8":
            packed = bnb_nn.Int8Params(stack.codes, requires_grad=False, has_fp16_weights=False)
            packed.SCB = stack.state.scales
            module.weight = packed
        else:
            module.weight = parametrize.hold(stack)


def _linear_kind(module: Any) -> str:
    return "int8" if isinstance(module, bnb_nn.Linear8bitLt) else str(module.weight.quant_type)


def adapt(twin: Twin, settings: Settings, lora_config: Any = None) -> None:
    """Put adapters on the twin, by this package's own `get_peft_model`.

    Args:
        twin: Changed in place.
        settings: Rank, targets and the adapters' dtype.
        lora_config: A `LoraConfig` to follow in the place of rank and targets.

    Raises:
        ConfigError: There is nothing that the targets name.
    """
    forward.activate(twin.base, {name.rpartition(".")[0] for name in twin.packed})
    config = lora_config or _lora_config(twin, settings)
    try:
        twin.model = get_peft_model(
            twin.base, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"PEFT cannot put LoRA on {settings.targets!r}: {error}") from error
    dtype = DTYPES[settings.adapter_dtype]
    sizes: dict[str, list[int]] = {}
    names = [block.name for block in twin.blocks]
    for name, parameter in twin.base.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device="meta", dtype=dtype)
            sizes.setdefault(_owner(name, names), []).append(parameter.numel())
    twin.blocks = tuple(
        replace(block, trained=tuple(sizes.get(block.name, ()))) for block in twin.blocks
    )


def _owner(name: str, blocks: list[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), name)


def _lora_config(twin: Twin, settings: Settings) -> Any:
    modules: str | list[str] = []
    parameters: list[str] | None = None
    for word in filter(None, (word.strip() for word in settings.targets.split(","))):
        if word == "experts":
            parameters = list(twin.packed)
        elif word == "all-linear":
            modules = word
        elif isinstance(modules, list):
            modules += _attention(twin.base) if word == "attention" else [word]
    if not modules and not parameters:
        raise ConfigError(
            f"targets={settings.targets!r} names nothing in this model; give attention, "
            "all-linear, experts, or the names of modules."
        )
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=modules,
        target_parameters=parameters,
    )


def _attention(model: nn.Module) -> list[str]:
    """Linear layers inside modules that are attention by their class or by their name."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parts = name.split(".")[:-1]
            owners = [".".join(parts[: end + 1]) for end in range(len(parts))]
            classes = [type(model.get_submodule(owner)).__name__ for owner in owners[-2:]]
            if any(map(_ATTENTION.search, (*parts, *classes))):
                found.append(name)
    return found


def stand_in(twin: Twin) -> None:
    """Put stand-ins on everything packed, so that the twin runs on meta."""
    for name in twin.linears:
        module = _innermost(twin.base.get_submodule(name))
        weight = module.weight
        state = getattr(weight, "quant_state", None)
        kind = _linear_kind(module)
        shape = (module.out_features, module.in_features)
        dtype = torch.float16 if state is None else state.dtype
        linear_forward(module, shape, kind, dtype, getattr(module, "compute_dtype", None))
    for _, module, leaf in parametrize.iter_packed(twin.base):
        stack = parametrize.read_packed(module, leaf)
        host: Any = module
        decoded(host.parametrizations[leaf][0], tuple(stack.shape), stack.dtype)
        if leaf == "down_proj" and detect_.dispatches(module):
            _stand_in_experts(host)


def _innermost(module: Any) -> Any:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _stand_in_experts(module: Any) -> None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    stack, other = (parametrize.read_packed(module, name) for name in ("down_proj", first))
    four = stack.kind != "int8"
    block = stack.state.blocksize if four else 1
    # `suits` of kernels/quantized_mm.py, which needs Triton.
    suits = not four or (block % 64 == 0 and not any(s.shape[2] % block for s in (stack, other)))
    count, rows, columns = stack.shape
    hidden, inner = (columns, rows) if module.is_transposed else (rows, columns)
    shape = {
        "experts": count,
        "hidden": hidden,
        "intermediate": inner,
        "gated": bool(module.has_gate),
        "transposed": bool(module.is_transposed),
        "weight_itemsize": stack.dtype.itemsize,
        "codes": suits,
        "nested": four and bool(stack.state.nested),
    }
    experts_forward(module, (first, "down_proj"), shape)


def blocks_of(model: Any) -> tuple[Block, ...]:
    """What each block holds before there are adapters; a tied tensor counts where it is first."""
    seen: set[int] = set()
    return tuple(_block(name, held, seen) for name, held in _units(model))


def tied_blocks(model: Any) -> list[tuple[str, str]]:
    """Pairs of blocks that hold the very same tensor, and so must share a device."""
    owner: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for name, held in _units(model):
        tensors = held.parameters() if isinstance(held, nn.Module) else [held]
        for tensor in tensors:
            first = owner.setdefault(id(tensor), name)
            if first != name and (first, name) not in pairs:
                pairs.append((first, name))
    return pairs


def whole_modules(model: Any) -> dict[str, nn.Module]:
    """The modules that a device map places whole, by name, in registration order."""
    return {name: held for name, held in _units(model) if isinstance(held, nn.Module)}


def _units(model: Any) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Modules that a device map places whole, and parameters and buffers outside of all of them."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    splits: set[str] = set()
    for name, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList) and not classes
        if type(module).__name__ in classes or listed:
            parts = name.split(".") + ([""] if listed else [])
            splits |= {".".join(parts[:end]) for end in range(len(parts))}
    yield from _descend("", model, splits, classes)


def _descend(
    path: str, module: nn.Module, splits: set[str], classes: set[str]
) -> Iterator[tuple[str, nn.Module | Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield f"{path}.{name}".lstrip("."), tensor
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if inner in splits and type(child).__name__ not in classes:
            yield from _descend(inner, child, splits, classes)
        elif any(True for _ in (*child.parameters(), *child.buffers())):
            yield inner, child


def _block(name: str, held: nn.Module | Tensor, seen: set[int]) -> Block:
    if isinstance(held, Tensor):
        fresh = id(held) not in seen
        seen.add(id(held))
        return Block(name, other=held.nbytes if fresh else 0)
    totals: dict[str, Any] = {"experts": 0, "linear": 0, "other": 0, "statistics": 0}
    decoded_most = 0
    for module in held.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            kind, statistics, whole = _what(module, leaf, tensor)
            totals[kind] += tensor.nbytes
            totals["statistics"] += statistics
            decoded_most = max(decoded_most, whole)
    return Block(name, **totals, decoded=decoded_most)


def _what(module: nn.Module, leaf: str, tensor: Tensor) -> tuple[str, int, int]:
    """(component, bytes of its statistics, bytes of what it is decoded to)."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList) and leaf == "original":
        first: Any = module[0]
        state = first.quant_state
        statistics = 0 if isinstance(state, Int8State) else _bytes(state)
        return "experts", statistics, _scratch(tuple(state.shape), state.dtype)
    if isinstance(module, parametrize.PackedInt8):
        return "statistics", 0, 0
    if is_packed_linear(module) and leaf == "weight":
        linear: Any = module
        state = getattr(tensor, "quant_state", None)
        size = linear.in_features * linear.out_features
        if state is not None:
            return "linear", _bytes(state), size * state.dtype.itemsize
        scales = getattr(tensor, "SCB", None)
        return "linear", scales.nbytes if isinstance(scales, Tensor) else 0, 2 * size
    return "other", 0, 0


def _bytes(state: Any) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(state))


def _scratch(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return size if size <= DEQUANTIZED_WEIGHT_BYTES else size // shape[0]


def is_packed(model: nn.Module) -> bool:
    """Whether experts or Linear layers of a model are packed."""
    return next(parametrize.iter_packed(model), None) is not None or any(
        is_packed_linear(module) for module in model.modules()
    )


def is_nested(twin: Twin) -> bool:
    """Whether the statistics of a model that came packed are quantized as well."""
    stacks = (parametrize.read_packed(m, leaf) for _, m, leaf in parametrize.iter_packed(twin.base))
    return any(getattr(stack.state, "nested", False) for stack in stacks)


def loaded_together(twin: Twin) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """(decoded shapes, bytes of a weight) of what is in flight together while loading."""
    by_module: dict[str, list[PackedWeight]] = {}
    for name, module, leaf in parametrize.iter_packed(twin.base):
        by_module.setdefault(name, []).append(parametrize.read_packed(module, leaf))
    for stacks in by_module.values():
        yield [tuple(stack.shape) for stack in stacks], max(s.dtype.itemsize for s in stacks)
    for name in twin.linears:
        module = _innermost(twin.base.get_submodule(name))
        state = getattr(module.weight, "quant_state", None)
        itemsize = 2 if state is None else state.dtype.itemsize
        yield [(module.out_features, module.in_features)], itemsize


@dataclass(frozen=True)
class Sizes:
    """What a model is before it is packed.

    Attributes:
        nbytes: Its parameters and buffers.
        hidden: Hidden size.
        vocabulary: Size of the vocabulary.
        outputs: Block name -> features that its Linear layers give out together.
        experts: Block name -> what an `ExpertsCall` needs beside the tokens.
    """

    nbytes: int
    hidden: int
    vocabulary: int
    outputs: dict[str, int]
    forward: dict[str, dict[str, Any]]

    def call(self, block: str, tokens: int) -> ExpertsCall | None:
        """The call of a block's experts for so many tokens; None where it has none."""
        shape = self.experts.get(block)
        return None if shape is None else ExpertsCall(tokens=tokens, **shape)


def sizes_of(model: Any) -> Sizes:
    """Read them off a model on meta."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    modules = whole_modules(model)
    outputs = {
        name: sum(part.out_features for part in module.modules() if isinstance(part, nn.Linear))
        for name, module in modules.items()
        if any(isinstance(part, nn.Linear) for part in module.modules())
    }
    experts_of: dict[str, dict[str, Any]] = {}
    for owner in detect(model).modules:
        block = _owner(f"{owner.name}.", list(modules))
        inner = [p.in_features for p in owner.parameters if p.role == "down" and p.in_features]
        wide = [p.out_features for p in owner.parameters if p.role == "down" and p.out_features]
        if inner and wide:
            experts_of[block] = {
                "top_k": top_k_of(text) or 1,
                "experts": owner.num_experts,
                "hidden": wide[0],
                "intermediate": inner[0],
                "gated": any(p.role in ("gate_up", "gate") for p in owner.parameters),
            }
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    return Sizes(sum(tensors.values()), hidden, vocabulary, outputs, experts_of)
