"""`moe_qlora.plan`: what a model takes on its devices, packed, loading and in training."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, MoeQloraError, check_numbers
from ..layout import dtype_name, human_bytes
from .attention import FLEX
from .budget import ENGINES, OPTIMIZERS, Engine, Settings
from .devices import devices_of
from .model import DTYPES, source_of
from .planner import LIGER_LOSS, Planner
from .report import Best, MemoryPlan

_MOST = {"batch": 1 << 20, "seq": 1 << 20, "rank": 1 << 16, "accumulation": 1 << 30}
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

_BOTH: dict[str, Any] = {"targets": "attention,experts"}
_ATTENTION: dict[str, Any] = {"targets": "attention"}
_SMALL: dict[str, Any] = {"adapter_dtype": "bfloat16", "optimizer": "adamw_8bit"}
_LOW_RANK = {**_SMALL, "rank": 8}
RUNGS: tuple[dict[str, Any], ...] = (
    _BOTH,
    _BOTH | _SMALL,
    _BOTH | _LOW_RANK,
    _ATTENTION,
    _ATTENTION | _LOW_RANK,
    _BOTH | _LOW_RANK | {"offload": True},
    _ATTENTION | _LOW_RANK | {"offload": True},
)
"""Settings of docs/memory.md, the best first: more trained weights come before less memory, and
experts in host memory, whose copies take time, last."""

_SHARED = ("batch", "seq", "optimizer", "accumulation", "prepared", "offload", "engine")
"""Settings under which a planner's model and its steps are the same."""

_SHORTEST = 64  # tokens


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
            a dict of "rank" (16), "targets" (such names) and "dtype" ("float32", the default, or
            "bfloat16").
        optimizer: "adamw", the default, "adamw_8bit", "paged_adamw" or "paged_adamw_8bit".
        attention: As `attn_implementation` of `from_pretrained`; None is what the configuration or
            model says, else transformers' choice.
        gpus: The devices: "2xH100", "2x24GiB", bytes, or a list of these. Experts are computed as
            on the card that is named, else as on any card of compute capability 8.0 and above.
        engine: "ddp" or "fsdp" (FSDP2), over all of `gpus` or over so many ranks ("fsdp:4", which
            must divide the number of `gpus`). The plan is then of each rank, a process with one of
            the GPUs. Without, layers are spread over the GPUs in one process.
        memory: Bytes, or a text as "24GiB", that a process may take of each device; None for all.
        offload: Whether packed experts lie in host memory, as `enabled(offload=True)` loads them,
            on one GPU or on each under DDP. `fit` is then of as many on the device as `fit_memory`
            brings there, with copies as quick as PCIe of the GPUs' generation, or for a size alone
            as an H200's host (55 GB/s). Default: no.
        prepared: Whether `prepare_training` is called: where Liger knows the model, its loss needs
            no logits of all tokens. What else that saves is not counted. Default: no.

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
    capacities, card, pace = devices_of(gpus)
    if memory is not None:
        limit = devices_of(memory, "memory")[0][0]
        capacities = tuple(min(limit, size) for size in capacities) or (limit,)
    count, ranks = len(capacities), _engine(engine, len(capacities))
    settings = replace(_settings_of(asked, lora_config), engine=ranks)
    source = source_of(model, quantization_config, trust_remote_code)
    planner = Planner(source, settings, lora_config, card, pace)
    if settings.offload:
        if count > 1 if ranks is None else ranks.name != "ddp":
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
            largest_seq=planner.largest(capacities, "seq"),
            largest_batch=planner.largest(capacities, "batch"),
            best=best_of(planner, capacities, asked),
        )
    if capacities:
        report = replace(report, fit=planner.fit(capacities))
    notes = [*source.notes, *planner.notes]  # The planner has some once a step has run
    if ranks is None and count > 1:
        notes.append(
            f"The layers are spread over the {count} GPUs in one process (device_map), and compute "
            "one after the other."
        )
    elif ranks is not None and count > ranks.ranks:
        groups = f"{count // ranks.ranks} groups of {ranks.ranks} ranks"
        notes.append(f"{groups}; each group holds the whole model.")
    if ranks is not None and ranks.name == "fsdp" and planner.meta.kind is not None:
        whole = planner.with_settings(replace(settings, engine=None)).load_peak
        notes.append(
            f"{human_bytes(planner.load_peak)} while loading is for moe_qlora.load_sharded; where "
            "a model is loaded first and sharded then, as under accelerate's FSDP plugin, each "
            f"rank loads the whole packed model, {human_bytes(whole)}."
        )
    return replace(report, notes=tuple(dict.fromkeys(notes)))


