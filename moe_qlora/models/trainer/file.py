"""The settings of a trainer's YAML file, in this package's terms: `TrainerFile`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, ConfigError
from ..files import read_json

if TYPE_CHECKING:
    from peft import LoraConfig

    from ...packing.settings import CodecSettings

DEFAULT = "axolotl's default"
"""Where a value comes from that the file leaves out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A value, and where it comes from."""

    value: Any
    key: str  # The key of the file, or `DEFAULT`


@dataclass(frozen=True, slots=True)
class AskedLora:
    """The LoRA of a file: fields of a `LoraConfig`, and what the plugin adds for experts."""

    fields: Mapping[str, Any]
    key: str = ""  # The keys that say what gets it
    experts: bool | tuple[str, ...] = False  # As of `adapt_lora_config`
    router: bool = False

    def config(self, rank: int) -> LoraConfig:
        """Return the `LoraConfig` with this rank; one that PEFT refuses is a `ConfigError`."""
        from peft import LoraConfig

        try:
            return LoraConfig(task_type="CAUSAL_LM", **{**self.fields, "r": rank})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"The LoRA settings of the file are refused: {error}") from error

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `adapt_lora_config`."""
        return {"experts": self.experts, "router": self.router}

    @property
    def targets(self) -> str:
        """The targets of LoRA, in words."""
        names: list[str] = []
        for name in ("target_modules", "target_parameters", "modules_to_save"):
            value = self.fields.get(name) or ()
            names += [value] if isinstance(value, str) else map(str, value)
        if self.experts:
            roles = () if isinstance(self.experts, bool) else self.experts
            names.append(f"experts ({', '.join(roles)})" if roles else "experts")
        return ", ".join([*names, *(["routers"] if self.router else [])])


@dataclass(frozen=True, slots=True)
class AskedEngine:
    """How a run is spread over GPUs."""

    name: str | None  # An engine of `plan`; None for layers spread over GPUs in one process
    key: str  # The key of the file, or `DEFAULT`
    ranks: int | None = None  # That share a model; None for as many as there are
    copies: int = 1  # Groups of ranks, where `ranks` is None


@dataclass(frozen=True)
class TrainerFile:
    """A trainer's YAML file, read as axolotl reads it; without axolotl, and nothing is loaded.

    Attributes:
        label: The file's name, for messages.
        settings: Arguments of `plan` -> what the file asks for, axolotl's defaults included.
        lora: The LoRA; None for a run without an adapter, which trains all weights.
        codec: How Linear layers are packed; None where the model is loaded in 16 bit.
        packs_experts: Whether experts are packed as well, by this package's plugin or by axolotl.
        engine: How the run is spread over several GPUs.
        faults: Why axolotl or the plugin would not run the file as it was meant, a sentence each.
        notes: What to know about the file, a sentence each.
        unplanned: What decides memory and no plan counts, a few words each.
    """

    label: str
    settings: Mapping[str, Asked] = field(default_factory=dict)
    lora: AskedLora | None = None
    codec: CodecSettings | None = None
    packs_experts: bool = False
    engine: AskedEngine = AskedEngine(None, DEFAULT)
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise a `ConfigError` with the faults, if there are any."""
        if self.faults:
            raise ConfigError(f"{self.label}: {' '.join(self.faults)}")


class Reader:
    """The keys of one file, read one by one; what is wrong with a value becomes a fault."""

    def __init__(self, cfg: Mapping[str, Any], folder: Path) -> None:  # in which the file lies
        self.cfg = {str(key): value for key, value in cfg.items() if value is not None}
        # What `deepspeed` has or names; None without it, and where its file is not here
        self.zero = read_zero(self.cfg["deepspeed"], folder) if self.cfg.get("deepspeed") else None
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.unplanned: list[str] = []
        self.settings: dict[str, Asked] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, as it was read."""
        return self.cfg.get(key, default)

    def flag(self, key: str) -> bool:
        """Return a key as yes or no; one that is left out is no."""
        value = self.cfg.get(key, False)
        if isinstance(value, str):
            value = {"true": True, "false": False, "yes": True, "no": False}.get(value.lower())
        if value in (True, False):
            return bool(value)
        self.faults.append(f"{key} is {self.cfg[key]!r:.80}; give true or false.")
        return False

    def number(self, key: str, default: int | None = None) -> int | None:
        """Return a key as a whole number of 1 or more."""
        value = self.cfg.get(key, default)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        self.faults.append(f"{key} is {value!r:.80}; give a whole number of 1 or more.")
        return default

    def names(self, key: str) -> Any:
        """Return a key as a name or a list of names."""
        value = self.cfg.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            return list(value)
        self.faults.append(f"{key} is {value!r:.80}; give a list of names.")
        return None

    def block(self, key: str) -> Mapping[str, Any]:
        """Return a key as a block of settings, empty where it is left out."""
        value = self.cfg.get(key)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.faults.append(f"{key} is {value!r:.80}; give a block of settings.")
        return {}

    def ask(self, argument: str, value: Any, key: str) -> None:
        """Note a value for an argument of `plan`: from a key, or axolotl's default without it."""
        known = any(part in self.cfg for part in key.split(" / "))
        self.settings[argument] = Asked(value, key if known else DEFAULT)


def read_zero(value: Any, folder: Path | None = None) -> Mapping[str, Any] | None:
    """Return the configuration that `deepspeed:` has or names; None where its file is not here.

    A file is looked for from the working directory, as axolotl does, then from `folder`.
    """
    if isinstance(value, Mapping):
        return value
    for path in (Path(str(value)), *([folder / str(value)] if folder else [])):
        if path.is_file():
            try:
                return read_json(path)
            except CheckpointError:
                return None
    return None


def zero_stage(value: Any, folder: Path | None = None) -> int | None:
    """Return the ZeRO stage of `deepspeed:`; of a file that is not here, the one in its name.

    None where neither says so.
    """
    if not value:
        return None
    found = read_zero(value, folder)
    if found is None:
        match = re.search(r"zero[-_]?(?:stage)?[-_]?([0-3])", str(value).lower())
        return int(match[1]) if match else None
    section = found.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, Mapping) else 0
    return int(stage) if str(stage) in ("0", "1", "2", "3") else None
