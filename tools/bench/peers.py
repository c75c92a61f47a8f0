"""What one layer of experts is measured beside: each peer makes the same random layer its own.

    ours        packed nf4 with double quantization, LoRA of both projections
    portable    the same as on a card of compute capability 8.6: neither Hopper's kernel nor torch's
                grouped matmul; only where it is asked for
    projection  the same as where the fused layer does not suit: projection by projection, and
    loop        without grouped products, expert by expert; both only where they are asked for
    frozen      bf16 weights, no LoRA, transformers' grouped_mm
    peft        bf16 weights, PEFT's LoRA of both projections, transformers' grouped_mm
    bnb         packed by bitsandbytes' parametrization, no LoRA, transformers' grouped_mm
    e4b         experts4bit-qlora's experts and LoRA, its fast path with dgrad
    axolotl     what `quantize_moe_experts: true` packs, on its scattermoe kernels, PEFT's LoRA

The last two are called as their documentation says. `fetch_peers` brings them; without them, or
without a GPU, they are skipped. `model.py` makes whole models theirs by the same functions.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from random_mxfp4 import BLOCK, random_mxfp4
from shapes import SHAPES, TINY
from torch import Tensor, nn

import moe_qlora

PEERS = ("ours", "frozen", "peft", "bnb", "e4b", "axolotl")
OURS = ("ours", "portable", "projection", "loop", "mxfp4")
DISTRIBUTIONS = {"e4b": ("experts4bit-qlora", "grouped-nf4-gemm"), "axolotl": ("axolotl",)}
PROJECTIONS = ("gate_up_proj", "down_proj")


class UnavailableError(Exception):
    """A peer cannot be measured here at all: it is not installed, or needs a GPU."""


def versions(peer: str) -> str:
    """`name=version` of what a peer comes from, beside the columns that every row has.

    Raises:
        UnavailableError: It is not installed.
    """
    try:
        return "".join(f" {name}={version(name)}" for name in DISTRIBUTIONS.get(peer, ()))
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error


def imported(name: str, device: torch.device) -> Any:
    """A peer's module.

    Raises:
        UnavailableError: It cannot be imported, or there is no GPU for it.
    """
    if device.type != "cuda":
        raise UnavailableError("its kernels need a GPU")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"cannot be imported: {error}") from error


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, int]:
    """A module that holds one experts module, as `experts`, random in bf16; and k."""
    from transformers import AutoConfig, AutoModelForCausalLM

    named = TINY if options.tiny else SHAPES.get(options.shape, (options.shape, {}))
    model_type, sizes = named
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, vocab_size=64, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = next(m for m in moe_qlora.detect(model).modules if m.dispatches)
    holder: Any = nn.Module()
    holder.experts = model.get_submodule(found.name).to_empty(device=device)
    holder.config = holder.experts.config
    with torch.no_grad():
        for parameter in holder.experts.parameters():
            parameter.normal_(std=0.02)
    holder.requires_grad_(False)
    choices = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    top_k = next(int(getattr(config, name)) for name in choices if hasattr(config, name))
    return holder, top_k


def prepare(peer: str, options: argparse.Namespace, holder: Any, stack: ExitStack) -> list[Tensor]:
    """Make the module what the peer runs.

    Args:
        peer: One of `PEERS`.
        options: `rank`, and `cap` for ours.
        holder: From `build`, changed in place.
        stack: Undoes, when it closes, what a peer changes outside the module.

    Returns:
        The adapters' weights.

    Raises:
        UnavailableError: The peer cannot run here.
    """
    holder.experts.config._experts_implementation = "grouped_mm"
    if peer == "portable":
        from moe_qlora.kernels import cards

        stack.enter_context(cards.acting_as(cards.PORTABLE))
    if peer in ("projection", "loop"):
        _without_fused_layer(stack, grouped=peer == "projection")
    if peer in OURS:
        return _ours(peer, options, holder)
    if peer in ("bnb", "axolotl"):
        _pack_by_bitsandbytes(holder.experts)
    if peer == "axolotl":
        device = holder.experts.parametrizations.down_proj.original.device
        stack.enter_context(axolotl(device))
        holder.experts.config._experts_implementation = "scattermoe"
    if peer in ("peft", "axolotl"):
        _peft(options, holder)
    if peer == "e4b":
        holder.experts = e4b_experts(holder.experts, options.rank)
        stack.enter_context(e4b_training(holder))
    return [p for p in holder.parameters() if p.requires_grad]


def _without_fused_layer(stack: ExitStack, *, grouped: bool) -> None:
    """Let ours compute projection by projection, or without grouped products expert by expert."""
    from moe_qlora.experts import backend, projection

    def replace(module: Any, name: str, value: Any) -> None:
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    replace(backend, "fused_obstacle", lambda *_: ("it is asked for", ()))
    for module in () if grouped else (backend, projection):
        replace(module, "runs_grouped", lambda *_: False)


def _ours(peer: str, options: argparse.Namespace, holder: Any) -> list[Tensor]:
    from moe_qlora.experts import forward as forward_
    from moe_qlora.experts import operands
    from moe_qlora.packing import codec, parametrize
    from moe_qlora.packing.settings import CodecSettings

    module = holder.experts
    count = module.num_experts
    terms: dict[str, tuple[operands.LoraFactors, ...]] = {}
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name)
        out, inp = (2, 1) if module.is_transposed else (1, 2)
        shape = weight.shape
        if peer == "mxfp4":
            packed = random_mxfp4(shape, bool(module.is_transposed), weight.device)
            if packed is None:
                raise UnavailableError(f"{name} {tuple(shape)} has no whole blocks of {BLOCK}")
        else:
            packed = codec.pack(weight.data, CodecSettings("nf4", True, torch.uint8))
        parametrize.attach(module, name, packed)
        device = packed.device
        a = torch.randn(count * options.rank, shape[inp], device=device) * shape[inp] ** -0.5
        b = torch.randn(shape[out], options.rank * count, device=device) * 0.01
        a, b = a.bfloat16(), b.bfloat16()
        terms[name] = (operands.LoraFactors(a.requires_grad_(), b.requires_grad_(), 2.0),)
    forward_.activate(holder, ["experts"])

    class Provider:
        def active_lora(self, parameter_name: str) -> tuple[operands.LoraFactors, ...]:
            return terms[parameter_name]

    operands.set_lora_source(module, Provider())
    if options.cap is not None:
        from moe_qlora.kernels import workspace

        workspace.set_workspace_cap(options.cap)
    return [t for both in terms.values() for term in both for t in (term.a, term.b)]


def _pack_by_bitsandbytes(experts: Any) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name in PROJECTIONS:
        replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")


def _peft(options: argparse.Namespace, holder: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names = [f"experts.{name}" for name in PROJECTIONS]
    config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=[], target_parameters=names
    )
    inject_adapter_in_model(config, holder)
    for parameter in holder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def e4b_experts(experts: Any, rank: int, *, offload: bool = False) -> Any:
    """Return experts4bit-qlora's own module, packed and with LoRA, on the device of the experts.

    Args:
        experts: The model's, in bf16.
        rank: Of LoRA on experts.
        offload: Whether its packed weights stay in pinned host memory, as its loader puts them
            there with `offload=True`. A layer's are copied as its forward starts: what copies the
            next layer's ahead (`enable_inference_prefetch`) leaves training alone.
    """
    device = experts.down_proj.device
    package = imported("experts4bit_qlora", device)
    if not experts.has_gate or experts.is_transposed or getattr(experts, "has_bias", False):
        raise NotImplementedError("takes gated experts stored (E, out, in) without biases alone")
    base = package.Experts4bit.from_float(
        experts.gate_up_proj.data,
        experts.down_proj.data,
        has_gate=True,
        activation=F.silu,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
    )
    lora = package.ExpertsLoRA(base, r=rank, alpha=2 * rank, dtype=torch.bfloat16).to(device)
    with torch.no_grad():  # a B of zeros is taken for an adapter that is not there
        lora.gate_up_lora_B.normal_(std=0.01)
        lora.down_lora_B.normal_(std=0.01)
    if offload:
        handle = package.enable_expert_offload(lora, device, pin=True)
        if device.type == "cuda" and not handle.pinned:
            raise RuntimeError("its host memory is not pinned")
    return lora


@contextmanager
def e4b_training(model: nn.Module) -> Iterator[None]:
    """Its fast path for as long as this lasts: it changes a module of transformers as well.

    After LoRA, gradient checkpointing and Liger: it brings a rotary embedding, norms, a chunked
    loss and reentrant checkpointing, each where it still finds transformers' own.
    """
    package = importlib.import_module("experts4bit_qlora")
    wanted = sum(isinstance(module, package.ExpertsLoRA) for module in model.modules())
    try:
        patched = package.enable_fast_train(model, dgrad=True)
        if patched != wanted:
            raise RuntimeError(f"its fast path took {patched} modules, not {wanted}")
        yield
    finally:
        package.disable_fast_train(model)


_replaced: dict[tuple[type, str], Any] = {}
"""What axolotl puts in the place of methods of PEFT's classes."""


@contextmanager
def axolotl(device: torch.device) -> Iterator[None]:
    """Its experts forward, and its changes to PEFT for as long as this lasts.

    It has no way to undo them, and the other peers are to run on PEFT as it is.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    kernels = "axolotl.integrations.kernels.libs.scattermoe_lora"
    forward = imported(f"{kernels}.experts", device)
    runtime = imported(f"{kernels}.runtime", device)
    patches = imported("axolotl.monkeypatch.moe_quant", device)
    classes: tuple[type, ...] = (BaseTuner, ParamWrapper)
    before = {owner: dict(vars(owner)) for owner in classes}
    try:
        if not _replaced:
            forward.register_scattermoe_experts()
            patches.patch_peft_target_parameters_matching()
        for (owner, name), value in _replaced.items():
            setattr(owner, name, value)
        # The settings of a run that sets none of them.
        runtime.configure_scattermoe_runtime({})
        yield
    finally:
        for owner, had in before.items():
            for name, value in dict(vars(owner)).items():
                if had.get(name) is not value:
                    _replaced[owner, name] = value
                    if name in had:
                        setattr(owner, name, had[name])
                    else:
                        delattr(owner, name)
