"""`torch.topk` of a router, within a compiled decoder layer, by the kernel of `kernels/top_k.py`.

Inductor has no code of its own for it, and calls torch's. The options that layers are compiled with
give Inductor a pass over its graphs, which puts our operator in the place of torch's; code that is
compiled elsewhere stays as it is. The pass comes after autograd, which sees torch's operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, custom_graph_pass
from torch.fx import Graph

from ..kernels import top_k as kernel
from ..kernels.lang import HAS_TRITON

_OPTION = "post_grad_custom_pre_pass"
_TOP_K = torch.ops.aten.topk.default


def compile_options() -> dict[str, Any]:
    """Return the `options` of torch.compile for a decoder layer; none if they would not be used.

    A pass that has been set in `torch._inductor.config` runs first.
    """
    default_backend = getattr(torch.compiler, "get_default_backend", lambda: "inductor")
    if not HAS_TRITON or default_backend() != "inductor":
        return {}
    _register()  # Here, since code from Inductor's cache calls the operator and runs no pass
    before = getattr(config, _OPTION)
    if before is None:
        return {_OPTION: TopKPass()}
    if (passes_of := getattr(custom_graph_pass, "get_custom_graph_passes", None)) is not None:
        return {_OPTION: (*passes_of(before), TopKPass())}
    return {_OPTION: TopKPass(before)}  # torch 2.11 takes one pass


@dataclass(frozen=True)  # and so equal: compiled code is used again where options are equal
class TopKPass(custom_graph_pass.CustomGraphPass):
    """Replaces the calls of `aten.topk` in a graph that the kernel can compute."""

    before: Any = None  # Another pass

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        if self.before is not None:
            self.before(graph)
        for node in graph.find_nodes(op="call_function", target=_TOP_K):
            if _takes(*node.args, **node.kwargs):
                node.target = torch.ops.moe_qlora.top_k.default
                node.args, node.kwargs = node.args[:2], {}

    def uuid(self) -> Any:
        """Return what Inductor's cache tells passes apart by; None if nothing does."""
        own = custom_graph_pass.get_hash_for_files((__file__, str(kernel.__file__)))
        if self.before is None:
            return own
        before = getattr(self.before, "uuid", lambda: None)()
        return (own, before) if before else None


def _takes(
    x: Any,
    k: Any = None,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002 - torch's name
) -> bool:
    """Whether the kernel computes a call of `aten.topk`, whose input is a node."""
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or not value.ndim or not _is_on_device(value):
        return False
    columns = value.shape[-1]  # A SymInt, as k may be, if the size is not known
    return (
        largest
        and dim in (-1, value.ndim - 1)
        and value.dtype in kernel.DTYPES
        and isinstance(columns, int)
        and isinstance(k, int)
        and 0 < k <= min(columns, kernel.MAX_K)
        and columns <= kernel.MAX_COLUMNS
    )


def _is_on_device(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return kernel.top_k(x, k)


def _fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _register() -> None:
    """Define the operator, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "top_k"):
        return
    operator: Any = torch.library.custom_op
    schema = "(Tensor x, int k) -> (Tensor, Tensor)"
    defined = operator("moe_qlora::top_k", _top_k, mutates_args=(), schema=schema)
    defined.register_fake(_fake)
