"""Loads an adapter with SGLang's own loader, as a program of its own, and checks what it made.

    python sglang_loader.py SGLANG ADAPTER MODEL

SGLANG is the folder of its unpacked wheel: SGLang itself does not install without CUDA, so the
modules that its `lora/lora.py` imports for other things are blanks here. `LoRAAdapter` reads the
exported tensors and stacks them as its kernels take them; each product B A of a gate, up, down, q,
k and v projection must come out as it went in, and nothing may be left beside them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file

_BLANK = (
    "sglang.srt.configs.load_config",
    "sglang.srt.layers.utils",
    "sglang.srt.lora.backend.base_backend",
    "sglang.srt.lora.lora_config",
    "sglang.srt.model_loader.loader",
    "sglang.srt.utils.hf_transformers_utils",
    "sglang.srt.lora.utils",
)
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}


def main(source: str, adapter: str, model: str) -> int:
    """Load and compare; return the exit code."""
    for name in _BLANK:
        sys.modules[name] = MagicMock()
    layer_of = re.compile(r"(?:^|\.)layers\.(\d+)\.")
    utils: Any = sys.modules["sglang.srt.layers.utils"]
    utils.get_layer_id = lambda name: (m := layer_of.search(name)) and int(m[1])
    path = Path(source) / "sglang" / "srt" / "lora" / "lora.py"
    spec = importlib.util.spec_from_file_location("sglang_lora", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    settings = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    base = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    config = types.SimpleNamespace(hf_config=settings, r=settings["r"], **{
        key: settings[key] for key in ("lora_alpha", "target_modules")
    })  # fmt: skip
    hf: Any = types.SimpleNamespace(**base)
    loaded = module.LoRAAdapter("one", config, hf, None, None)
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    loaded.initialize_weights_from_tensors(dict(tensors))
    expected = {
        key.removesuffix(".lora_A.weight"): tensors[key.replace("lora_A", "lora_B")] @ value
        for key, value in tensors.items()
        if key.endswith(".lora_A.weight")
    }
    assert loaded.scaling == settings["lora_alpha"] / settings["r"]
    seen: dict[str, torch.Tensor] = {}
    for layer in loaded.layers:
        for key, a in layer.weights.items():
            if key.endswith(".lora_A.weight"):
                plain = key.removesuffix(".lora_A.weight")
                _unstack(plain, a, layer.weights, config.r, seen, tensors)
    renamed = {_plain(key): value for key, value in expected.items()}
    assert seen.keys() == renamed.keys(), sorted(seen.keys() ^ renamed.keys())[:4]
    wrong = [key for key, value in renamed.items() if not torch.equal(seen[key], value)]
    assert not wrong, wrong[:4]
    sys.stdout.write(f"SGLang's loader stacks {len(seen)} products as they were.\n")
    return 0


def _plain(path: str) -> str:
    for old, new in ((".w1", ".gate_proj"), (".w2", ".down_proj"), (".w3", ".up_proj")):
        path = path.removesuffix(old) + new if path.endswith(old) else path
    return path


def _unstack(
    path: str, a: Any, weights: Any, rank: int, seen: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Note the products of a layer that SGLang has stacked, under the names before."""
    b = weights[f"{path}.lora_B.weight"]
    parent, _, leaf = path.rpartition(".")
    names = _STACKED.get(leaf, (leaf,))
    assert len(a) == rank * len(names), path
    rows = 0
    for index, name in enumerate(names):
        path_before = f"{parent}.{name}"
        count = next(
            len(value)
            for key, value in tensors.items()
            if _plain(key.removesuffix(".lora_B.weight")) == path_before
        )
        part = a[index * rank : (index + 1) * rank]
        seen[f"{parent}.{name}"] = b[rows : rows + count] @ part
        rows += count
    assert rows == len(b), path


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
