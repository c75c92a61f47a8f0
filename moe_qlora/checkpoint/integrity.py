"""Check a packed folder against its manifest; open any checkpoint folder.

Checksums find accidental damage. Further checks cover what decoding and loading rely on: the parts
of each packed weight, and their dtypes and sizes against the shapes of the model.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, visible
from ..layout import dtype_name, listed
from ..models.files import read_json, reading
from ..packing.bnb4bit import RECORD
from ..packing.codecs import codecs
from ..packing.int8 import SCALES
from ..packing.settings import CodecSettings, problems
from .manifest import (
    CONFIG,
    CONFIG_KEY,
    SHARD_NAME,
    Manifest,
    Mark,
    checksum,
    has_manifest,
    is_packed,
    read_manifest,
    reading_threads,
    shard_entry,
)
from .reader import (
    DTYPE_NAMES,
    DTYPES,
    SINGLE,
    Checkpoint,
    TensorInfo,
    index_of,
    inside,
    read_header,
    read_index,
)

_SMALL = 1 << 16

# Keys of config.json that do not change the forward.
_IDLE = {
    *(CONFIG_KEY, "transformers_weights"),
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
}
INT8_FORMAT = ".weight_format"  # tensor of bitsandbytes' int8 Linear layers


def check_folder(folder: str | Path, *, checksums: bool = True) -> Manifest:
    """Check a packed folder without its model; `checksums` compares those of large tensors too."""
    check = FolderCheck(folder, large=checksums)
    check.finish()
    return check.manifest


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open the files that manifest or index name, or the only one; compare no checksums."""
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
        files = [file for file in files if file.name == SINGLE] or files
        if not files and has_manifest(folder) and not (folder / CONFIG).exists():
            raise CheckpointError(f"{folder / CONFIG} is missing: copy the whole folder.")
        if len(files) != 1:
            others = [*folder.glob("*.gguf"), *folder.glob("*.bin"), *folder.glob("*.pt*")]
            found = f"{len(files)} safetensors files and no index of those that belong together"
            if not files:
                found = "no safetensors file"
            if not files and others:
                kind = "GGUF" if min(others).suffix == ".gguf" else "a pickle"
                found += f" but {min(others).name}, {kind}, which is never read"
            raise CheckpointError(f"{folder} holds {found}: name the model in safetensors.")
        return Checkpoint([inside(folder, files[0].name)])
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
    """Warn if config.json has changed since packing in a key that changes the forward."""
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


class FolderCheck:
    """A check of a packed folder that runs partly in threads while its files are loaded.

    Everything that a loader parses is checked at once: headers, and the bytes of small tensors. The
    checksums of large tensors are compared in threads, or never if `large` is False. `mark` is the
    mark in the model's config; None reads config.json.
    """

    def __init__(self, folder: str | Path, mark: Mark | None = None, *, large: bool = True) -> None:
        self.folder = folder = Path(folder)
        manifest = read_manifest(folder, mark)
        if manifest is None:
            raise CheckpointError(
                f"{folder} was not packed by moe_qlora: its {CONFIG} is missing, or names no "
                "manifest."
            )
        self.manifest = manifest
        self._infos: dict[str, TensorInfo] = {}
        for name, shard in manifest.shards.items():
            file = inside(folder, name)
            seen = shard_entry(file)
            if seen != shard:
                raise CheckpointError(
                    f"{file} has {seen.nbytes} bytes, {shard.nbytes} were written, or its header "
                    "is not the one that was written: copy it again."
                )
            self._infos |= read_header(file)
        for key in (*manifest.tensors, *self._infos):
            info, entry = self._infos.get(key), manifest.tensors.get(key)
            held = info and (info.file.name, DTYPE_NAMES[info.dtype], info.shape)
            said = entry and (entry.file, entry.dtype, entry.shape)
            if held != said:
                raise CheckpointError(
                    f"{folder}: the shards hold {key} as {held}, the manifest says {said}: copy "
                    "the whole folder again."
                )
        for name, expert in manifest.experts.items():
            check_packed_weight(folder, name, manifest)
            for alias in manifest.tensors.keys() & expert.aliases - manifest.experts.keys():
                raise CheckpointError(
                    f"{folder}: {alias} is a tensor, and an alias of the packed weight {name}."
                )
        # largest first, for threads that end together
        order = sorted(self._infos.items(), key=lambda item: -item[1].nbytes)
        for key, info in order:
            if info.nbytes <= _SMALL:
                self._compare(key, checksum(info))
        self._pool = ThreadPoolExecutor(reading_threads())
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


def check_packed_weight(folder: Path, name: str, manifest: Manifest) -> None:
    """Check the codes and statistics of a packed weight against its shape."""
    keys = tuple(key for key in manifest.tensors if key == name or key.startswith(f"{name}."))
    problem = next(form_problems(manifest, name, keys, manifest.experts[name].shape), None)
    if problem is not None:
        raise CheckpointError(f"{folder}: the packed weight {name} {problem}.")


