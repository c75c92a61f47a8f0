"""The records of a diagnosis, and its parts without a model: packages and devices."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..experts.backend import suits
from ..kernels.cards import HOPPER, Card, acting_as, actual, multiplies_by_torch, of_capability
from ..memory.devices import GPUS, gpu_named, unknown_gpu
from ..versions import OPTIONAL, PYTHON, REQUIRED, Range, installed_version, release_of

PROBLEM, WARNING = "problem", "warning"

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_LOOP = "expert by expert, in plain torch"
Versions = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Package:
    """A package: the installed version, and the tested ones."""

    name: str
    installed: str | None  # None: not installed
    tested: str  # Tested versions, as text
    status: str  # "tested", "untested", "too old", "missing", or "not installed" if optional


@dataclass(frozen=True, slots=True)
class Device:
    """A device for the experts."""

    name: str
    nbytes: int | None  # Memory; None for a CPU
    capability: str  # Of CUDA, "8.9"; "" for others
    here: bool  # False if it was only named
    few_tokens: str  # Matrix products with few tokens an expert
    many_tokens: str  # With many


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Expert modules of a model that differ in nothing but their layer."""

    pattern: str  # Name with `*` for layer numbers
    count: int
    class_name: str
    backend: str  # "fused layer", "projection by projection", ...
    reason: str  # Why this backend, in words
    fast: bool  # True for the fastest backend
    cost: str  # How much slower it is, and where that was measured; "" if `fast`


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will break or slow down a run, and what to do about it."""

    severity: str  # "problem" or "warning"
    what: str  # A sentence
    cure: str  # A sentence


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        packages: This package's dependencies, and programs that it is tested with.
        device: The device of `layers` and `findings`: the first GPU, the named one, or the CPU.
        devices: Every device here, or the one that was named.
        model: The name of the model; "" without one.
        layers: How each kind of the model's expert layers will be computed on `device`.
        findings: Problems first.
        notes: Sentences on the model.
        fit: Whether `device` (a GPU) holds a training step, and the best settings that fit, in
            lines; "" where that is not known.
    """

    packages: tuple[Package, ...]
    device: Device
    devices: tuple[Device, ...]
    model: str = ""
    layers: tuple[LayerKind, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    fit: str = ""

    @property
    def good(self) -> bool:
        """True if no finding is a problem; there may be warnings."""
        return not any(finding.severity == PROBLEM for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`."""
        return {"good": self.good, **asdict(self)}

    def __str__(self) -> str:
        lines = [self.fit] if self.fit else []
        lines += [f"{self.device.name}: {self.device.many_tokens}"]
        lines += [f"{p.name} {p.installed or 'none'}: {p.status}" for p in self.packages]
        lines += [f"{layer.pattern}: {layer.backend}, {layer.reason}" for layer in self.layers]
        lines += [f"{finding.severity}: {finding.what} {finding.cure}" for finding in self.findings]
        return "\n".join(lines)


def named(text: str) -> tuple[Device, Card]:
    """Return a card by its name, such as "4090"; a `ConfigError` for an unknown one."""
    try:
        name = gpu_named(text)
    except ValueError as error:
        raise ConfigError(f"gpu: {error}.") from error
    if name is None:
        raise ConfigError(f"gpu: {text.strip()!r} is no {unknown_gpu(text)}.")
    gpu = GPUS[name]
    card = of_capability(gpu.capability)
    return _described(name, gpu.nbytes, card, here=False), card


def here() -> list[tuple[Device, Card]]:
    """Return every GPU of this machine, or the CPU if it has none."""
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        card = actual(device)
        found.append((_described(properties.name, properties.total_memory, card, here=True), card))
    return found or [(_described("CPU", None, actual(_CPU), here=True), actual(_CPU))]


def _described(name: str, nbytes: int | None, card: Card, *, here: bool) -> Device:
    capability = ".".join(map(str, card.capability)) if card.maker == "nvidia" else ""
    few, many = _multipliers(card)
    return Device(name, nbytes, capability, here, few, many)


def _multipliers(card: Card) -> tuple[str, str]:
    if not suits(card):
        return _LOOP, _LOOP
    with acting_as(card):
        hopper = card.capability == HOPPER
        by_torch = multiplies_by_torch(_CUDA, torch.bfloat16)
    tried = ", untested on ROCm" if card.maker == "amd" else ""
    return (
        f"{'Hopper' if hopper else 'portable'} quantized matmul{tried}",
        f"{'torch' if by_torch else 'own Triton'} grouped matmul{tried}",
    )


def packages() -> tuple[Package, ...]:
    """Return all required and optional packages, Python first."""
    rows = [_package("python", platform.python_version(), PYTHON, True)]
    rows += [_package(n, installed_version(n), tested, True) for n, tested in REQUIRED.items()]
    rows += [_package(n, installed_version(n), tested, False) for n, tested in OPTIONAL.items()]
    return tuple(rows)


def releases(rows: tuple[Package, ...]) -> Versions:
    """Return the release numbers of installed packages by name."""
    return {row.name: release_of(row.installed) for row in rows if row.installed}


def _package(name: str, installed: str | None, tested: Range, required: bool) -> Package:
    return Package(name, installed, str(tested), _status(installed, tested, required))


def _status(installed: str | None, tested: Range, required: bool) -> str:
    if installed is None:
        return "missing" if required else "not installed"
    if tested.includes(installed):
        return "tested"
    older = release_of(installed) < release_of(tested.first)
    return "too old" if required and older else "untested"


def findings(rows: tuple[Package, ...]) -> list[Finding]:
    """Return findings on versions."""
    found = []
    for row in rows:
        if row.status == "missing":
            what, cure = f"{row.name} is not installed.", f"Install {row.name} {row.tested}."
            found.append(Finding(PROBLEM, what, cure))
        elif row.status == "too old":
            what = f"{row.name} {row.installed} is older than what was tested ({row.tested})."
            found.append(Finding(PROBLEM, what, f"Install {row.name} {row.tested}."))
        elif row.status == "untested":
            what = f"{row.name} {row.installed} is not a version that was tested ({row.tested})."
            cure = f"Look at the first losses, or install {row.name} {row.tested}."
            found.append(Finding(WARNING, what, cure))
    return found
