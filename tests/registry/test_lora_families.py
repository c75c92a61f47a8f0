"""LoRA on packed experts of twelve architectures, against decoded W + s B A on plain loops.

Logits and the gradients of the token embeddings, of every lora_A and lora_B and of every router are
those of a plain model, whose weights are the decoded ones with s B A added expert by expert.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from small_models import decoded, slow_delta
from torch import Tensor, nn
from torch.func import functional_call
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.layout import ModelLayout
from moe_qlora.lora import layer as lora
from moe_qlora.testing import tiny_inputs, tiny_model

# Per expert and fused on disk, transposed, biased, shared experts, two banks, 2-D, no gate, experts
# in attention, a router of several layers, gated delta nets, an own forward.
TYPES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "llama4_text", "dbrx"),
    *("jetmoe", "zaya", "qwen3_next", "ernie4_5_vl_moe", "nemotron_h"),
)
# Stock PEFT's wrapper hides the weights that dbrx's experts read from outside of their module.
RUN_BY_STOCK = [name for name in TYPES if name != "dbrx"]
TOLERANCE = 1e-5

BNB = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Case:
    """A packed model, its plain twin, its expert stacks, names of its routers, and one batch."""

    model_type: str
    base: Any
    twin: Any
    layout: ModelLayout
    routers: list[str]
    inputs: dict[str, Tensor]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The case of one architecture, which its tests share: they adapt copies of the base."""
    base = tiny_model(request.param, seed=1)
    moe_qlora.quantize_experts(base, BNB)
    layout = moe_qlora.detect(base)
    assert len(layout.packed) == len(layout) > 1
    routers = [router.name for router in layout.routers]
    return Case(request.param, base, decoded(base), layout, routers, tiny_inputs(base))


def attention_linears(case: Case) -> list[str]:
    """Names of the text layers' Linear layers outside every feed-forward block."""
    return [
        name
        for name, module in case.base.named_modules()
        if type(module) is nn.Linear
        and any(part in name for part in ("attn", "attention", "mixer.", "mamba"))
        and not any(part in name for part in ("vision", "visual", "audio", "indexer"))
        and not name.endswith("out_proj")  # PEFT refuses Mamba's
        and f"{name}.weight" not in case.routers
        and name not in case.routers
    ]


def fill(model: nn.Module, seed: int = 2) -> None:
    """Random factors whose product matters beside a base weight of the usual size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name:
            size = 0.05 if ".lora_B" in name else 0.1
            parameter.data = torch.randn(parameter.shape, generator=generator) * size


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each adapted weight under its name in the plain model, with PEFT's layer for it."""
    for name, layer in model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(layer, LoraLayer):
            plain = name.replace(".base_layer", "")
            yield f"{plain}.{getattr(layer, 'parameter_name', 'weight')}", layer


def run_packed(model: Any, case: Case) -> dict[str, Tensor | None]:
    leaves = {
        f"{name} {part}": getattr(layer, part)["default"].weight
        for name, layer in adapted_layers(model)
        for part in ("lora_A", "lora_B")
    }
    return results(model.get_base_model(), model, leaves, case)


def run_reference(case: Case, model: Any) -> dict[str, Tensor | None]:
    """The plain model with W + s B A for W, from copies of the adapter's factors."""
    leaves: dict[str, Tensor] = {}
    weights = {}
    for name, layer in adapted_layers(model):
        a, b = (
            getattr(layer, part)["default"].weight.detach().clone().requires_grad_()
            for part in ("lora_A", "lora_B")
        )
        leaves |= {f"{name} lora_A": a, f"{name} lora_B": b}
        stacked = isinstance(layer, lora.StockParamWrapper)
        delta = slow_delta(layer, a, b) if stacked else (b @ a) * layer.scaling["default"]
        weights[name] = case.twin.get_parameter(name).detach() + delta
    case.twin.requires_grad_(False)

    def run_twin(**inputs: Any) -> Any:
        # An adapter belongs to the module it was put on, whatever else shares the weight.
        return functional_call(case.twin, weights, kwargs=inputs, tie_weights=False)

    return results(case.twin, run_twin, leaves, case)


