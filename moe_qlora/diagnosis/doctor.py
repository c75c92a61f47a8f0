"""`doctor`: examine this environment, and how a model's expert layers are computed in it.

`layer_kinds` packs the model on meta, as a memory plan does, and asks `experts/backend.py` for the
backend and the reason, as a forward with LoRA would. Each known problem is a function: its
docstring says which versions it was seen with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..errors import ConfigError, MoeQloraError
from ..experts.backend import (
    FUSED,
    UNPACKED,
    Backend,
    choose_backend,
    has_triton,
    read_call,
    suits,
)
from ..experts.forward import can_serve
from ..experts.operands import LoraFactors
from ..kernels.cards import Card
from ..layout import ExpertsModule, ModelLayout, name_pattern, unwrapped_name
from ..lora.targets import base_model
from ..memory import meta_model
from ..memory.attention import EagerAttention, eager_attention
from ..memory.devices import gpu_named
from ..memory.meta_model import ModelSource, source_of
from ..memory.plan import plan_settings, settings_of
from ..models import named
from ..models.files import refuse_yaml
from ..packing import parametrize
from . import report
from .report import PROBLEM, WARNING, Device, Diagnosis, Finding, LayerKind, Versions

_DRIVER = Path("/proc/driver/nvidia/version")
_CURES = (
    ("is to be computed in", "Set bnb_4bit_compute_dtype to the dtype of the model."),
    ("ranks of the adapters", "Train with a lower rank."),
    ("are torch.float32", "Load the model in bfloat16."),
    ("is not packed", "Look at llm_int8_skip_modules."),
    ("no expert weight is packed", "Look at llm_int8_skip_modules."),
)
"""What to do, by words in a backend's reason; other reasons are the model's own."""
_NO_CURE = "Nothing to change: this model type has no faster path here."
_LIGER_FAILS = {"5.23": ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"), "5.24": ("glm4v_moe",)}
OWN_FORWARD = "own forward"
LINEAR_LAYERS = "Linear layers"

COSTS = {
    OWN_FORWARD: (
        "A layer's dequantized weights are kept for backward: 1,441 MiB, not 114 MiB, and 1.4 "
        "times the time of a step without any LoRA on them (Qwen3-30B-A3B's layer, 4,096 tokens, "
        "H200: peer=bnb beside peer=ours of commit 88efafc in tools/bench/results/layer.csv)."
    ),
    "projection by projection": (
        "Two dequantized weights and a gate of their own, one after the other; how much slower "
        "that is than the fused layer was not measured."
    ),
    "reference loop": (
        "Expert by expert: on a GPU it waits for the device once a projection and starts some ten "
        "kernels an expert (tools/bench/NOTES.md); its time was not measured."
    ),
    "unpacked": "16-bit experts, and no LoRA of this package on them.",
}
"""Costs of each backend compared with the fused layer, and where they were measured."""

_TOKENS = 4096  # any positive number: it only matters within the fused layer


def doctor(
    model: Any = None,
    quantization_config: Any = None,
    *,
    gpu: str | None = None,
    rank: int | None = None,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Examine this environment and, given a model, how its expert layers will be computed.

    Nothing is loaded, downloaded or computed: a model is built on the meta device.

    Args:
        model: None, or what `plan` takes: a checkpoint folder, plain or packed, a configuration, a
            model type, a hub id whose configuration is cached, or a model; of a model with
            adapters, the active ones are examined.
        quantization_config: A `BitsAndBytesConfig`; None takes the model's own, else nf4 with
            double quantization and bfloat16 as its compute dtype.
        gpu: A card to examine instead of the installed ones, by its name, such as "4090".
        rank: Of LoRA on the experts, if the model has no adapters yet; None for 16.
        trust_remote_code: Run model code that a checkpoint brings.

    Returns:
        Versions, devices, backends and findings; print it, or read its fields.

    Raises:
        ConfigError: `gpu`, `rank` or the quantization settings are not valid.
        CheckpointError: `model` cannot be read or built.
    """
    refuse_yaml(model, "doctor")
    if isinstance(model, (str, Path)):
        model = named.resolve(model, trust_remote_code=trust_remote_code)
    settings_of({} if rank is None else {"rank": rank})
    cards = report.here() if gpu is None else [report.named(gpu)]
    device, card = cards[0]
    installed = report.packages()
    kinds: tuple[LayerKind, ...] = ()
    notes: tuple[str, ...] = ()
    label, model_type, fit = "", None, ""
    eager: EagerAttention | None = None
    if isinstance(model, nn.Module) and hasattr(model, "peft_config"):
        if quantization_config is not None:
            raise ConfigError("quantization_config is for a model without adapters: leave it out.")
        config: Any = getattr(model, "config", None)
        label = getattr(config, "name_or_path", "") or type(base_model(model)).__name__
        model_type = getattr(config, "model_type", None)
        kinds, eager = adapted_kinds(model, card), eager_attention(base_model(model))
    elif model is not None:
        source = source_of(model, quantization_config, trust_remote_code)
        label, notes = source.label, source.notes
        model_type = getattr(source.config, "model_type", None)
        built = source.build()
        eager = eager_attention(built)
        kinds = layer_kinds(built, source, card, 16 if rank is None else rank)
        fit = _fit(model, quantization_config, device, rank, trust_remote_code)
    if model is not None and not kinds:
        notes = (*notes, "The model has no experts.")
    found = report.findings(installed)
    releases = report.releases(installed)
    found += known_problems(releases, device, card, model_type, kinds, eager)
    return Diagnosis(
        installed,
        device,
        tuple(each for each, _ in cards),
        label,
        kinds,
        tuple(sorted(found, key=lambda finding: finding.severity != PROBLEM)),
        notes,
        fit,
    )


