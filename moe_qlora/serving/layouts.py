"""The layouts of adapters that servers take, by server and architecture.

The table `servers.json` holds what was seen with the version named there: `bash tools/test_serving`
asks the servers themselves and compares. "fused" is PEFT's own layout, LoRA on fused expert
weights; "single" has a pair for each projection of each expert.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError

MERGE = "merge the adapter with moe-qlora merge and serve the merged folder"
_ROLES = ("gate", "up", "down")


@dataclass(frozen=True)
class ServerLayout:
    """How one server takes adapters of one architecture."""

    server: str
    tested: str  # the server's version that the row was seen with
    fused: bool  # PEFT's layout, else a pair for each projection of each expert
    leaves: dict[str, str]  # of single experts: the name of each role's projection
    one_scaling: bool = False  # the server knows one `lora_alpha / r` for all
    together: tuple[tuple[str, ...], ...] = ()  # layers of which all or none need LoRA
    # parts of the names of layers beside the experts: seen to be served, and seen not to be
    layers: frozenset[str] = frozenset()
    unserved: frozenset[str] = frozenset()
    loader_only: bool = False  # the server's loader was given the adapters; its engine was not run


@cache
def _table() -> dict[str, Any]:
    file = Path(__file__).with_name("servers.json")
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def servers() -> tuple[str, ...]:
    """Return the servers of the table."""
    return tuple(_table())


def layout_for(server: str, architecture: str) -> ServerLayout:
    """Return the layout that a server takes for an architecture.

    Raises:
        ConfigError: The table has no such server, or none of its rows was seen to serve LoRA on
            experts of this architecture.
    """
    if server not in _table():
        raise ConfigError(f"target is {server!r}; give one of {', '.join(servers())}.")
    entry = _table()[server]
    rows = entry["architectures"]
    row = rows.get(architecture) or rows.get("*")
    if row is None:
        raise ConfigError(
            f"{server} {entry['tested']} was not seen to serve LoRA on the experts of "
            f"{architecture} (it was for {', '.join(rows)}): {MERGE}."
        )
    return ServerLayout(
        server,
        entry["tested"],
        row["experts"] == "fused",
        dict(zip(_ROLES, row.get("leaves", ()), strict=False)),
        entry.get("one_scaling", False),
        tuple(map(tuple, entry.get("together", ()))),
        frozenset((*entry.get("layers", ()), *row.get("layers", ()))),
        frozenset(row.get("unserved", ())),
        entry.get("loader_only", False),
    )