def _settings_of(asked: Mapping[str, Any], lora_config: Any) -> Settings:
    settings = Settings(**asked)
    dtype = dtype_name(settings.adapter_dtype)
    optimizer = OPTIMIZERS.get(settings.optimizer, settings.optimizer)
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
    known = {"adapter_dtype": [*DTYPES], "optimizer": [*dict.fromkeys(OPTIMIZERS.values())]}
    for name, values in known.items():
        if (value := getattr(settings, name)) not in values:
            raise ConfigError(f"{name} is {value!r}; give one of {', '.join(values)}.")
    return settings


def _engine(asked: str | None, devices: int) -> Engine | None:
    """Return the engine that is asked for, checked against the number of devices, 0 for unknown."""
    if asked is None:
        return None
    name, _, number = str(asked).partition(":")
    ranks = int(number) if number.isdecimal() else 0 if number else devices
    if name not in ENGINES or ranks < 2:
        raise ConfigError(
            f"engine is {asked!r} for {devices} gpus; give ddp or fsdp for 2 gpus or more, or with "
            "the number of ranks, as in fsdp:4."
        )
    if devices and (devices != ranks if name == "ddp" else devices % ranks):
        allowed = f"{devices}" if name == "ddp" else f"a number of ranks that divides {devices}"
        raise ConfigError(
            f"{name} is {ranks}, and gpus names {devices}: a rank has one GPU to itself, so give "
            f"{allowed}, or {ranks} GPUs."
        )
    return Engine(name, ranks)


def best_of(planner: Planner, capacities: Sequence[int], fixed: Collection[str]) -> Best | None:
    """Return the best combination of settings that fits devices of these bytes; None for none.

    Settings in `fixed` are kept. Where nothing fits with them, all but the LoRA's targets, the
    batch and the sequence may change, and at last the sequence is halved, and one at a time.
    """
    defaults = {name: getattr(Settings(), name) for name in _SHARED}
    planners = {replace(planner.settings, **defaults): planner}

    def tried(settings: Settings) -> Best | None:
        key = replace(settings, **defaults)
        if key not in planners:
            own = (settings, planner.lora_config, planner.card, planner.pace)
            planners[key] = Planner(planner.source, *own)
        try:
            report = planners[key].with_settings(settings).report(capacities)
        except MoeQloraError:  # A target that the model does not have
            return None
        if not report.fits:
            return None
        use, hosting = report.fullest, report.hosting
        host = 0 if hosting is None else hosting.host_nbytes(hosting.most)
        return Best(settings, use.needed, use.capacity, host)

    targets = {"targets"} & set(fixed)
    if planner.lora_config is not None:
        targets |= {"targets", "rank"}
    settings = planner.settings
    for kept in (targets | set(fixed), targets):
        for settings in _candidates(planner, len(capacities), kept):
            if (found := tried(settings)) is not None:
                return found
    seq = settings.seq if settings.batch > 1 else settings.seq // 2
    while seq >= _SHORTEST:
        if (found := tried(replace(settings, batch=1, seq=seq))) is not None:
            return found
        seq //= 2
    return None


def _candidates(planner: Planner, devices: int, fixed: Collection[str]) -> Iterator[Settings]:
    """Yield the settings to try, the best first; those in `fixed` are as they were asked."""
    asked = planner.settings
    base: dict[str, Any] = {"checkpointing": True, "prepared": planner.model_type in LIGER_LOSS}
    if planner.eager is not None:
        base["attention"] = FLEX
    engines = [asked.engine]
    if asked.engine is None and devices > 1:
        engines = [Engine(name, devices) for name in ENGINES]
    seen: list[Settings] = []
    for rung in RUNGS:
        given = {name: value for name, value in (rung | base).items() if name not in fixed}
        if not planner.expert_layers:
            given |= _ATTENTION if "targets" in given else {}
            if given.get("offload"):
                continue
        if "rank" in given:
            given["rank"] = min(given["rank"], asked.rank)
        for engine in engines:
            alone = devices == 1 if engine is None else engine.name == "ddp"
            settings = replace(asked, engine=engine, **given)
            if settings not in seen and (alone or not given.get("offload")):
                seen.append(settings)
                yield settings
