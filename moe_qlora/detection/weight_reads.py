"""Find Linear layers whose weight the module that owns them reads, instead of calling them.

Such code sees codes where bitsandbytes packs the layer, and no LoRA, which the layer's forward
adds. Longcat's routers are so, and Mamba layers, where `mamba_ssm` computes the output projection.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from ..layout import unwrapped
from .tree import join

# What a packed weight says as a plain one does.
_FACTS = frozenset({"device", "dtype", "is_cuda", "is_meta", "ndim", "requires_grad", "shape"})


def weights_read(model: nn.Module) -> dict[str, str]:
    """Return the full names of such layers, each with the class whose code reads its weight.

    The code is that of the owner's `forward` and of the methods that it names. Code without a
    source file is taken to call its layers, as is a method that asks whether the model is
    quantized, as jamba's does; and a weight's device or dtype may be read.
    """
    found = {}
    for name, module in model.named_modules():
        children = {
            child
            for child, layer in module.named_children()
            if isinstance(unwrapped(layer), nn.Linear)
        }
        if children:
            for function in functions_run(module):
                for child in children & _read_by(function):
                    found[join(name, child)] = type(module).__name__
    return found


def functions_run(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions that a module's forward may run on it."""
    seen, names = set(), ["forward"]
    while names:
        name = names.pop()
        # Properties are not run.
        method: Any = module.__dict__.get(name, getattr(type(module), name, None))
        method = inspect.unwrap(method)
        function = getattr(method, "__func__", method)
        if name in seen or not isinstance(function, FunctionType):
            continue
        seen.add(name)
        yield function
        names += (used for used in function.__code__.co_names if hasattr(type(module), used))


@cache
def _read_by(function: FunctionType) -> frozenset[str]:
    code = function.__code__
    if "weight" not in code.co_names or "_is_quantized" in code.co_names + code.co_consts:
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return frozenset()
    owner = code.co_varnames[:1]
    nodes = list(ast.walk(tree))
    facts = {id(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr in _FACTS}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            facts.add(id(node.args[0]))
    return frozenset(
        node.value.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in facts
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute)
        if isinstance(node.value.value, ast.Name) and (node.value.value.id,) == owner
    )
