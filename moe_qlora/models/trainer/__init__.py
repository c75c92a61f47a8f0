"""Trainers' YAML files, read as axolotl reads them, without axolotl.

In goes the content of a file; out comes a `TrainerFile`: how the model is packed, what gets LoRA,
what a training step is, and every fault of the file in a sentence. Open file.py first.

    file.py     TrainerFile, the reader of single keys, and DeepSpeed's configuration
    adapter.py  how the model is packed, and its LoRA
    step.py     sizes, precision, optimizer, attention, and how a run is spread over GPUs
    checks.py   refuses settings that do not work together and misspelt keys; ExpertsSettings, the
                `moe_qlora:` block
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import adapter, checks, step
from .checks import BLOCK
from .file import Reader, TrainerFile

READ = (*adapter.KEYS, *step.KEYS)
"""The keys that decide how a model is packed and what a step takes."""


def read(label: str, content: Mapping[str, Any], folder: Path, model_type: str) -> TrainerFile:
    """Read the content of a YAML file that lies in `folder`, of a model of this type.

    Raises:
        ConfigError: `bnb_config_kwargs`, or modules to skip, cannot be followed. Everything else
            that is wrong with the file is in `faults`.
    """
    reader = Reader(content, folder)
    faults, unknown = checks.misspelt(reader.cfg, READ)
    reader.faults += faults
    reader.notes += unknown
    block = adapter.read_block(reader)
    dtype = step.read_dtype(reader)
    codec = adapter.read_packing(reader, model_type, dtype)
    packs_experts = adapter.packs_experts(reader, block, codec)
    step.read_sizes(reader)
    step.read_optimizer(reader)
    step.read_layers(reader)
    engine = step.read_engine(reader)
    lora = adapter.read_lora(reader, block)
    step.read_rest(reader)
    return TrainerFile(
        label,
        reader.settings,
        lora,
        adapter.with_skips(codec, reader.get(BLOCK)),
        packs_experts,
        engine,
        tuple(dict.fromkeys(reader.faults)),
        tuple(reader.notes),
        tuple(reader.unplanned),
    )
