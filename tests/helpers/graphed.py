"""Decoder layers that are recorded as CUDA graphs, and such graphs on a CPU.

There a replay runs the recorded Python code again: it reads and writes the same buffers as a graph
does, and sees nothing else of a call.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from training import NF4
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.packing import decoders
from moe_qlora.testing import tiny_model
from moe_qlora.train import graphs
from moe_qlora.train.offload import _Hosted
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
) -> Iterator[graphs.LayerGraphs]:
    """Record decoder layers in calls of any shape, as in flat rows; on a level, or one for each."""
    made = graphs.LayerGraphs(model, compiled=compiled)
    for place, runner in enumerate(made._runners if level else ()):
        runner.level = level if isinstance(level, str) else level[place]
        runner.promised = 1, 1 << 20
    token = running.set(Segments(0, torch.zeros(1), 0, recorded=True, dense=True))
    try:
        yield made
    finally:
        running.reset(token)
        for runner in made._runners if level else ():
            runner.level = None
            runner.end()
        made.remove()


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


class _Graph:
    current: "_Graph | None" = None  # The one that is recorded or replayed

    work: Any = None

    def __init__(self) -> None:
        self.read: dict[Any, Tensor] = {}  # Codes by weight, alive: no other has their address

    def replay(self) -> None:
        with _recorded(self):
            self.work()


@contextmanager
def _recorded(graph: _Graph) -> Iterator[None]:
    before, _Graph.current = _Graph.current, graph
    try:
        yield
    finally:
        _Graph.current = before


def in_graph() -> bool:
    """Whether a graph is recorded or replayed now: its launches wait for nothing outside of it."""
    return _Graph.current is not None


def hold_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a replay fail that finds packed weights elsewhere than they were when it was recorded."""

    def noting(read: Any) -> Any:
        def noted(*args: Any) -> Any:
            packed = read(*args)
            if _Graph.current is not None:
                before = _Graph.current.read.setdefault(packed.origin, packed.codes.detach())
                assert before.data_ptr() == packed.codes.data_ptr(), "a graph reads what was freed"
            return packed

        return noted

    monkeypatch.setattr(decoders, "fetched", noting(decoders.fetched))
    monkeypatch.setattr(_Hosted, "fetch", noting(_Hosted.fetch))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recorded calls run on a CPU during a test."""
    forward, gradients = graphs.RecordedCall._forward, graphs.RecordedCall._gradients

    def recorded(run: Any, again: Any) -> Any:
        def at_once(call: Any, *args: Any) -> Any:
            def work() -> None:
                """Write what the call computes where it was when it was recorded."""
                places = call.outs, call.grads, call.grad_x, call.weight_grads
                with call.exchanged():
                    again(call)
                found = [*call.outs, call.grad_x, *call.weight_grads]
                call.outs, call.grads, call.grad_x, call.weight_grads = places
                for place, result in zip([*places[0], places[2], *places[3]], found, strict=True):
                    if place is not None and place is not result:
                        place.data.copy_(result)  # A replay counts no version

            if _Graph.current is not None:
                _Graph.current.work = work
            return run(call, *args)

        return at_once

    def forward_again(call: Any) -> None:
        call.latest = forward(call)

    def gradients_again(call: Any) -> None:
        gradients(call, call.latest)

    monkeypatch.setattr(graphs.RecordedCall, "_forward", recorded(forward, forward_again))
    monkeypatch.setattr(graphs.RecordedCall, "_gradients", recorded(gradients, gradients_again))
    generator = SimpleNamespace(get_offset=lambda: 0, set_offset=lambda _: None)
    monkeypatch.setattr(graphs, "capture", lambda graph, _: _recorded(graph))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
