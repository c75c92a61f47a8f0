"""Tunes the kernels for the packed experts of one model, before training and on request.

A forward never measures: it takes what a table on disk says, or a configuration that is never far
behind (`kernels/table.py`).
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..errors import QuantizationError
from ..kernels.weights import PackedWeight
from ..packing import parametrize
from . import backend

_log = logging.getLogger(__name__)


def tune_kernels(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> int:
    """Find the fastest configuration of the quantized matmul for a model's packed experts.

    One weight of each shape and kind is measured, every configuration's result being checked first;
    the fastest go into Triton's cache folder, for this device and these versions, and hold for
    later processes. Takes some seconds a shape, once.

    Args:
        model: A model with packed experts on a CUDA device.
        dtype: Of the activations: bf16 or fp16.

    Returns:
        How many shapes were measured; 0 on a device that the kernels do not run on.

    Raises:
        QuantizationError: No experts of the model are packed.
    """
    by_shape: dict[tuple[str, tuple[int, ...]], PackedWeight] = {}
    for _, module, name in parametrize.iter_packed(model):
        weight = parametrize.read_packed(module, name)
        if len(weight.shape) == 3:
            by_shape.setdefault((weight.kind, tuple(weight.shape[1:])), weight)
    if not by_shape:
        raise QuantizationError(
            f"tune_kernels: {type(model).__name__} has no packed experts; quantize_experts(model) "
            "or loading under moe_qlora.enabled() packs them."
        )
    measured = 0
    for weight in by_shape.values():
        if not backend.kernels_run(weight.device):
            continue
        from ..kernels import table

        packed = weight.aligned()
        if table.can_tune(packed):
            _log.warning(
                "tune_kernels: compiling and measuring kernels for experts of %d x %d (%s); "
                "this takes seconds to minutes, once for this GPU",
                *packed.shape[1:], packed.kind,
            )  # fmt: skip
            table.tune(packed, dtype)
            measured += 1
    return measured
