"""`doctor`: versions, devices, and the backends of a model's expert layers, packed on meta."""

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
from ..kernels.cards import Card, actual, of_capability
from ..layout import ModelLayout, base_model, human_bytes, name_pattern, unwrapped_name
from ..packing import parametrize
from ..planning import model as meta_model
from ..planning.devices import GPUS, gpu_named, unknown_gpu
from ..versions import OPTIONAL, PYTHON, REQUIRED, installed_version, release_of

OWN_FORWARD = "own forward"
_OWN = backends.Backend(OWN_FORWARD, "the class does not use transformers' experts interface")
_LINEAR = backends.Backend("Linear layers", "experts are lists of them, which bitsandbytes packs")
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
    """A package, and the tested versions of it."""

    name: str
    installed: str | None
    tested: str
    status: str  # "tested", "untested", "too old", "missing", or "not installed" if optional


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and its matrix products with few or many tokens an expert."""

    name: str
    nbytes: int | None  # None for a CPU
    capability: str  # of CUDA, "8.9"; "" for others
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
    device: Device  # of `layers` and `findings`: the first GPU, the named one, or the CPU
    devices: tuple[Device, ...]
    model: str = ""
    layers: tuple[LayerKind, ...] = ()
    findings: tuple[Finding, ...] = ()  # problems first
    notes: tuple[str, ...] = ()
    fit: str = ""  # the command that plans training steps on `device`, a GPU

    @property
    def good(self) -> bool:
        """True if no finding is a problem; there may be warnings."""
        return not any(finding.severity == "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`."""
        return {"good": self.good, **asdict(self)}

    def __str__(self) -> str:
        problems = sum(one.severity == "problem" for one in self.findings)
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
    model: Any = None, quantization_config: Any = None, *, gpu: str | None = None,
    rank: int | None = None, trust_remote_code: bool = False,
) -> Diagnosis:  # fmt: skip
    """Examine this environment and, given a model, on meta, the backends of its expert layers.

    `model` is as `plan` takes it, or a model with adapters, of which the active ones are examined;
    `quantization_config` None takes the model's own, else nf4. `gpu` names a card to examine, such
    as "4090"; `rank`, by default 16, is of LoRA on the experts of a model without adapters. A
    `ConfigError`: an argument is not valid; a `CheckpointError`: the model cannot be read.
    """
    check_numbers(rank=(rank := 16 if rank is None else rank))
    cards = examined(gpu)
    device, card = cards[0]
    kinds: list[LayerKind] = []
    notes: tuple[str, ...] = ()
    label = fit = ""
    if isinstance(model, nn.Module) and hasattr(model, "peft_config"):
        if quantization_config is not None:
            raise ConfigError("quantization_config is for a model without adapters: leave it out.")
        base: Any = base_model(model)
        label = getattr(base.config, "name_or_path", "") or type(base).__name__
        kinds = _kinds(base, detect(base), card, None)
    elif model is not None:
        source = meta_model.source_of(model, quantization_config, trust_remote_code)
        label, notes, meta = source.label, source.notes, meta_model.MetaModel(source)
        kinds = _kinds(meta.base, meta.layout, card, rank)
        if device.nbytes is not None:
            where = human_bytes(device.nbytes).replace(" ", "") if device.here else device.name
            fit = f"Training steps that fit {device.name}: moe-qlora plan {label} --gpus {where}"
    if model is not None and not kinds:
        notes = (*notes, "The model has no experts.")
    installed, devices = packages(), tuple(each for each, _ in cards)
    found = known_problems(installed, device, card, kinds)
    return Diagnosis(installed, device, devices, label, tuple(kinds), found, notes, fit)


