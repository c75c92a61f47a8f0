"""`moe_qlora.plan`: what a model takes on its devices, packed, loading and in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ..errors import ConfigError, check_numbers
from ..kernels.cards import PORTABLE, Card, of_capability
from ..layout import dtype_name, human_bytes
from ..models.files import refuse_yaml
from . import meta_model
from .budget import ALIASES, OPTIMIZERS, Engine, Settings
from .devices import Gpu, pace_of, parse_gpus
from .engines import ENGINES
from .hosting import Pace
from .meta_model import source_of
from .planner import Planner
from .report import MemoryPlan
from .search import best_of, fit_of

_LONGEST = 1 << 20  # tokens
_LARGEST_BATCH = 1 << 12
_MOST = {"batch": 1 << 20, "seq": _LONGEST, "rank": 1 << 16, "accumulation": 1 << 30}
_SEQ_STEP = 64  # tokens
_SMALLEST_DEVICE = 1 << 12  # bytes; a smaller number was meant as GiB


_COMPILED = (
    "What torch.compile keeps is not modelled: sizes are of uncompiled layers, which kept more for "
    "backward where both were measured. Take them as an upper bound."
)
_NO_ARGUMENTS = ("foreach", "workspace", "engine")
DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in fields(Settings) if field.name not in _NO_ARGUMENTS
} | {"dtype": None}
"""Arguments of `plan`, and their values where nothing else says so."""


def plan(
    model: Any,
    quantization_config: Any = None,
    *,
    gpus: str | int | Sequence[str | int] | None = None,
    ddp: int | bool | None = None,
    fsdp: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    rank: int | None = None,
    targets: str | None = None,
    lora_config: Any = None,
    adapter_dtype: str | None = None,
    optimizer: str | None = None,
    checkpointing: bool | None = None,
    accumulation: int | None = None,
    attention: str | None = None,
    liger: bool | None = None,
    compile: bool | None = None,  # noqa: A002 - torch's own name for it
    offload: bool | None = None,
    dtype: Any = None,
    search: bool = True,
    trust_remote_code: bool = False,
    keep_codes: bool = False,
) -> MemoryPlan:
    """Plan a model's memory without loading it.

    Args:
        model: A transformers configuration; a path, model type or hub id as `moe-qlora dump` takes
            it; or a model: on meta it stands for what `from_pretrained` will load, elsewhere for
            itself, packed already or with experts that `quantize_experts` will pack.
        quantization_config: `BitsAndBytesConfig` or dict; None is what the configuration says, else
            nf4 with double quantization. A model whose experts are packed stays as it is.
        gpus: The devices: "2xH100", "2x24GiB", bytes, or a list of these. Experts are computed as
            on the card that is named; where cards differ, or a size alone is given, as on any card
            of compute capability 8.0 and above.
        ddp: Ranks of a run under DDP; True takes as many as there are `gpus`. With this or
            `fsdp` the plan is of each rank: one process with one of the GPUs (`engines.py`).
            Without, layers are spread over the GPUs in one process.
        fsdp: Ranks that share a model under FSDP2; it must divide the number of `gpus`.
        batch: Sequences in a micro-batch, `seq` tokens each; of one rank. Default: 1.
        seq: Tokens in a sequence. Default: 4096.
        rank: LoRA rank. Default: 16.
        targets: "attention", "all-linear", "experts", names of modules as `target_modules` of a
            `LoraConfig` takes them, or several by comma. One that names nothing is an error.
            Default: "attention".
        lora_config: A `LoraConfig` instead of `rank` and `targets`.
        adapter_dtype: "float32", which PEFT's default gives and which is the default, or
            "bfloat16".
        optimizer: "adamw", the default, "adamw_8bit", "paged_adamw" or "paged_adamw_8bit".
        checkpointing: Whether gradient checkpointing is on, as it is by default.
        accumulation: Micro-batches to an optimizer step. Default: 1.
        attention: As `attn_implementation` of `from_pretrained`: "eager", "sdpa",
            "flex_attention" or a flash kernel; None is what the configuration or model says, else
            transformers' choice.
        liger: Whether Liger computes the loss, as `use_liger_kernel=True` of a Trainer has it: a
            few tokens at a time, without the logits of all. What its other kernels save is not
            counted. Default: no.
        compile: Whether torch.compile compiles the layers. Sizes are of uncompiled ones all the
            same, as an upper bound, and a note says so. Default: no.
        offload: Whether packed experts lie in host memory, as `enabled(offload=True)` loads them,
            on one GPU or on each under DDP. `fit` is then of as many on the device as `fit_memory`
            brings there. Copies are taken to be as quick as PCIe of the GPUs' generation, or for a
            size alone as an H200's host (55 GB/s). Default: no.
        dtype: What the rest is loaded in; None is what the configuration says.
        search: Look for the best combination of settings that fits `gpus`, and for the longest
            sequence and the largest batch of the one that is asked for. Settings that are given
            change only where nothing fits with them.
        trust_remote_code: Run model code that a checkpoint brings.
        keep_codes: Whether experts keep the MXFP4 codes of their checkpoint, as
            `enabled(keep_codes=True)` loads it. A packed folder says so itself.

    Raises:
        CheckpointError: There is no such model, or transformers cannot build it.
        ConfigError: A setting makes no sense, or cannot be followed.
    """
    asked = {name: v for name, v in locals().items() if name in (*DEFAULTS, *ENGINES)}
    options = {name: value for name, value in asked.items() if value is not None}
    if not (offload is None or isinstance(offload, bool)):
        raise ConfigError(f"offload is {offload!r}; give True or False.")
    refuse_yaml(model, "plan")
    capacities, card = devices_of(gpus)
    settings = _settings({**DEFAULTS, **options}, lora_config, len(capacities))
    source = source_of(
        model, quantization_config, options.get("dtype"), trust_remote_code, keep_codes
    )
    compiled = (_COMPILED,) if settings.compile else ()
    source = replace(source, notes=(*source.notes, *compiled))
    planner = Planner(source, settings, lora_config, card, _slowest(gpus))
    _check_offload(planner, len(capacities))
    return _report(planner, capacities, options if search and capacities else None)


def _check_offload(planner: Planner, devices: int) -> None:
    engine = planner.settings.engine
    if not planner.settings.offload:
        return
    if (engine is None and devices > 1) or (engine is not None and engine.name != "ddp"):
        raise ConfigError(
            "offload is True, and experts in host memory are copied to one GPU, or to each of its "
            "own under DDP: give one GPU, or ddp, or leave offload out."
        )
    if not planner.expert_layers:
        raise ConfigError(
            f"offload is True, and {planner.source.label} has no packed experts that could lie in "
            "host memory: leave it out."
        )


def _settings(values: Mapping[str, Any], lora_config: Any, devices: int) -> Settings:
    """Return the settings of a step; those that make no sense are a `ConfigError`."""
    values = dict(values)
    values["optimizer"] = ALIASES.get(values["optimizer"], values["optimizer"])
    values["adapter_dtype"] = dtype_name(values["adapter_dtype"])
    engines = {name: values.get(name) for name in ENGINES}
    named_fields = {field.name for field in fields(Settings)}
    settings = Settings(**{name: v for name, v in values.items() if name in named_fields})
    if lora_config is not None:
        rank = getattr(lora_config, "r", settings.rank)
        settings = replace(settings, rank=rank, targets="lora_config")
    check_settings(settings)
    return replace(settings, engine=_engine(engines, devices))


def check_settings(settings: Settings) -> None:
    """Refuse settings of a step that make no sense, in a `ConfigError`."""
    check_numbers(**{name: getattr(settings, name) for name in _MOST})
    if not isinstance(settings.targets, str):
        raise ConfigError(
            f"targets is {settings.targets!r}; give a string with names by comma, as in "
            '"attention,experts", or pass a LoraConfig as lora_config.'
        )
    if not (settings.attention is None or isinstance(settings.attention, str)):
        raise ConfigError(
            f"attention is {settings.attention!r}; give a name, as attn_implementation has it."
        )
    for name, most in _MOST.items():
        if getattr(settings, name) > most:
            raise ConfigError(f"{name} is {getattr(settings, name)}; plans go up to {most}.")
    known = {"adapter_dtype": tuple(meta_model.DTYPES), "optimizer": OPTIMIZERS}
    for name, values in known.items():
        if (value := getattr(settings, name)) not in values:
            raise ConfigError(f"{name} is {value!r}; give one of {', '.join(values)}.")


def devices_of(gpus: Any) -> tuple[tuple[int, ...], Card]:
    """Return the bytes of each device that `gpus` names, and the card that they all are.

    Where they differ, or one has no name, that is `PORTABLE`.
    """
    if gpus is None:
        return (), PORTABLE
    found: list[tuple[int, Gpu | None]] = []
    try:
        for entry in [gpus] if isinstance(gpus, (str, int)) else gpus:
            if isinstance(entry, int) and entry <= 0:
                raise ValueError(f"{entry} is no size of a device; it must be over 0")
            found += parse_gpus(_text(entry))
            least = min(size for size, _ in found)
            if least < _SMALLEST_DEVICE:
                meant = f"{least}GiB" if least < 1000 else "the memory, as in 24GiB"
                raise ValueError(f"{least} is a number of bytes; write {meant}")
    except ValueError as error:
        raise ConfigError(f"gpus: {error}.") from error
    capabilities = {gpu and gpu.capability for _, gpu in found}
    known = capabilities.pop() if len(capabilities) == 1 else None
    return tuple(size for size, _ in found), of_capability(known) if known else PORTABLE


def _text(entry: Any) -> str:
    return f"{entry}B" if isinstance(entry, int) else str(entry)


def _slowest(gpus: Any) -> Pace:
    """Return how quick the slowest of the devices are that `gpus` names, in each respect."""
    entries = [gpus] if isinstance(gpus, (str, int)) else gpus or ()
    paces = [pace_of(gpu) for entry in entries for _, gpu in parse_gpus(_text(entry))]
    if not paces:
        return Pace()
    return Pace(*(min(getattr(pace, each.name) for pace in paces) for each in fields(Pace)))


def _engine(asked: dict[str, int | bool | None], devices: int) -> Engine | None:
    """Return the engine that is asked for, checked against the number of devices, 0 for unknown."""
    given = {
        name: ranks for name, ranks in asked.items() if ranks is not None and ranks is not False
    }
    if not given:
        return None
    if len(given) > 1:
        listed = " and ".join(f"{name}={ranks}" for name, ranks in given.items())
        raise ConfigError(f"{listed} are {len(given)} engines for one run; give one of them.")
    ((name, ranks),) = given.items()
    if ranks is True and name == "ddp":
        if not devices:
            raise ConfigError("ddp takes the number of ranks from gpus: give gpus, or ddp=2.")
        ranks = devices
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        raise ConfigError(f"{name} is {ranks!r}; give the number of ranks, 2 or more.")
    if devices and ranks > devices:
        raise ConfigError(
            f"{name} is {ranks}, and gpus names {devices}: a rank has a GPU to itself, so give at "
            f"least {ranks} GPUs, or "
            + (f"{name} of at most {devices}." if devices > 1 else f"leave {name} out.")
        )
    if devices and name == "ddp" and ranks < devices:
        raise ConfigError(
            f"{name} is {ranks}, and gpus names {devices}: a rank has one GPU, and its layers are "
            f"not spread over several; give {name}={devices}, or {ranks} GPUs."
        )
    if devices % ranks:
        raise ConfigError(
            f"{name} is {ranks}, which does not divide the {devices} GPUs of gpus into groups that "
            "each hold the model; give a number that does."
        )
    return Engine(name, ranks)


def _report(
    planner: Planner, capacities: tuple[int, ...], asked: Mapping[str, Any] | None
) -> MemoryPlan:
    """Return the plan; `asked` are the settings that are given, None for no search."""
    report = planner.report(capacities)
    if asked is not None:
        batch, seq = planner.settings.batch, planner.settings.seq
        by_seq = partial(planner.fullness, batch, capacities=capacities)
        by_batch = partial(planner.fullness, seq=seq, capacities=capacities)
        report = replace(
            report,
            largest_seq=_largest(by_seq, seq, _LONGEST, _SEQ_STEP),
            largest_batch=_largest(by_batch, batch, _LARGEST_BATCH, 1),
            best=best_of(planner, capacities, asked),
        )
    if capacities:
        report = replace(report, fit=fit_of(planner, report.devices))
    # The planner has notes once a step has run.
    notes = dict.fromkeys(
        (*planner.source.notes, *planner.notes, *_engine_notes(planner, len(capacities)))
    )
    return replace(report, notes=tuple(notes), estimated=planner.estimated)


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


def _largest(fullness: Callable[[int], float], start: int, limit: int, step: int) -> int:
    """Return the largest multiple of `step` that fits (within 1/128), 0 where none does.

    Memory grows nearly in proportion to tokens: where it ends is found on the line through the two
    sizes nearest to it.
    """
    sizes: dict[int, float] = {}  # Fullness by the multiple of `step`

    def fits(multiple: int) -> bool:
        sizes[multiple] = fullness(multiple * step)
        return sizes[multiple] <= 1.0

    low, high, most = 0, max(start // step, 1), limit // step
    while high <= most and fits(high):
        # Past where the line ends by a little, so that the end is between.
        end = _end_of_line(sizes, high)
        low, high = high, 2 * high if end is None else max(high + 1, int(1.02 * end) + 1)
    high = min(high, most + 1)
    turn = 0
    while high - low > (least := max(1, low // 128)):
        # Every third time the half, where memory grows faster than the line (eager attention).
        end = None if turn % 3 == 2 else _end_of_line(sizes, high)
        middle = (low + high) // 2 if end is None else int(end)
        middle = min(max(middle, low + least), high - least)
        low, high = (middle, high) if fits(middle) else (low, middle)
        turn += 1
    return low * step


def _end_of_line(sizes: Mapping[int, float], near: int) -> float | None:
    """Return where fullness is 1 on the line through the two sizes nearest to `near`."""
    if len(sizes) < 2:
        return None
    first, second = sorted(sorted(sizes, key=lambda size: abs(size - near))[:2])
    slope = (sizes[second] - sizes[first]) / (second - first)
    return None if slope <= 0 else first + (1 - sizes[first]) / slope
