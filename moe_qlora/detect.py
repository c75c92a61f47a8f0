"""nn.Module -> ModelLayout: which parameters are stacks of expert matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from .layout import ModelLayout


def detect(model: nn.Module) -> ModelLayout:
    """Find every parameter that stacks the weight matrices of a Mixture-of-Experts layer.

    Raises:
        DetectionError: `model` is no `nn.Module`.
    """
    from torch import nn

    from .detection.walk import detect_layout
    from .errors import DetectionError

    if not isinstance(model, nn.Module):
        raise DetectionError(f"The model is a {type(model).__name__}: give a built nn.Module.")
    return detect_layout(model)