def examined(gpu: str | None) -> list[tuple[Device, Card]]:
    """Return the card of a name such as "4090", or all devices here for None."""
    cards: list[tuple[str, int | None, Card]] = []
    if gpu is not None:
        try:
            if (name := gpu_named(gpu)) is None:
                raise ValueError(f"{gpu.strip()!r} is no {unknown_gpu(gpu)}")
        except ValueError as error:
            raise ConfigError(f"gpu: {error}.") from error
        cards.append((name, GPUS[name].nbytes, of_capability(GPUS[name].capability)))
    for index in range(torch.cuda.device_count() if gpu is None else 0):
        its = torch.cuda.get_device_properties(index)
        cards.append((its.name, its.total_memory, actual(torch.device("cuda", index))))
    devices = []
    for name, nbytes, card in cards or [("CPU", None, actual(torch.device("cpu")))]:
        capability = ".".join(map(str, card.capability)) if card.maker == "nvidia" else ""
        few, many = "quantized matmul", "grouped matmul"
        if not backends.suits(card):
            few = many = "expert by expert, in plain torch"
        devices.append((Device(name, nbytes, capability, gpu is None, few, many), card))
    return devices


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
    found = []
    for row in installed:
        if row.status in ("missing", "too old", "untested"):
            what = " ".join(filter(None, (row.name, row.installed, "is", row.status)))
            severity = "warning" if row.status == "untested" else "problem"
            found.append((severity, f"{what}.", f"Install {row.name} {row.tested}."))
    if device.here and _DRIVER.exists() and not torch.cuda.is_available():
        what = f"NVIDIA's driver is loaded, and torch {torch.__version__} sees no GPU."
        cure = "Install torch with CUDA, or look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        found.append(("problem", what, cure))
    if card.maker == "nvidia" and card.capability < (8, 0):
        what = f"{device.name} has compute capability {device.capability}; the kernels need 8.0."
        found.append(("warning", what, "Train on Ampere or later."))
    elif card.maker in ("nvidia", "amd") and not backends.has_triton():
        what = "Triton, of the fused kernels, is not installed."
        found.append(("problem", what, "pip install triton"))
    slow = [layer for layer in layers if backends.suits(card) and not layer.fast]
    for reason in dict.fromkeys(layer.reason for layer in slow):
        count = sum(layer.count for layer in slow if layer.reason == reason)
        what = f"{count} expert layers do not run on the fused layer of {device.name}: {reason}."
        cure = next(cure for words, cure in _CURES.items() if words in reason)
        found.append(("warning", what, cure))
    return tuple(Finding(*each) for each in sorted(found, key=lambda each: each[0]))


def _kinds(model: nn.Module, layout: ModelLayout, card: Card, rank: int | None) -> list[LayerKind]:
    """Return the kinds of expert layers, with LoRA of this rank; None for the LoRA they have."""
    counted = Counter[tuple[str, ...]]()
    for entry in layout.modules:
        module: Any = model.get_submodule(entry.name)
        leaves = (param.parameter_name for param in entry.parameters)
        packed = next((leaf for leaf in leaves if parametrize.is_packed(module, leaf)), None)
        chosen = backends.UNPACKED
        if packed is not None and not can_serve(module):
            chosen = _OWN
        elif packed is not None:
            call = backends.read_call(module, torch.empty(0))  # no autocast on meta
            if rank is not None:
                up, down = (_factors(weight, rank) for weight in call.weights)
                call = call._replace(lora=(up, down))
            # Hidden states (4096 tokens, hidden) in the experts' dtype before packing, no memory.
            dtype = getattr(torch, entry.parameters[0].dtype_name)
            x = torch.empty((), dtype=dtype, device=parametrize.device_of(module, packed))
            x = x.expand(4096, entry.parameters[0].in_features or 1)
            chosen = backends.choose_backend(module, call._replace(x=x, card=card))
        pattern = name_pattern(unwrapped_name(entry.name))
        counted[pattern, entry.class_name, chosen.name, chosen.reason] += 1
    for experts in layout.linear_experts:
        counted[name_pattern(experts.name), "nn.Linear", *_LINEAR] += 1
    kinds = []
    for (pattern, owner, name, reason), n in counted.items():
        fast = name in (backends.FUSED.name, _LINEAR.name)
        cost = "" if fast else _COST if name == OWN_FORWARD else "Slower; not measured."
        kinds.append(LayerKind(pattern, n, owner, name, reason, fast, cost))
    return kinds


def _factors(weight: Any, rank: int) -> tuple[LoraFactors, ...]:
    if weight is None or len(weight.shape) != 3:
        return ()
    experts, rows, columns = weight.shape  # in float32 like PEFT's
    a = torch.empty(experts * rank, columns, device="meta")
    return (LoraFactors(a, torch.empty(rows, rank * experts, device="meta"), 1.0),)