def _fit(
    model: Any, quantization_config: Any, device: Device, rank: int | None, remote: bool
) -> str:
    if device.nbytes is None:
        return ""
    named_card = gpu_named(device.name) is not None and not device.here
    where = device.name if named_card else device.nbytes
    plan = partial(plan_settings, model, quantization_config, gpus=where, trust_remote_code=remote)
    try:
        asked = {} if rank is None else {"rank": rank}
        made = plan(asked)
        if made.best is None:
            return f"{device.name} holds no training step of it: {made.verdict}"
        fit = plan(made.best.values(), search=False).fit
    except MoeQloraError:
        return ""  # `plan` says why
    settings = made.best.settings
    size = f"{settings.batch} x {settings.seq:,} tokens, LoRA on {settings.targets}"
    kept = f" With moe_qlora.fit_memory {fit}." if fit else ""
    command = f"moe-qlora plan {made.label} --gpus {where} {made.best.options}".rstrip()
    said = f"{device.name} holds a training step ({size}): {made.best}.{kept}"
    return "\n    ".join([f"{said}\n", command, *made.best.python])


def known_problems(
    versions: Versions,
    device: Device,
    card: Card,
    model_type: str | None,
    layers: Iterable[LayerKind],
    eager: EagerAttention | None = None,
) -> list[Finding]:
    """Return the known problems of this environment and model, with what to do about each."""
    found = [
        *_liger(versions, model_type),
        *_sharding(versions),
        *_torch_build(device),
        *_kernels(device, card),
        *_slow_layers(device, card, layers),
    ]
    if eager is not None and suits(card):
        found.append(Finding(WARNING, eager.what, eager.cure))
    return sorted(found, key=lambda finding: finding.severity != PROBLEM)


def _liger(versions: Versions, model_type: str | None) -> Iterable[Finding]:
    """Liger 0.8.5 imports classes that transformers has removed: an ImportError."""
    liger, host = versions.get("liger-kernel", ()), versions.get("transformers", ())
    failing = _LIGER_FAILS.get(_text(host[:2]), ()) if liger and liger <= (0, 8, 5) else ()
    if failing and (model_type is None or model_type in failing):
        yield Finding(
            WARNING if model_type is None else PROBLEM,
            f"Liger {_text(liger)} raises an ImportError for {', '.join(failing)} under "
            f"transformers {_text(host)}.",
            "Leave use_liger_kernel out for these, or install a later liger-kernel.",
        )


def _sharding(versions: Versions) -> Iterable[Finding]:
    """Before torch 2.13 FSDP2 asks gradients of integer shards, and mixed precision casts them."""
    installed = versions.get("torch", ())
    if installed and installed < (2, 13):
        yield Finding(
            WARNING,
            f"fully_shard of torch {_text(installed)} asks gradients of packed codes, and casts "
            "them in mixed precision.",
            "On several GPUs use moe_qlora.distributed.sharding.shards_integers() around it, or "
            "torch 2.13.",
        )


def _torch_build(device: Device) -> Iterable[Finding]:
    """NVIDIA's driver is loaded, but torch does not see a GPU."""
    built = torch.version.cuda is not None or torch.version.hip is not None
    if device.here and _DRIVER.exists() and not torch.cuda.is_available():
        what = "sees no GPU" if built else "is built without CUDA"
        yield Finding(
            PROBLEM,
            f"NVIDIA's driver is loaded, and torch {torch.__version__} {what}.",
            "Look at CUDA_VISIBLE_DEVICES and the driver's version (nvidia-smi)."
            if built
            else "Install torch with CUDA (https://pytorch.org/get-started).",
        )


