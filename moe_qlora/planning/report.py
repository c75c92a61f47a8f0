"""The result of `plan`: frozen records, free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from ..layout import human_bytes
from .budget import COMPONENTS, DeviceUse, Peak, Settings
from .choice import LayerChoice, counted, sentence
from .devices import CONTEXT_BYTES
from .hosting import Hosting


@dataclass(frozen=True, slots=True)
class Best:
    """The best combination of settings that fits the devices of a plan."""

    settings: Settings
    needed: int  # Bytes of the fullest device, with its reserve
    memory: int  # Bytes of that device
    host: int  # Bytes of packed experts in host memory

    def values(self) -> dict[str, Any]:
        """Return the arguments of `plan` that are not its defaults."""
        plain, own = Settings(), self.settings
        names = (name for name in own.__slots__ if name not in ("engine", "workspace", "foreach"))
        values = {n: getattr(own, n) for n in names if getattr(own, n) != getattr(plain, n)}
        engine = self.settings.engine
        return values | ({} if engine is None else {engine.name: engine.ranks})

    @property
    def options(self) -> str:
        """The same as options of `moe-qlora plan`."""
        words = []
        for name, value in self.values().items():
            word = f"--{name.replace('_', '-')}"
            if value is False:
                word = f"--no-{name}"
            words.append(word if isinstance(value, bool) else f"{word} {quote(str(value))}")
        return " ".join(words)

    @property
    def python(self) -> tuple[str, ...]:
        """Lines of Python that train so."""
        settings, lines = self.settings, []
        if settings.offload:
            lines.append("with moe_qlora.enabled(offload=True): ...")
        if settings.attention is not None:
            lines.append(f'from_pretrained(..., attn_implementation="{settings.attention}")')
        options = ", experts=True" * ("experts" in settings.targets.split(","))
        if settings.adapter_dtype == "bfloat16":
            options += ", autocast_adapter_dtype=False"
        lines.append(
            f"moe_qlora.get_peft_model(model, LoraConfig(r={settings.rank}, ...){options})"
        )
        size = f"batch_size={settings.batch}, seq_len={settings.seq}"
        lines += ["# pip install liger-kernel, for its loss"] if settings.prepared else []
        lines.append(f"moe_qlora.prepare_training(model, {size})")
        lines.append(f'TrainingArguments(..., optim="{_OPTIM[settings.optimizer]}")')
        return tuple(lines)

    def __str__(self) -> str:
        held = f"{human_bytes(self.needed)} of {human_bytes(self.memory)}"
        return held + (f", and {human_bytes(self.host)} of host memory" if self.host else "")

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`; sizes in bytes."""
        sizes = {"needed": self.needed, "memory": self.memory, "host": self.host}
        return {"settings": self.values(), "options": self.options, **sizes}


_OPTIM = {"adamw": "adamw_torch_fused", "paged_adamw": "paged_adamw_32bit"} | {
    name: name for name in ("adamw_8bit", "paged_adamw_8bit")
}
"""Optimizers of `Settings` by Trainer's names."""


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
        best: The best combination of settings that fits `gpus`; None without `gpus`, and where none
            of docs/memory.md fits.
        notes: What to know about the figures, a sentence each.
        whole: With an engine (`settings.engine`), the whole packed model. `resident`, `load_peak`,
            `peak`, `reserve` and each of `devices` are then of one rank, and there is no device
            map.
        on_disk: The tensors of a folder that its maker quantized, None for any other.
        hosting: With `offload`, what all packed experts take in host memory and cost; `resident`,
            `load_peak`, `peak` and `devices` are then without them, and with two slots in training.
            `fit` is of as many on the device as `fit_memory` brings there. None without.
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
    best: Best | None = None
    notes: tuple[str, ...] = ()
    whole: int | None = None
    on_disk: int | None = None
    hosting: Hosting | None = None

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

    @property
    def verdict(self) -> str:
        """Whether it fits, and what does, in words; "" without `gpus`."""
        if not self.devices:
            return ""
        use = max(self.devices, key=lambda use: use.needed / use.capacity)
        held = f"{human_bytes(use.needed)} of {human_bytes(use.capacity)}"
        if self.fits:
            said = f"It fits: {held}."
            other = self.best is not None and self.best.settings != self.settings
            return said + (f" The best that fits: {self.best}." if other else "")
        said = f"It does not fit as asked: {held}."
        if all(use.fits for use in self.devices):
            said = f"It would train ({held}), but does not fit while it is loaded."
        if self.best is not None:
            return f"{said} This fits: {self.best}."
        return f"{said} Nothing that was tried fits: take larger GPUs, or more of them."

    def _offload(self, hosting: Hosting) -> dict[str, Any]:
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
        del plain["hosting"]
        if self.hosting is not None:
            plain["offload"] = self._offload(self.hosting)
        plain["fit"] = self.fit and self.fit.counts
        plain["best"] = self.best and self.best.as_dict()
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
