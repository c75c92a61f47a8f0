"""Expert parallelism: each rank has some experts of every layer, and tokens travel to them.

    expert_parallel(model, mesh)
      |  every experts module: the weights' experts [first, last) in place of all of them
      |                        (`Codec.cut`)
      v
    transformers' own dispatch    EpDispatchExpertsParallel: all-to-all in training, on local
      |                           expert ids, around the module's forward
      v
    get_peft_model                LoRA of the experts: DTensors sharded over the mesh, so that
                                  clipping, optimizers and files see the whole (shares.py)

Each rank runs its own batch, and an expert sees the tokens of all. Other trained parameters are
replicated or sharded by DDP or FSDP2, which ignore the experts.

transformers' all-to-all sends each token once for each of its k experts, sorted by owner, and reads
the counts back to the host in every layer. With N ranks of at most k, a token has experts on nearly
every rank. There `GatheredDispatch` gathers the hidden states on all ranks and sums the ranks'
outputs: it moves (N - 1) / k as many bytes, sorts nothing, and no layer waits for the host. Two
H200s, Qwen3-30B-A3B, 16 layers, 16,384 tokens a rank: 0.600 s a step instead of 0.866
(tools/bench/results/two_gpu.csv). The experts forward skips the rows of other ranks' experts, but
they take memory all the same: so it is used for few ranks.

Before each forward, `watch` checks that no engine treats the ranks' experts as replicas: DDP
writes the first rank's parameters over all others', and FSDP2 shards parameters that it assumes
equal on all ranks. Both are told to ignore the experts, but DDP asks the module that it wraps,
which another wrapper may hide, and FSDP2 relies on its caller's list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad
from transformers.distributed.expert_parallel import AutoEP, EPImplementationInterface

from ..detection.detect import detect
from ..errors import ConfigError, QuantizationError, UnsupportedWeightError
from ..experts.forward import can_serve
from ..experts.forward_override import mark_as_calling
from ..layout import ExpertsModule, ModelLayout, listed, name_pattern
from ..packing import parametrize
from ..packing.settings import CodecSettings
from ..world import first_share
from .agreement import check_agreement, model_facts
from .shares import ExpertShare, expert_share, keep_from_ddp, local_tensors, set_share

_LOG = logging.getLogger(__name__)
_DISPATCH = "_moe_qlora_dispatch"
NAME = "moe_qlora"
_SAMPLE = 512  # compared bytes of the first weight's codes
MOST_RANKS = 4
"""Most ranks for which `GatheredDispatch`, with rows of all ranks' experts, is chosen."""


def expert_parallel(model: nn.Module, mesh: Any, *, implementation: str = "auto") -> nn.Module:
    """Keep on each rank only its experts of every layer, and let tokens travel between ranks.

    With N ranks along the mesh's last dimension, rank r has experts `[r E / N, (r + 1) E / N)`.
    All ranks call it, with equal models, before `get_peft_model`; experts that are not packed yet
    are packed afterwards as they would be whole. Every rank then runs its own batch.

    Args:
        model: The model with all its experts; changed in place.
        mesh: A `DeviceMesh` of all ranks: `(N,)`, or `(copies, N)` where several ranks have the
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
    parametrize.check_resident(model)
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
    """Do what `expert_parallel` does; weights loaded as a share stay as they are."""
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
    """Return the parameters of this rank's own experts, for FSDP2's `ignored_params`.

        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=expert_parallel_parameters(model))

    Empty where the model is not expert parallel. DDP needs no such list.
    """
    local = local_tensors(model).values()
    return {tensor for tensor in local if isinstance(tensor, nn.Parameter)}


def check_mesh(mesh: Any) -> None:
    """Raise unless a mesh has every rank once, in one or two dimensions."""
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
    """Return this rank's share of a layer's experts."""
    dimension = mesh.ndim - 1
    count = experts // mesh.size(dimension)
    first = mesh.get_local_rank(dimension) * count
    return ExpertShare(experts, first, first + count, mesh, batches)


class _Dispatch:
    """transformers' dispatch around one module's own forward, created at its first call.

    transformers binds it to the module that it is installed on: a copy of the module creates its
    own.
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


mark_as_calling(_dispatched_forward)  # it only wraps the module's own forward


def dispatch(module: nn.Module, share: ExpertShare, tp_mesh: Any, implementation: str) -> None:
    """Wrap the forward of a module with a share in transformers' dispatch of tokens."""
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
    # A method, so that a copy of the module binds it to itself.
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
            continue  # loaded as a share
        if id(whole) not in kept:  # else tied to one that was cut already
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


def register() -> str:
    """Register the dispatch with transformers, and return its name there."""
    if NAME not in EPImplementationInterface():
        EPImplementationInterface.register(NAME, GatheredDispatch)
    return NAME


