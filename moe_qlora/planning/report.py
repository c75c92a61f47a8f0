"""The result of `plan`: frozen records, free of torch."""

from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

from ..layout import human_bytes
from .budget import COMPONENTS, DeviceUse, Peak, Settings
from .choice import Choices, PlannedFit
from .devices import CONTEXT_BYTES


@dataclass(frozen=True, slots=True)
class Best:
    """The best combination of settings that fits the devices of a plan."""

    settings: Settings
    needed: int  # Bytes of the fullest device, with its reserve
    memory: int  # Bytes of that device
    host: int  # Bytes of packed experts in host memory

    def values(self) -> dict[str, Any]:
        """Return the settings that are not `plan`'s defaults, by option."""
        plain, own = asdict(Settings()), asdict(self.settings)
        values = {name: own[name] for name in own if own[name] != plain[name]}
        engine = values.pop("engine", None)
        return values | ({} if engine is None else {engine["name"]: engine["ranks"]})

    @property
    def options(self) -> str:
        """The same as options of `moe-qlora plan`."""
        words = []
        for name, value in self.values().items():
            word = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            alone = isinstance(value, bool) or name == "ddp"
            words.append(word if alone else f"{word} {quote(str(value))}")
        return " ".join(words)

    def __str__(self) -> str:
        held = f"{human_bytes(self.needed)} of {human_bytes(self.memory)}"
        return held + (f", and {human_bytes(self.host)} of host memory" if self.host else "")


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
    hosting: Choices | None = None  # With `offload`, what experts in host memory take and cost

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
    def fullest(self) -> DeviceUse:
        """The device with the largest part of its memory in use."""
        return max(self.devices, key=lambda use: use.needed / use.capacity)

    @property
    def verdict(self) -> str:
        """Whether it fits, and what does, in words; "" without `gpus`."""
        if not self.devices:
            return ""
        held = f"{human_bytes(self.fullest.needed)} of {human_bytes(self.fullest.capacity)}"
        if self.fits:
            other = self.best is not None and self.best.settings != self.settings
            return f"It fits: {held}." + (f" The best that fits: {self.best}." if other else "")
        said = f"It does not fit as asked: {held}."
        if self.fullest.fits:
            said = f"It would train ({held}), but does not fit while it is loaded."
        if self.best is not None:
            return f"{said} This fits: {self.best}."
        return f"{said} Nothing that was tried fits: take larger GPUs, or more of them."

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (component, the most it ever takes, what it takes at the peak) where not empty."""
        largest, parts = self.peak.largest, self.peak.parts
        rows = ((name, largest.get(name, 0), parts.get(name, 0)) for name in COMPONENTS)
        return [row for row in rows if any(row[1:])]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for `json.dumps`; sizes in bytes."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        training, fit = asdict(plain.pop("settings")), self.fit
        engine, whole = training.pop("engine"), plain.pop("whole")
        best, hosting = self.best, plain.pop("hosting")
        if self.on_disk is None:
            del plain["on_disk"]
        devices = [
            {**asdict(use), "peak": use.peak and _peak(use.peak), "fits": use.fits}
            for use in self.devices
        ]
        found = {
            "model": plain.pop("label"),
            "model_type": plain.pop("model_type"),
            "quantization": {name: plain.pop(name) for name in ("kind", "double_quant")},
            "training": training,
            **plain,
            "peak": _peak(self.peak),
            "devices": devices,
            "fit": fit and fit.counts,
            "best": best and {**asdict(best), "settings": best.values(), "options": best.options},
            "fits": self.fits,
        }
        if engine is not None:
            found["engine"] = {**engine, "whole": whole}
        if hosting is not None:
            found["offload"] = {
                "host": hosting.host_nbytes(hosting.most),
                "slots": hosting.slots,
                "fitted_host": fit and fit.host,
                "fitted_copies_s": fit and fit.copies,
                "fitted_waiting_s": fit and fit.waiting,
                "fitted_computing_s": fit and fit.computing,
            }
        return found


def _peak(peak: Peak) -> dict[str, Any]:
    said = asdict(peak)
    return said | {"at_peak": said.pop("parts")}
