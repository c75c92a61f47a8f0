"""AdamW whose step takes as long as the memory takes to read and write it, on CUDA.

torch's fused step updates what few tensors fit into a launch's arguments: for 642 M LoRA weights in
600 tensors 30 launches one after the other, 4.2 ms on an H100. Here `kernels/adamw.py` updates all
that are alike in one launch, by tables of their addresses that lie on the device and change only
where an address does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter, itemgetter
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import adamw as kernel
from ..kernels.adamw import DTYPES, Kind, Row
from ..kernels.lang import HAS_TRITON
from ..kernels.quantized_mm import FAILURES

_PLAIN = Tensor, nn.Parameter
_STATE = "exp_avg", "exp_avg_sq", "step"
_OFF = "amsgrad", "maximize", "capturable", "differentiable"
_SIZE, _ADDRESS, _DTYPE = Tensor.numel, Tensor.data_ptr, attrgetter("dtype")

_works = HAS_TRITON
"""Whether the kernels compile, as far as is known; once one did not, none is tried again."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same arguments, param groups, state and results, in less time.

    The kernel updates parameters on CUDA that are contiguous plain tensors in fp32, bf16 or fp16,
    as their gradients are, in groups with `fused` and without `amsgrad`, `maximize`, `capturable`
    or `differentiable`, whose lr is no tensor. torch's own step updates all others (DTensors, say),
    and all where a `GradScaler` hands its scale over, under torch.compile, and in a CUDA graph's
    capture. If the kernel does not compile, torch's step serves from then on, after one warning.

    `fused` is by default True where all parameters are on CUDA and neither `foreach` nor
    `differentiable` is given. State dicts go from here to `torch.optim.AdamW` and back; each `step`
    lies on the device, as with torch's `fused=True`. Groups that were saved without `fused` have it
    after they are loaded, if it is the default here.

    Raises what torch's raises.
    """

    def __init__(self, params: Any, *args: Any, fused: bool | None = None, **kwargs: Any) -> None:
        super().__init__(params, *args, fused=fused, **kwargs)
        self._plans: dict[int, _Plan] = {}  # By the group's place
        groups = self.param_groups
        chosen = any(group[name] for group in groups for name in ("foreach", "differentiable"))
        chosen |= any(group[name] is False for group in groups for name in ("foreach", "fused"))
        on_cuda = all(p.is_cuda and p.is_floating_point() for g in groups for p in g["params"])
        if not chosen and on_cuda:
            self._step_supports_amp_scaling = True
            for options in (self.defaults, *groups):
                options["fused"] = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict as well. torch's __getstate__ leaves the plans out.
        super().__setstate__(state)
        self._plans = {}
        for group in self.param_groups if self.defaults.get("fused") else ():
            if group["fused"] is None and not (group["foreach"] or group["differentiable"]):
                group["fused"] = True
                for p in group["params"]:
                    if "step" in (of := self.state.get(p, {})):
                        of["step"] = of["step"].to(p.device, torch.float32)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; return what `closure` returns, which is called first, with gradients on."""
        if torch.compiler.is_compiling() or not self._may_launch():
            return _torch_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index in [*self._plans][len(self.param_groups) :]:  # Of groups that are gone
            del self._plans[index]
        left: list[list[Tensor]] = []
        with torch.no_grad():
            for i, group in enumerate(self.param_groups):  # A warning says where `step` was called
                left.append(self._update(i, group))
        if any(p.grad is not None for params in left for p in params):
            every = [group["params"] for group in self.param_groups]
            try:
                for group, params in zip(self.param_groups, left, strict=True):
                    group["params"] = params
                _torch_step(self)
            finally:
                for group, params in zip(self.param_groups, every, strict=True):
                    group["params"] = params
        return loss

    def _may_launch(self) -> bool:
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return _works and not scaled and not capturing

    def _update(self, index: int, group: dict[str, Any]) -> list[Tensor]:
        """Update the parameters of a group that the kernel takes, and return the others."""
        global _works
        params, grads, states = self._candidates(group)
        addresses = [*map(_ADDRESS, grads)]
        found = _Found(
            [*map(id, group["params"])],
            [*map(id, params)],
            [*map(_SIZE, params)],
            [*map(_SIZE, grads)],
            [*map(_DTYPE, params)],
            [*map(_DTYPE, grads)],
            [*map(_ADDRESS, params)],
            [*map(_ADDRESS, map(itemgetter("exp_avg"), states))],
            [*map(_ADDRESS, map(itemgetter("exp_avg_sq"), states))],
            [*map(_ADDRESS, map(itemgetter("step"), states))],
            [address % 16 == 0 for address in addresses],
        )
        plan = self._plans.get(index)
        if plan is None or plan.found != found:
            plan = self._plans[index] = _Plan(group["params"], params, states, found)
        left = plan.left
        for batch in plan.batches:
            if not _works or not batch.launch(group, addresses, self.state):
                _works = False
                left = left + batch.params
        return left

    def _candidates(
        self, group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        """Return the parameters that the kernel may take, their gradients and their states."""
        found: tuple[list[Any], list[Any], list[Any]] = [], [], []
        params, grads, states = found
        if (
            not group["fused"]
            or not group["decoupled_weight_decay"]
            or any(group[name] for name in _OFF)
            or any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
        ):
            return found
        for p in group["params"]:
            if (grad := p.grad) is not None and _may_take(p, grad):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                params.append(p)
                grads.append(grad)
                states.append(state)
        return found


class _Found(NamedTuple):
    """What a plan depends on, which is looked at in every step (0.5 ms for 600 tensors)."""

    group: list[int]  # id of all parameters
    params: list[int]  # id of those that the kernel may take
    sizes: list[int]  # Elements
    grad_sizes: list[int]
    dtypes: list[torch.dtype]
    grad_dtypes: list[torch.dtype]
    p: list[int]  # Addresses
    exp_avg: list[int]
    exp_avg_sq: list[int]
    step: list[int]
    aligned: list[bool]  # Whether the gradient's address, which may change, is one of 16 bytes


class _Plan:
    """Which parameters of a group the kernel updates, and which are left to torch."""

    def __init__(
        self, group: list[Tensor], params: list[Tensor], states: list[Any], found: _Found
    ) -> None:
        self.found = found
        places: dict[tuple[torch.device, Kind], list[int]] = {}
        for i, (p, state) in enumerate(zip(params, states, strict=True)):
            m, v, step = (state[name] for name in _STATE)
            at = found.p[i] | found.exp_avg[i] | found.exp_avg_sq[i]
            kind = Kind(p.dtype, found.grad_dtypes[i], m.dtype, found.aligned[i] and at % 16 == 0)
            fits = found.sizes[i] == found.grad_sizes[i] == m.numel() == v.numel()
            fits &= all(t.device == p.device and t.is_contiguous() for t in (m, v, step))
            fits &= all(dtype in DTYPES for dtype in kind[:3])
            fits &= v.dtype == m.dtype and step.dtype == torch.float32
            if fits and _is_on_device(p):
                places.setdefault((p.device, kind), []).append(i)
        self.batches = [_Batch(*key, those, params, found) for key, those in places.items()]
        taken = {id(p) for batch in self.batches for p in batch.params}
        self.left = [p for p in group if id(p) not in taken]


class _Batch:
    """What one launch updates, and its tables on the device."""

    def __init__(
        self, device: torch.device, kind: Kind, places: list[int], params: list[Tensor], at: _Found
    ) -> None:
        self.device, self.kind, self.places = device, kind, places
        self.params = [params[i] for i in places]
        every = [*map(Row, at.sizes, at.p, at.exp_avg, at.exp_avg_sq, at.step)]
        self.tables = kernel.tabulate([every[i] for i in places], device)
        self.grads: list[int] = []  # Addresses, as of the last step

    def launch(self, group: dict[str, Any], grads: list[int], state: dict[Tensor, Any]) -> bool:
        """Do a step, and return True; if a kernel does not compile, do nothing but warn."""
        grads = [grads[i] for i in self.places]
        if self.grads != grads:
            self.grads, self.of_grads = grads, kernel.to_device(grads, self.device)
        betas, advanced = group["betas"], False
        try:
            kernel.advance(self.tables, *betas)
            advanced = True
            numbers = group["lr"], *betas, group["eps"], group["weight_decay"]
            kernel.update(self.kind, self.tables, self.of_grads, *numbers)
        except (*FAILURES, OSError, SubprocessError) as error:
            if advanced:
                torch._foreach_sub_([state[p]["step"] for p in self.params], 1)
            warnings.warn(
                f"the kernel for AdamW does not compile ({type(error).__name__}: {error}); this "
                "process goes on with torch's step, which takes longer",
                stacklevel=5,
            )
            return False
        torch.autograd.graph.increment_version(self.params)  # As operators do in place
        return True


def _may_take(p: Tensor, grad: Tensor) -> bool:
    """Whether the kernel can update a parameter with this gradient, where sizes and dtypes fit."""
    return (
        type(p) in _PLAIN
        and type(grad) in _PLAIN
        and p.dtype in DTYPES
        and grad.layout is torch.strided
        and p.is_contiguous()
        and grad.is_contiguous()
    )


def _is_on_device(p: Tensor) -> bool:
    return p.is_cuda


def _torch_step(optimizer: AdamW, closure: Callable[[], Any] | None = None) -> Any:
    """Do torch's step without its hooks, which run around ours.

    torch puts them around a class's step once an optimizer of that class is made.
    """
    step: Any = torch.optim.AdamW.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, closure)