class GatheredDispatch(AutoEP):
    """transformers' automatic choice, with gathered tokens in training on few ranks."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.group = ep_mesh.get_group()
        self.host_group = host_group(self.group)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        ranks = self.ep_mesh.size()
        if self.shares_batch or self.tp_mesh.size() > 1 or ranks > MOST_RANKS:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        if top_k_index.shape[-1] < ranks:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        tokens = hidden_states.shape[0]
        missing = _longest(tokens, self.host_group) - tokens
        held = self.num_local_experts
        if missing:
            hidden_states, top_k_weights = (
                pad(tensor, (0, 0, 0, missing)) for tensor in (hidden_states, top_k_weights)
            )
            top_k_index = pad(top_k_index, (0, 0, 0, missing), value=ranks * held)
        index = top_k_index.new_empty(ranks * len(top_k_index), top_k_index.shape[1])
        distributed.all_gather_into_tensor(index, top_k_index.contiguous(), group=self.group)
        states = _Gather.apply(hidden_states, self.group)
        weights = _Gather.apply(top_k_weights, self.group)
        index = index - self.ep_mesh.get_local_rank() * held
        elsewhere = (index < 0) | (index >= held)
        index = index.masked_fill(elsewhere, held)
        out = self.experts_forward(states, index, weights.masked_fill(elsewhere, 0))
        return _ReduceScatter.apply(out, self.group)[:tokens]


_host_groups: dict[Any, Any] = {}
"""By process group: a gloo group of the same ranks."""


def host_group(group: Any) -> Any:
    """Return a gloo group of the same ranks, so that counts of tokens need not wait for the GPU.

    All ranks of the whole run must call it in the same order.
    """
    if group not in _host_groups:
        everyone: list[Any] = [None] * distributed.get_world_size()
        ranks = tuple(distributed.get_process_group_ranks(group))
        distributed.all_gather_object(everyone, ranks)
        for each in sorted(set(everyone)):
            made = distributed.new_group(each, backend="gloo")
            if each == ranks:
                _host_groups[group] = made
    return _host_groups[group]


def _longest(tokens: int, group: Any) -> int:
    """Return the largest number of tokens that a rank of the group has."""
    counts = torch.tensor([tokens])
    distributed.all_reduce(counts, distributed.ReduceOp.MAX, group=group)
    return int(counts)


class _Gather(torch.autograd.Function):
    """Gathers rows of all ranks; in backward each gets the sum of its rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_gather(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """Sums all ranks' outputs of each token, on the rank whose token it is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _reduce_scatter(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather(grad, ctx.group), None


def _all_gather(rows: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    out = rows.new_empty(ranks * rows.shape[0], *rows.shape[1:])
    distributed.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def _reduce_scatter(rows: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    out = rows.new_empty(rows.shape[0] // ranks, *rows.shape[1:])
    distributed.reduce_scatter_tensor(out, rows.contiguous(), group=group)
    return out


class _Watch:
    """Samples of the codes of a model's first divided weight: this rank's and the first rank's."""

    def __init__(self, module: nn.Module, leaf: str) -> None:
        self.module, self.leaf = module, leaf
        own = self.sample()
        self.first_rank = own.clone()
        distributed.broadcast(self.first_rank, src=0)
        self.differs = not torch.equal(own, self.first_rank)
        self.version: int | None = None

    def sample(self) -> Tensor:
        codes = parametrize.read_packed(self.module, self.leaf).flat_codes
        return codes[:_SAMPLE].clone()


def watch(model: nn.Module) -> None:
    """Check a divided model before each of its forwards; all ranks must call it."""
    for _, module, leaf in parametrize.iter_packed(model):
        share = expert_share(module)
        if share is not None:
            state = _Watch(module, leaf)
            model.register_forward_pre_hook(partial(_check, state))
            model.register_forward_pre_hook(partial(_check_batch, share), with_kwargs=True)
            _group_of(share)  # created by all ranks in one order
            return


def _group_of(share: ExpertShare) -> Any:
    return host_group(share.mesh.get_group(share.mesh.ndim - 1))


def _check_batch(share: ExpertShare, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise on every rank where one has no tokens, for which the others would wait in the experts.

    One all-reduce by the host in each forward; the dispatch has one in each layer.
    """
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    empty = bool(inputs) and not inputs[0].numel()
    first = torch.tensor([distributed.get_rank() + 1 if empty else 0])
    distributed.all_reduce(first, distributed.ReduceOp.MAX, group=_group_of(share))
    if int(first):
        raise ConfigError(
            f"rank {int(first) - 1} has an empty batch: with experts divided over ranks, each rank "
            "runs a batch of its own with one token or more (dataloader_drop_last=True leaves out "
            "the last batches that do not fill all ranks)."
        )


def _check(state: _Watch, *args: Any) -> None:
    if not parametrize.is_packed(state.module, state.leaf):
        return
    codes: Any = parametrize.original_of(state.module, state.leaf)
    if hasattr(codes, "device_mesh"):
        raise QuantizationError(
            f"The packed {state.leaf} of a rank's own experts was sharded as if all ranks held the "
            "same: pass ignored_params=moe_qlora.expert_parallel_parameters(model) to every call "
            "of fully_shard."
        )
    # The version counts writes in place; comparing at each forward would wait for the device.
    if codes._version != state.version:
        state.version = codes._version
        if state.differs and torch.equal(state.sample(), state.first_rank.to(codes.device)):
            raise QuantizationError(
                f"The packed {state.leaf} of this rank's experts was overwritten with the first "
                "rank's: load the model again, and give DistributedDataParallel the PeftModel "
                "itself, whose _ddp_params_and_buffers_to_ignore names what it must leave alone."
            )
