"""The experts forward in every architecture that dispatches to it, against its own plain loops.

The reference is the same model on transformers' "eager" experts, each class's own loop over its
experts, with plain weights W + s B A made from the decoded stacks by torch's autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import representatives
import torch
from torch import Tensor, nn
from torch.func import functional_call

from moe_qlora import registry
from moe_qlora.detection import detect
from moe_qlora.experts import forward, operands
from moe_qlora.kernels.weights import PackedWeight
from moe_qlora.packing import codec, parametrize, settings
from moe_qlora.testing import registry_families, tiny_inputs, tiny_model

RANK, SCALING = 3, 0.7
FAMILIES = representatives.first(
    name
    for name in registry_families()
    if any(item["dispatches"] for item in registry.load(name).experts)
)
# Models without a forward that takes text: their experts modules are called by themselves.
BY_MODULE = ["dots3_note_vision_encoder", "qwen3_omni_moe"]
# Their linear attention takes up to ten seconds on a CPU: one run each.
SLOW = ["glm5_next", "glm5_next_text", "kimi_linear"]
# Badly conditioned: transformers' own fp32 loops are 1.2e-5 away from fp64 (this forward 1.0e-5).
WIDE = dict.fromkeys(["diffusion_gemma", "diffusion_gemma_text", "gemma4", "gemma4_text"], 3e-5)
SIDES = ["both", "first", "down", "none"]
# Both projections adapted, and one of the other sides by turns.
RUNS = [
    (name, side)
    for turn, name in enumerate(FAMILIES)
    if name not in BY_MODULE
    for side in (SIDES[:1] if name in SLOW else (SIDES[0], SIDES[1 + turn % 3]))
]


class Provider:
    """Factors for some parameters of one module."""

    def __init__(self, terms: dict[str, operands.LoraFactors]) -> None:
        self.by_name = terms

    def active_lora(self, parameter_name: str) -> tuple[operands.LoraFactors, ...]:
        term = self.by_name.get(parameter_name)
        return () if term is None else (term,)


def build(model_type: str) -> Any:
    """A tiny model whose experts weigh as much in its output as everything else."""
    model = tiny_model(model_type)
    generator = torch.Generator().manual_seed(4)
    for _, module, names in banks(model):
        for name in names:
            weight = getattr(module, name)
            inputs = weight.shape[1 if module.is_transposed else 2]
            nn.init.normal_(weight, std=inputs**-0.5, generator=generator)
    return model


def banks(model: nn.Module) -> Iterator[tuple[str, Any, tuple[str, str]]]:
    for name, module in model.named_modules():
        if detect.dispatches(module):
            assert isinstance(module, nn.Module)
            yield name, module, ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def packed_and_plain(model_type: str) -> tuple[Any, Any]:
    """The packed model on this package's forward, and its decoded twin on plain loops."""
    plain = build(model_type)
    packed = copy.deepcopy(plain)
    stacks: dict[int, PackedWeight] = {}
    twins = {name: module for name, module, _ in banks(plain)}
    found = list(banks(packed))
    for module_name, module, names in found:
        for name in names:
            weight = getattr(module, name)
            if id(weight) not in stacks:
                stacks[id(weight)] = codec.pack(weight, settings.CodecSettings("nf4"))
            stack = stacks[id(weight)]
            parametrize.attach(module, name, stack)
            getattr(twins[module_name], name).data = codec.unpack(stack)
    assert forward.activate(packed, [name for name, _, _ in found]) == ()
    for module in twins.values():
        module.config._experts_implementation_internal = "eager"
    return packed, plain


