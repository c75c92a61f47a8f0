"""Liger's loss on one model, and off it again.

Liger's own call replaces the model's forward; norms, rotary embedding, MLPs and experts are left to
torch.compile. A forward that other code has bound to the model, as accelerate's hooks are, stays,
and Liger's loss is left out. TRL's trainers bind one, whose loss is in chunks.
"""

from contextlib import ExitStack
from importlib.util import find_spec
from inspect import signature
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..errors import ConfigError, first_line

# Chunks of the loss that are eight times as large as Liger's: its 64 tokens leave most of a GPU
# idle, and a step of Qwen3-30B-A3B takes 324 ms, not 309 (4,096 tokens, one H100).
_CHUNKS = {"chunk_mem_const": 8}


def apply_liger(model: nn.Module) -> ExitStack:
    """Give a model, without PEFT's around it, Liger's loss; return what restores it when closed.

    A `ConfigError` where Liger is not installed, does not know this type, or fails.
    """
    if find_spec("liger_kernel") is None:
        raise ConfigError("liger_kernel is not installed (pip install liger-kernel)")
    from liger_kernel.transformers import functional
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has no kernels for {kind}")
    if (obstacle := loss_obstacle(model)) is not None:
        raise ConfigError(obstacle)
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    given = signature(apply).parameters.items()
    flags = {n: n == "fused_linear_cross_entropy" for n, p in given if isinstance(p.default, bool)}
    held = [(cls, vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls)]
    before = {name: value for name, value in vars(model).items() if name == "forward"}
    undo = ExitStack()
    try:
        apply(model=model, **flags)
        liger = vars(model).get("forward")
        if not str(getattr(liger, "__module__", "")).startswith("liger_kernel."):
            raise ConfigError(f"Liger replaces the forward of all {kind} models, and not of one")
    except Exception as error:
        vars(model).pop("forward", None)
        vars(model).update(before)
        if isinstance(error, ConfigError):
            raise
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"Liger fails on {kind} ({said})") from error
    finally:
        for cls, forward in held:
            if vars(cls)["forward"] is not forward:  # Liger replaces llama4's
                setattr(cls, "forward", forward)  # noqa: B010 - mypy refuses to assign a method

    def restore() -> None:
        if vars(model).get("forward") is liger:  # Else other code has changed it meanwhile
            del vars(model)["forward"]
            vars(model).update(before)

    def ask(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Ask for larger chunks where a call with labels does not say how large they are."""
        labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        return args, {**_CHUNKS, **kwargs} if labelled else kwargs

    undo.callback(restore)
    if _CHUNKS.keys() <= signature(functional.liger_fused_linear_cross_entropy).parameters.keys():
        undo.callback(model.register_forward_pre_hook(ask, with_kwargs=True).remove)
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
    if (forward := vars(model).get("forward")) is None:
        return "transformers."
    # Wrappers copy the name and module of what they wrap, but not this.
    code: Any = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    return str(code.get("__name__"))
