"""A long story of public calls on a packed model, held against plain fp32 weights after each call.

The oracle is the stock model in fp32 with W + sum of s B A in place of each W. Base weights are
decoded once, factors are read from the adapted model's state dict in PEFT's layout.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from training import SETTINGS
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import model_class, tiny_inputs, tiny_model
from moe_qlora.train import offload

pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = 4  # of every tiny model
TOLERANCE = 5e-4  # a forward in fp32 rounds by 1e-5; trained factors can make attention steep


def forward(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits; inputs that need gradients keep bitsandbytes' Linear layers in fp32 on the CPU."""

    def ask(module: Any, args: Any, out: Tensor) -> Tensor:
        return out if out.requires_grad else out.requires_grad_()

    with model.get_input_embeddings().register_forward_hook(ask):
        return model(**inputs, use_cache=False).logits


def loss(logits: Tensor) -> Tensor:
    """A loss without labels, whose gradient is dense."""
    ramp = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return (logits * ramp).sum(-1).tanh().mean()


def read_factors(model: Any, adapter: str) -> dict[str, Any]:
    """A and B of an adapter by the name of the weight in the plain model."""
    state, found = model.state_dict(), {}
    for key, a in state.items():
        if f".lora_A.{adapter}." in key:
            layer = key.split(".lora_A.")[0]
            path = layer.removeprefix("base_model.model.").replace(".base_layer", "")
            leaf = getattr(model.get_submodule(layer), "parameter_name", None) or "weight"
            b = state[key.replace(".lora_A.", ".lora_B.")]
            found[f"{path}.{leaf}"] = (a.detach().clone(), b.detach().clone())
    return found