def lora(model: nn.Module, which: str) -> dict[str, Provider]:
    """Random factors for the chosen projections of each experts module."""
    generator = torch.Generator().manual_seed(1)
    providers = {}
    for module_name, module, names in banks(model):
        chosen = {"both": names, "first": names[:1], "down": names[1:], "none": ()}[which]
        terms = {}
        for name in chosen:
            count, out, inputs = parametrize.read_packed(module, name).shape
            if module.is_transposed:
                out, inputs = inputs, out
            a = torch.randn(count * RANK, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(out, RANK * count, generator=generator) * RANK**-0.5
            a, b = a.requires_grad_(), b.requires_grad_()
            terms[name] = operands.LoraFactors(a, b, SCALING)
        providers[module_name] = Provider(terms)
    return providers


def folded(plain: nn.Module, providers: dict[str, Provider]) -> dict[str, Tensor]:
    """`W + s B A` of every adapted parameter, one expert after the other."""
    weights = {}
    for module_name, module, _ in banks(plain):
        for name, term in providers[module_name].by_name.items():
            weight = getattr(module, name).detach()
            a = term.a.reshape(len(weight), RANK, -1)
            b = term.b.reshape(-1, RANK, len(weight))
            rows = []
            for expert, matrix in enumerate(weight):
                delta = term.scaling * b[:, :, expert] @ a[expert]
                rows.append(matrix + (delta.t() if module.is_transposed else delta))
            weights[f"{module_name}.{name}"] = torch.stack(rows)
    return weights


def close(mine: Tensor, theirs: Tensor, name: str, bound: float, floor: float) -> None:
    """Within `bound` of its own norm, or of `floor` where only rounding is left of it."""
    error, size = (mine - theirs).norm().item(), max(theirs.norm().item(), floor)
    assert error <= bound * size, f"{name}: {error / size}"


def compare(
    mine: Tensor,
    theirs: Tensor,
    leaves: dict[str, tuple[Tensor, Tensor]],
    others: dict[str, tuple[Tensor, Tensor]] | None = None,
    bound: float = 1e-5,
) -> None:
    """Outputs, and gradients of each (mine, theirs) pair of leaves.

    `others` lie behind attention, norms and convolutions, whose own fp32 rounding they share.
    """
    leaves, others = leaves | (others or {}), others or {}
    close(mine, theirs, "output", bound, 0.0)
    probe = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2))
    pairs = []
    for side, out in enumerate((mine, theirs)):
        wanted = [pair[side] for pair in leaves.values()]
        pairs.append(torch.autograd.grad((out * probe).sum(), wanted, allow_unused=True))
    largest = max(float(grad.norm()) for grad in pairs[1] if grad is not None)
    for name, mine_grad, their_grad in zip(leaves, *pairs, strict=True):
        assert (mine_grad is None) == (their_grad is None), name
        if mine_grad is not None and their_grad is not None:
            allowed = 1e-4 if name in others else bound
            close(mine_grad, their_grad, name, allowed, 1e-4 * largest)


def factors(providers: dict[str, Provider]) -> dict[str, tuple[Tensor, Tensor]]:
    leaves = {}
    for module_name, provider in providers.items():
        for name, term in provider.by_name.items():
            leaves[f"{module_name}.{name}.a"] = (term.a, term.a)
            leaves[f"{module_name}.{name}.b"] = (term.b, term.b)
    return leaves


def first_output(output: Any) -> Tensor:
    value = output.get("logits", output.get("last_hidden_state"))
    assert isinstance(value, Tensor)
    return value


@pytest.fixture(scope="module")
def twins(request: pytest.FixtureRequest) -> tuple[Any, Any, set[str]]:
    """`packed_and_plain` of one architecture, which its tests share, and names of its routers."""
    layout = detect.detect(tiny_model(request.param, device="meta"))
    return *packed_and_plain(request.param), {router.name for router in layout.routers}


@pytest.mark.parametrize(("twins", "which"), representatives.cases(RUNS), indirect=["twins"])
def test_model_equals_plain_loops(twins: tuple[Any, Any, set[str]], which: str) -> None:
    packed, plain, routers = twins
    providers = lora(packed, which)
    for name, module, _ in banks(packed):
        operands.set_lora_source(module, providers[name])
    given = tiny_inputs(packed) | {"use_cache": False}
    leaves = factors(providers)
    if "inputs_embeds" in given:
        embeds = given["inputs_embeds"].requires_grad_()
        leaves["inputs_embeds"] = embeds, embeds
    torch.manual_seed(3)  # diffusion models draw noise
    mine = first_output(packed(**given))
    torch.manual_seed(3)
    weights = folded(plain, providers)
    theirs = first_output(functional_call(plain, weights, kwargs=given, tie_weights=False))
    trained, others = dict(plain.named_parameters()), {}
    table = None if "inputs_embeds" in given else packed.get_input_embeddings().weight
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad and name in trained:
            routes = name in routers or any(name.startswith(f"{router}.") for router in routers)
            (leaves if routes or parameter is table else others)[name] = parameter, trained[name]
    assert any(name in routers or name.rpartition(".")[0] in routers for name in leaves)
    compare(mine, theirs, leaves, others, WIDE.get(packed.config.model_type, 1e-5))


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("model_type", representatives.cases(BY_MODULE))
def test_modules_equal_plain_loops(model_type: str, which: str) -> None:
    packed, plain = packed_and_plain(model_type)
    providers = lora(packed, which)
    weights = folded(plain, providers)
    twins = {name: module for name, module, _ in banks(plain)}
    for module_name, module, names in banks(packed):
        operands.set_lora_source(module, providers[module_name])
        count, *shape = parametrize.read_packed(module, names[0]).shape
        hidden = torch.randn(11, shape[0] if module.is_transposed else shape[1])
        index = torch.stack([torch.randperm(count)[:2] for _ in hidden])
        given = hidden.requires_grad_(), torch.rand(index.shape).requires_grad_()
        own = {
            name.removeprefix(f"{module_name}."): weight
            for name, weight in weights.items()
            if name.startswith(f"{module_name}.")
        }
        mine = module(given[0], index, given[1])
        theirs = functional_call(twins[module_name], own, (given[0], index, given[1]))
        leaves = factors({module_name: providers[module_name]})
        leaves |= {"hidden_states": (given[0],) * 2, "top_k_weights": (given[1],) * 2}
        compare(mine, theirs, leaves)