def results(
    base: Any, run: Callable[..., Any], leaves: dict[str, Tensor], case: Case
) -> dict[str, Tensor | None]:
    """Logits, and gradients of leaves, of the routers of `base` and of its embedded tokens."""
    named, tracked = dict(base.named_parameters()), dict(leaves)
    tracked |= {name: named.get(f"{name}.weight", named.get(name)) for name in case.routers}

    def leaf(_: Any, __: Any, out: Tensor) -> Tensor:
        tracked["input"] = out.detach().requires_grad_()
        return tracked["input"]

    for weight in tracked.values():
        weight.requires_grad_()
    with base.get_input_embeddings().register_forward_hook(leaf):
        logits = run(**case.inputs, use_cache=False)[0]
    generator = torch.Generator().manual_seed(3)
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    found = {name: weight.grad for name, weight in tracked.items()}
    for weight in tracked.values():
        weight.grad = None
    return {"logits": logits.detach(), **found}


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max()) / max(float(right.abs().max()), 1e-30)


@pytest.mark.parametrize("case", TYPES, indirect=True)
def test_lora_on_every_projection_on_one_and_on_attention(case: Case) -> None:
    plain, everything = run(case.twin, case), moe_qlora.target_parameters(case.base)
    assert set(everything) == {name for param in case.layout for name in param.names}
    one = moe_qlora.target_parameters(case.base, roles=[case.layout.experts[0].role])
    for parameters in (everything, one, None):
        modules = attention_linears(case) if parameters is None else []
        config = LoraConfig(r=3, lora_alpha=7, target_modules=modules, target_parameters=parameters)
        if not (modules or parameters):
            continue
        model: Any = moe_qlora.get_peft_model(copy.deepcopy(case.base), config)
        fill(model)
        adapted = {name for name, _ in adapted_layers(model)}
        assert adapted == set(parameters or [f"{name}.weight" for name in modules])
        found, expected = run_packed(model, case), run_reference(case, model)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert (found[name] is None) == (grad is None), name
            assert grad is None or relative(found[name], grad) < TOLERANCE, name
        trained = [grad for name, grad in found.items() if " lora_" in name and grad is not None]
        assert trained and any(bool(grad.any()) for grad in trained)
        assert relative(found["logits"], plain) > 10 * TOLERANCE, "LoRA makes no difference"


def unpacked(case: Case) -> Any:
    """The same weights, decoded, in a model that was never packed: what stock PEFT adapts."""
    model: Any = tiny_model(case.model_type, seed=1)
    with torch.no_grad():
        for param in case.layout:
            model.get_parameter(param.name).copy_(case.twin.get_parameter(param.name))
    return decoded(model)  # on the loop over experts


def run(model: Any, case: Case) -> Tensor:
    with torch.no_grad():
        return model(**case.inputs, use_cache=False)[0]


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and dtype of each tensor, and the configuration, with lists in order."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    ordered = {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}, ordered


@pytest.mark.parametrize("case", RUN_BY_STOCK, indirect=True)
def test_files_are_those_of_stock_peft_and_go_both_ways(case: Case, tmp_path: Path) -> None:
    # dt_proj: unless a model is quantized, Mamba's own forward reads the weight and misses LoRA.
    modules = [n for n in attention_linears(case) if not n.endswith("dt_proj")]
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=modules[:3],
        target_parameters=moe_qlora.target_parameters(case.base),
    )
    ours = moe_qlora.get_peft_model(copy.deepcopy(case.base), config)
    stock = peft.get_peft_model(unpacked(case), copy.deepcopy(config))
    for model, seed, folder in ((ours, 2, "ours"), (stock, 5, "stock")):
        fill(model, seed)
        model.save_pretrained(tmp_path / folder, save_embedding_layers=False)
    assert files(tmp_path / "ours") == files(tmp_path / "stock")

    # The files differ in their values alone, so that what loads one loads the other: each loads the
    # other's in every second family.
    if TYPES.index(case.model_type) % 2:
        again = moe_qlora.load_adapter(copy.deepcopy(case.base), str(tmp_path / "stock"))
        saved, other = stock, ours
    else:
        again = peft.PeftModel.from_pretrained(unpacked(case), tmp_path / "ours")
        saved, other = ours, stock
    output = run(again, case)
    assert relative(output, run(saved, case)) < TOLERANCE
    assert relative(output, run(other, case)) > 10 * TOLERANCE
