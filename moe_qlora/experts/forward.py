"""The experts forward "moe_qlora": computes from packed codes, through transformers' interface.

`activate` registers `experts_forward` in transformers' `ALL_EXPERTS_FUNCTIONS`, a public extension
point, and selects it on the configuration that the experts modules read. One call, with T tokens,
k assignments a token, R = T k rows sorted by expert:

    experts_forward(module, hidden_states, top_k_index, top_k_weights)
      |  read_call        backend.py: both packed weights, active LoRA factors, autocast
      |  choose_backend   backend.py: one of these, and why; once for a form of call
      +- "unpacked": no expert weight is packed: the forward selected before `activate`
      +- "fused layer": on CUDA, 16-bit activations, both projections as one operation
      |     eager: kernels/moe_layer.py, then one autograd node; compiled: one custom operator
      |         routing, x [W1 | B1], the gate, h [W2 | B2], sums to tokens
      |         kernels/table.py       few rows an expert: quantized_mm*.py, on the codes
      |                                else: grouped_mm.py, dequantized into workspace.py
      +- "projection by projection" or "reference loop": everything else, in plain autograd
            projection.run    a product with decoded weights, the gate, another product:
                                torch's grouped matmul on CUDA in 16 bit, else expert by expert

No decoded weight is alive between forward and backward: backward decodes again. LoRA is two
low-rank products added to the base product, never W + B A.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..detection.structure import dispatches
from ..errors import ConfigError
from ..packing import parametrize
from ..packing.codec import unpack
from . import checks, forward_override, fused, projection
from .backend import FUSED, UNPACKED, choose_backend, find_gate, read_call
from .kept import pop_saved, save
from .operands import known_record, record_of
from .projection import no_autocast

IMPLEMENTATION = "moe_qlora"

_INTERFACE = "transformers.integrations.moe"  # defines transformers' decorator of experts
_RUN = "_moe_qlora_run"
BOUND_METHODS = "_moe_qlora_methods"
"""Entry of a model's `__dict__`: the functions by name that were bound to this instance."""


def activate(model: nn.Module, module_names: Iterable[str]) -> tuple[str, ...]:
    """Select `experts_forward` for the named experts modules.

    The selection is made on the configuration object that each module reads, which it shares with
    the model's other experts modules: those without packed weights use the forward selected
    before. Modules of Liger's class read no configuration, and get the forward itself. Returns the
    names of modules whose own forward runs, on decoded weights.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    left: list[str] = []
    configs: dict[int, Any] = {}
    served: list[Any] = []
    for name in module_names:
        module: Any = model.get_submodule(name)
        config = getattr(module, "config", None)
        if getattr(module, "_is_expert_parallel", False):
            raise ConfigError(
                f"{name} has one rank's experts alone, and packed experts do not support expert "
                "parallelism: train with DDP or FSDP2."
            )
        if config is not None and goes_through_interface(module):
            configs[id(config)] = config
        elif not forward_override.of_liger(type(module)):
            left.append(name)
            continue
        served.append(module)
    if served and IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        fused.register_operators()
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in configs and dispatches(module):
            _prepare(module, getattr(config, "_experts_implementation", None))
    for module in served:
        parametrize.extend_class(module, _class_members)
        _prepare(module, None)  # One of Liger's class; others are
    for config in configs.values():
        # The internal name, as `set_experts_implementation` writes it: the property's setter would
        # also change sub-configurations without packed experts.
        config._experts_implementation_internal = IMPLEMENTATION
    return tuple(left)


def deactivate(model: nn.Module) -> None:
    """Give every experts module back the implementation that it had before `activate`."""
    for module in model.modules():
        if not known_record(module).activated:
            continue
        record = record_of(module)
        record.activated = False
        parametrize.extend_class(module, None)
        if not forward_override.of_liger(type(module)):
            config: Any = module.config
            config._experts_implementation_internal = record.previous


def can_serve(module: nn.Module) -> bool:
    """Whether `activate` can select `experts_forward` for a module."""
    return goes_through_interface(module) or forward_override.of_liger(type(module))


def goes_through_interface(module: nn.Module) -> bool:
    """Whether the forward of a module's class is that of transformers' experts interface."""
    # Also if Liger has replaced it, not if other code has.
    forward = forward_override.class_forward(module)
    origin = getattr(forward, "__globals__", {}).get("__name__")
    return dispatches(module) and (origin == _INTERFACE or forward_override.is_ligers(forward))


def asks_for_lora(module: Any) -> bool:
    """Whether a call certainly ends in `experts_forward`, which adds LoRA; not if one is bound."""
    bound = forward_override.bound_forward(module)
    if bound is not None or not parametrize.packed_names(module):
        return False
    if not known_record(module).activated and not goes_through_interface(module):
        return False
    config = getattr(module, "config", None)
    return config is None or config._experts_implementation == IMPLEMENTATION


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute an experts module, as the forward registered with transformers.

    Hidden states are `(T, H)`, the index `(T, k)` integers below E, and the weights `(T, k)`.
    Returns `(T, H)` in the hidden states' dtype.
    """
    call = read_call(self, hidden_states)
    backend = choose_backend(self, call)
    if backend.name == UNPACKED.name:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        own: Any = forward_override.class_forward(self)
        run, previous = getattr(own, "__wrapped__", own), known_record(self).previous
        if previous not in (None, "eager", IMPLEMENTATION):
            run = ALL_EXPERTS_FUNCTIONS.get_interface(previous, run)
        return cast(Tensor, run(self, hidden_states, top_k_index, top_k_weights))
    compiling = torch.compiler.is_compiling()
    if backend.name != FUSED.name:
        return projection.run(self, call, top_k_index, top_k_weights)
    inputs = fused.read_inputs(self, call, top_k_index, top_k_weights)
    if compiling:
        return fused.by_operator(inputs).to(hidden_states.dtype)
    # A kernel is launched at most 5 frames of this package from here.
    x, weights, index, *others = inputs[:6]
    layer, operands = fused.make_layer(inputs), fused.make_operands(x, weights, *others)
    kernels, state = fused.layer_kernels(), None
    with torch.no_grad(), no_autocast(x):
        saved = pop_saved()
        if saved is None:
            state = kernels.gate_up_forward(layer, index, operands)
            saved = state.routing.ints, *state.saved
            save(saved)
    out = fused.save_for_backward(inputs, layer, saved)
    # A checkpoint's recomputation ends in the line before, unless the layer needs the output.
    with torch.no_grad(), no_autocast(x):
        state = state or kernels.gate_up_forward(layer, index, operands)
        kernels.down_forward(layer, state, out)
    return out.to(hidden_states.dtype)


