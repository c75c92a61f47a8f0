"""`moe_qlora.plan`: what a model takes on its devices, packed, loading and in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, check_numbers
from ..kernels.cards import PORTABLE, Card, of_capability
from ..layout import dtype_name, human_bytes
from ..models.files import refuse_yaml
from . import meta_model
from .budget import ALIASES, ENGINES, OPTIMIZERS, Engine, Settings
from .devices import pace_of, parse_gpus
from .hosting import Pace
from .planner import Planner
from .report import MemoryPlan
from .search import best_of, fit_of, largest

_LONGEST = 1 << 20  # tokens
_LARGEST_BATCH = 1 << 12
_SEQ_STEP = 64  # tokens
_MOST = {"batch": 1 << 20, "seq": _LONGEST, "rank": 1 << 16, "accumulation": 1 << 30}
_SMALLEST_DEVICE = 1 << 12  # bytes; a smaller number was meant as GiB
_KINDS: dict[str, tuple[Any, str]] = {
    "targets": (
        str,
        'a string with names by comma, as in "attention,experts", or a LoraConfig as lora',
    ),
    "attention": (str | None, "a name, as attn_implementation has it"),
    **dict.fromkeys(("checkpointing", "offload", "prepared"), (bool, "True or False")),
}
_LORA = {"rank": "rank", "targets": "targets", "dtype": "adapter_dtype"}
"""Keys of `plan`'s `lora`, and the fields of `Settings` that they set."""


