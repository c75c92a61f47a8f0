"""What lies in a checkpoint's folder beside its weights, and goes with them."""

from __future__ import annotations

import shutil
from pathlib import Path

from .folder import INDEX_SUFFIX
from .folder_manifest import CONFIG, MANIFEST

_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin.index.json")
_NEVER = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz", ".npy"),
    *(".gguf", ".onnx", ".ot", ".tflite", ".partial"),
)
_FOLDERS = ("additional_chat_templates",)


def copy_side_files(source: Path, folder: Path) -> None:
    """Copy everything but config.json, weights in any format, adapters and hidden files."""
    for file in sorted(source.iterdir()):
        name = file.name
        if file.is_dir():
            if name in _FOLDERS:
                shutil.copytree(file, folder / name, dirs_exist_ok=True)
        elif not (
            name.startswith((".", "adapter_"))
            or name in (CONFIG, MANIFEST)
            or name.lower().endswith(_WEIGHTS + _NEVER)
        ):
            shutil.copyfile(file, folder / name)
