"""Which value each setting of a plan has: what was given, then a trainer's file, then defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..models.trainer.file import DEFAULT, TrainerFile
from .engines import ENGINES

OPTION, OWN_DEFAULT = "option", "plan's default"

DEFAULTS: Mapping[str, Any] = {
    "batch": 1,
    "seq": 4096,
    "rank": 16,
    "targets": "attention",
    "adapter_dtype": "float32",
    "optimizer": "adamw",
    "checkpointing": True,
    "accumulation": 1,
    "attention": None,
    "liger": False,
    "compile": False,
    "dtype": None,
}
"""Arguments of `plan`, and their values where nothing else says so."""

_ENGINES = tuple(ENGINES)


@dataclass(frozen=True)
class AskedPlan:
    """The settings of a plan, and where each comes from."""

    values: Mapping[str, Any]  # Arguments of `plan`, engines among them
    lora: Any  # A `LoraConfig` or `AskedLora` instead of targets, None without
    origins: dict[str, str] | None = None  # As of `MemoryPlan`
    notes: tuple[str, ...] = ()


def settle(
    given: Mapping[str, Any], lora_config: Any, file: TrainerFile | None, devices: int
) -> AskedPlan:
    """Choose the values of a plan for so many devices (0: unknown); `given` is None where not.

    Raises:
        ConfigError: The file has a fault.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if file is None:
        return AskedPlan({**DEFAULTS, **options}, lora_config)
    file.check()
    asked = {name: each.value for name, each in file.settings.items()}
    origins = {name: each.key for name, each in file.settings.items()}
    lora = lora_config
    if lora_config is None and "targets" not in options:
        if file.lora is None:
            raise ConfigError(
                f"{file.label}: the file has no adapter and trains every weight, which is not "
                "planned: set adapter: qlora and load_in_4bit: true, or give --targets."
            )
        if file.lora.targets:
            lora = file.lora
            asked["targets"], origins["targets"] = file.lora.targets, file.lora.key
    unplanned = list(file.unplanned)
    if not any(name in options for name in _ENGINES):
        engine, key, note = _engine(file, devices)
        asked |= engine
        origins |= dict.fromkeys(engine, key)
        unplanned += [note] if note else []
    values = {**DEFAULTS, **asked, **options}
    origins = {name: origins.get(name, OWN_DEFAULT) for name in values} | dict.fromkeys(
        options, OPTION
    )
    if lora_config is not None:
        origins |= {"targets": OPTION, "rank": OPTION}
    notes = (f"Not planned: {'; '.join(unplanned)}.",) if unplanned else ()
    return AskedPlan(values, lora, origins, notes)


def _engine(file: TrainerFile, devices: int) -> tuple[dict[str, int], str, str]:
    """Return the engine of a file as an argument of `plan`, its key, and what is not planned."""
    engine = file.engine
    if engine.name is None or devices == 1:
        return {}, DEFAULT, ""
    ranks = engine.ranks or devices // engine.copies
    if ranks < 2:
        title = ENGINES[engine.name]
        hint = f"{title} (give --gpus, or --{engine.name} with the number of ranks)"
        return {}, DEFAULT, hint if engine.name != "ddp" and not devices else ""
    return {engine.name: ranks}, engine.key, ""


def in_words_of(error: ConfigError, asked: AskedPlan, file: TrainerFile | None) -> ConfigError:
    """Return an error about a value of a file so that it names the file, and the key if it can."""
    if file is None or asked.origins is None:
        return error
    said = str(error)
    argument, _, rest = said.partition(" is ")
    key = asked.origins.get(argument.lstrip("-"))
    if key in (None, OPTION):
        return error
    known = key not in (DEFAULT, OWN_DEFAULT)
    return type(error)(f"{file.label}: {key if known else argument} is {rest}")
