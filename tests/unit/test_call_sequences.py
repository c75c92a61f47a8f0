"""Random sequences of public calls on packed models, held against plain fp32 weights.

The oracle is the stock model in fp32 with W + sum of s B A in place of each W. Base weights are
decoded once, factors are read from the adapted model's state dict in PEFT's layout: after every
call the logits, and after a step each factor, must be the oracle's.
"""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from peft import LoraConfig
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import model_class, tiny_inputs, tiny_model
from moe_qlora.train import offload

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "granitemoe", "deepseek_v3", "llama4_text", "zaya")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
CODECS = [NF4, {**NF4, "bnb_4bit_use_double_quant": True}, FP4, {"load_in_8bit": True}]
WAYS = ("while loading", "after loading", "of a packed folder")
LAYERS: list[Any] = [["q_proj"], ["k_proj", "o_proj"], "all-linear", []]
EXPERTS = 4  # of every tiny model
some = st.sampled_from
TOLERANCE = 5e-4  # a forward in fp32 rounds by 1e-5; trained factors can make attention steep


def loss(logits: Tensor) -> Tensor:
    """A loss without labels, whose gradient is dense."""
    ramp = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return (logits * ramp).sum(-1).tanh().mean()


def forward(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits; inputs that need gradients keep bitsandbytes' Linear layers in fp32 on the CPU."""

    def ask(module: Any, args: Any, out: Tensor) -> Tensor:
        return out if out.requires_grad else out.requires_grad_()

    with model.get_input_embeddings().register_forward_hook(ask):
        return model(**inputs, use_cache=False).logits


def assert_close(got: Tensor, wanted: Tensor) -> None:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    assert error <= TOLERANCE, f"off by {error:.2g} of the largest value"


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


class Calls(RuleBasedStateMachine):
    """A packed model, its adapters, and the oracle that says what they compute."""

    place: Path
    model: Any = None
    off: Any = None
    merged, number = False, 0
    adapters: dict[str, tuple[dict[str, Any], float]] = {}
    active: list[str] = []

    def delta(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """B A in the weight's shape: A (E r, in), expert slowest, B (out, r E), fastest."""
        if self.base[name].dim() == 2:
            return b @ a
        b, a = b.view(len(b), -1, EXPERTS), a.view(EXPERTS, -1, a.shape[1])
        out = torch.einsum("ore,eri->eoi", b, a)
        experts = self.twin.get_submodule(name.rpartition(".")[0])
        return out.mT if getattr(experts, "is_transposed", False) else out

    def weights(self, adapters: list[str], factors: dict[str, Any] | None = None) -> Any:
        weights = dict(self.base)
        for adapter in adapters:
            mine, scaling = self.adapters[adapter]
            for name, pair in (factors[adapter] if factors else mine).items():
                weights[name] = weights[name] + scaling * self.delta(name, *pair)
        return weights

    def logits_of(self, weights: Any) -> Tensor:
        return functional_call(self.twin, weights, kwargs=self.inputs).logits

    def read_base(self) -> None:
        """Decode what is packed; hold it against the weights before."""
        for name in self.base:
            path, _, leaf = name.rpartition(".")
            weight = getattr(self.model.get_submodule(path), leaf)
            state = getattr(weight, "quant_state", None)
            weight = (weight if state is None else dequantize_4bit(weight, state)).detach()
            off = float((weight.float() - self.base[name]).norm())
            packed = moe_qlora.detect(self.model).find(name) is not None
            share = 0.2 if packed or state is not None else 1e-6  # FP4 rounds by 0.12
            assert off <= share * float(self.base[name].norm()), f"{name}: {off}"
            self.base[name] = weight.float().clone()  # a merge writes into plain layers

    @invariant()
    def computes_the_oracles_logits(self) -> None:
        if self.model is not None:
            assert set(getattr(self.model, "peft_config", {})) == set(self.adapters)
            wanted = self.logits_of(self.weights(self.active))
            assert_close(forward(self.model, self.inputs), wanted)

    @initialize(family=some(FAMILIES), codec=some(CODECS), way=some(WAYS), offloaded=st.booleans())
    def load(self, family: str, codec: dict[str, Any], way: str, offloaded: bool) -> None:
        self.adapters, folder = {}, self.place / family
        if not folder.exists():
            tiny_model(family, dtype=torch.bfloat16, initializer_range=0.1).save_pretrained(folder)
        cls = model_class(family)
        stock = {"dtype": torch.float32, "experts_implementation": "eager"}
        self.twin = cls.from_pretrained(folder, **stock).requires_grad_(False)
        self.base = {name: p.detach().clone() for name, p in self.twin.named_parameters()}
        linears = {n: m for n, m in self.twin.named_modules() if type(m) is nn.Linear}
        # bitsandbytes' int8 rounds activations too, and its CPU kernels want whole blocks.
        skip = [n for n, m in linears.items() if codec == CODECS[3] or m.in_features % 64]
        given = {**codec, "llm_int8_skip_modules": [*skip, "lm_head"]}
        self.config = BitsAndBytesConfig(**given, bnb_4bit_compute_dtype=torch.float32)
        if way == "after loading":
            self.model = cls.from_pretrained(folder, dtype=torch.float32)
            moe_qlora.quantize_experts(self.model, self.config)
        else:
            given = {"quantization_config": self.config}
            if way == "of a packed folder":
                out = Path(mkdtemp(dir=self.place)) / "packed"
                moe_qlora.quantize_checkpoint(folder, out, self.config)
                folder, given = out, {}
            with moe_qlora.enabled(offload=offloaded):
                self.model = cls.from_pretrained(folder, dtype=torch.float32, **given)
            if offloaded:
                self.off = moe_qlora.offload_experts(self.model)
        self.inputs = tiny_inputs(self.twin)
        self.read_base()

    def new_name(self) -> str:
        self.number += 1
        return f"a{self.number}"

    def take(self, name: str, scaling: float) -> None:
        """Give a new adapter factors that are not zero, and note them."""
        generator = torch.Generator().manual_seed(self.number)
        for key, parameter in self.model.named_parameters():
            if ".lora_" in key and f".{name}." in key:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values * (0.1 if ".lora_A." in key else 0.3))
        self.adapters[name] = (read_factors(self.model, name), scaling)
        experts = {n for n, w in self.base.items() if w.dim() == 3 and len(w) == EXPERTS}
        assert experts <= set(self.adapters[name][0])

    @precondition(lambda self: not self.merged and len(self.adapters) < 3)
    @rule(rank=some([1, 2, 8]), alpha=some([1, 7, 16]), root=st.booleans(), layers=some(LAYERS))
    def add_adapter(self, rank: int, alpha: int, root: bool, layers: Any) -> None:
        name = self.new_name()
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers, use_rslora=root)
        if self.adapters:
            config = moe_qlora.adapt_lora_config(self.model, config, experts=True)
            self.model.add_adapter(name, config)
        else:
            self.model = moe_qlora.get_peft_model(self.model, config, name, experts=True)
            self.active = [name]
        self.take(name, alpha / (rank**0.5 if root else rank))

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), several=st.booleans())
    def disable_and_set_adapter(self, data: Any, several: bool) -> None:
        with self.model.disable_adapter(), torch.no_grad():
            assert_close(forward(self.model, self.inputs), self.logits_of(self.base))
        names = data.draw(st.permutations(sorted(self.adapters)))
        self.active = names[: 2 if several else 1]
        self.model.base_model.set_adapter(self.active)
        self.merged = False  # PEFT unmerges what was merged

    @precondition(lambda self: len(self.adapters) > 1 and not self.merged)
    @rule(data=st.data())
    def delete_adapter(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        self.model.delete_adapter(name)
        del self.adapters[name]
        self.active = [next(iter(self.adapters))]
        self.model.set_adapter(self.active[0])

    @precondition(lambda self: 0 < len(self.adapters) < 3 and not self.merged)
    @rule(by_peft=st.booleans())
    def save_and_load(self, by_peft: bool) -> None:
        name, new, folder = self.active[0], self.new_name(), mkdtemp(dir=self.place)
        self.model.save_pretrained(folder, selected_adapters=[name])
        if by_peft:
            self.model.load_adapter(f"{folder}/{name}", new)
        else:
            self.model = moe_qlora.load_adapter(self.model, f"{folder}/{name}", new)
        self.adapters[new] = mine = self.adapters[name]
        for key, pair in read_factors(self.model, new).items():
            assert all(map(torch.equal, pair, mine[0][key])), key
        self.active = [new]
        self.model.set_adapter(new)

    @precondition(lambda self: self.adapters and not self.merged)
    @rule(recomputed=st.booleans())
    def train(self, recomputed: bool) -> None:
        if recomputed:
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train().base_model.set_adapter(self.active)
        leaves = {one: copy.deepcopy(self.adapters[one][0]) for one in self.active}
        for leaf in tree_leaves(leaves):
            leaf.requires_grad_()
        loss(self.logits_of(self.weights(self.active, leaves))).backward()
        loss(forward(self.model, self.inputs)).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        for adapter, factors in leaves.items():
            seen = read_factors(self.model, adapter)
            for name, pair in factors.items():
                grads = [leaf.new_zeros(()) if leaf.grad is None else leaf.grad for leaf in pair]
                allowed = 3e-4 * max(float(grad.abs().max()) for grad in grads) + 3e-6
                for new, leaf, grad in zip(seen[name], pair, grads, strict=True):
                    off = float((new - leaf.detach() + 0.1 * grad).abs().max())
                    assert off <= allowed, f"step of {name}: off by {off:.2g} of {allowed:.2g}"
            self.adapters[adapter] = (seen, self.adapters[adapter][1])
        self.model.gradient_checkpointing_disable()

    @rule()
    def deepcopy(self) -> None:
        self.model, self.off = copy.deepcopy(self.model), None  # the copy's experts are all here

    @precondition(lambda self: not self.merged)
    @rule()
    def move_experts(self) -> None:
        self.off = moe_qlora.offload_experts(self.model) if self.off is None else self.off.remove()

    @precondition(lambda self: self.adapters and self.off is None)
    @rule()
    def merge_and_unmerge(self) -> None:
        if self.merged:
            self.model.unmerge_adapter()
        else:
            self.model.merge_adapter(dtype=torch.float32)
        self.merged = not self.merged

    @precondition(lambda self: self.adapters and not self.merged and self.off is None)
    @rule()
    def merge_and_pack_again(self) -> None:
        self.base = self.weights(self.active)
        self.model = self.model.merge_and_unload(dtype=torch.float32)
        self.adapters, self.active = {}, []
        self.computes_the_oracles_logits()
        moe_qlora.quantize_experts(self.model, self.config)
        self.read_base()


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offload, "SLOTS", 1)  # two layers share a slot
    monkeypatch.setattr(Calls, "place", tmp_path, raising=False)


# Without shrinking, which takes minutes.
FEW = settings(
    max_examples=6, stateful_step_count=10, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), derandomize=True, database=None,
)  # fmt: skip


def test_sequences_of_calls_agree_with_plain_weights():
    run(Calls, settings=FEW)


@pytest.mark.nightly
def test_others_agree_too():
    run(Calls, settings=settings(FEW, max_examples=300, derandomize=False))
