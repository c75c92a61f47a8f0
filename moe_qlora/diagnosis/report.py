"""What a diagnosis holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PROBLEM, WARNING = "problem", "warning"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package beside the versions that this one was tested with."""

    name: str
    installed: str | None  # None where it is not installed
    tested: str  # The versions that tests ran with, as text
    status: str  # "tested", "untested", "too old", "missing", or "not installed" where none asks


@dataclass(frozen=True, slots=True)
class Device:
    """A device that experts may be computed on."""

    name: str
    nbytes: int | None  # Memory; None for a CPU
    capability: str  # Of CUDA, "8.9"; "" for others
    here: bool  # False where it was only named
    few_tokens: str  # What multiplies where experts have few tokens each
    many_tokens: str  # And where they have many


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Expert modules of a model that differ in nothing but their layer."""

    pattern: str  # Name with `*` for layer numbers
    count: int
    class_name: str
    backend: str  # "fused layer", "projection by projection", ...
    reason: str  # Why this backend, in words
    fast: bool  # Whether it is the quickest there is
    cost: str  # How slow it is about, and where that was measured; "" where `fast`


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will break or slow down a run, and what to do about it."""

    severity: str  # "problem" or "warning"
    what: str  # A sentence
    cure: str  # A sentence


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `doctor` found out.

    Attributes:
        packages: This package's dependencies, and programs that it is tested with.
        device: What `layers` and `findings` are about: the first GPU, the one named, or the CPU.
        devices: Every device here, or the one that was named.
        model: What was named as the model; "" where none was.
        layers: How each kind of the model's expert layers will be computed on `device`.
        findings: Problems first.
        notes: What to know of the model, a sentence each.
    """

    packages: tuple[Package, ...]
    device: Device
    devices: tuple[Device, ...]
    model: str = ""
    layers: tuple[LayerKind, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether no finding is a problem; warnings may be there."""
        return not any(finding.severity == PROBLEM for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`."""
        return {"good": self.good, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.device.name}: {self.device.many_tokens}"]
        lines += [f"{p.name} {p.installed or 'none'}: {p.status}" for p in self.packages]
        lines += [f"{layer.pattern}: {layer.backend}, {layer.reason}" for layer in self.layers]
        lines += [f"{finding.severity}: {finding.what} {finding.cure}" for finding in self.findings]
        return "\n".join(lines)
