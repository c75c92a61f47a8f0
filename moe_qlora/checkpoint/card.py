"""The part of an adapter's model card (README.md) that says what it was trained on and with.

Of a card that others wrote, and of PEFT's, everything stays; the part is written anew each time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import visible
from ..layout import name_pattern
from ..versions import installed_version
from .rounding import Rounding
from .source import Fingerprint
from .staging import replace_file

CARD = "README.md"
_START, _END = "<!-- moe_qlora: start -->", "<!-- moe_qlora: end -->"
_PART = re.compile(rf"\n*{_START}.*?{_END}\n*", re.DOTALL)
_PACKAGES = ("moe-qlora", "transformers", "peft", "bitsandbytes", "torch")


def write_card(folder: Path, facts: Mapping[str, str], base: str = "") -> None:
    """Write the part into a folder's card; a card without one gets it at the end."""
    file = folder / CARD
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        named = f"base_model: {json.dumps(base)}\n" if base else ""
        text = f"---\n{named}library_name: peft\ntags:\n- lora\n- moe\n---\n"
    rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in facts.items() if value)
    table = f"## Adapter of a Mixture-of-Experts model\n\n| | |\n|---|---|\n{rows}"
    part = f"{_START}\n\n{table}\n{_END}"
    kept = _PART.sub("\n", text).rstrip("\n")
    replace_file(file, f"{kept}\n\n{part}\n".encode())


def facts_of(config: Mapping[str, Any], packed: Rounding | None) -> dict[str, str]:
    """Return what a card says of an adapter, given adapter_config.json and the note beside it."""
    base = packed.base if packed is not None else None
    patterns = config.get("rank_pattern") or {}
    return {
        "base": base.name if base else str(config.get("base_model_name_or_path") or ""),
        "fingerprint of the base": digest(base) if base else "",
        "base was packed as": _codec(packed) if packed is not None else "",
        "rank, alpha": f"{config.get('r')}, {config.get('lora_alpha')}"
        + (f" (and {len(patterns)} ranks of single targets)" if patterns else ""),
        "target_modules": _targets(config.get("target_modules")),
        "target_parameters": _targets(config.get("target_parameters")),
        "versions": ", ".join(
            f"{name} {installed_version(name) or 'unknown'}" for name in _PACKAGES
        ),
    }


def digest(base: Fingerprint) -> str:
    """Return a fingerprint in short; models that differ in a noted field or bit differ in it."""
    content = {key: value for key, value in asdict(base).items() if key != "name"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _codec(packed: Rounding) -> str:
    settings = packed.settings
    double = ", double quantization" if settings.double_quant else ""
    return f"{settings.kind}, blocks of {settings.blocksize}{double}"


def _targets(names: Any) -> str:
    if isinstance(names, str):
        return names
    listed = names if isinstance(names, list) else []
    return ", ".join(sorted({name_pattern(name) for name in listed if isinstance(name, str)}))


def _cell(value: str) -> str:
    """Return a value as code in a table: no name in it becomes markup."""
    plain = visible(value).replace("|", "\\|").replace("`", "'")
    return f"`{plain}`"
