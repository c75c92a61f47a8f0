"""The model card (README.md) of an adapter.

The part between two markers is replaced; the rest is PEFT's or the author's, and stays.
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
from ..layout import dtype_name, name_pattern
from ..versions import installed_version
from .staging import replace_file
from .training_codec import TrainingCodec

CARD = "README.md"
_START, _END = "<!-- moe_qlora: start -->", "<!-- moe_qlora: end -->"
_PART = re.compile(rf"\n*{_START}.*?{_END}\n*", re.DOTALL)
_HEADER = re.compile(r"---\n.*?\n---\n", re.DOTALL)
_VERSIONS = "### Framework versions"  # PEFT adds it, and its own version, to any card
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoModel",
}
_PACKAGES = ("moe-qlora", "transformers", "peft", "bitsandbytes", "torch")


def shorten_card(folder: Path) -> None:
    """Remove the text of Hugging Face's template from a model card, if nobody has filled it in."""
    from huggingface_hub import ModelCard, ModelCardData

    file = folder / CARD
    text = file.read_text(encoding="utf-8", errors="replace")
    header = found[0] if (found := _HEADER.match(text)) else ""
    body = text.removeprefix(header)
    known = {*ModelCard.from_template(ModelCardData()).text.splitlines(), _VERSIONS}
    lines = _PART.sub("\n", body).splitlines()
    if all(line in known or line.startswith("- PEFT ") for line in lines):
        part = _PART.search(body)
        replace_file(file, f"{header}{part[0] if part else ''}".encode())


def write_card(folder: Path, facts: Mapping[str, str], base: str = "", usage: str = "") -> None:
    """Write our part of a folder's model card; a card without it gets it at the end."""
    file = folder / CARD
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        named = f"base_model: {json.dumps(base)}\n" if base else ""
        text = f"---\n{named}library_name: peft\ntags:\n- lora\n- moe\n---\n"
    # as code, so that names are not read as markup
    plain = {n: visible(f).replace("|", "\\|").replace("`", "'") for n, f in facts.items() if f}
    rows = "".join(f"| {name} | `{value}` |\n" for name, value in plain.items())
    table = f"## Adapter of a Mixture-of-Experts model\n\n| | |\n|---|---|\n{rows}{usage}"
    part = f"{_START}\n\n{table}\n{_END}"
    others = _PART.sub("\n", text).rstrip("\n")
    replace_file(file, f"{others}\n\n{part}\n".encode())


def facts_of(config: Mapping[str, Any], packed: TrainingCodec | None) -> dict[str, str]:
    """Return the rows of a card, given adapter_config.json and the note beside it."""
    base = packed.base if packed is not None else None
    patterns = config.get("rank_pattern") or {}
    facts = {
        "base": base.name if base else str(config.get("base_model_name_or_path") or ""),
        "fingerprint of the base": "",
        "base was packed as": "",
        "packed": "",
        "dtype in training": dtype_name(packed.dtype) if packed and packed.dtype else "",
        "rank, alpha": f"{config.get('r')}, {config.get('lora_alpha')}"
        + (f" (and {len(patterns)} ranks of single targets)" if patterns else ""),
        "target_modules": _targets(config.get("target_modules")),
        "target_parameters": _targets(config.get("target_parameters")),
        "versions": ", ".join(
            f"{name} {installed_version(name) or 'unknown'}" for name in _PACKAGES
        ),
    }
    if base is not None:  # without the model's name
        content = {key: value for key, value in asdict(base).items() if key != "name"}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        facts["fingerprint of the base"] = digest[:16]
    if packed is not None:
        how = packed.settings
        double = ", double quantization" if how.double_quant else ""
        facts["base was packed as"] = f"{how.kind}, blocks of {how.blocksize}{double}"
        counts = len(packed.experts), len(packed.linears)
        facts["packed"] = "{} expert weights, {} Linear layers".format(*counts)
    return facts


def usage_of(config: Mapping[str, Any], packed: TrainingCodec) -> str:
    """Return how a program loads and merges the adapter, in Markdown."""
    base = packed.base.name if packed.base else config.get("base_model_name_or_path")
    base = json.dumps(visible(str(base or "BASE")))
    model = _CLASSES.get(str(config.get("task_type")), "AutoModelForCausalLM")
    fields = packed.settings.bnb_fields().items()
    how = ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}=True"
        for name, value in fields
        if value is True or isinstance(value, str)
    )
    dtype = f', dtype="{dtype_name(packed.dtype)}"' if packed.dtype else ""
    return f"""
```python
import moe_qlora
from transformers import {model}, BitsAndBytesConfig

quantization = BitsAndBytesConfig({how})
with moe_qlora.enabled():
    model = {model}.from_pretrained(
        {base}, quantization_config=quantization{dtype}
    )
model = moe_qlora.load_adapter(model, "ADAPTER")  # the folder of this card
```

Merged into the 16-bit model: `moe-qlora merge BASE ADAPTER OUT`, with `--like-training` to round
the base as in training first.
"""


def _targets(names: Any) -> str:
    if isinstance(names, str):
        return names
    listed = names if isinstance(names, (list, set)) else []
    return ", ".join(sorted({name_pattern(name) for name in listed if isinstance(name, str)}))
