"""Packed models on CUDA whose layers are recorded as graphs, and their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from training import NF4, Run, assert_same_training
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import tiny_model
from moe_qlora.train.graphs import LayerGraphs
from moe_qlora.train.segments import Segments, running


def packed(model_type: str = "qwen3_moe", config: dict[str, Any] | None = None, **lora: Any) -> Any:
    """A packed model on CUDA in bf16, with an adapter that changes what it computes."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
    sizes |= config or {}
    model: Any = tiny_model(model_type, dtype=torch.bfloat16, **sizes).to("cuda")
    model.config.use_cache = False
    quantization = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, quantization)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **lora)
    how: dict[str, Any] = {"experts": True, "autocast_adapter_dtype": False}
    with warnings.catch_warnings():  # Of deepseek_v3: stock PEFT would load other targets
        warnings.simplefilter("ignore", UserWarning)
        adapted = moe_qlora.get_peft_model(model, settings, **how)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted.train()


@contextmanager
def recorded(
    model: Any, level: str | Sequence[str] | None = None, *, compiled: bool = False
) -> Iterator[LayerGraphs]:
    """Record decoder layers in calls of any shape, as in flat rows; on a level, or one for each."""
    graphs = LayerGraphs(model, compiled=compiled)
    for place, runner in enumerate(graphs._runners if level else ()):
        runner.level = level if isinstance(level, str) else level[place]
        runner.promised = 1, 1 << 20
    token = running.set(Segments(0, torch.zeros(1), 0, recorded=True, dense=True))
    runners = graphs._runners
    try:
        yield graphs
    finally:
        running.reset(token)
        for runner in runners if level else ():
            runner.level = None
            runner.end()
        graphs.remove()


def batch(step: int, length: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (2, length), generator=generator).cuda()


def gradients(model: Any, ids: Tensor, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch, and each trained weight's gradient."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), named


COMPILED = 0.06
"""How far bf16 gradients of compiled layers may be from those of eager ones: both are some 4 % from
those of float32, and up to 1.5 % from each other on a CPU."""


def assert_near(got: Run, wanted: Run, within: float = 0.02) -> None:
    assert_same_training(got, wanted, within)
