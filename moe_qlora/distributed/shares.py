"""One rank's share of a layer's experts, under expert parallelism.

A rank has the experts `[first, last)` of each layer as a packed weight of their own (`Codec.cut`),
and as LoRA factors of their own.

A factor is a DTensor of the shape in PEFT's file; the local part is that of the rank's experts:
rows of `lora_A`, where the expert is slowest, and in `lora_B`, where it is fastest, one run of
columns for each rank of the adapter. So gradient norms, optimizers and files count each expert
once. Each expert sees the tokens of all ranks that share a copy of it: its gradient is summed over
the copies and divided by the number of batches, as DDP and FSDP2 average all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from ..errors import QuantizationError, first_line
from ..layout import unwrapped
from ..world import SHARE, share_of

_ELEMENTWISE = ("_foreach_", "_fused_")
_NORMS = ("vector_norm", "linalg_vector_norm")
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


@dataclass(frozen=True, eq=False)
class ExpertShare:
    """This rank's experts `[first, last)` of a layer's `experts`.

    `mesh` is a `DeviceMesh` whose last dimension divides the experts; ranks along the other one, if
    any, have copies. `batches` is the number of different batches of all its ranks in a step.
    """

    experts: int
    first: int
    last: int
    mesh: Any
    batches: int

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShare:
        return self  # process groups cannot be copied, and the copy of a model uses the same ones

    @property
    def count(self) -> int:
        """Number of this rank's experts."""
        return self.last - self.first

    @property
    def group(self) -> Any:
        """The process group whose ranks have all experts together."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def copies(self) -> Any:
        """The process group whose ranks have the same experts; None where each exists once."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 and self.mesh.size(0) > 1 else None

    def mean(self, name: str, absmax: Tensor) -> Tensor:
        """All-gather the ranks' equally sized absmax of a weight and return the mean.

        It is bit for bit the mean of all absmax in one tensor. All ranks of the group must call it;
        a `QuantizationError` where one does not.
        """
        parts = [torch.empty_like(absmax) for _ in range(distributed.get_world_size(self.group))]
        gather_absmax(name, parts, absmax.contiguous(), self.group)
        return torch.cat(parts).mean()

    def factors(self, a: nn.Parameter, b: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """Return this rank's part of the whole `lora_A` `(E r, in)` and `lora_B` `(out, r E)`."""
        return divided_factors(a, b, self)

    def local(self, factor: Tensor) -> Tensor:
        """Return this rank's part of a factor, whose gradient is averaged over all batches."""
        return local_factor(factor, self)


def gather_absmax(name: str, parts: list[Tensor], absmax: Tensor, group: Any) -> None:
    """Gather each rank's absmax of a weight into `parts`; `QuantizationError` where one is lost."""
    try:
        distributed.all_gather(parts, absmax, group=group)
    except RuntimeError as error:
        raise QuantizationError(
            f"Packing {name} failed on rank {distributed.get_rank()} while it gathered absmax "
            f"from all ranks ({first_line(error)}): every rank must take part to the end; load "
            "the model again."
        ) from error


def expert_share(module: nn.Module) -> ExpertShare | None:
    """Return a module's share of the experts; None where it has all of its layer's."""
    return cast("ExpertShare | None", share_of(module))


def set_share(module: nn.Module, share: ExpertShare) -> None:
    """Set a module's share of the experts."""
    module.__dict__[SHARE] = share


class LocalNames:
    """The names of `local_tensors`, looked up at each iteration: adapters are added later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        return iter(local_tensors(self.model))


def keep_from_ddp(model: nn.Module) -> None:
    """Make DDP, which would overwrite them with the first rank's, ignore local tensors.

    It asks the module that it wraps for their names, by the attribute that
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` sets.
    """
    host: Any = model
    host._ddp_params_and_buffers_to_ignore = LocalNames(model)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers of experts that no other rank may overwrite.

    These are the packed weights and biases of modules with a share, and the LoRA factors on them.
    """
    names: dict[str, Tensor] = {}
    held = {id(module) for module in model.modules() if share_of(module) is not None}
    for prefix, module in model.named_modules():
        if id(unwrapped(module)) not in held:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names[f"{prefix}.{name}".lstrip(".")] = tensor
    return names


def divided_factors(
    a: nn.Parameter, b: nn.Parameter, share: Any
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return this rank's part of the whole `lora_A` `(E r, in)` and `lora_B` `(out, r E)`."""
    rank = a.shape[0] // share.experts
    rows = a.detach().view(share.experts, rank, -1)[share.first : share.last]
    columns = b.detach().view(len(b), rank, share.experts)[:, :, share.first : share.last]
    return (
        _divided(a, rows.flatten(0, 1), Shard(0), share),
        _divided(b, columns.flatten(1), _StridedShard(1, split_factor=rank), share),
    )


def _divided(whole: nn.Parameter, local: Tensor, placement: Any, share: Any) -> nn.Parameter:
    placements = [*[Replicate()] * (share.mesh.ndim - 1), placement]
    # A copy, so that the whole factor is freed.
    part = DTensor.from_local(
        local.clone(), share.mesh, placements, run_check=False,
        shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    return nn.Parameter(DividedTensor.of(part), requires_grad=whole.requires_grad)


def is_divided(factor: Tensor) -> bool:
    """Whether a LoRA factor is a DTensor."""
    return hasattr(factor, "placements")


def local_factor(factor: Tensor, share: Any) -> Tensor:
    """Return this rank's part of a factor, whose gradient will be averaged over all batches."""
    if not is_divided(factor):
        return factor
    if factor.requires_grad:
        return cast(Tensor, _AverageGradient.apply(factor, share))
    return cast(Tensor, cast(Any, factor).to_local())


class _AverageGradient(torch.autograd.Function):
    """Returns this rank's part of a factor, and averages its gradient over all ranks' batches.

    In backward, not in a hook: a hook is lost where the parameter is replaced, and one after
    accumulation would divide the gradients of earlier micro-batches again.
    """

    @staticmethod
    def forward(ctx: Any, factor: Any, share: Any) -> Tensor:
        ctx.share, ctx.spec = share, factor._spec
        local: Tensor = factor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = grad / ctx.share.batches
        if ctx.share.copies is not None:
            distributed.all_reduce(averaged, group=ctx.share.copies)
        part: Any = DTensor(averaged, ctx.spec, requires_grad=False)
        return part, None


class DividedTensor(DTensor):
    """A part of a LoRA factor of divided experts, of its gradient or of its optimizer state.

    Optimizers and gradient clipping may use it with plain tensors. The LoRA factors of divided
    experts lie on another mesh than a model's other trained parameters, which are plain tensors
    under DDP and DTensors of FSDP2's mesh under FSDP2. torch's optimizers and `clip_grad_norm_`
    group all of them in one `_foreach` or fused operation, which DTensor refuses: "got mixed
    torch.Tensor and DTensor" (torch 2.11 and 2.13). Those operations work element by element, so
    that each rank can run them on its own part; norms and the search for infinite gradients are
    reduced over the ranks, so that all get the whole's.
    """

    __slots__: list[str] = []

    @staticmethod
    def of(tensor: DTensor) -> DividedTensor:
        """Return a DTensor as this class; it shares memory."""
        local, spec = tensor._local_tensor, tensor._spec
        divided: Any = DividedTensor(local, spec, requires_grad=tensor.requires_grad)
        return cast(DividedTensor, divided)

    # Not `__torch_dispatch__`, which torch 2.11 does not call on a DTensor's subclass.
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "_foreach_norm":
                norms = func(tree_map(_local, args[0]), *args[1:], **kwargs)
                return _reduced(norms, args[0], _order(args))
            if name in _NORMS and len(args) < 3:
                norm = func(_local(args[0]), *args[1:], **kwargs)
                return _reduced([norm], args[:1], _order(args))[0]
            if name == _UNSCALE:
                func(*tree_map(_local, args), **kwargs)
                first = next(each for each in args[0] if isinstance(each, DividedTensor))
                for group in first.device_mesh.get_all_groups():
                    distributed.all_reduce(_local(args[1]), distributed.ReduceOp.MAX, group=group)
                return None
            if name == "mul_" and not getattr(args[1], "ndim", 0):
                # by a number or a scalar tensor: FSDP2's is on a mesh of its own
                factor = args[1].full_tensor() if isinstance(args[1], DTensor) else args[1]
                _local(args[0]).mul_(factor)
                return args[0]
            if name.startswith(_ELEMENTWISE):
                return func(*tree_map(_local, args), **tree_map(_local, kwargs))
            return tree_map(_wrapped, func(*args, **kwargs))


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _wrapped(value: Any) -> Any:
    return DividedTensor.of(value) if type(value) is DTensor else value


def _order(args: Sequence[Any]) -> float:
    order = args[1] if len(args) > 1 and args[1] is not None else 2
    return float(order)


def _reduced(norms: list[Tensor], tensors: Sequence[Any], order: float) -> list[Tensor]:
    """Reduce the norms of parts of DTensors over the ranks with the other parts."""
    results = list(norms)
    by_mesh: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            key = tensor.device_mesh, tuple(p.is_replicate() for p in tensor.placements)
            by_mesh.setdefault(key, []).append(index)
    reduce, power = distributed.ReduceOp.SUM, order or 1.0  # order 0 counts nonzeros
    if math.isinf(order):
        reduce = distributed.ReduceOp.MAX if order > 0 else distributed.ReduceOp.MIN
        power = 1.0
    for (mesh, replicated), indices in by_mesh.items():
        values = torch.stack([norms[index] for index in indices]) ** power
        for dimension, whole in enumerate(replicated):
            if not whole:
                distributed.all_reduce(values, reduce, group=mesh.get_group(dimension))
        for index, value in zip(indices, values ** (1 / power), strict=True):
            results[index] = value
    return results
