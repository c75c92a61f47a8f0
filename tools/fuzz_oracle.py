"""What a model must compute after a sequence of calls, kept apart from the package under test.

The oracle holds the plain fp32 weights of a model, decoded once from the packed ones by the
format's definition, and the LoRA factors of every adapter as PEFT names and stores them. A stock
transformers model in fp32 with W + sum of s B A in place of W then says what the logits are, and
what the gradient of each factor is. No file of `moe_qlora` is imported here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

TOLERANCE = 5e-4
"""Largest error of logits and gradients in fp32, as a part of their largest value.

One forward rounds by 1e-6 to 1e-5; trained factors can make attention steep.
"""

LOOSE, LOOSE_ROWS = 0.1, 0.4
"""Where bitsandbytes' own bf16 product runs: the error of a token's logits, and how many tokens may
be off by more, since another rounding may send a token to another expert."""

GAPS = {"nf4": 0.155, "fp4": 0.17, "int8": 0.005}
"""Half of the widest gap between two values of a table, as a part of a block's largest value."""


class Contradiction(AssertionError):  # noqa: N818 - a result of a run, not an error in it
    """What the oracle contradicts."""


@dataclass
class Adapter:
    """One adapter: A and B by the name of the plain weight, as PEFT stores them, and scalings."""

    factors: dict[str, tuple[Tensor, Tensor]]
    scaling: float
    trained: dict[str, list[int]] = field(default_factory=dict)  # experts with LoRA, if not all

    @property
    def rank(self) -> int:
        return int(next(iter(self.factors.values()))[0].shape[0])

    def loaded_by(self, call: str) -> Adapter:
        """Return the adapter as a call loads it: by one of PEFT's, LoRA of zeros counts as LoRA."""
        trained = self.trained if call.startswith("moe_qlora.") else {}
        return Adapter(dict(self.factors), self.scaling, trained)


def decode(codes: Tensor, state: Any) -> Tensor:
    """Decode 4-bit weights by bitsandbytes' definition, in fp64: a table times absmax."""
    absmax = state.absmax.double()
    if state.nested:
        outer = state.state2
        scales = outer.absmax.double().repeat_interleave(outer.blocksize)[: absmax.numel()]
        absmax = outer.code.double()[state.absmax.long()] * scales + state.offset.double()
        absmax = absmax.float().double()
    pairs = codes.reshape(-1).view(torch.uint8).long()
    each = torch.stack([pairs >> 4, pairs & 15], 1).view(-1)[: math.prod(state.shape)]
    scales = absmax.repeat_interleave(state.blocksize)[: each.numel()]
    return (state.code.double()[each] * scales).to(state.dtype).double().view(state.shape)


def is_packed(module: Any, name: str) -> bool:
    """Tell whether a parameter is packed, behind a parametrization or as a Linear layer's."""
    chain = module._modules.get("parametrizations", {})
    return name in chain or getattr(getattr(module, name), "quant_state", None) is not None


def decode_parameter(module: Any, name: str) -> Tensor:
    """Return a parameter of a module in fp64, decoded if it is packed in 4 bit or int8."""
    chain = module._modules.get("parametrizations", {})
    if name not in chain:
        weight = getattr(module, name).detach()
        state = getattr(getattr(module, name), "quant_state", None)
        return weight.double() if state is None else decode(weight, state)
    first, codes = chain[name][0], chain[name].original.data
    if hasattr(first, "scale_bits"):
        scales = first.scale_bits.view(torch.float32).double()
        shape = tuple(first.weight_shape)
        weight = codes.view(torch.int8).double().view(-1, shape[-1]) * scales[:, None] / 127
        return weight.view(shape).to(first.weight_dtype).double()
    return decode(codes, first.quant_state)


