"""Liger's kernels on one model, and off it again.

Liger's own call replaces forwards in the model's modules, and functions and classes in the module
of transformers that defines them. Classes go back at once, so that the next model is built of
transformers' own. The rotary embedding is a function that is looked up when it is called: it stays
replaced, for all models of this type, until the model is as it was.

What its forward calls for the loss is replaced in turn (liger_loss.py). A forward that other code
has bound to the model computes a loss of its own, as TRL's trainers do in chunks too, and reads
more of the outputs: it stays, and Liger's loss is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..errors import ConfigError, first_line
from .liger_loss import MISSING, loss_obstacle, put_back, use_own_loss


def apply_liger(model: nn.Module, *, in_layers: bool) -> ExitStack:
    """Give a model Liger's loss and, with `in_layers`, its norms and rotary embedding.

    Experts and MLPs stay as they are.

    Args:
        model: A transformers model, without PEFT's around it.
        in_layers: False leaves the decoder layers to torch.compile.

    Returns:
        What puts back all that was replaced, when it is closed.

    Raises:
        ConfigError: Liger is not installed, does not know this type of model, has nothing to do or
            fails on it; then the model is as it was.
    """
    if find_spec("liger_kernel") is None:
        raise ConfigError("liger_kernel is not installed (pip install liger-kernel)")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has no kernels for {kind}")
    obstacle = loss_obstacle(model)
    loss = obstacle is None
    if obstacle is not None and not in_layers:
        raise ConfigError(obstacle)
    modules = [(vars(module), dict(vars(module))) for module in model.modules()]
    code = [(vars(module), dict(vars(module))) for module in _modeling(model)]
    forwards = _class_forwards(model)
    undo = ExitStack()
    try:
        _apply_liger_kernel_to_instance(
            model=model,
            fused_linear_cross_entropy=loss,
            **dict.fromkeys(("rope", "rms_norm", "layer_norm"), in_layers),
            **dict.fromkeys(("swiglu", "geglu", "cross_entropy"), False),
        )
    except Exception as error:
        _watch(modules, code, forwards, undo)
        undo.close()
        raise ConfigError(
            f"Liger fails on {kind} ({type(error).__name__}: {first_line(error)})"
        ) from error
    _watch(modules, code, forwards, undo)
    if loss and not use_own_loss(model, undo):
        undo.close()
        raise ConfigError(f"Liger replaces the forward of all {kind} models, and not of one")
    return undo


def _class_forwards(model: nn.Module) -> dict[type, Any]:
    """Return the forwards that transformers' classes of a model define."""
    every = {cls for module in model.modules() for cls in type(module).__mro__}
    ours = [cls for cls in every if cls.__module__.startswith("transformers.models.")]
    return {cls: vars(cls)["forward"] for cls in ours if "forward" in vars(cls)}


def _modeling(model: nn.Module) -> list[Any]:
    """Return the modules of transformers that define the model's classes."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


_Namespaces = list[tuple[dict[str, Any], dict[str, Any]]]


def _watch(
    modules: _Namespaces, code: _Namespaces, forwards: dict[type, Any], undo: ExitStack
) -> None:
    """Put classes and their forwards back, and note in `undo` everything else that has changed."""
    for cls, forward in forwards.items():
        if vars(cls)["forward"] is not forward:  # Liger replaces llama4's
            setattr(cls, "forward", forward)  # noqa: B010 - mypy refuses to assign a method
    for now, before in modules:
        if "_old_forward" in before and now.get("forward") is not before.get("forward"):
            # accelerate's hook is around it, and stays there.
            now["_old_forward"], now["forward"] = now["forward"], before["forward"]
    for now, before in (*modules, *code):
        for name in _changed(now, before):
            old = before.get(name, MISSING)
            if isinstance(old, type):
                now[name] = old
            else:
                undo.callback(put_back, now, name, now[name], old)


def _changed(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    for name, value in list(now.items()):
        if value is not before.get(name, MISSING):
            yield name
