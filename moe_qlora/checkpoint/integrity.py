"""Checks of a packed folder against its manifest, and the way to open any checkpoint folder."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, visible
from ..layout import listed
from ..models.files import read_json, reading
from .cpus import usable_cpus
from .fit import form_problems
from .manifest import (
    CONFIG,
    CONFIG_KEY,
    SHARD_NAME,
    Manifest,
    Mark,
    ShardEntry,
    checksum,
    has_manifest,
    is_packed,
    read_manifest,
)
from .reader import (
    DTYPES,
    SINGLE,
    Checkpoint,
    TensorInfo,
    header_bytes,
    index_of,
    inside,
    read_header,
    read_index,
)

_SMALL = 1 << 16

# Keys of config.json that no result of the forward depends on.
_IDLE = {
    *(CONFIG_KEY, "transformers_weights"),
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
}


def check_folder(folder: str | Path, *, checksums: bool = True) -> Manifest:
    """Check a packed folder as far as it goes without its model; `checksums`: read all of it."""
    check = FolderCheck(folder, large=checksums)
    check.finish()
    return check.manifest


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open the files that manifest or index name, or a folder's one; compare no checksums."""
    folder = Path(folder)
    with reading(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: name one that holds a checkpoint.")
    if is_packed(folder):
        return open_shards(folder, check_folder(folder, checksums=False))
    index = index_of(folder)
    if index is None:
        with reading(folder):
            files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        files = [file for file in files if not SHARD_NAME.fullmatch(file.name)]
        single = [file for file in files if file.name == SINGLE] or files
        if not files and has_manifest(folder) and not (folder / CONFIG).exists():
            raise CheckpointError(f"{folder / CONFIG} is missing: copy the whole folder.")
        if len(single) != 1:
            raise CheckpointError(f"{folder} holds {_what_is_there(folder, files)}.")
        return Checkpoint([inside(folder, single[0].name)])
    weight_map = read_index(index)
    if os.path.lexists(folder / SINGLE) and SINGLE not in weight_map.values():
        raise CheckpointError(
            f"{folder} holds {SINGLE} beside {index.name}, which does not name it: remove the file "
            "or the index, whichever is not of this model (transformers reads the file)."
        )
    checkpoint = Checkpoint([inside(folder, name) for name in dict.fromkeys(weight_map.values())])
    for key, name in weight_map.items():
        if key not in checkpoint or checkpoint.info(key).file.name != name:
            raise CheckpointError(f"{index}: {name} does not hold {key}: a file is damaged.")
    return checkpoint


def warn_of_changes(folder: Path, manifest: Manifest) -> None:
    """Warn where config.json decides another computation than that of the model that was packed."""
    if not (folder / CONFIG).is_file():
        return
    file = inside(folder, CONFIG)
    changes = [
        f"{visible(key)} is {_short(now)} and was {_short(before)}"
        for key, before, now in _differences(manifest.config, read_json(file))
    ]
    if changes:
        warnings.warn(
            f"{file} changed since the model was packed: {listed(changes, separator='; ')}; "
            "restore it, or pack the model again.",
            UserWarning,
            stacklevel=2,
        )


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that decides the computation with its values; None where it is not set."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now} - _IDLE):
            inner = f"{key}.{name}".lstrip(".")
            yield from _differences(before.get(name), now.get(name), inner)
    elif before != now and repr(before) != repr(now):  # NaN differs from itself
        yield key, before, now


def _short(value: Any) -> str:
    return "not set" if value is None else f"{value!r:.40}"


def open_shards(folder: Path, manifest: Manifest) -> Checkpoint:
    """Open the tensors of a packed folder."""
    return Checkpoint([inside(folder, name) for name in manifest.shards])


def _what_is_there(folder: Path, files: list[Path]) -> str:
    """Say why a folder's safetensors files are no checkpoint."""
    if files:
        return f"{len(files)} safetensors files and no index that says which belong together"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return (
            f"no safetensors file but {ggufs[0].name}, and GGUF is not read: name the 16-bit model"
        )
    pickles = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if not pickles:
        return "no safetensors file"
    return f"no safetensors file but {pickles[0].name}, a pickle, which is never read: convert it"


class FolderCheck:
    """A check of a packed folder whose longest part runs while its files are loaded.

    What is small, which is all that a loader has to make sense of, is checked at once; the
    checksums of large tensors, whose bytes no loader trips over, are compared in threads, or never
    (`large`). `mark` is what the model's config says of the manifest; None reads config.json.
    """

    def __init__(self, folder: str | Path, mark: Mark | None = None, *, large: bool = True) -> None:
        self.folder = folder = Path(folder)
        manifest = read_manifest(folder, mark)
        if manifest is None:
            raise CheckpointError(
                f"{folder} was not packed by moe_qlora: it has no {CONFIG} that names a manifest."
            )
        self.manifest = manifest
        self._infos: dict[str, TensorInfo] = {}
        for name, shard in manifest.shards.items():
            self._infos |= _check_shard(folder, name, shard, manifest)
        for key in manifest.tensors:
            if key not in self._infos:
                raise CheckpointError(f"{folder / manifest.tensors[key].file} lacks {key}.")
        for name in manifest.experts:
            check_packed_weight(folder, name, manifest)
        # largest first, so that none is left over at the end
        order = sorted(self._infos.items(), key=lambda item: -item[1].nbytes)
        for key, info in order:
            if info.nbytes <= _SMALL:
                self._compare(key, checksum(info))
        self._pool = ThreadPoolExecutor(min(8, usable_cpus()))
        self._sums = {
            key: self._pool.submit(checksum, info)
            for key, info in order
            if large and info.nbytes > _SMALL
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> FolderCheck:
        return self  # transformers copies its quantizer for every tensor

    def _compare(self, key: str, digest: str) -> None:
        if digest != self.manifest.tensors[key].sha256:
            raise CheckpointError(
                f"{self._infos[key].file}: the bytes of {key} are not those that were written "
                "(their checksum differs): copy the file again."
            )

    def finish(self) -> None:
        """Wait for the checksums of large tensors."""
        try:
            for key, digest in self._sums.items():
                self._compare(key, digest.result())
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _check_shard(
    folder: Path, name: str, shard: ShardEntry, manifest: Manifest
) -> dict[str, TensorInfo]:
    """Return what a shard holds, having compared it with the manifest."""
    file = inside(folder, name)
    with reading(file):
        size = file.stat().st_size
    if size != shard.nbytes:
        raise CheckpointError(
            f"{file} has {size} bytes, {shard.nbytes} were written: copy it again."
        )
    if hashlib.sha256(header_bytes(file)).hexdigest() != shard.header_sha256:
        raise CheckpointError(f"{file}: its header is not the one that was written: copy it again.")
    infos = read_header(file)
    for key, info in infos.items():
        entry = manifest.tensors.get(key)
        if entry is None or entry.file != name:
            raise CheckpointError(f"{file} holds {key}, which the manifest does not know of there.")
        if DTYPES.get(entry.dtype) != info.dtype or entry.shape != info.shape:
            raise CheckpointError(
                f"{file}: {key} is {info.dtype} of shape {info.shape}, the manifest says "
                f"{entry.dtype} {entry.shape}."
            )
    return infos


def check_packed_weight(folder: Path, name: str, manifest: Manifest) -> None:
    """Check that a packed weight has the codes and statistics that its shape needs."""
    keys = tuple(key for key in manifest.tensors if key == name or key.startswith(f"{name}."))
    problem = next(form_problems(manifest, name, keys, manifest.experts[name].shape), None)
    if problem is not None:
        raise CheckpointError(f"{folder}: the packed weight {name} {problem}.")