class Oracle:
    """The weights and adapters that a model must have, and what it must compute with them."""

    def __init__(self, twin: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        """Take the stock model, in fp32, of the weights that were packed, and its inputs."""
        self.twin, self.inputs = twin.eval().requires_grad_(False), dict(inputs)
        self.original = {name: p.detach().clone() for name, p in twin.named_parameters()}
        self.base = dict(self.original)
        self.adapters: dict[str, Adapter] = {}
        self.active: list[str] = []

    # --- base weights ---------------------------------------------------------------------------

    def read_base(self, model: nn.Module, kind: str, kept: Collection[str] = ()) -> set[str]:
        """Decode a model's weights; return the names of packed ones.

        Each is held against the weight that it was packed from: no value is off by more than the
        table's widest gap, and what is not packed is equal. The maker's codes of `kept` stand for
        the weights of the plain folder exactly.
        """
        packed = set()
        for name, before in self.base.items():
            path, _, leaf = name.rpartition(".")
            module: Any = model.get_submodule(path)
            if is_packed(module, leaf):
                packed.add(name)
            if name in kept:
                continue
            weight = decode_parameter(module, leaf).float()
            if weight.shape != before.shape:
                shapes = tuple(weight.shape), tuple(before.shape)
                raise Contradiction(f"{name} has shape {shapes[0]}, not {shapes[1]}")
            if not torch.allclose(weight, before, rtol=0, atol=1e-5):  # a merge rounds elsewhere
                if name not in packed:
                    raise Contradiction(f"{name} is not packed, and has other values")
                block = before.shape[-1] if kind == "int8" else 64
                rows = nn.functional.pad(before.reshape(-1), (0, -before.numel() % block))
                off = nn.functional.pad((weight - before).reshape(-1), (0, -before.numel() % block))
                bound = rows.view(-1, block).abs().amax(1, keepdim=True) * GAPS[kind]
                # 8-bit statistics round by a part of the largest of 256 blocks.
                bound = bound + 1e-5 + 0.02 * rows.abs().max()
                if bool((off.view(-1, block).abs() > bound).any()):
                    raise Contradiction(f"{name} is packed with an error over that of {kind}")
            self.base[name] = weight
        return packed

    def transposed(self, name: str) -> bool:
        """Tell whether an expert weight is stored `(E, in, out)`; PEFT asks its module."""
        return bool(getattr(self.twin.get_submodule(name.rpartition(".")[0]), "is_transposed", 0))

    # --- adapters -------------------------------------------------------------------------------

    def delta(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return B A in the shape of the weight.

        PEFT's layout: A `(E r, in)` with the expert slowest, B `(out, r E)` with the expert
        fastest.
        """
        shape = self.base[name].shape
        if len(shape) == 2:
            return b @ a
        experts = shape[0]
        out = torch.einsum(
            "ore,eri->eoi", b.view(len(b), -1, experts), a.view(experts, -1, a.shape[1])
        )
        return out.mT if self.transposed(name) else out

    def effect(self, adapter: str) -> dict[str, Tensor]:
        """Return s B A by name of the weight."""
        one = self.adapters[adapter]
        return {n: one.scaling * self.delta(n, a, b) for n, (a, b) in one.factors.items()}

    def weights(self, adapters: Iterable[str], base: Mapping[str, Tensor] | None = None) -> Any:
        """Return W + sum of s B A by name."""
        weights = dict(base or self.base)
        for adapter in adapters:
            for name, delta in self.effect(adapter).items():
                weights[name] = weights[name] + delta
        return weights

    def weighted(self, adapters: list[str], weights: list[float], way: str, rank: int) -> Any:
        """Return the weighted sum's effect by name, as PEFT defines it."""
        total: dict[str, Tensor] = {}
        names = dict.fromkeys(n for adapter in adapters for n in self.adapters[adapter].factors)
        for name in names:
            having = [
                (self.adapters[adapter], weight)
                for adapter, weight in zip(adapters, weights, strict=True)
                if name in self.adapters[adapter].factors
            ]
            pairs = [(one.factors[name], weight * one.scaling) for one, weight in having]
            if way == "linear":  # factors are summed, so that products of two adapters appear
                a = add(a * scale**0.5 for (a, _), scale in pairs)
                b = add(b * scale**0.5 for (_, b), scale in pairs)
                total[name] = self.delta(name, a, b)
                continue
            delta = add(scale * self.delta(name, a, b) for (a, b), scale in pairs)
            total[name] = delta if way == "cat" else low_rank(delta, rank)
        return total

    # --- what is computed -----------------------------------------------------------------------

    def logits(
        self, adapters: Iterable[str] | None = None, base: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the logits with these adapters, by default the active ones."""
        weights = self.weights(self.active if adapters is None else adapters, base)
        with torch.no_grad():
            return self._forward(weights)

    def _forward(self, weights: Mapping[str, Tensor]) -> Tensor:
        return functional_call(self.twin, dict(weights), kwargs=self.inputs).logits

    def gradients(self, adapters: list[str]) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        """Return the gradients of (A, B) for `loss`, by adapter and name."""
        keys = [(adapter, name) for adapter in adapters for name in self.adapters[adapter].factors]
        leaves = []
        weights = dict(self.base)
        for adapter, name in keys:
            one = self.adapters[adapter]
            a, b = (factor.clone().requires_grad_() for factor in one.factors[name])
            leaves += [a, b]
            weights[name] = weights[name] + one.scaling * self.delta(name, a, b)
        grads = torch.autograd.grad(loss(self._forward(weights)), leaves, allow_unused=True)
        filled = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, grads, strict=True)
        ]
        pairs = list(zip(filled[::2], filled[1::2], strict=True))
        return {key: self._of_chosen(*key, *pair) for key, pair in zip(keys, pairs, strict=True)}

    def rounding(self, adapters: list[str], exact: Mapping[Any, Any]) -> dict[tuple[str, str], Any]:
        """Return how far the gradients move where every weight and factor moves by its last bit.

        Saturated attention takes differences of large numbers: in a sequence of two steps, the
        gradients of q's factors are 2e-4, and 3e-5 of them the rounding of the stock model itself.
        """
        generator = torch.Generator().manual_seed(0)

        def moved(t: Tensor) -> Tensor:
            return t * (1 + 2**-23 * torch.randn(t.shape, generator=generator))

        other = Oracle(self.twin, self.inputs)
        other.base = {name: moved(weight) for name, weight in self.base.items()}
        for key, one in self.adapters.items():
            factors = {name: (moved(a), moved(b)) for name, (a, b) in one.factors.items()}
            other.adapters[key] = Adapter(factors, one.scaling, one.trained)
        return {
            key: tuple(a - b for a, b in zip(pair, exact[key], strict=True))
            for key, pair in other.gradients(adapters).items()
        }

    def _of_chosen(self, adapter: str, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Set the gradients of experts without LoRA to zero."""
        chosen = self.adapters[adapter].trained.get(name)
        if chosen is None:
            return a, b
        experts = self.base[name].shape[0]
        mask = torch.zeros(experts)
        mask[chosen] = 1
        a = a.view(experts, -1) * mask[:, None]
        return a.view(-1, self.adapters[adapter].factors[name][0].shape[1]), (
            b.view(-1, experts) * mask
        ).view(b.shape)


def loss(logits: Tensor) -> Tensor:
    """Return a loss without labels, whose gradient is dense."""
    ramp = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return (logits * ramp).sum(-1).tanh().mean()


def add(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(list(tensors)).sum(0)


def low_rank(delta: Tensor, rank: int) -> Tensor:
    """Return the nearest matrices of this rank."""
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    out: Tensor = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
    return out


# --- PEFT's names -------------------------------------------------------------------------------


def plain_name(peft_model: nn.Module, layer: str) -> str:
    """Return the name that the weight under a LoRA layer has in the plain model."""
    module = peft_model.get_submodule(layer)
    path = layer.removeprefix("base_model.model.").replace(".base_layer", "")
    return f"{path}.{getattr(module, 'parameter_name', None) or 'weight'}"


def read_factors(peft_model: nn.Module, adapter: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of an adapter by the name of the plain weight, from the state dict."""
    state = peft_model.state_dict()
    found = {}
    for key, a in state.items():
        if key.endswith(f".lora_A.{adapter}.weight"):
            b = state[key.replace(".lora_A.", ".lora_B.")]
            name = plain_name(peft_model, key.split(".lora_A.")[0])
            found[name] = (a.detach().float().clone(), b.detach().float().clone())
    return found


def read_file(folder: Any, parameters: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return A and B of an adapter's file by the name of the plain weight.

    Args:
        folder: The adapter's.
        parameters: The targeted parameters of each module in the order of its definition: the first
            is innermost in a file, with the most `base_layer`s in its key.
    """
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        path, depth = re.subn(r"\.base_layer(?=\.|$)", "", path)
        leaves = parameters.get(path, ["weight"])
        found[f"{path}.{leaves[len(leaves) - 1 - depth]}"] = (
            a.float(),
            tensors[key.replace(".lora_A.", ".lora_B.")].float(),
        )
    return found


# --- comparing ----------------------------------------------------------------------------------


def check_close(what: str, got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """Raise a Contradiction where the largest error is over the tolerance."""
    if got.shape != wanted.shape:
        raise Contradiction(f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    scale = float(wanted.abs().max()) or 1e-6
    error = float((got.detach().double() - wanted.double()).abs().max()) / scale
    if not error <= tolerance:
        raise Contradiction(f"{what}: off by {error:.2g} of its largest value")


def check_loosely(what: str, got: Tensor, wanted: Tensor) -> None:
    """Raise a Contradiction where too many tokens' logits are off."""
    error = (got - wanted).abs().amax(-1) / wanted.abs().max()
    share = float((~(error <= LOOSE)).float().mean())
    if share > LOOSE_ROWS:
        raise Contradiction(f"{what}: {share:.0%} of the tokens are off by more than {LOOSE:.0%}")