def plan(
    model: Any,
    quantization_config: Any = None,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    lora: Any = None,
    optimizer: str | None = None,
    attention: str | None = None,
    gpus: str | int | Sequence[str | int] | None = None,
    engine: str | None = None,
    memory: str | int | None = None,
    offload: bool | None = None,
    prepared: bool | None = None,
) -> MemoryPlan:
    """Plan a model's memory without loading it.

    With `gpus` or `memory` it also looks for the best combination of settings that fits, and for
    the longest sequence and the largest batch of the one that is asked for. Settings that are given
    change only where nothing fits with them.

    Args:
        model: A transformers configuration; a path, model type or hub id as `moe-qlora dump` takes
            it; or a model: on meta it stands for what `from_pretrained` will load, elsewhere for
            itself, packed already or with experts that `quantize_experts` will pack.
        quantization_config: `BitsAndBytesConfig` or dict; None is what the configuration says, else
            nf4 with double quantization. A model whose experts are packed stays as it is.
        batch_size: Sequences in a micro-batch of one rank. Default: 1.
        seq_len: Tokens in a sequence. Default: 4096.
        lora: A `LoraConfig`; or the names that get LoRA, by comma: "attention" (the default),
            "all-linear", "experts", or modules as `target_modules` of a `LoraConfig` takes them; or
            a dict of "rank" (16), "targets" (such names) and "dtype" ("float32", which PEFT gives
            adapters, or "bfloat16"). A name that the model does not have is an error.
        optimizer: "adamw", the default, "adamw_8bit", "paged_adamw" or "paged_adamw_8bit".
        attention: As `attn_implementation` of `from_pretrained`: "eager", "sdpa",
            "flex_attention" or a flash kernel; None is what the configuration or model says, else
            transformers' choice.
        gpus: The devices: "2xH100", "2x24GiB", bytes, or a list of these. Experts are computed as
            on the card that is named; where cards differ, or a size alone is given, as on any card
            of compute capability 8.0 and above.
        engine: "ddp" or "fsdp" (FSDP2), over all of `gpus` or over so many ranks ("fsdp:4", which
            must divide the number of `gpus`). The plan is then of each rank: one process with one
            of the GPUs. Without, layers are spread over the GPUs in one process.
        memory: Bytes, or a text as "24GiB", that a process may take of each device; None for all.
        offload: Whether packed experts lie in host memory, as `enabled(offload=True)` loads them,
            on one GPU or on each under DDP. `fit` is then of as many on the device as `fit_memory`
            brings there. Copies are taken to be as quick as PCIe of the GPUs' generation, or for a
            size alone as an H200's host (55 GB/s). Default: no.
        prepared: Whether `prepare_training` is called: where Liger knows the model, it computes the
            loss a few tokens at a time, without the logits of all. What its other kernels and
            torch.compile save is not counted. Default: no.

    Raises:
        CheckpointError: There is no such model, or transformers cannot build it.
        ConfigError: A setting makes no sense, or cannot be followed.
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    check_numbers(**{name: value for name, value in sizes.items() if value is not None})
    asked = {"batch": batch_size, "seq": seq_len, "optimizer": optimizer, "attention": attention}
    asked |= {"offload": offload, "prepared": prepared}
    config, named = (lora, {}) if hasattr(lora, "peft_type") else (None, lora)
    if named is not None:
        named = named if isinstance(named, Mapping) else {"targets": named}
        if unknown := named.keys() - _LORA:
            raise ConfigError(f"lora has {min(unknown)!r}; give some of {', '.join(_LORA)}.")
        asked |= {_LORA[name]: value for name, value in named.items()}
    asked = {name: value for name, value in asked.items() if value is not None}
    where: dict[str, Any] = {"gpus": gpus, "engine": engine, "memory": memory}
    return plan_settings(model, quantization_config, asked, lora_config=config, **where)


def plan_settings(
    model: Any,
    quantization_config: Any,
    asked: Mapping[str, Any],
    *,
    lora_config: Any = None,
    gpus: Any = None,
    engine: str | None = None,
    memory: Any = None,
    trust_remote_code: bool = False,
    search: bool = True,
) -> MemoryPlan:
    """Plan as `plan` does, for fields of `Settings` that are asked for, with or without a search.

    `trust_remote_code` runs model code that a checkpoint brings.
    """
    refuse_yaml(model, "plan")
    capacities, card, pace = devices_of(gpus)
    if memory is not None:
        limit = devices_of(memory, "memory")[0][0]
        capacities = tuple(min(limit, size) for size in capacities) or (limit,)
    settings = replace(settings_of(asked, lora_config), engine=_engine(engine, len(capacities)))
    source = meta_model.source_of(model, quantization_config, trust_remote_code)
    planner = Planner(source, settings, lora_config, card, pace)
    if settings.offload:
        ranks = settings.engine
        if len(capacities) > 1 if ranks is None else ranks.name != "ddp":
            raise ConfigError(
                "offload is True, and experts in host memory are copied to one GPU, or to each of "
                "its own under DDP: give one GPU, or ddp, or leave offload out."
            )
        if not planner.expert_layers:
            raise ConfigError(
                f"offload is True, and {source.label} has no packed experts that could lie in host "
                "memory: leave it out."
            )
    report = planner.report(capacities)
    if capacities and search:
        report = replace(
            report,
            largest_seq=largest(planner, capacities, "seq", _SEQ_STEP, _LONGEST),
            largest_batch=largest(planner, capacities, "batch", 1, _LARGEST_BATCH),
            best=best_of(planner, capacities, asked),
        )
    if capacities:
        report = replace(report, fit=fit_of(planner, report.devices))
    # The planner has notes once a step has run.
    notes = (*source.notes, *planner.notes, *_engine_notes(planner, len(capacities)))
    return replace(report, notes=tuple(dict.fromkeys(notes)))


def settings_of(asked: Mapping[str, Any], lora_config: Any = None) -> Settings:
    """Return the settings of a step; those that make no sense are a `ConfigError`."""
    settings = Settings(**asked)
    optimizer = ALIASES.get(settings.optimizer, settings.optimizer)
    dtype = dtype_name(settings.adapter_dtype)
    settings = replace(settings, optimizer=optimizer, adapter_dtype=dtype)
    if lora_config is not None:
        rank = getattr(lora_config, "r", settings.rank)
        settings = replace(settings, rank=rank, targets="lora_config")
    check_numbers(**{name: getattr(settings, name) for name in _MOST})
    for name, (kind, what) in _KINDS.items():
        if not isinstance(value := getattr(settings, name), kind):
            raise ConfigError(f"{name} is {value!r}; give {what}.")
    for name, most in _MOST.items():
        if getattr(settings, name) > most:
            raise ConfigError(f"{name} is {getattr(settings, name)}; plans go up to {most}.")
    for name, values in {
        "adapter_dtype": tuple(meta_model.DTYPES),
        "optimizer": OPTIMIZERS,
    }.items():
        if (value := getattr(settings, name)) not in values:
            raise ConfigError(f"{name} is {value!r}; give one of {', '.join(values)}.")
    return settings


def devices_of(gpus: Any, name: str = "gpus") -> tuple[tuple[int, ...], Card, Pace]:
    """Return the bytes of each device that `gpus` names, their card, and how quick the slowest is.

    Where cards differ, or one has no name, the card is `PORTABLE`.
    """
    if gpus is None:
        return (), PORTABLE, Pace()
    try:
        if isinstance(gpus, int) and gpus <= 0:
            raise ValueError(f"{gpus} is no size of a device; it must be over 0")
        entries = [gpus] if isinstance(gpus, (str, int)) else gpus
        texts = (f"{entry}B" if isinstance(entry, int) else str(entry) for entry in entries)
        found = [each for text in texts for each in parse_gpus(text)]
        if (least := min(size for size, _ in found)) < _SMALLEST_DEVICE:
            meant = f"{least}GiB" if least < 1000 else "the memory, as in 24GiB"
            raise ValueError(f"{least} is a number of bytes; write {meant}")
    except ValueError as error:
        raise ConfigError(f"{name}: {error}.") from error
    capabilities = {gpu and gpu.capability for _, gpu in found}
    known = capabilities.pop() if len(capabilities) == 1 else None
    paces = [pace_of(gpu) for _, gpu in found]
    pace = Pace(min(each.link for each in paces), min(each.rate for each in paces))
    return tuple(size for size, _ in found), of_capability(known) if known else PORTABLE, pace


def _engine(asked: str | None, devices: int) -> Engine | None:
    """Return the engine that is asked for, checked against the number of devices, 0 for unknown."""
    if asked is None:
        return None
    name, _, number = str(asked).partition(":")
    ranks = int(number) if number.isdecimal() else 0 if number else devices
    if name not in ENGINES:
        raise ConfigError(f"engine is {asked!r}; give ddp or fsdp, or with ranks, as in fsdp:4.")
    if not number and not devices:
        raise ConfigError(f"{name} takes the number of ranks from gpus: give gpus, or {name}:2.")
    if ranks < 2:
        raise ConfigError(f"{name} is {number or ranks}; give the number of ranks, 2 or more.")
    if not devices:
        return Engine(name, ranks)
    said = f"{name} is {ranks}, and gpus names {devices}: a rank has"
    if ranks > devices:
        less = f"{name} of at most {devices}" if devices > 1 else f"leave {name} out"
        raise ConfigError(f"{said} a GPU to itself, so give at least {ranks} GPUs, or {less}.")
    if name == "ddp" and ranks < devices:
        raise ConfigError(
            f"{said} one GPU, and its layers are not spread over several; give {devices} ranks, or "
            f"{ranks} GPUs."
        )
    if devices % ranks:
        raise ConfigError(
            f"{name} is {ranks}, which does not divide the {devices} GPUs of gpus into groups that "
            "each hold the model; give a number that does."
        )
    return Engine(name, ranks)


def _engine_notes(planner: Planner, devices: int) -> Iterator[str]:
    engine = planner.settings.engine
    if engine is None:
        if devices > 1:
            yield (
                f"The layers are spread over the {devices} GPUs in one process (device_map), and "
                "compute one after the other."
            )
        return
    groups = devices // engine.ranks
    if groups > 1:
        yield f"{groups} groups of {engine.ranks} ranks; each group holds the whole model."
    if engine.name == "fsdp" and planner.meta.kind is not None:
        whole = planner.with_engine(None).load_peak
        yield (
            f"{human_bytes(planner.load_peak)} while loading is for moe_qlora.load_sharded; where "
            "a model is loaded first and sharded then, as under accelerate's FSDP plugin, each "
            f"rank loads the whole packed model, {human_bytes(whole)}."
        )
