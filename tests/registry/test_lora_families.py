"""LoRA on packed experts of ten architectures: numerics of plain weights, files of stock PEFT."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracle import Oracle, factors_of
from peft import LoraConfig
from safetensors.torch import load_file
from small_models import close, decoded, fill
from torch import Tensor, nn
from training import packed

import moe_qlora
from moe_qlora.testing import tiny_inputs, tiny_model

# Per expert and fused on disk, transposed, biased, shared experts, two banks, 2-D, no gate, experts
# in attention, a router of several layers, an own forward.
TYPES = (
    *("qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3", "llama4_text", "dbrx", "jetmoe"),
    *("zaya", "ernie4_5_vl_moe", "nemotron_h"),
)
# Stock PEFT's wrapper hides the weights that dbrx's experts read from outside of their module.
RUN_BY_STOCK = [name for name in TYPES if name != "dbrx"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest) -> Any:
    """The packed model of one architecture, of which tests adapt copies."""
    model = packed(request.param, seed=1)
    layout = moe_qlora.detect(model)
    assert len(layout.packed) == len(layout) > 1
    return model


def attention_linears(base: Any) -> list[str]:
    """Names of the text layers' Linear layers outside every feed-forward block."""
    routers = {router.name for router in moe_qlora.detect(base).routers}
    return [
        name
        for name, module in base.named_modules()
        if type(module) is nn.Linear
        and any(part in name for part in ("attn", "attention", "mixer.", "mamba"))
        and not any(part in name for part in ("vision", "visual", "audio", "indexer"))
        and not name.endswith("out_proj")  # PEFT refuses Mamba's
        and not {name, f"{name}.weight"} & routers
    ]


@pytest.mark.parametrize("base", TYPES, indirect=True)
def test_lora_on_every_projection_on_one_and_on_attention(base: Any) -> None:
    """Logits and all gradients are those of decoded W + s B A on plain loops."""
    layout, everything = moe_qlora.detect(base), moe_qlora.target_parameters(base)
    assert set(everything) == {name for param in layout for name in param.names}
    one = moe_qlora.target_parameters(base, roles=[layout.experts[0].role])
    for parameters in (everything, one, None):
        modules = attention_linears(base) if parameters is None else []
        if not (modules or parameters):
            continue
        oracle = Oracle(decoded(base), 1e-5)
        config = LoraConfig(r=3, lora_alpha=7, target_modules=modules, target_parameters=parameters)
        model: Any = moe_qlora.get_peft_model(copy.deepcopy(base), config)
        names = parameters or [f"{name}.weight" for name in modules]
        assert set(factors_of(model, "default")) == set(names)
        plain = oracle.run(model)[0]
        oracle.take(model, "default", 7 / 3)
        assert not close(oracle.run(model)[0], plain, 1e-4), "LoRA makes no difference"
        oracle.train(model, "default")


def unpacked(base: Any) -> Any:
    """The same weights, decoded, in a model that was never packed: what stock PEFT adapts."""
    model, twin = tiny_model(base.config.model_type, seed=1), decoded(base)
    for param in moe_qlora.detect(base):
        model.get_parameter(param.name).data.copy_(twin.get_parameter(param.name))
    return decoded(model)  # on the loop over experts


@torch.no_grad()
def run(model: Any, base: Any) -> Tensor:
    return model(**tiny_inputs(base), use_cache=False)[0]


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and dtype of each tensor, and the configuration, with lists in order."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    ordered = {k: sorted(v) if isinstance(v, list) else v for k, v in config.items()}
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}, ordered


@pytest.mark.parametrize("base", RUN_BY_STOCK, indirect=True)
def test_files_are_those_of_stock_peft_and_go_both_ways(base: Any, tmp_path: Path) -> None:
    # dt_proj: unless a model is quantized, Mamba's own forward reads the weight and misses LoRA.
    modules = [n for n in attention_linears(base) if not n.endswith("dt_proj")][:3]
    names = moe_qlora.target_parameters(base)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=modules, target_parameters=names)
    ours = moe_qlora.get_peft_model(copy.deepcopy(base), config)
    stock = peft.get_peft_model(unpacked(base), copy.deepcopy(config))
    for model, seed, folder in ((ours, 2, "ours"), (stock, 5, "stock")):
        fill(model, seed, 0.07).save_pretrained(tmp_path / folder, save_embedding_layers=False)
    assert files(tmp_path / "ours") == files(tmp_path / "stock")

    # The files differ in their values alone, so that what loads one loads the other: each loads the
    # other's in every second family.
    if TYPES.index(base.config.model_type) % 2:
        again = moe_qlora.load_adapter(copy.deepcopy(base), str(tmp_path / "stock"))
        saved, other = stock, ours
    else:
        again = peft.PeftModel.from_pretrained(unpacked(base), tmp_path / "ours")
        saved, other = ours, stock
    output = run(again, base)
    assert close(output, run(saved, base)) and not close(output, run(other, base), 1e-4)
