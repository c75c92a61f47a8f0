"""LoRA on packed experts of twelve architectures, against decoded W + s B A on plain loops.

Logits and the gradients of the token embeddings, of every lora_A and lora_B and of every router are
those of a plain model, whose weights are the decoded ones with s B A added expert by expert.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    return make_case(request.param)


def make_case(model_type: str) -> Case:
    base = tiny_model(model_type, seed=1)
    moe_qlora.quantize_experts(base, BNB)
    layout = moe_qlora.detect(base)
    assert len(layout.packed) == len(layout) > 1
    routers = [router.name for router in layout.routers]
    return Case(model_type, base, decoded(base), layout, routers, tiny_inputs(base))


def attention_linears(model: nn.Module, routers: list[str]) -> list[str]:
    """Names of the text layers' Linear layers outside every feed-forward block."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and any(part in name for part in ("attn", "attention", "mixer.", "mamba"))
        and not any(part in name for part in ("vision", "visual", "audio", "indexer"))
        and not name.endswith("out_proj")  # PEFT refuses Mamba's
        and f"{name}.weight" not in routers
        and name not in routers
    ]


def get_peft_model(case: Case, modules: list[str], parameters: list[str] | None) -> Any:
    """A copy of the packed model with random LoRA on these modules and parameters."""
    config = LoraConfig(r=3, lora_alpha=7, target_modules=modules, target_parameters=parameters)
    model = moe_qlora.get_peft_model(copy.deepcopy(case.base), config)
    fill(model)
    return model


def fill(model: nn.Module, seed: int = 2) -> None:
    """Random factors whose product matters beside a base weight of the usual size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name:
            size = 0.05 if ".lora_B" in name else 0.1
            parameter.data = torch.randn(parameter.shape, generator=generator) * size


@dataclass
class Outcome:
    """Logits, and gradients by name."""

    logits: Tensor
    grads: dict[str, Tensor | None]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each adapted weight under its name in the plain model, with PEFT's layer for it."""
    for name, layer in model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(layer, LoraLayer):
            plain = name.replace(".base_layer", "")
            yield f"{plain}.{getattr(layer, 'parameter_name', 'weight')}", layer


def routers_of(model: nn.Module, names: list[str]) -> dict[str, nn.Parameter]:
    found = {}
    for name in names:
        try:
            found[name] = model.get_parameter(f"{name}.weight")
        except AttributeError:
            found[name] = model.get_parameter(name)
    return found


@contextmanager
def watched_embeddings(
    model: Any, inputs: dict[str, Any], into: list[Tensor]
) -> Iterator[dict[str, Any]]:
    """Make what goes into the first layer a leaf, kept in `into`."""
    if "inputs_embeds" in inputs:
        into.append(inputs["inputs_embeds"].clone().requires_grad_())
        yield {"inputs_embeds": into[0]}
        return

    def leaf(_: Any, __: Any, out: Tensor) -> Tensor:
        into.append(out.detach().requires_grad_())
        return into[-1]

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    yield inputs
    hook.remove()


def logits_of(output: Any) -> Tensor:
    return output.logits if "logits" in output else output[0]


def run_packed(model: Any, case: Case) -> Outcome:
    leaves = {
        f"{name} {part}": getattr(layer, part)["default"].weight
        for name, layer in adapted_layers(model)
        for part in ("lora_A", "lora_B")
    }
    return outcome(model.get_base_model(), model, leaves, case)


def run_reference(case: Case, model: Any) -> Outcome:
    """The plain model with W + s B A for W, from copies of the adapter's factors."""
    twin = case.twin
    leaves: dict[str, Tensor] = {}
    weights = {}
    for name, layer in adapted_layers(model):
        weight = twin.get_parameter(name).detach()
        for part in ("lora_A", "lora_B"):
            held = getattr(layer, part)["default"].weight.detach()
            leaves[f"{name} {part}"] = held.clone().requires_grad_()
        a, b = leaves[f"{name} lora_A"], leaves[f"{name} lora_B"]
        if isinstance(layer, lora.StockParamWrapper):
            weights[name] = weight + slow_delta(layer, a, b)
        else:
            weights[name] = weight + (b @ a) * layer.scaling["default"]
    twin.requires_grad_(False)

    def run(**inputs: Any) -> Any:
        # An adapter belongs to the module it was put on, whatever else shares the weight.
        return functional_call(twin, weights, kwargs=inputs, tie_weights=False)

    return outcome(twin, run, leaves, case)


