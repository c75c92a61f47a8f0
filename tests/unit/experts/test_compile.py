"""torch.compile of packed models as users switch it on: what is compiled, how often, and the same.

Dynamo alone traces most cases (`Graphs("eager")`): graphs, breaks and recompilations are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer

import moe_qlora
from moe_qlora.testing import tiny_model
from tests.helpers.mxfp4 import write_gpt_oss
from tests.helpers.training import SETTINGS

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
LAYERS = 3


class Graphs:
    """A backend that counts the graphs it is given; another one runs them."""

    def __init__(self, runs: str = "eager") -> None:
        self.count, self._run = 0, torch._dynamo.lookup_backend(runs)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.count += 1
        return self._run(graph, inputs, **options)

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
    settings = SETTINGS.get(codes, SETTINGS["nf4"])
    if codes == "kept":
        write_gpt_oss(folder, num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=64)
        folder = folder / "maker"
    else:
        tiny_model(model_type, num_hidden_layers=LAYERS, dtype=dtype).save_pretrained(folder)
    with moe_qlora.enabled(keep_codes=codes == "kept"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**settings), dtype=dtype
        )
    torch.manual_seed(1)
    target = "o_proj" if model_type == "deepseek_v3" else "q_proj"
    config = LoraConfig(r=3, lora_alpha=8, target_modules=[target])
    peft_model: Any = moe_qlora.get_peft_model(model, config, experts=True)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return peft_model.train()


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def ids(length: int, rows: int = 2) -> Tensor:
    return torch.randint(5, 48, (rows, length), generator=torch.Generator().manual_seed(length))


def step(model: Any, length: int) -> dict[str, Tensor]:
    """The loss and all gradients of one micro-batch."""
    loss = model(input_ids=ids(length), labels=ids(length), use_cache=False).loss
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name], parameter.grad = parameter.grad, None
    return results


def assert_same(compiled: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert compiled.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    ("model_type", "codes", "runs", "dynamic", "expected"),
    [
        ("qwen3_moe", "nf4", "aot_eager", None, [1, 0, 1, 0]),
        ("gpt_oss", "kept", "eager", True, [1, 0, 0, 0]),
        ("granitemoe", "int8", "eager", True, [1, 0, 0, 0]),
        ("deepseek_v3", "bf16 storage", "eager", True, [2, 0, 0, 0]),  # the first layer is dense
    ],
)
def test_layers_share_a_graph_and_one_more_for_all_lengths(
    model_type: str,
    codes: str,
    runs: str,
    dynamic: bool | None,
    expected: list[int],
    tmp_path: Path,
) -> None:
    model = packed(tmp_path, model_type, codes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    lengths = 12, 12, 17, 23
    plain = [step(model, length) for length in lengths]
    graphs = Graphs(runs)
    for layer in layers_of(model):
        layer.compile(backend=graphs, fullgraph=True, dynamic=dynamic)
    compiled: list[dict[str, Tensor]] = []
    assert [graphs.of(lambda n=n: compiled.append(step(model, n))) for n in lengths] == expected
    for one, other in zip(compiled, plain, strict=True):
        assert_same(one, other)
