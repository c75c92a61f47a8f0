"""`doctor`: what of this environment runs packed experts fast, what falls back, what breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..lora.names import base_model
from ..memory.attention import EagerAttention, eager_attention, set_attention
from ..memory.source import source_of
from ..models import named
from . import combinations, report
from .report import PROBLEM, Diagnosis, Finding, LayerKind


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
            model type, a hub id whose configuration is cached, or a model; of one with adapters
            what is active now is examined. Of axolotl's YAML file its settings count, and every
            fault of it is a problem.
        quantization_config: A `BitsAndBytesConfig`; None takes the model's own, else nf4 with
            double quantization and bfloat16 as its compute dtype.
        gpu: A card to answer for in place of what is here, by its name, such as "4090".
        rank: Of LoRA on the experts, where the model has no adapters yet; None takes 16, and of a
            trainer's YAML file its own.
        trust_remote_code: Run model code that a checkpoint brings.

    Returns:
        Versions, devices, backends and findings; print it, or read its fields.

    Raises:
        ConfigError: `gpu`, `rank` or the quantization settings are none.
        CheckpointError: `model` cannot be read or built.
    """
    if isinstance(model, (str, Path)):
        model = named.resolve(model, trust_remote_code=trust_remote_code)
    file = model.trainer if isinstance(model, named.Source) else None
    asked = {name: each.value for name, each in file.settings.items()} if file else {}
    rank = asked.get("rank", 16) if rank is None else rank
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"rank is {rank!r}; give a whole number of 1 or more.")
    cards = report.here() if gpu is None else [report.named(gpu)]
    device, card = cards[0]
    installed = report.packages()
    kinds: tuple[LayerKind, ...] = ()
    notes: tuple[str, ...] = ()
    label, model_type = "", None
    eager: EagerAttention | None = None
    if isinstance(model, nn.Module) and hasattr(model, "peft_config"):
        if quantization_config is not None:
            raise ConfigError("quantization_config is for a model without adapters: leave it out.")
        config: Any = getattr(model, "config", None)
        label = getattr(config, "name_or_path", "") or type(base_model(model)).__name__
        model_type = getattr(config, "model_type", None)
        kinds, eager = combinations.adapted_kinds(model, card), eager_attention(base_model(model))
    elif model is not None:
        source = source_of(model, quantization_config, asked.get("dtype"), trust_remote_code)
        label, notes = source.label, source.notes
        model_type = getattr(source.config, "model_type", None)
        built = source.build()
        if asked.get("attention") is not None:
            set_attention(built, asked["attention"])
        eager = eager_attention(built)
        kinds = combinations.layer_kinds(built, source, card, rank)
    if model is not None and not kinds:
        notes = (*notes, "The model has no experts.")
    found = report.findings(installed)
    releases = report.releases(installed)
    found += combinations.findings(releases, device, card, model_type, kinds, eager)
    found += [Finding(PROBLEM, fault, "") for fault in (file.faults if file else ())]
    return Diagnosis(
        installed,
        device,
        tuple(each for each, _ in cards),
        label,
        kinds,
        tuple(sorted(found, key=lambda finding: finding.severity != PROBLEM)),
        notes,
    )