def outcome(base: Any, run: Callable[..., Any], leaves: dict[str, Tensor], case: Case) -> Outcome:
    """Forward and backward, with the routers of `base` trained beside `leaves`."""
    tracked = {**leaves, **routers_of(base, case.routers)}
    for weight in tracked.values():
        weight.requires_grad_()
    embedded: list[Tensor] = []
    torch.manual_seed(4)  # diffusion_gemma draws the text it starts from
    with watched_embeddings(base, case.inputs, embedded) as inputs:
        logits = logits_of(run(**inputs, use_cache=False))
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(logits.shape, generator=generator, dtype=torch.float32)
    (logits * mix).sum().backward()
    grads = {name: weight.grad for name, weight in tracked.items()}
    for weight in tracked.values():
        weight.grad = None
    grads |= {f"input {index}": leaf.grad for index, leaf in enumerate(embedded)}
    return Outcome(logits.detach(), grads)


def difference(left: Outcome, right: Outcome) -> dict[str, float]:
    """For each tensor the largest difference, relative to its largest value in `right`."""
    assert set(left.grads) == set(right.grads)
    worst = {"logits": relative(left.logits, right.logits)}
    for name, grad in right.grads.items():
        held = left.grads[name]
        assert (held is None) == (grad is None), name
        if grad is not None and held is not None:
            worst[name] = relative(held, grad)
    return worst


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max()) / max(float(right.abs().max()), 1e-30)


@pytest.mark.parametrize("case", TYPES, indirect=True)
def test_lora_on_every_projection_and_on_attention(case: Case) -> None:
    plain, everything = run(case.twin, case), moe_qlora.target_parameters(case.base)
    assert set(everything) == {name for param in case.layout for name in param.names}
    (role, *_) = dict.fromkeys(param.role for param in case.layout)
    for parameters in (everything, moe_qlora.target_parameters(case.base, roles=[role]), None):
        modules = attention_linears(case.base, case.routers) if parameters is None else []
        if not modules and not parameters:
            continue
        model = get_peft_model(case, modules, parameters)
        adapted = {name for name, _ in adapted_layers(model)}
        assert adapted == set(parameters or [f"{name}.weight" for name in modules])
        found, expected = run_packed(model, case), run_reference(case, model)
        apart = difference(found, expected)
        assert max(apart.values()) < TOLERANCE, apart
        trained = [g for n, g in found.grads.items() if " lora_" in n and g is not None]
        assert trained and any(bool(grad.any()) for grad in trained)
        assert relative(found.logits, plain) > 10 * TOLERANCE, "LoRA makes no difference"


def unpacked(case: Case) -> Any:
    """The same weights, decoded, in a model that was never packed: what stock PEFT adapts."""
    model: Any = tiny_model(case.model_type, seed=1)
    with torch.no_grad():
        for param in case.layout:
            model.get_parameter(param.name).copy_(case.twin.get_parameter(param.name))
    return decoded(model)  # on the loop over experts


def run(model: Any, case: Case) -> Tensor:
    torch.manual_seed(4)
    with torch.no_grad():
        return logits_of(model(**case.inputs, use_cache=False))


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and dtype of each tensor, and the configuration, with lists in order."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    ordered = {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}, ordered


@pytest.mark.parametrize("case", RUN_BY_STOCK, indirect=True)
def test_files_are_those_of_stock_peft_and_go_both_ways(case: Case, tmp_path: Path) -> None:
    # dt_proj: unless a model is quantized, Mamba's own forward reads the weight and misses LoRA.
    modules = [n for n in attention_linears(case.base, case.routers) if not n.endswith("dt_proj")]
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
