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
            word = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
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

    With an engine (`settings.engine`), `resident`, `load_peak`, `peak`, `reserve` and each of
    `devices` are of one rank, and there is no device map. With `offload` they are without packed
    experts, and in training with two slots for these. What was not asked for is None: `devices`,
    `device_map`, `fit` and `best` without `gpus`, the largest sizes without a search.
    """

    label: str  # The model's name
    model_type: str  # `config.model_type`, "" where there is no configuration
    kind: str | None  # The packed type, None where nothing is packed
    double_quant: bool  # Whether the 4-bit statistics are quantized as well
    settings: Settings  # How it is trained
    trained_weights: int  # Number of trained weights
    unpacked: int  # The model in the dtype that it is loaded in, nothing packed
    resident: int  # The packed model
    load_peak: int  # The most while it is loaded and packed
    # The most in a training step on one device that holds everything; `peak.nbytes` is comparable
    # with `torch.cuda.max_memory_allocated`.
    peak: Peak
    reserve: int  # The rest of the process there: CUDA context, gaps between blocks
    devices: tuple[DeviceUse, ...] = ()  # What each of `gpus` holds
    # Module or parameter name -> device, for `from_pretrained` and `accelerate.dispatch_model`
    device_map: dict[str, int] | None = None
    largest_seq: int | None = None  # The longest sequence that fits the devices, 0 for none
    largest_batch: int | None = None  # The most sequences of `seq` tokens, likewise
    # What decoder layers can keep of their activations, where `fit_memory` decides in place of
    # gradient checkpointing; all are "recompute" where not even that fits.
    fit: PlannedFit | None = None
    best: Best | None = None  # The best settings of docs/memory.md that fit, None for none
    notes: tuple[str, ...] = ()  # What to know about the figures, a sentence each
    whole: int | None = None  # With an engine, the whole packed model
    on_disk: int | None = None  # The tensors of a folder that its maker quantized
    hosting: Hosting | None = None  # With `offload`, what all experts in host memory take and cost

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
        training, whole, _ = (plain.pop(name) for name in ("settings", "whole", "hosting"))
        training["scratch"] = training.pop("workspace")
        if (engine := training.pop("engine")) is not None:
            plain["engine"] = {**engine, "whole": whole}
        if plain["on_disk"] is None:
            del plain["on_disk"]
        if (hosting := self.hosting) is not None:
            fit = self.fit
            host, saved = (hosting.most, {}) if fit is None else (fit.counts["host"], fit.saved)
            plain["offload"] = {
                "host": hosting.host_nbytes(hosting.most),
                "slots": hosting.slots(hosting.most),
                "fitted_host": hosting.host_nbytes(host),
                "fitted_copies_s": hosting.copies(host),
                "fitted_waiting_s": hosting.waiting(host, saved),
                "fitted_computing_s": hosting.computing(saved),
            }
        plain["fit"] = self.fit and self.fit.counts
        plain["best"] = self.best and self.best.as_dict()
        for device, use in zip(plain["devices"], self.devices, strict=True):
            device |= {"fits": use.fits, "blocks": list(use.blocks)}
        for part in (plain, *plain["devices"]):
            if peak := part["peak"]:
                peak["at_peak"] = peak.pop("parts")
        return {
            "model": plain.pop("label"),
            "model_type": plain.pop("model_type"),
            "quantization": {name: plain.pop(name) for name in ("kind", "double_quant")},
            "training": training,
            **plain,
            "fits": self.fits,
        }
