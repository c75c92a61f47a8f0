"""Find Linear layers whose weight the module that owns them reads, instead of calling them.

Such code sees codes where bitsandbytes packs the layer, and no LoRA, which the layer's forward
adds. Longcat's routers are so, and Mamba layers, where `mamba_ssm` computes the output projection.
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from ..layout import unwrapped
from .tree import join

# Not what a packed weight says as a plain one does, nor an assignment.
_READ = (
    r"(?<!isinstance\()\b{owner}\.(\w+)\.weight\b(?!\s*=[^=])"
    r"(?!\.(?:device|dtype|is_cuda|is_meta|ndim|requires_grad|shape)\b)"
)


def weights_read(model: nn.Module) -> dict[str, str]:
    """Return the full names of such layers, each with the class whose code reads its weight.

    That is its `forward`, and methods which that names. Code without a source file is taken to call
    its layers, as is a method that asks whether the model is quantized, as jamba's does.
    """
    return {
        join(name, child): type(module).__name__
        for name, module in model.named_modules()
        if any(isinstance(unwrapped(layer), nn.Linear) for layer in module.children())
        for function in functions_run(module)
        for child in _read_by(function)
        if isinstance(layer := module._modules.get(child), nn.Module)
        if isinstance(unwrapped(layer), nn.Linear)
    }


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
        source = inspect.getsource(function)
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(re.findall(_READ.format(owner=code.co_varnames[0]), source))
