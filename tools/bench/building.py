"""Builds whole models with random weights on a device, packed a module at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import Rows, allocated, release, synchronize
from peers import UnavailableError, e4b_experts
from random_mxfp4 import BLOCK, random_mxfp4
from torch import Tensor, nn

import moe_qlora

OURS = ("ours", "mxfp4")
"""This package's peers, the second only where it is asked for."""

Each = Callable[[str, nn.Module], None]


def build(config: Any, device: torch.device, each: Each | None = None) -> Any:
    """The model in bf16 on the device, as `moe_qlora.testing.fill_randomly` makes it."""
    from moe_qlora.testing import fill_randomly, model_class

    with torch.device("meta"):
        model = model_class(config.model_type)._from_config(config, dtype=torch.bfloat16)
    return fill_randomly(model, device, each)


class Packer:
    """Packs a model's expert stacks as they are made, and counts.

    Args:
        peer: One that packs.
        config: The model's.
        rank: Of the LoRA that e4b's experts are made with.
        offload: Of how many last layers e4b's experts are kept in host memory, 0 of all; None: of
            none.

    Attributes:
        before: Bytes of the stacks in bf16.
        after: Bytes packed, statistics included.
        host: Bytes of them in host memory.
        seconds: Time taken.
    """

    def __init__(
        self, peer: str, config: Any, *, rank: int = 16, offload: int | None = None
    ) -> None:
        self.peer = peer
        self.rank = rank
        self.made: dict[str, nn.Module] = {}
        self.stacks: dict[str, list[str]] = {}
        from moe_qlora.testing import model_class

        with torch.device("meta"):
            model = model_class(config.model_type)._from_config(config, dtype=torch.bfloat16)
        for param in moe_qlora.detect(model):
            self.stacks.setdefault(param.module_name, []).append(param.parameter_name)
        self.offloaded: list[str] = []
        if peer == "e4b" and offload is not None:
            self.offloaded = list(self.stacks)[-offload:]
        self.before = self.after = self.host = 0
        self.seconds = 0.0

    def visit(self, name: str, module: nn.Module) -> None:
        """Pack what is an expert stack of this module."""
        if self.peer == "e4b" and name in self.stacks:
            self._replace(name, module)
            return
        for parameter in self.stacks.get(name, ()):
            weight = module.get_parameter(parameter).data
            device = weight.device
            self.before += weight.nbytes
            synchronize(device)
            start = time.perf_counter()
            if self.peer in OURS:
                self._ours(module, parameter, weight)
            else:
                self._theirs(module, parameter)
            del weight
            synchronize(device)
            self.seconds += time.perf_counter() - start

    def put(self, model: nn.Module) -> None:
        """Put the modules that were made in the place of the model's."""
        for name, made in self.made.items():
            model.set_submodule(name, made)

    def _replace(self, name: str, module: nn.Module) -> None:
        """Make e4b's module of this one, whose own weights are given back."""
        stacks = [module.get_parameter(parameter) for parameter in self.stacks[name]]
        self.before += sum(stack.nbytes for stack in stacks)
        device = stacks[0].device
        synchronize(device)
        start = time.perf_counter()
        offload = name in self.offloaded
        made = e4b_experts(module, self.rank, offload=offload)
        module.to_empty(device="meta")
        synchronize(device)
        self.seconds += time.perf_counter() - start
        state = made.base.state_dict()  # also what is in host memory
        held = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        self.after += held
        self.host += held if offload else 0
        self.made[name] = made

    def _ours(self, module: nn.Module, parameter: str, weight: Tensor) -> None:
        from moe_qlora.packing import codec, parametrize
        from moe_qlora.packing.settings import CodecSettings

        if self.peer == "mxfp4":
            packed = random_mxfp4(weight.shape, bool(module.is_transposed), weight.device)
            if packed is None:
                shape = tuple(weight.shape)
                raise UnavailableError(f"{parameter} {shape} has no whole blocks of {BLOCK}")
        else:
            packed = codec.pack(weight, CodecSettings.from_config(quantization()))
        self.after += packed.nbytes
        parametrize.attach(module, parameter, packed)

    def _theirs(self, module: Any, parameter: str) -> None:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        replace_parameter_4bit(module, parameter, compress_statistics=True, quant_type="nf4")
        held = module.parametrizations[parameter]
        state = held[0].quant_state
        tensors = [held.original, state.absmax, state.offset, state.state2.absmax]
        self.after += sum(tensor.nbytes for tensor in tensors)


def quantization() -> Any:
    """nf4 with double quantization."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def pack(model: Any, device: torch.device, rows: Rows | None) -> None:
    """`quantize_experts`, which also takes on stacks that are packed already.

    Args:
        model: The model.
        device: Where it is.
        rows: Records time, bytes and the memory that packing takes beyond the model; None where
            everything is packed already.
    """
    release(device)
    before = allocated(device)
    start = time.perf_counter()
    report = moe_qlora.quantize_experts(model, quantization())
    synchronize(device)
    if rows is None:
        return
    rows.add("packing time", "s", time.perf_counter() - start)
    rows.add("experts before", "bytes", report.bytes_before)
    rows.add("experts packed", "bytes", report.bytes_after)
    rows.add("packed weight", "bytes/weight", 2 * report.bytes_after / report.bytes_before)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        rows.add("16-bit model", "bytes", before)
        rows.add("peak while packing over model", "bytes", peak - before)