def canonical_name(model: Any, name: str, names: Container[str]) -> str | None:
    """Return the name with or without `base_model_prefix`, whichever is in `names`, or None."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = (name, prefix + name, name.removeprefix(prefix))
    return next((candidate for candidate in candidates if candidate in names), None)


def packed_names(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the keys of each packed weight, an expert's or a Linear layer's, by its name."""
    keys = manifest.tensors
    owners = set(manifest.experts)
    for key in keys:
        if RECORD in key:
            owners.add(key.partition(RECORD)[0])
        elif key.endswith(SCALES) and key.removesuffix(SCALES) not in owners:
            owners.add(f"{key.removesuffix(SCALES)}.weight")
    names = {}
    for name in owners & keys.keys():
        module = name.removesuffix(".weight")
        int8 = {module + SCALES, module + INT8_FORMAT} if module != name else set()
        names[name] = tuple(
            key for key in keys if key == name or key.startswith(f"{name}.") or key in int8
        )
    return names


def parts_of(name: str, keys: tuple[str, ...], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return a packed weight's tensors by key suffix; ValueError for another int8 layout."""
    form = next((key for key in keys if key.endswith(INT8_FORMAT)), None)
    if form is not None and not (value := read(form)).is_meta and value.flatten().tolist() != [0]:
        raise ValueError(f"has another {INT8_FORMAT} than 0, which stands for rows")
    ends = {SCALES if key.endswith(SCALES) else key.removeprefix(name): key for key in keys}
    return {end: read(key) for end, key in ends.items() if key != form}


def form_problems(
    manifest: Manifest, name: str, keys: tuple[str, ...], shape: tuple[int, ...]
) -> Iterator[str]:
    """Yield missing tensors of a packed weight, and those of a wrong dtype or size."""

    def blank(key: str) -> Tensor:
        entry = manifest.tensors[key]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    yield from problems(parts_of(name, keys, blank), shape, manifest.settings_of(name))


def settings_problem(manifest: Manifest, settings: CodecSettings) -> str | None:
    """Return the first contradiction between the manifest and config.json's settings."""
    saved, asked = manifest.settings.to_dict(), settings.to_dict()
    for key in ("kind", "double_quant", "blocksize", "storage_dtype"):
        if saved[key] != asked[key]:
            return f"the manifest says {key}={saved[key]!r}, config.json {asked[key]!r}"
    return None


def model_problems(manifest: Manifest, model: Any) -> Iterator[str]:
    """Yield differences between a packed folder and the meta model, each as a sentence's start.

    The model may have another class than the saved one; then missing tensors are no difference.
    """
    from ..packing.parametrize import is_packed_linear  # imports bitsandbytes, which prints

    state = model.state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    owners = {f"{n}.weight": m for n, m in model.named_modules() if hasattr(m, "out_features")}
    packed = packed_names(manifest)
    # In a load, bitsandbytes has replaced its layers already, if its config packs any.
    linears = {name for name, module in owners.items() if is_packed_linear(module)}
    owned = {key for keys in packed.values() for key in keys}
    stored = set()
    ends = (INT8_FORMAT, *(end for codec in codecs() for end in codec.ends))
    for name, entry in manifest.tensors.items():
        if name in owned and name not in packed:
            continue
        own = canonical_name(model, name, shapes)
        if own is None:
            if name.endswith(ends) or RECORD in name:
                yield f"{name} belongs to no packed weight"
            continue
        stored.add(own)
        if name in manifest.experts:
            continue
        plain = name not in packed
        floats = DTYPES[entry.dtype].is_floating_point == state[own].is_floating_point()
        if linears and not plain and own not in linears:
            yield f"{name} is packed, and by its config it is not"
        elif not plain and own not in owners:
            yield f"{name} is packed, and the manifest does not name it"
        elif plain and own not in linears and not floats:
            yield f"{name} is {entry.dtype}, the model's is {dtype_name(state[own].dtype)}"
        elif not plain:
            why = next(form_problems(manifest, name, packed[name], shapes[own]), None)
            if why is not None:
                yield f"{name} {why}"
        elif entry.shape != shapes[own]:
            yield f"{name} has the shape {entry.shape}, the model's config gives {shapes[own]}"
    classes = manifest.config.get("architectures")
    if isinstance(classes, list) and type(model).__name__ in classes:
        # A folder of this very class has all tensors but tied ones.
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        tied |= {alias for entry in manifest.experts.values() for alias in entry.aliases}
        ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
        for name in shapes.keys() - tied - stored:
            if not (ignored and re.search(ignored, name)):
                yield f"{name} is missing"
