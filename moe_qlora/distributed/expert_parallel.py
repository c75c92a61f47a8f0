"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to them.

    expert_parallel(model, mesh)
      |  every experts module: the weights' experts [first, last) in place of all of them
      |                        (`Codec.cut`)
      v
    transformers' own dispatch    EpDispatchExpertsParallel: all-to-all in training, on local
      |                           expert ids, around the module's forward
      v
    get_peft_model                LoRA of the experts: DTensors sharded over the mesh, so that
                                  clipping, optimizers and files see the whole (shares.py)

Each rank runs its own batch, and an expert sees the tokens of all. What else is trained is
replicated, and is the work of DDP or FSDP2, which leave the experts alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..detection.detect import detect
from ..errors import ConfigError, UnsupportedWeightError
from ..experts.forward import can_serve
from ..experts.rebinding import mark_as_calling
from ..layout import ExpertsModule, ModelLayout, listed, name_pattern
from ..packing import parametrize
from ..packing.settings import CodecSettings
from ..world import first_share
from .agreement import check_agreement, model_facts
from .dispatch import register, watch
from .shares import ExpertShare, keep_from_ddp, local_tensors, set_share

_LOG = logging.getLogger(__name__)
_DISPATCH = "_moe_qlora_dispatch"


def expert_parallel(model: nn.Module, mesh: Any, *, implementation: str = "auto") -> nn.Module:
    """Keep on each rank its experts of every layer only, and let tokens travel between ranks.

    With N ranks along the mesh's last dimension, rank r holds experts `[r E / N, (r + 1) E / N)`.
    All ranks call it, with equal models, before `get_peft_model`; experts that are not packed yet
    are packed afterwards as they would be whole. Every rank then runs its own batch.

    Args:
        model: The model with all its experts; changed in place.
        mesh: A `DeviceMesh` of all ranks: `(N,)`, or `(copies, N)` where several ranks hold the
            same experts.
        implementation: How tokens travel: a name of transformers' `EPImplementationInterface`.

    Returns:
        The same model.

    Raises:
        ConfigError: The mesh does not fit, or the model's experts cannot be divided over it.
        UnsupportedWeightError: Blocks of a packed weight belong to experts of two ranks.
    """
    if hasattr(model, "peft_config") or first_share(model) is not None:
        state = "has adapters" if hasattr(model, "peft_config") else "is expert parallel already"
        raise ConfigError(
            f"The model {state}: call expert_parallel once, before moe_qlora.get_peft_model."
        )
    check_mesh(mesh)
    check_agreement("expert_parallel", lambda: model_facts(model), mesh)
    layout = detect(model)
    for entry in modules_to_divide(model, layout, mesh.size(mesh.ndim - 1)):
        if not entry.dispatches and not any(param.packed for param in entry.parameters):
            raise ConfigError(
                f"{entry.name} is a {entry.class_name}, whose own forward knows no experts of "
                "other ranks: call moe_qlora.quantize_experts before expert_parallel."
            )
        for param in entry.parameters:
            _check_cut(model, param.name, mesh)
    return divide(model, layout, mesh, implementation)


def divide(
    model: nn.Module, layout: ModelLayout, mesh: Any, implementation: str = "auto"
) -> nn.Module:
    """Do what `expert_parallel` does; weights of which a load kept a share stay as they are."""
    tp_mesh = _mesh_of_one(mesh)
    kept: dict[int, Any] = {}
    inexact: list[str] = []
    for entry in modules_to_divide(model, layout, mesh.size(mesh.ndim - 1)):
        share = make_share(entry.num_experts, mesh, mesh.size())
        module = model.get_submodule(entry.name)
        inexact += _keep_share(module, entry, share, kept)
        dispatch(module, share, tp_mesh, implementation)
    if inexact and distributed.get_rank() == 0:
        _LOG.warning(
            "The experts of a rank are no whole second-level blocks of double quantization in %s: "
            "their absmax are coded in blocks of their own there, and differ in the last of 8 bits "
            "from those of the whole weight; codes are the same.",
            listed(list(dict.fromkeys(map(name_pattern, inexact)))),
        )
    host: Any = model
    # Trainer then neither wraps nor moves the model, averages what is replicated, and saves on
    # all ranks, which gathering needs.
    host._is_distributed_loading_by_transformers = True
    keep_from_ddp(model)
    watch(model)
    return model


