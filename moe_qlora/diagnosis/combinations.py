"""Versions and devices that are known not to work together, each with what to do about it.

Each function looks at one thing and returns what it found. Where it was seen is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ..experts.backend import layer_kernels, suits
from ..kernels.cards import Card
from ..memory.attention import EagerAttention
from .packages import Versions
from .report import PROBLEM, WARNING, Device, Finding, LayerKind

_DRIVER = Path("/proc/driver/nvidia/version")
_CURES = (
    ("is to be computed in", "Set bnb_4bit_compute_dtype to the dtype of the model."),
    ("ranks of the adapters", "Train with a lower rank."),
    ("are torch.float32", "Load the model in bfloat16."),
    ("is not packed", "Look at llm_int8_skip_modules."),
    ("no expert weight is packed", "Look at llm_int8_skip_modules."),
)
"""What to do, by words of a backend's reason; the others are the model's own."""
_NO_CURE = "Nothing to change: this model type has no faster path here."
_LIGER_FAILS = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")


def findings(
    versions: Versions,
    device: Device,
    card: Card,
    model_type: str | None,
    layers: Iterable[LayerKind],
    eager: EagerAttention | None = None,
) -> list[Finding]:
    """Return every known combination that is here."""
    found = [
        *_liger(versions, model_type),
        *_sharding(versions),
        *_llama_factory(versions),
        *_ms_swift(versions),
        *_torch_build(device),
        *_kernels(device, card),
        *_slow_layers(device, card, layers),
        *_slow_attention(card, eager),
    ]
    return sorted(found, key=lambda finding: finding.severity != PROBLEM)


def _liger(versions: Versions, model_type: str | None) -> Iterable[Finding]:
    """Liger 0.8.5 imports classes of outputs that transformers 5.23 has no more: an ImportError."""
    liger, host = versions.get("liger-kernel", ()), versions.get("transformers", ())
    if not liger or liger > (0, 8, 5) or host < (5, 23):
        return
    if model_type in _LIGER_FAILS or model_type is None:
        yield Finding(
            WARNING if model_type is None else PROBLEM,
            f"Liger {_text(liger)} raises an ImportError for {', '.join(_LIGER_FAILS)} under "
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
            "On several GPUs use `with moe_qlora.shards_integers():` around it, or torch 2.13.",
        )


def _llama_factory(versions: Versions) -> Iterable[Finding]:
    """LLaMA-Factory 0.9.5 was run under transformers 5.23."""
    installed, host = versions.get("llamafactory", ()), versions.get("transformers", ())
    if installed and installed <= (0, 9, 5) and host > (5, 6):
        yield Finding(
            WARNING,
            f"The gradient checkpointing of LLaMA-Factory {_text(installed)} fails under "
            f"transformers {_text(host)}, with any model.",
            "Set disable_gradient_checkpointing: true and gradient_checkpointing: true.",
        )


def _ms_swift(versions: Versions) -> Iterable[Finding]:
    """`swift rlhf` of 4.6.0 needs TRL below 1.0; `swift sft` was run beside 1.16."""
    installed, trl = versions.get("ms-swift", ()), versions.get("trl", ())
    if installed and installed <= (4, 6, 0) and trl >= (1, 0):
        yield Finding(
            WARNING,
            f"`swift rlhf` of ms-swift {_text(installed)} needs TRL below 1.0, and {_text(trl)} "
            "is installed; `swift sft` runs.",
            "For rlhf install trl 0.29.",
        )


def _torch_build(device: Device) -> Iterable[Finding]:
    """A driver of NVIDIA's is there, and torch does not see it."""
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
    """The fused kernels have no Triton, or too old a card."""
    if card.maker == "nvidia" and card.capability < (8, 0):
        yield Finding(
            WARNING,
            f"{device.name} has compute capability {device.capability}, and the fused kernels "
            "need 8.0: experts are computed expert by expert.",
            "Train on Ampere or later.",
        )
    elif card.maker in ("nvidia", "amd") and layer_kernels() is None:
        yield Finding(
            PROBLEM,
            f"Triton is not installed, so that {device.name} computes without the fused kernels.",
            "pip install triton",
        )


def _slow_layers(device: Device, card: Card, layers: Iterable[LayerKind]) -> Iterable[Finding]:
    """Layers that fall back on a GPU that has the kernels for others."""
    slow = [layer for layer in layers if not layer.fast] if suits(card) else []
    for reason in dict.fromkeys(layer.reason for layer in slow):
        count = sum(layer.count for layer in slow if layer.reason == reason)
        yield Finding(
            WARNING,
            f"{count} expert layers are not computed by the fused layer on {device.name}: "
            f"{reason}.",
            next((cure for words, cure in _CURES if words in reason), _NO_CURE),
        )


def _slow_attention(card: Card, eager: EagerAttention | None) -> Iterable[Finding]:
    """Attention is eager on a GPU that runs the kernels which the class supports."""
    if eager is not None and suits(card):
        yield Finding(WARNING, eager.what, eager.cure)


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
