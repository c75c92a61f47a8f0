"""`doctor`: versions, devices, and the backends of a model's expert layers, packed on meta."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..detection.detect import detect
from ..errors import ConfigError, check_numbers
from ..experts import backend as backends
from ..experts.forward import can_serve
from ..experts.operands import LoraFactors
from ..kernels.cards import HOPPER, Card, acting_as, actual, multiplies_by_torch, of_capability
from ..layout import ExpertsModule, ModelLayout, human_bytes, name_pattern, unwrapped_name
from ..lora.targets import base_model
from ..models.files import refuse_yaml
from ..packing import parametrize
from ..planning import model as meta_model
from ..planning.devices import GPUS, gpu_named, unknown_gpu
from ..versions import OPTIONAL, PYTHON, REQUIRED, installed_version, release_of

PROBLEM, WARNING = "problem", "warning"
OWN_FORWARD, LINEAR_LAYERS = "own forward", "Linear layers"
# Compared with the fused layer.
_COST = "1.4 times the time, and 1,441 MiB a layer, not 114 (bench/results/layer.csv)."
_DRIVER = Path("/proc/driver/nvidia/version")
_CURES = {  # by words in a backend's reason
    "is to be computed in": "Set bnb_4bit_compute_dtype to the dtype of the model.",
    "is of rank": "Train with a lower rank.",
    "are torch.float32": "Load the model in bfloat16.",
    " packed": "Look at llm_int8_skip_modules.",
    "": "Nothing to change: this model type has no faster path here.",
}


@dataclass(frozen=True, slots=True)
class Package:
    """A package: the installed version, and the tested ones."""

    name: str
    installed: str | None
    tested: str
    status: str  # "tested", "untested", "too old", "missing", or "not installed" if optional


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and its matrix products with few or many tokens an expert."""

    name: str
    nbytes: int | None  # Memory; None for a CPU
    capability: str  # Of CUDA, "8.9"; "" for others
    here: bool  # False for a card that was only named
    few_tokens: str
    many_tokens: str


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Expert modules of a model that differ only in their layer, `*` in `pattern`."""

    pattern: str
    count: int
    class_name: str
    backend: str  # "fused layer", "projection by projection", ...
    reason: str
    fast: bool
    cost: str  # "" if `fast`


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that breaks or slows down a run, and its cure, a sentence each."""

    severity: str  # "problem" or "warning"
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `doctor`; `str()` is its text."""

    packages: tuple[Package, ...]
    device: Device  # Of `layers` and `findings`: the first GPU, the named one, or the CPU
    devices: tuple[Device, ...]
    model: str = ""  # Its name
    layers: tuple[LayerKind, ...] = ()
    findings: tuple[Finding, ...] = ()  # Problems first
    notes: tuple[str, ...] = ()  # Sentences on the model
    fit: str = ""  # The command that plans training steps on `device`, a GPU

    @property
    def good(self) -> bool:
        """True if no finding is a problem; there may be warnings."""
        return not any(finding.severity == PROBLEM for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`."""
        return {"good": self.good, **asdict(self)}

    def __str__(self) -> str:
        problems = sum(one.severity == PROBLEM for one in self.findings)
        counts = {"problem": problems, "warning": len(self.findings) - problems}
        said = ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items())
        lines = [f"{said}.", *(f"{one.severity}: {one.what} {one.cure}" for one in self.findings)]
        lines += [self.fit] * bool(self.fit)
        for kind in self.layers:
            what = f"{kind.pattern} ({kind.count} {kind.class_name}) on {self.device.name}"
            lines.append(f"{what}: {kind.backend}; {kind.reason}. {kind.cost}".rstrip())
        for one in self.devices:
            size = f" ({human_bytes(one.nbytes)})" if one.nbytes is not None else ""
            lines.append(f"{one.name}{size}: {one.many_tokens}; few tokens: {one.few_tokens}.")
        for row in self.packages:
            if row.status != "not installed":
                lines.append(f"{row.name} {row.installed or 'none'}: {row.status} ({row.tested}).")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def doctor(
    model: Any = None,
    quantization_config: Any = None,
    *,
    gpu: str | None = None,
    rank: int | None = None,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Examine this environment and, given a model, on meta, the backends of its expert layers.

    Args:
        model: As `plan` takes it, or a model with adapters, of which the active ones are examined.
        quantization_config: A `BitsAndBytesConfig`; None takes the model's own, else nf4.
        gpu: A card to examine instead of the installed ones, by its name, such as "4090".
        rank: Of LoRA on the experts, if the model has no adapters yet; None for 16.
        trust_remote_code: Run model code that a checkpoint brings.

    Raises:
        ConfigError: `gpu`, `rank` or the quantization settings are not valid.
        CheckpointError: `model` cannot be read or built.
    """
    refuse_yaml(model, "doctor")
    check_numbers(rank=(rank := 16 if rank is None else rank))
    cards = _here() if gpu is None else [card_named(gpu)]
    device, card = cards[0]
    kinds: list[LayerKind] = []
    notes: tuple[str, ...] = ()
    label = fit = ""
    if isinstance(model, nn.Module) and hasattr(model, "peft_config"):
        if quantization_config is not None:
            raise ConfigError("quantization_config is for a model without adapters: leave it out.")
        base, config = base_model(model), getattr(model, "config", None)
        label = getattr(config, "name_or_path", "") or type(base).__name__
        kinds = _kinds(base, detect(base), card, None)
    elif model is not None:
        source = meta_model.source_of(model, quantization_config, trust_remote_code)
        label, notes = source.label, source.notes
        meta = meta_model.MetaModel(source)
        kinds = _kinds(meta.base, meta.layout, card, rank)
        if device.nbytes is not None:
            where = human_bytes(device.nbytes).replace(" ", "") if device.here else device.name
            fit = f"Training steps that fit {device.name}: moe-qlora plan {label} --gpus {where}"
    if model is not None and not kinds:
        notes = (*notes, "The model has no experts.")
    installed, devices = packages(), tuple(each for each, _ in cards)
    found = known_problems(installed, device, card, kinds)
    return Diagnosis(installed, device, devices, label, tuple(kinds), found, notes, fit)


def card_named(text: str) -> tuple[Device, Card]:
    """Return a card by its name, such as "4090"; a `ConfigError` for an unknown one."""
    try:
        if (name := gpu_named(text)) is None:
            raise ValueError(f"{text.strip()!r} is no {unknown_gpu(text)}")
    except ValueError as error:
        raise ConfigError(f"gpu: {error}.") from error
    card = of_capability(GPUS[name].capability)
    return _described(name, GPUS[name].nbytes, card, here=False), card


def _here() -> list[tuple[Device, Card]]:
    cpu, found = actual(torch.device("cpu")), []
    for index in range(torch.cuda.device_count()):
        its, card = torch.cuda.get_device_properties(index), actual(torch.device("cuda", index))
        found.append((_described(its.name, its.total_memory, card, here=True), card))
    return found or [(_described("CPU", None, cpu, here=True), cpu)]


def _described(name: str, nbytes: int | None, card: Card, *, here: bool) -> Device:
    capability = ".".join(map(str, card.capability)) if card.maker == "nvidia" else ""
    few = many = "expert by expert, in plain torch"
    if backends.suits(card):
        with acting_as(card):
            by_torch = multiplies_by_torch(torch.device("cuda", 0), torch.bfloat16)
        few = f"{'Hopper' if card.capability == HOPPER else 'portable'} quantized matmul"
        many = f"{'torch' if by_torch else 'own Triton'} grouped matmul"
    return Device(name, nbytes, capability, here, few, many)


def packages() -> tuple[Package, ...]:
    """Return all required and optional packages, Python first."""
    rows = []
    for name, tested in {"python": PYTHON, **REQUIRED, **OPTIONAL}.items():
        here = platform.python_version() if name == "python" else installed_version(name)
        status = "untested"
        if here is None:
            status = "not installed" if name in OPTIONAL else "missing"
        elif tested.includes(here):
            status = "tested"
        elif name not in OPTIONAL and release_of(here) < release_of(tested.first):
            status = "too old"
        rows.append(Package(name, here, str(tested), status))
    return tuple(rows)


def known_problems(
    installed: tuple[Package, ...], device: Device, card: Card, layers: Iterable[LayerKind] = ()
) -> tuple[Finding, ...]:
    """Return the known problems of this environment and model, and then the warnings."""
    found: list[tuple[str, str, str]] = []
    for row in installed:
        if row.status in ("missing", "too old", "untested"):
            what = " ".join(filter(None, (row.name, row.installed, "is", row.status)))
            severity = WARNING if row.status == "untested" else PROBLEM
            found.append((severity, f"{what}.", f"Install {row.name} {row.tested}."))
    if device.here and _DRIVER.exists() and not torch.cuda.is_available():
        what = f"NVIDIA's driver is loaded, and torch {torch.__version__} sees no GPU."
        cure = "Install torch with CUDA, or look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        found.append((PROBLEM, what, cure))
    if card.maker == "nvidia" and card.capability < (8, 0):
        what = f"{device.name} has compute capability {device.capability}; the kernels need 8.0."
        found.append((WARNING, what, "Train on Ampere or later."))
    elif card.maker in ("nvidia", "amd") and not backends.has_triton():
        what = "Triton, of the fused kernels, is not installed."
        found.append((PROBLEM, what, "pip install triton"))
    slow = [layer for layer in layers if backends.suits(card) and not layer.fast]
    for reason in dict.fromkeys(layer.reason for layer in slow):
        count = sum(layer.count for layer in slow if layer.reason == reason)
        what = f"{count} expert layers do not run on the fused layer of {device.name}: {reason}."
        cure = next(cure for words, cure in _CURES.items() if words in reason)
        found.append((WARNING, what, cure))
    return tuple(Finding(*each) for each in sorted(found, key=lambda each: each[0]))


def _kinds(model: nn.Module, layout: ModelLayout, card: Card, rank: int | None) -> list[LayerKind]:
    counted = Counter[tuple[str, str, str, str]]()
    for entry in layout.modules:
        chosen = _backend(model.get_submodule(entry.name), entry, card, rank)
        pattern = name_pattern(unwrapped_name(entry.name))
        counted[pattern, entry.class_name, chosen.name, chosen.reason] += 1
    why = "experts are lists of Linear layers, which bitsandbytes packs and computes"
    for experts in layout.linear_experts:
        counted[name_pattern(experts.name), "nn.Linear", LINEAR_LAYERS, why] += 1
    kinds = []
    for (pattern, owner, name, reason), n in counted.items():
        fast = name in (backends.FUSED.name, LINEAR_LAYERS)
        cost = "" if fast else _COST if name == OWN_FORWARD else "Slower; not measured."
        kinds.append(LayerKind(pattern, n, owner, name, reason, fast, cost))
    return kinds


def _backend(module: Any, entry: ExpertsModule, card: Card, rank: int | None) -> backends.Backend:
    """Return a packed module's backend, with LoRA of this rank; None for the LoRA that it has."""
    names = [param.parameter_name for param in entry.parameters]
    packed = next((name for name in names if parametrize.is_packed(module, name)), None)
    if packed is None:
        return backends.UNPACKED
    if not can_serve(module):
        return backends.Backend(
            OWN_FORWARD, "the class does not use transformers' experts interface"
        )
    call = backends.read_call(module, torch.empty(0))  # no autocast on meta
    if rank is not None:
        # In float32 like PEFT's, of weights `(E, ...)` that are packed.
        up, down = (_factors(weight, rank) for weight in call.weights)
        call = call._replace(lora=(up, down))
    # Hidden states (4096 tokens, hidden) in the experts' dtype before packing, without memory.
    dtype = getattr(torch, entry.parameters[0].dtype_name)
    x = torch.empty((), dtype=dtype, device=parametrize.device_of(module, packed))
    x = x.expand(4096, entry.parameters[0].in_features or 1)
    return backends.choose_backend(module, call._replace(x=x, card=card))


def _factors(weight: Any, rank: int) -> tuple[LoraFactors, ...]:
    if weight is None or len(weight.shape) != 3:
        return ()
    experts, rows, columns = weight.shape
    a = torch.empty(experts * rank, columns, device="meta")
    return (LoraFactors(a, torch.empty(rows, rank * experts, device="meta"), 1.0),)
