"""Packed experts inside other people's training programs: one file for each, on one small class.

    host.py           ExpertsHost, for the author of any loader
    axolotl.py        its plugin and its subcommand
    llama_factory.py  its YAML file with a block of ours; a program and a context manager
    ms_swift.py       a tuner for its registry, and loaders that pack

README.md in this folder is the page that says what to call, and when. Importing the package imports
no host; settings are checked by pydantic, which the extra `hosts` installs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .host import ExpertsHost
    from .settings import ExpertsSettings


_HOME = {"ExpertsHost": "host", "ExpertsSettings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".{_HOME[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        raise ModuleNotFoundError(
            f"moe_qlora.integrations.{name} needs pydantic: pip install 'moe-qlora[hosts]'.",
            name="pydantic",
        ) from error
    return getattr(module, name)


__all__ = [
    "ExpertsHost",
    "ExpertsSettings",
]