def expert_parallel_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts that this rank alone holds, for FSDP2's `ignored_params`.

        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=expert_parallel_parameters(model))

    Empty where the model is not expert parallel. DDP is told by itself.
    """
    local = local_tensors(model).values()
    return {tensor for tensor in local if isinstance(tensor, nn.Parameter)}


def check_mesh(mesh: Any) -> None:
    """Raise where a mesh does not hold every rank once in one or two dimensions."""
    if mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise ConfigError(
            f"The mesh has {mesh.ndim} dimensions called {mesh.mesh_dim_names}; expert_parallel "
            "takes (ranks,) or (copies, ranks), the latter with mesh_dim_names."
        )
    if mesh.size() != distributed.get_world_size():
        raise ConfigError(
            f"The mesh has {mesh.size()} of {distributed.get_world_size()} ranks: give one of all "
            "ranks, (copies, ranks) where several hold the same experts."
        )


def modules_to_divide(
    model: nn.Module, layout: ModelLayout, ranks: int
) -> tuple[ExpertsModule, ...]:
    """Return the experts modules of a model to divide over some ranks; raise where one cannot be.

    Stacked shared experts, which every token goes to, stay whole on each rank.
    """
    modules = tuple(entry for entry in layout.modules if entry.router is not None)
    if not modules:
        raise ConfigError("The model has no routed expert weights that ranks could divide.")
    for entry in modules:
        if not can_serve(model.get_submodule(entry.name)):
            raise ConfigError(
                f"{entry.name} is a {entry.class_name.removeprefix('Parametrized')}, which does "
                "not compute through transformers' experts interface: its experts cannot be "
                "divided over ranks."
            )
        for param in entry.parameters:
            if param.num_experts != entry.num_experts or param.shape[0] != entry.num_experts:
                raise ConfigError(
                    f"{param.name} has the shape {tuple(param.shape)} for {entry.num_experts} "
                    "experts: it cannot be divided by experts."
                )
        if entry.num_experts % ranks:
            raise ConfigError(
                f"{entry.name} has {entry.num_experts} experts, which {ranks} ranks cannot hold in "
                "equal numbers: choose a number of ranks that divides it."
            )
    return modules


def make_share(experts: int, mesh: Any, batches: int) -> ExpertShare:
    """Return the share that this rank holds of a layer's experts."""
    dimension = mesh.ndim - 1
    count = experts // mesh.size(dimension)
    first = mesh.get_local_rank(dimension) * count
    return ExpertShare(experts, first, first + count, mesh, batches)


class _Dispatch:
    """transformers' dispatch around one module's own forward, made at its first call.

    transformers binds it to the module that it is installed on: a copy of the module makes its own.
    """

    def __init__(self, share: ExpertShare, tp_mesh: Any, implementation: str) -> None:
        self.share, self.tp_mesh, self.implementation = share, tp_mesh, implementation
        self.forward: Callable[..., Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dispatch:
        return _Dispatch(self.share, self.tp_mesh, self.implementation)

    def install(self, module: nn.Module) -> Callable[..., Tensor]:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        name = register() if self.implementation == "auto" else self.implementation
        mesh = self.share.mesh
        mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        host: Any = module
        dispatching = module.__dict__.get("forward")
        if dispatching is not None:
            del host.forward
        EpDispatchExpertsParallel().install_forward(
            module, mesh, tp_mesh=self.tp_mesh, ep_implementation=name
        )
        self.forward = module.__dict__["forward"]
        del host.forward
        if dispatching is not None:
            host.forward = dispatching
        return self.forward


def _dispatched_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute an experts module, global expert ids given, with the experts of all ranks."""
    state: _Dispatch = self.__dict__[_DISPATCH]
    forward = state.forward or state.install(self)
    return forward(hidden_states, top_k_index, top_k_weights)


mark_as_calling(_dispatched_forward)  # around the module's own forward, and nothing else


def dispatch(module: nn.Module, share: ExpertShare, tp_mesh: Any, implementation: str) -> None:
    """Put transformers' dispatch of tokens around the forward of a module that holds a share."""
    host: Any = module
    host.num_experts, host._is_expert_parallel = share.count, True
    set_share(module, share)
    state = _Dispatch(share, tp_mesh, implementation)
    try:
        state.install(module)
    except ImportError as error:
        raise ConfigError(
            "The installed transformers cannot divide experts over ranks: update transformers."
        ) from error
    module.__dict__[_DISPATCH] = state
    # A method, which a copy of the module binds to itself.
    host.forward = MethodType(_dispatched_forward, module)


def _check_cut(model: nn.Module, name: str, mesh: Any) -> None:
    """Raise where a packed weight's blocks belong to experts of two ranks."""
    module, leaf = parametrize.owner_of(model, name)
    if not parametrize.is_packed(module, leaf):
        return
    packed = parametrize.read_packed(module, leaf)
    settings = CodecSettings.of(packed)
    reason = settings.codec.why_not_cut(packed.shape, mesh.size(mesh.ndim - 1), settings)
    if reason is not None:
        raise UnsupportedWeightError(f"{name} {reason}.")


def _keep_share(
    module: nn.Module, entry: ExpertsModule, share: ExpertShare, kept: dict[int, Any]
) -> list[str]:
    """Replace a module's weights and biases by their experts `[first, last)`.

    Return the names of weights whose second-level blocks belong to several ranks.
    """
    first, last = share.first, share.last
    inexact = []
    names = [param.parameter_name for param in entry.parameters]
    for name in names:
        if not parametrize.is_packed(module, name):
            continue
        whole = parametrize.original_of(module, name)
        packed = parametrize.read_packed(module, name)
        settings, shape = CodecSettings.of(packed), (share.experts, *packed.shape[1:])
        if not settings.codec.is_exact(shape, 0, share.count, settings):
            inexact.append(f"{entry.name}.{name}")
        if packed.shape[0] == share.count:
            continue  # loaded so
        if id(whole) not in kept:  # else tied to one that is cut already
            kept[id(whole)] = whole, settings.codec.cut(packed, first, last)
        parametrize.detach(module, name, torch.empty(0, device=whole.device))
        module._parameters.pop(name)
        parametrize.attach(module, name, kept[id(whole)][1])
    for name in (*names, *(bias.rpartition(".")[2] for bias in entry.bias_names)):
        plain = module._parameters.get(name)
        if plain is None:
            continue
        if id(plain) not in kept:
            part = nn.Parameter(plain.detach()[first:last].clone(), plain.requires_grad)
            kept[id(plain)] = plain, part
        module._parameters[name] = kept[id(plain)][1]
    return inexact


def _mesh_of_one(mesh: Any) -> Any:
    """Return a mesh of this rank alone: no other one has its batch."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("rank", "same_batch")
    return init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=names)[names[1]]
