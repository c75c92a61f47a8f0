"""Training LoRA over packed experts ends where LoRA over the experts in full precision ends.

The demo's small Qwen3-MoE is trained from scratch on Python code. Then, from that one checkpoint,
three adapters are trained on English with the same first factors, the same batches and the same
steps, and are compared on held-out text:

    full      stock PEFT, LoRA on attention and experts, all weights in fp32
    packed    this package, LoRA on attention and experts, experts in nf4 with double quantization
    frozen    LoRA on attention alone, experts in nf4
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import moe_qlora

sys.path.append(str(Path(__file__).parents[2]))

from tools import demo

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BNB = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
STEPS = 80
RATE = 1e-2


@dataclass
class Trained:
    """The checkpoint that all start from, and the text."""

    folder: Path
    scale: Any
    tokens: Tensor
    held_out: Tensor

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def packed(self) -> Any:
        model = self.model()
        report = moe_qlora.quantize_experts(model, BNB)
        assert len(report.quantized) == 2 * self.scale.layers
        return model

    def loss(self, model: Any) -> float:
        return float(demo.evaluate(model, self.held_out, self.scale))

    def train(self, model: Any) -> float:
        """Train the adapter; the loss on held-out text."""
        generator = torch.Generator().manual_seed(5)
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_A" in name:  # lora_B starts at zero
                bound = parameter.shape[1] ** -0.5
                parameter.data.uniform_(-bound, bound, generator=generator)
        demo.train(model, self.tokens, self.scale, STEPS, RATE, "LoRA")
        return self.loss(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    scale = demo.Scale(
        hidden=64, layers=1, experts=8, batch=8, length=64, pretrain_steps=250, steps=STEPS,
        characters=300_000,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(demo.SEED)
    run = demo.Run()
    demo.pretrain(folder, scale, run)
    (losses,) = run.curves.values()
    assert losses[-1] < losses[0] - 1.5, "the model has learned something to start from"
    tokens = demo.encode(AutoTokenizer.from_pretrained(folder), demo.manual())
    tenth = len(tokens) // 10
    return Trained(folder, scale, tokens[tenth:], tokens[:tenth])


def lora_config(experts: bool) -> LoraConfig:
    return LoraConfig(
        r=8, lora_alpha=16, target_modules=ATTENTION,
        target_parameters=EXPERTS if experts else None, task_type="CAUSAL_LM",
    )  # fmt: skip


def test_packed_experts_train_like_full_ones(trained: Trained) -> None:
    start = trained.loss(trained.packed())
    full = trained.train(peft.get_peft_model(trained.model(), lora_config(experts=True)))
    packed = trained.train(moe_qlora.get_peft_model(trained.packed(), lora_config(experts=True)))
    frozen = trained.train(moe_qlora.get_peft_model(trained.packed(), lora_config(experts=False)))
    losses = f"{start=:.4f} {full=:.4f} {packed=:.4f} {frozen=:.4f}"
    assert packed < start - 0.2, losses
    assert abs(packed - full) < 0.02 * full, losses
    # Over three seeds packed ended within 0.04 % of full, and 1.5 to 1.7 % below frozen. An adapter
    # that trains wrong would lie between the two, so what LoRA on the experts brings must be there
    # nearly whole.
    assert packed < 0.99 * frozen, losses
    assert frozen - packed > 0.8 * (frozen - full), losses
