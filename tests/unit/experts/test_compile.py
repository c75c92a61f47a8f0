"""torch.compile of packed models as users switch it on: what is compiled, how often, and the same.

Dynamo alone traces them: graphs, breaks and recompilations are its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.testing import assert_close
from transformers.modeling_layers import GradientCheckpointingLayer

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model
from tests.helpers.fitting import token_ids
from tests.helpers.graphed import gradients
from tests.helpers.prequantized import write_both
from tests.helpers.training import NF4, SETTINGS, adapted, loaded

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Graphs:
    """A backend that counts the graphs it is given, and runs them as they are."""

    count = 0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend("eager")(graph, inputs, **options)

    def of(self, call: Callable[[], object]) -> int:
        """How many graphs a call has compiled."""
        before = self.count
        call()
        return self.count - before


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def packed(folder: Path, model_type: str, codes: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of packed experts and Linear layers, with LoRA on both."""
    layers = 3 if model_type == "deepseek_v3" else 2  # the first of which is dense there
    if codes == "kept":
        sizes = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 64}
        write_both(folder, "gpt_oss mxfp4", shards=1, **sizes)
        folder = folder / "maker"
    else:
        tiny_model(model_type, num_hidden_layers=layers, dtype=dtype).save_pretrained(folder)
    with moe_qlora.enabled(keep_codes=codes == "kept"):
        model = loaded(folder, SETTINGS.get(codes, NF4), dtype=dtype)
    return adapted(model, ["o_proj" if model_type == "deepseek_v3" else "q_proj"]).train()


def compile_layers(model: nn.Module, **options: Any) -> Graphs:
    graphs = Graphs()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(backend=graphs, fullgraph=True, **options)
    return graphs


def step(model: Any, length: int) -> Any:
    """The loss and all gradients of one micro-batch."""
    return gradients(model, token_ids(model, 2, length, seed=length), use_cache=False)


@pytest.mark.parametrize(
    ("model_type", "codes", "dynamic", "expected"),
    [
        ("qwen3_moe", "bf16 storage", None, [1, 0, 1, 0]),
        ("gpt_oss", "kept", True, [1, 0, 0, 0]),
        pytest.param("granitemoe", "int8", True, [1, 0, 0, 0], marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "nf4", True, [2, 0, 0, 0], marks=pytest.mark.nightly),
    ],
)
def test_layers_share_a_graph_and_one_more_for_all_lengths(
    model_type, codes, dynamic, expected, tmp_path, monkeypatch
):
    """No call sets an attribute: torch 2.11 would compile no layer that is checkpointed."""

    def refuse(module: nn.Module, name: str, value: Any) -> None:
        raise AssertionError(name)

    model = packed(tmp_path, model_type, codes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    lengths = 12, 12, 17, 23
    plain = [step(model, length) for length in lengths]
    graphs = compile_layers(model, dynamic=dynamic)
    compiled: list[Any] = []
    for kind in {type(module) for _, module, _ in parametrize.iter_packed(model)}:
        monkeypatch.setattr(kind, "__setattr__", refuse)
    assert [graphs.of(lambda n=n: compiled.append(step(model, n))) for n in lengths] == expected
    assert_close(compiled, plain)


def test_each_way_to_call_is_compiled_once(tmp_path):
    model = packed(tmp_path, "qwen3_moe", "nf4", torch.bfloat16)
    model.add_adapter("other", LoraConfig(r=5, target_modules=["k_proj"], lora_dropout=0.5))
    model.enable_input_require_grads()

    def way(adapter: str, cast: bool) -> Any:
        torch.manual_seed(0)
        model.set_adapter(adapter)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return step(model, 12)

    ways = [("default", False), ("default", True), ("other", False)]
    plain = [way(*each) for each in ways]
    graphs = compile_layers(model)
    for count in (1, 0):
        for each, wanted in zip(ways, plain, strict=True):
            assert graphs.of(lambda e=each, w=wanted: assert_close(way(*e), w)) == count