class Oracle:
    """The plain model, and by adapter its factors and its scaling."""

    def __init__(self, twin: Any) -> None:
        self.twin, self.inputs = twin.requires_grad_(False), tiny_inputs(twin)
        self.base = {name: p.detach().clone() for name, p in twin.named_parameters()}
        self.adapters: dict[str, tuple[dict[str, Any], float]] = {}

    def read_base(self, model: Any) -> None:
        """Decode what is packed; hold it against the weights before."""
        for name in self.base:
            path, _, leaf = name.rpartition(".")
            weight = getattr(model.get_submodule(path), leaf)
            state = getattr(weight, "quant_state", None)
            weight = (weight if state is None else dequantize_4bit(weight, state)).detach()
            packed = state is not None or moe_qlora.detect(model).find(name) is not None
            off, norm = (weight.float() - self.base[name]).norm(), self.base[name].norm()
            assert off <= (0.2 if packed else 1e-6) * norm, f"{name}: {off}"  # FP4 rounds by 0.12
            self.base[name] = weight.float().clone()  # a merge writes into plain layers

    def delta(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """B A in the weight's shape: A (E r, in), expert slowest, B (out, r E), fastest."""
        if self.base[name].dim() == 2:
            return b @ a
        b, a = b.view(len(b), -1, EXPERTS), a.view(EXPERTS, -1, a.shape[1])
        out = torch.einsum("ore,eri->eoi", b, a)
        experts = self.twin.get_submodule(name.rpartition(".")[0])
        return out.mT if getattr(experts, "is_transposed", False) else out

    def weights(self, adapters: list[str], leaves: dict[str, Any] | None = None) -> Any:
        weights = dict(self.base)
        for adapter in adapters:
            factors, scaling = self.adapters[adapter]
            for name, pair in (leaves[adapter] if leaves else factors).items():
                weights[name] = weights[name] + scaling * self.delta(name, *pair)
        return weights

    def logits(self, weights: Any) -> Tensor:
        return functional_call(self.twin, weights, kwargs=self.inputs).logits

    def check(self, model: Any, *active: str) -> None:
        """The model has the oracle's adapters, and its logits with these."""
        assert set(getattr(model, "peft_config", {})) == set(self.adapters)
        wanted, got = self.logits(self.weights([*active])), forward(model, self.inputs)
        error = float((got - wanted).abs().max() / wanted.abs().max())
        assert error <= TOLERANCE, f"off by {error:.2g} of the largest value"

    def take(self, model: Any, name: str, scaling: float) -> None:
        """Give a new adapter factors that are not zero, and note them."""
        generator = torch.Generator().manual_seed(len(self.adapters))
        for key, parameter in model.named_parameters():
            if ".lora_" in key and f".{name}." in key:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values * (0.1 if ".lora_A." in key else 0.3))
        self.adapters[name] = (read_factors(model, name), scaling)
        stacks = {n for n, w in self.base.items() if w.dim() == 3 and len(w) == EXPERTS}
        assert stacks <= set(self.adapters[name][0])

    def train(self, model: Any, *active: str) -> None:
        """A step of SGD on both; each factor has moved as the oracle's gradient says."""
        model.train().base_model.set_adapter([*active])
        leaves = {one: copy.deepcopy(self.adapters[one][0]) for one in active}
        for leaf in tree_leaves(leaves):
            leaf.requires_grad_()
        loss(self.logits(self.weights([*active], leaves))).backward()
        loss(forward(model, self.inputs)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        for adapter, factors in leaves.items():
            seen = read_factors(model, adapter)
            for name, pair in factors.items():
                grads = [leaf.new_zeros(()) if leaf.grad is None else leaf.grad for leaf in pair]
                allowed = 3e-4 * max(float(grad.abs().max()) for grad in grads) + 3e-6
                for new, leaf, grad in zip(seen[name], pair, grads, strict=True):
                    off = float((new - leaf.detach() + 0.1 * grad).abs().max())
                    assert off <= allowed, f"step of {name}: off by {off:.2g} of {allowed:.2g}"
            self.adapters[adapter] = (seen, self.adapters[adapter][1])
        self.check(model, *active)


def load(family: str, codec: str, way: str, folder: Path) -> tuple[Any, Oracle, Any]:
    """A packed model, its oracle, and the config that it was packed with."""
    tiny_model(family, dtype=torch.bfloat16, initializer_range=0.1).save_pretrained(folder / "a")
    cls, stock = model_class(family), {"dtype": torch.float32, "experts_implementation": "eager"}
    oracle = Oracle(cls.from_pretrained(folder / "a", **stock))
    linears = {n: m for n, m in oracle.twin.named_modules() if type(m) is nn.Linear}
    # bitsandbytes' int8 rounds activations too, and its CPU kernels want whole blocks.
    skip = [n for n, m in linears.items() if codec == "int8" or m.in_features % 64]
    given = {**SETTINGS[codec], "llm_int8_skip_modules": [*skip, "lm_head"]}
    config = BitsAndBytesConfig(**given, bnb_4bit_compute_dtype=torch.float32)
    if way == "after loading":
        model: Any = cls.from_pretrained(folder / "a", dtype=torch.float32)
        moe_qlora.quantize_experts(model, config)
    elif way == "while loading":
        with moe_qlora.enabled(offload=True):
            model = cls.from_pretrained(
                folder / "a", dtype=torch.float32, quantization_config=config
            )
    else:
        moe_qlora.quantize_checkpoint(folder / "a", folder / "packed", config)
        with moe_qlora.enabled():
            model = cls.from_pretrained(folder / "packed", dtype=torch.float32)
    oracle.read_base(model)
    return model, oracle, config


@pytest.mark.parametrize(
    ("family", "codec", "way"),
    [
        ("qwen3_moe", "nf4", "while loading"),
        ("gpt_oss", "fp4", "of a packed folder"),
        ("llama4_text", "int8", "after loading"),
    ],
)
def test_a_long_story_agrees_with_plain_weights(family, codec, way, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "SLOTS", 1)  # two layers share a slot
    model, oracle, config = load(family, codec, way, tmp_path)
    off = moe_qlora.offload_experts(model)
    oracle.check(model)

    first = LoraConfig(r=8, lora_alpha=7, target_modules=["k_proj", "o_proj"])
    model = moe_qlora.get_peft_model(model, first, "one", experts=True)
    oracle.take(model, "one", 7 / 8)
    oracle.train(model, "one")
    second = LoraConfig(r=2, lora_alpha=16, target_modules="all-linear", use_rslora=True)
    model.add_adapter("two", moe_qlora.adapt_lora_config(model, second, experts=True))
    oracle.take(model, "two", 16 / 2**0.5)
    oracle.check(model, "one")
    off.remove()
    oracle.train(model, "two", "one")
    with model.disable_adapter():
        error = forward(model, oracle.inputs) - oracle.logits(oracle.base)
        assert float(error.detach().abs().max()) < TOLERANCE

    model.save_pretrained(tmp_path, selected_adapters=["one"])
    model = moe_qlora.load_adapter(model, str(tmp_path / "one"), "three")
    model.load_adapter(tmp_path / "one", "four")
    for name in ("three", "four"):
        oracle.adapters[name] = oracle.adapters["one"]
        for key, pair in read_factors(model, name).items():
            assert all(map(torch.equal, pair, oracle.adapters["one"][0][key])), key
    off, model = moe_qlora.offload_experts(model), copy.deepcopy(model)  # whose experts are here
    for name in ("one", "four"):
        model.delete_adapter(name)
        del oracle.adapters[name]
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    oracle.train(model, "three")
    model.gradient_checkpointing_disable()

    model.merge_adapter(dtype=torch.float32)
    oracle.check(model, "three")
    model.unmerge_adapter()
    oracle.check(model, "three")
    oracle.base = oracle.weights(["three"])
    oracle.adapters = {}
    model = model.merge_and_unload(dtype=torch.float32)
    oracle.check(model)
    moe_qlora.quantize_experts(model, config)
    oracle.read_base(model)
    oracle.check(model)
