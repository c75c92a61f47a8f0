"""The result of `plan`: frozen records, free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .budget import COMPONENTS, DeviceUse, Peak, Settings
from .choice import LayerChoice, counted, sentence
from .devices import CONTEXT_BYTES
from .hosting import Hosting


@dataclass(frozen=True, slots=True)
class Hint:
    """One change that makes a plan smaller."""

    what: str  # In words
    setting: str  # The same as an argument
    saves: int  # Bytes less at the peak, with this change alone
    fits: bool  # Whether it alone makes the plan fit the devices


@dataclass(frozen=True, slots=True)
class Advice:
    """An engine for the GPUs of a plan; times are arithmetic (`scaling.py`), not measured."""

    engine: str  # "ddp", "fsdp" or "ep"
    ranks: int  # Its argument of `plan`: of `fsdp` and `ep` those that share one model
    copies: int  # Groups of so many ranks
    offload: bool  # With packed experts in host memory
    seconds: float  # Of a step of one micro-batch on each GPU
    tokens_per_s: float  # Of all GPUs
    needed: int  # Bytes of the fullest rank, with its reserve
    fits: bool
    reason: str  # In words
    alternatives: tuple[Advice, ...] = ()  # The other engines, those that do not fit included

    @property
    def setting(self) -> str:
        """The same as arguments of `plan`."""
        return f"{self.engine}={self.ranks}{', offload=True' if self.offload else ''}"


@dataclass(frozen=True, slots=True)
class PlannedFit:
    """What decoder layers can keep between forward and backward, as `fit_memory` sets it."""

    layers: tuple[LayerChoice, ...]  # In the model's order
    peak: int  # Bytes of tensors on the fullest device
    needed: int  # With the reserve of the process
    memory: int  # Bytes of that device
    gain: float  # How many times as fast as computing all again, about
    hosting: Hosting | None = None  # With experts in host memory, what these cost
    saved: Mapping[str, float] = field(default_factory=dict)  # As `Hosting` takes it

    @property
    def fits(self) -> bool:
        """False where not even computing all layers again does."""
        return self.needed <= self.memory

    @property
    def counts(self) -> dict[str, int]:
        """Layers that "keep" all, "part" or nothing ("recompute"), and with experts on "host"."""
        return counted(self.layers)

    def __str__(self) -> str:
        return sentence(self.counts, self.needed, self.memory, self.gain, self.hosting, self.saved)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a model, loading and training; all figures in bytes.

    Attributes:
        label: The model's name.
        model_type: `config.model_type`, "" where there is no configuration.
        kind: The packed type, None where nothing is packed.
        double_quant: Whether the 4-bit statistics are quantized as well.
        settings: How it is trained.
        trained_weights: Number of trained weights.
        unpacked: The model in the dtype that it is loaded in, nothing packed.
        resident: The packed model.
        load_peak: The most while it is loaded and packed.
        peak: The most in a training step on one device that holds everything. `peak.nbytes` is
            comparable with `torch.cuda.max_memory_allocated`.
        reserve: The rest of the process on that device: CUDA context, gaps between blocks.
        devices: What each of `gpus` holds; empty without `gpus`.
        device_map: Module or parameter name -> device, for `from_pretrained` and
            `accelerate.dispatch_model`; None without `gpus`.
        largest_seq: The longest sequence that fits the devices, 0 where none does, None where it
            was not looked for.
        largest_batch: The most sequences of `seq` tokens, likewise.
        fit: What decoder layers can keep of their activations on `gpus`, where `fit_memory` decides
            in place of gradient checkpointing; that `settings` have it or not does not matter. All
            layers are "recompute" where not even that fits; None without `gpus`, and where the
            model has no decoder layers.
        advice: Which engine to take on several `gpus`, whether one was asked for or not; None where
            none fits.
        hints: What to change, where it does not fit; the changes that cost least come first.
        notes: What to know about the figures, a sentence each.
        estimated: Whether the activations of layers are an estimate, since the model's own cannot
            run without data.
        whole: With an engine (`settings.engine`), the whole packed model. `resident`, `load_peak`,
            `peak`, `reserve` and each of `devices` are then of one rank, and there is no device
            map.
        on_disk: The tensors of a folder that its maker quantized, None for any other.
        hosting: With `offload`, what all packed experts take in host memory and cost; `resident`,
            `load_peak`, `peak` and `devices` are then without them, and with two slots in training.
            `fit` is of as many on the device as `fit_memory` brings there. None without.
        origins: Of a trainer's file: argument of `plan` -> the key of the file that its value comes
            from, "option" for one that was given beside the file, "axolotl's default" or "plan's
            default" for one that neither says. None for any other model.
    """

    label: str
    model_type: str
    kind: str | None
    double_quant: bool
    settings: Settings
    trained_weights: int
    unpacked: int
    resident: int
    load_peak: int
    peak: Peak
    reserve: int
    devices: tuple[DeviceUse, ...] = ()
    device_map: dict[str, int] | None = None
    largest_seq: int | None = None
    largest_batch: int | None = None
    fit: PlannedFit | None = None
    advice: Advice | None = None
    hints: tuple[Hint, ...] = ()
    notes: tuple[str, ...] = ()
    estimated: bool = False
    whole: int | None = None
    on_disk: int | None = None
    hosting: Hosting | None = None
    origins: dict[str, str] | None = None

    @property
    def fits(self) -> bool | None:
        """True if it fits `gpus`, loading included; None without `gpus`."""
        if not self.devices:
            return None
        loads = self.load_peak - self.resident
        return all(use.fits for use in self.devices) and all(
            use.peak is None or use.weights + loads + CONTEXT_BYTES <= use.capacity
            for use in self.devices
        )

    def values(self) -> dict[str, Any]:
        """Return the values of `settings` under the names that `plan` has for them."""
        plain = {name: getattr(self.settings, name) for name in self.settings.__slots__}
        engine = plain.pop("engine")
        return plain | ({} if engine is None else {engine.name: engine.ranks})

    def _offload(self, hosting: Hosting) -> dict[str, Any]:
        """Return what `--json` says of experts in host memory: bytes, and seconds of a step."""
        host, saved = hosting.most, dict[str, float]()
        if self.fit is not None:
            host, saved = self.fit.counts["host"], dict(self.fit.saved)
        return {
            "host": hosting.host_nbytes(hosting.most),
            "slots": hosting.slots(hosting.most),
            "fitted_host": hosting.host_nbytes(host),
            "fitted_copies_s": hosting.copies(host),
            "fitted_waiting_s": hosting.waiting(host, saved),
            "fitted_computing_s": hosting.computing(saved),
        }

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (component, the most it ever takes, what it takes at the peak) where not empty."""
        return [
            (name, self.peak.largest[name], self.peak.parts[name])
            for name in COMPONENTS
            if self.peak.largest.get(name) or self.peak.parts.get(name)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`; sizes in bytes."""
        plain = asdict(self)
        training = plain.pop("settings")
        training["scratch"] = training.pop("workspace")
        engine = training.pop("engine")
        if engine is not None:
            plain["engine"] = {**engine, "whole": plain["whole"]}
        del plain["whole"]
        if plain["on_disk"] is None:
            del plain["on_disk"]
        if plain["origins"] is None:
            del plain["origins"]
        del plain["hosting"]
        if self.hosting is not None:
            plain["offload"] = self._offload(self.hosting)
        plain["fit"] = self.fit and self.fit.counts
        devices = [
            {**device, "fits": use.fits, "blocks": list(use.blocks)}
            for device, use in zip(plain["devices"], self.devices, strict=True)
        ]
        for part in (plain, *devices):
            if peak := part["peak"]:
                peak["at_peak"] = peak.pop("parts")
        return {
            "model": plain.pop("label"),
            "model_type": plain.pop("model_type"),
            "quantization": {name: plain.pop(name) for name in ("kind", "double_quant")},
            "training": training,
            **plain,
            "devices": devices,
            "fits": self.fits,
        }
