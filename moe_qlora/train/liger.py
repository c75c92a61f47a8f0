"""Liger's kernels on one model, and off it again.

Liger's own call replaces forwards in the model's modules, and functions and classes in the module
of transformers that defines them. Classes go back at once, so that the next model is built of
transformers' own. The rotary embedding is a function that is looked up when it is called: it stays
replaced, for all models of this type, until the model is as it was.

A forward that other code has bound to the model, as accelerate's hooks are, stays, and Liger's loss
is left out. TRL's trainers bind one, whose loss is in chunks.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib.util import find_spec
from inspect import signature
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..errors import ConfigError, first_line

_MISSING: Any = object()  # the value before of a new entry
# Chunks of the loss that are eight times as large as Liger's: its 64 tokens leave most of a GPU
# idle, and a step of Qwen3-30B-A3B takes 324 ms, not 309 (4,096 tokens, one H100).
_CHUNKS = {"chunk_mem_const": 8}


def apply_liger(model: nn.Module, *, in_layers: bool) -> ExitStack:
    """Give a model Liger's loss and, with `in_layers`, its norms and rotary embedding.

    Experts and MLPs stay as they are.

    Args:
        model: A transformers model, without PEFT's around it.
        in_layers: False leaves the decoder layers to torch.compile.

    Returns:
        A stack that restores the model when it is closed.

    Raises:
        ConfigError: Liger is not installed, does not know this type, has nothing to do or fails.
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
    every = {cls for module in model.modules() for cls in type(module).__mro__}
    theirs = [cls for cls in every if cls.__module__.startswith("transformers.models.")]
    files = [sys.modules[name] for name in sorted({cls.__module__ for cls in theirs})]
    code = [(vars(file), dict(vars(file))) for file in files]
    forwards = {cls: vars(cls)["forward"] for cls in theirs if "forward" in vars(cls)}
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
    if loss:
        _enlarge_chunks(model, undo)
    home = str(getattr(vars(model).get("forward"), "__module__", ""))
    if loss and not home.startswith("liger_kernel."):
        undo.close()
        raise ConfigError(f"Liger replaces the forward of all {kind} models, and not of one")
    return undo


def loss_obstacle(model: nn.Module) -> str | None:
    """Return why Liger's loss, which reads the head's weight alone, cannot be used; else None."""
    if not _home_of_forward(model).startswith(("liger_kernel.", "transformers.")):
        return "other code computes the loss by a forward of its own"
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, BaseTunerLayer):
        return "the head has LoRA, which Liger's loss would not compute"
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return "the head is quantized, and Liger's loss multiplies by its weight"
    if getattr(head, "bias", None) is not None:
        return "the head has a bias, which Liger's loss would not add"
    if "_loss_function" in vars(model):
        return "the model's loss_function was set, which Liger's forward would not call"
    return None


def has_trls_loss(model: nn.Module) -> bool:
    """Whether a trainer of TRL has bound its forward, which computes the loss in chunks."""
    return _home_of_forward(model).startswith("trl.")


def _home_of_forward(model: nn.Module) -> str:
    """Return the module that defines a model's forward."""
    forward = vars(model).get("forward")
    if forward is None:
        return "transformers."
    # Wrappers copy the name and module of what they wrap, but not this.
    code: Any = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    return str(code.get("__name__"))


def _enlarge_chunks(model: nn.Module, undo: ExitStack) -> None:
    """Let calls with labels that do not say how large the loss's chunks are ask for larger ones."""
    from liger_kernel.transformers import functional

    known = signature(functional.liger_fused_linear_cross_entropy).parameters
    if not _CHUNKS.keys() <= known.keys():
        return

    def ask(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        return args, {**_CHUNKS, **kwargs} if labelled else kwargs

    undo.callback(model.register_forward_pre_hook(ask, with_kwargs=True).remove)


_Namespaces = list[tuple[dict[str, Any], dict[str, Any]]]


def _watch(
    modules: _Namespaces, code: _Namespaces, forwards: dict[type, Any], undo: ExitStack
) -> None:
    """Put classes and their forwards back, and note in `undo` everything else that has changed."""
    for cls, forward in forwards.items():
        if vars(cls)["forward"] is not forward:  # Liger replaces llama4's
            setattr(cls, "forward", forward)  # noqa: B010 - mypy refuses to assign a method
    for now, before in (*modules, *code):
        for name, value in list(now.items()):
            old = before.get(name, _MISSING)
            if isinstance(old, type) and value is not old:
                now[name] = old
            elif value is not old:
                undo.callback(_put_back, now, name, value, old)


def _put_back(now: dict[str, Any], name: str, value: Any, old: Any) -> None:
    """Restore an entry, unless other code has changed it meanwhile."""
    if now.get(name) is value:
        if old is _MISSING:
            del now[name]
        else:
            now[name] = old
