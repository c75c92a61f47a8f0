"""Checkpoint folders of tensors of random bits, and how two merges are compared."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_qlora.checkpoint.folder import INDEX_SUFFIX
from moe_qlora.checkpoint.manifest import FolderCheck, Manifest, open_checkpoint

TRICKS = (
    *("../model.safetensors", "/etc/passwd", "..", ".", "", "sub/model.safetensors"),
    *("sub\\model.safetensors", "C:model.safetensors", "C:\\model.safetensors", "a\0b", "~/x/y"),
    *("\\\\server\\share", "..\\model.safetensors", "./model.safetensors"),
)


def check_folder(folder: Path | str, *, checksums: bool = True) -> Manifest:
    return FolderCheck(folder, large=checksums).finish()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def bits(model: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Every tensor of the state dict as bytes: codes that are stored as floats may be NaN."""
    return {
        key: (t.dtype, tuple(t.shape), t.detach().flatten().view(torch.uint8).numpy().tobytes())
        for key, t in model.state_dict().items()
    }


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Let `change` alter the tensors of each safetensors file of a folder."""
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        change(held)
        save_file(held, file, {"format": "pt"})
    return folder


def set_json(file: Path, **fields: object) -> Path:
    """Set fields of a JSON file, which may not be there yet."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))
    return file


def noise(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, NaN among them where the dtype has it."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (torch.Size(shape).numel() * dtype.itemsize,)
    noise = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return noise.view(dtype).view(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    flat = (t.contiguous().flatten().view(torch.uint8) for t in (left, right))
    return torch.equal(*flat)


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / f"model{INDEX_SUFFIX}").write_text(json.dumps({"weight_map": weight_map}))


def two_shards(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    first, second = {"a": noise(torch.float32, 4, 3)}, {"b": noise(torch.bfloat16, 2, 2, 2)}
    save_file(first, folder / "m-1.safetensors")
    save_file(second, folder / "m-2.safetensors")
    index(folder, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    return first | second


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], rtol=0, atol=1e-6, msg=lambda m, k=key: k + m)
