"""What adapters on a packed model compute: the plain model in fp32 with W + sum of s B A for W."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from moe_qlora.testing import tiny_inputs

Factors = dict[str, tuple[Tensor, Tensor]]


def factors_of(model: Any, adapter: str) -> Factors:
    """A and B of an adapter by the name of the weight in the plain model."""
    found = {}
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
            path, leaf = name.replace(".base_layer", ""), getattr(layer, "parameter_name", "weight")
            found[f"{path}.{leaf}"] = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return found


def copied(factors: Any) -> Any:
    return tree_map(lambda factor: factor.detach().clone(), factors)


class Oracle:
    """The plain model, its weights, and by adapter its factors and its scaling."""

    def __init__(self, twin: Any, tolerance: float) -> None:
        self.twin, self.inputs = twin.requires_grad_(False), tiny_inputs(twin)
        self.base = {name: p.detach().clone() for name, p in twin.named_parameters()}
        self.adapters: dict[str, tuple[Factors, float]] = {}
        self.tolerance = tolerance

    def run(self, model: Any, weights: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Logits, and the embedded tokens, which get a gradient.

        With one, bitsandbytes' Linear layers stay in fp32 on the CPU.
        """
        seen = []

        def leaf(module: Any, args: Any, out: Tensor) -> Tensor:
            seen.append(out.detach().requires_grad_())
            return seen[0]

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        inputs = {**self.inputs, "use_cache": False}
        with base.get_input_embeddings().register_forward_hook(leaf):
            if weights is None:
                out = model(**inputs)
            else:  # an adapter belongs to the module it was put on, whatever else shares the weight
                out = functional_call(model, weights, kwargs=inputs, tie_weights=False)
        return out[0], seen[0]

    def weights(self, adapters: list[str], leaves: dict[str, Factors] | None = None) -> Any:
        """All weights, with these adapters added, or these factors for theirs."""
        weights = dict(self.base)
        for adapter in adapters:
            factors, scaling = self.adapters[adapter]
            for name, pair in (leaves[adapter] if leaves else factors).items():
                weights[name] = weights[name] + scaling * self._delta(name, *pair)
        return weights

    def _delta(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """B A in the weight's shape: A (E r, in), expert slowest, B (out, r E), fastest."""
        if self.base[name].dim() == 2:
            return b @ a
        experts = len(self.base[name])
        b, a = b.view(len(b), -1, experts), a.view(experts, -1, a.shape[1])
        out = torch.einsum("ore,eri->eoi", b, a)
        module = self.twin.get_submodule(name.rpartition(".")[0])
        return out.mT if getattr(module, "is_transposed", False) else out

    def assert_close(self, got: Tensor, wanted: Tensor, what: str = "logits", of: Any = ()) -> None:
        """By a part of the largest value, of this tensor or of those in `of`."""
        off = float((got - wanted).abs().max())
        largest = max(float(each.abs().max()) for each in (wanted, *of))
        assert off <= self.tolerance * largest + 1e-9, f"{what}: off by {off:.2g} of {largest:.2g}"

    def check(self, model: Any, *active: str) -> None:
        """The model has the oracle's adapters, and its logits with these."""
        assert set(getattr(model, "peft_config", {})) == set(self.adapters)
        wanted = self.run(self.twin, self.weights([*active]))[0]
        self.assert_close(self.run(model)[0].detach(), wanted.detach())

    def take(self, model: Any, name: str, scaling: float) -> None:
        """Give a new adapter factors that are not zero, and note them."""
        generator = torch.Generator().manual_seed(len(self.adapters))
        for pair in factors_of(model, name).values():
            for factor, size in zip(pair, (0.1, 0.3), strict=True):
                factor.data = torch.randn(factor.shape, generator=generator) * size
        self.adapters[name] = copied(factors_of(model, name)), scaling

    def train(self, model: Any, *active: str) -> None:
        """Gradients of factors and embedded tokens are the oracle's; then both take a step."""
        model.train().base_model.set_adapter([*active])
        leaves = {one: copied(self.adapters[one][0]) for one in active}
        tree_map(lambda leaf: leaf.requires_grad_(), leaves)
        wanted, wanted_inputs = self.run(self.twin, self.weights([*active], leaves))
        got, got_inputs = self.run(model)
        self.assert_close(got.detach(), wanted.detach())
        seed = torch.linspace(-1, 1, got.shape[-1])  # a loss without labels
        for logits in (wanted, got):
            (logits * seed).sum(-1).tanh().mean().backward()
        self.assert_close(got_inputs.grad, wanted_inputs.grad, "inputs")
        for adapter, factors in leaves.items():
            for name, pair in factors_of(model, adapter).items():
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in pair]
                expected = [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in factors[name]
                ]
                for one, other in zip(grads, expected, strict=True):
                    self.assert_close(one, other, f"gradient of {name}", expected)
                for parameter, grad in zip(pair, grads, strict=True):
                    parameter.data -= 0.1 * grad
                    parameter.grad = None
            self.adapters[adapter] = copied(factors_of(model, adapter)), self.adapters[adapter][1]
        self.check(model, *active)
