"""Experts that are lists of Linear layers, as remote code has them: LoRA by `experts=True`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

import moe_qlora

CONFIG = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
FIRST = "layers.0.moe.experts.0.up_proj"


class ListConfig(PretrainedConfig):
    model_type = "list_of_experts"
    hidden_size: int = 64
    num_experts_per_tok: int = 2


class Expert(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, 128, bias=False)
        self.up_proj = nn.Linear(size, 128, bias=False)
        self.down_proj = nn.Linear(128, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Moe(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, 4, bias=False)
        self.experts = nn.ModuleList(Expert(size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        dense = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        return sum(dense[..., e, None] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)
        self.moe = Moe(size)
        self.mlp = Expert(size)  # whose layers have the experts' names

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.moe(self.q_proj(x)) + self.mlp(x)
        return out


class ListModel(PreTrainedModel):
    config_class = ListConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(2))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    ListModel(ListConfig()).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(model: nn.Module) -> set[str]:
    return {
        name.removeprefix("base_model.model.").partition(".lora_A")[0]
        for name, _ in model.named_parameters()
        if ".lora_A" in name
    }


def linears(model: nn.Module, *words: str) -> set[str]:
    named = model.named_modules()
    return {n for n, m in named if isinstance(m, nn.Linear) and any(w in n for w in words)}


def loaded(folder: Path, packed: bool = True) -> Any:
    with moe_qlora.enabled():
        model: Any = ListModel.from_pretrained(
            folder, quantization_config=CONFIG if packed else None
        )
    return model.train()  # in evaluation bitsandbytes has another layout on some CPUs


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj", None, "all-linear"])
def test_experts_are_trained_saved_and_loaded(
    folder: Path, tmp_path: Path, packed: bool, targets: Any
) -> None:
    model = loaded(folder, packed)
    experts = linears(model, ".experts.")
    assert len(experts) == 24
    expected = experts | linears(model, *([] if targets is None else ["q_proj"]))
    if targets == "all-linear":
        expected = linears(model, "")
    mine = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    before = repr(mine)
    made = moe_qlora.get_peft_model(model, mine, experts=True)
    assert repr(mine) == before
    assert adapted(made) == expected
    x = torch.randn(1, 5, 64)
    out = made(x)
    out.sum().backward()
    assert all(p.grad is not None for n, p in made.named_parameters() if ".lora_" in n)
    made.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(loaded(folder, packed), tmp_path / "adapter")
    torch.testing.assert_close(again.train()(x), out)
    ours = moe_qlora.load_adapter(loaded(folder, packed), tmp_path / "adapter", unpacked_ok=True)
    torch.testing.assert_close(ours.train()(x), out)


def test_another_module_with_the_name_of_an_expert_gets_no_lora(folder: Path) -> None:
    model = loaded(folder)
    model.tower = nn.Module()
    model.tower.experts = nn.ModuleList([Expert(64)])
    made = moe_qlora.get_peft_model(model, LoraConfig(target_modules=["q_proj"]), experts=True)
    assert adapted(made) == linears(loaded(folder), ".experts.", "q_proj")


def test_routers_and_ranks(folder: Path) -> None:
    config = LoraConfig(r=8, target_modules=["q_proj"])
    options: Any = {"experts": True, "router": True, "scale_expert_rank": True}
    made = moe_qlora.get_peft_model(loaded(folder), config, **options)
    assert linears(loaded(folder), "moe.gate") <= adapted(made)
    inner = made.get_base_model()
    assert inner.get_submodule(FIRST).r == {"default": 4}
    assert inner.get_submodule("layers.0.q_proj").r == {"default": 8}


def test_models_that_peft_rewrites_targets_for(folder: Path) -> None:
    model = loaded(folder)
    model.config.model_type = "mixtral"
    made = moe_qlora.get_peft_model(model, LoraConfig(target_modules=["q_proj"]), experts=True)
    assert adapted(made) == linears(loaded(folder), ".experts.", "q_proj")


def test_an_adapted_model_takes_a_second_adapter(folder: Path) -> None:
    made = moe_qlora.get_peft_model(loaded(folder), LoraConfig(), experts=True)
    second = moe_qlora.adapt_lora_config(made, LoraConfig(target_modules=["q_proj"]), experts=True)
    made.add_adapter("second", second)
    assert adapted(made) == linears(loaded(folder), ".experts.", "q_proj")
    assert isinstance(made, peft.PeftModel)