def _kernels(device: Device, card: Card) -> Iterable[Finding]:
    if card.maker == "nvidia" and card.capability < (8, 0):
        yield Finding(
            WARNING,
            f"{device.name} has compute capability {device.capability}, and the fused kernels "
            "need 8.0: experts are computed expert by expert.",
            "Train on Ampere or later.",
        )
    elif card.maker in ("nvidia", "amd") and not has_triton():
        yield Finding(
            PROBLEM,
            f"Triton is not installed, so that {device.name} computes without the fused kernels.",
            "pip install triton",
        )


def _slow_layers(device: Device, card: Card, layers: Iterable[LayerKind]) -> Iterable[Finding]:
    slow = [layer for layer in layers if not layer.fast] if suits(card) else []
    for reason in dict.fromkeys(layer.reason for layer in slow):
        count = sum(layer.count for layer in slow if layer.reason == reason)
        yield Finding(
            WARNING,
            f"{count} expert layers are not computed by the fused layer on {device.name}: "
            f"{reason}.",
            next((cure for words, cure in _CURES if words in reason), _NO_CURE),
        )


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def layer_kinds(
    model: nn.Module, source: ModelSource, card: Card, rank: int
) -> tuple[LayerKind, ...]:
    """Return the kinds of expert layers of a source's model with their backends on a card."""
    meta = meta_model.pack(model, source.quantization, linears=source.linears, native=source.native)
    return _count(meta.base, meta.layout, partial(_backend, card=card, rank=rank))


def adapted_kinds(model: nn.Module, card: Card) -> tuple[LayerKind, ...]:
    """Return the same for a model with adapters, with the active ones."""
    base = base_model(model)
    return _count(base, detect(base), partial(_backend, card=card, rank=None))


def _count(
    model: nn.Module, layout: ModelLayout, backend: Callable[..., Backend]
) -> tuple[LayerKind, ...]:
    counted = Counter[tuple[str, str, str, str]]()
    for entry in layout.modules:
        chosen = backend(model.get_submodule(entry.name), entry)
        pattern = name_pattern(unwrapped_name(entry.name))
        counted[pattern, entry.class_name, chosen.name, chosen.reason] += 1
    why = "experts are lists of Linear layers, which bitsandbytes packs and computes"
    for experts in layout.linear_experts:
        counted[name_pattern(experts.name), "nn.Linear", LINEAR_LAYERS, why] += 1
    quick = (FUSED.name, LINEAR_LAYERS)
    return tuple(
        LayerKind(pattern, n, owner, name, reason, name in quick, COSTS.get(name, ""))
        for (pattern, owner, name, reason), n in counted.items()
    )


def _backend(module: nn.Module, entry: ExpertsModule, card: Card, rank: int | None) -> Backend:
    """Return the backend of an experts module in training, with LoRA of this rank on all of it.

    None for the LoRA that it has.
    """
    names = [param.parameter_name for param in entry.parameters]
    if not any(parametrize.is_packed(module, name) for name in names):
        return UNPACKED
    if not can_serve(module):
        why = "the class does not compute through transformers' experts interface"
        return Backend(OWN_FORWARD, why)
    host: Any = module
    call = read_call(host, torch.empty(0))  # no autocast on meta
    if rank is not None:
        first, second = (_factors(weight, rank) for weight in call.weights)
        call = call._replace(lora=(first, second))
    packed = next(name for name in names if parametrize.is_packed(module, name))
    device = parametrize.device_of(module, packed)
    return choose_backend(host, call._replace(x=_hidden_states(entry, device), card=card))


def _hidden_states(entry: ExpertsModule, device: torch.device) -> torch.Tensor:
    """Return `(tokens, hidden)` in the dtype of the experts before packing, without memory."""
    first, dtype = entry.parameters[0], getattr(torch, entry.parameters[0].dtype_name)
    return torch.empty((), dtype=dtype, device=device).expand(_TOKENS, first.in_features or 1)


def _factors(weight: Any, rank: int) -> tuple[LoraFactors, ...]:
    """Return LoRA factors of a weight `(E, ...)` on meta, in float32 like PEFT's."""
    if weight is None or len(weight.shape) != 3:  # not packed, or refused for its shape
        return ()
    experts, rows, columns = weight.shape
    a = torch.empty(experts * rank, columns, device="meta")
    return (LoraFactors(a, torch.empty(rows, rank * experts, device="meta"), 1.0),)