@cache
def _class_members(base: Any) -> Mapping[str, Any]:
    """Return the members that a packed module's class adds to `base`, the plain module's class."""
    run = experts_forward if forward_override.is_ligers(base.forward) else base.forward
    more = forward_override.LIGER_INTERFACE if forward_override.of_liger(base) else {}
    return {"forward": forward_override.forward_property(_RUN), _RUN: run, **more}


def _prepare(module: nn.Module, previous: str | None) -> None:
    """Note the selection before, and find the gate, which compiled code cannot."""
    record = record_of(module)
    if record.activated:
        return
    record.activated, record.previous = True, previous
    find_gate(module)


def clear_quantized(model: nn.Module) -> None:
    """Undo `hf.model.finish_packing` where no expert is packed any more, such as after a merge."""
    # A model that still has bitsandbytes Linear layers stays marked as quantized.
    if any(parametrize.iter_packed(model)):
        return
    deactivate(model)
    for module in model.modules():
        parametrize.follow_no_calls(module)
    checks.remove(model)
    for name, function in model.__dict__.pop(BOUND_METHODS, {}).items():
        method = model.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is function:
            del model.__dict__[name]
    host: Any = model
    linears = any(map(parametrize.is_packed_linear, model.modules()))
    if getattr(host, "hf_quantizer", None) is not None and not linears:
        host.hf_quantizer.remove_quantization_config(model)
        host.is_loaded_in_4bit = host.is_loaded_in_8bit = False


def dequantize(self: Any, dtype: torch.dtype | None = None) -> Any:
    """Decode experts and Linear layers of a model in place and return it, no longer quantized.

    Without a dtype each expert weight gets its own, and Linear layers the model's.
    """
    plain: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for _, module, name in list(parametrize.iter_packed(self)):
        key = id(parametrize.original_of(module, name))
        if key not in plain:
            weight = unpack(parametrize.read_packed(module, name))
            plain[key] = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
        parametrize.detach(module, name, plain[key])
    clear_quantized(self)
    # The stock method raises without at least one such layer.
    if any(map(parametrize.is_packed_linear, self.modules())):
        type(self).dequantize(self, dtype=dtype)
    self.is_loaded_in_4bit = self.is_loaded_in_8bit = False
    return self
