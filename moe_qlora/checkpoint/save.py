"""`save_pretrained` of a model with packed experts: a packed folder (FORMAT.md).

The stock method splits fused experts again, which packed codes do not allow, and overwrites files.
Here tensors are written under the model's names, and no file of the folder changes before the whole
new model is on disk.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import AdapterError, CheckpointError, ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name
from ..models.files import read_json
from ..packing import parametrize
from ..packing.decoders import Params4bit
from ..packing.selection import is_skipped
from ..packing.settings import CodecSettings
from ..versions import installed_version
from ..world import NOT_GIVEN, WholeTensor, World, world, world_of
from .manifest import (
    CONFIG,
    CONFIG_KEY,
    Manifest,
    PackedEntry,
    check_experts,
    is_packed,
    is_save_file,
    manifest_id,
    shard_entry,
    shard_names,
    tensor_entries,
)
from .reader import SINGLE, plain_weights
from .rows import kept_dtypes
from .staging import ShardWriter, absolute, discard, move_files, new_folder, plan_shards, staging

# Glob patterns for the hub's client; only files of a packed save have hashes of these lengths.
_SHARDS, _MANIFESTS = "model-????????-?????-of-?????.safetensors", f"moe_qlora-{'?' * 16}.json"


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = NOT_GIVEN,
    push_to_hub: bool = False,
    max_shard_size: int | str = "5GB",
    variant: str | None = None,
    token: str | bool | None = None,
    **kwargs: Any,
) -> None:
    """Save the model with its experts packed; `from_pretrained` under `enabled()` reads it back.

    A new folder appears whole or not at all. In one that exists, the model that was there stays
    valid until the new config.json replaces the old one. Only then its weight files are removed:
    packed shards, or a 16-bit checkpoint's model.safetensors and what its index names. A second
    process that saves into the folder meanwhile is refused.

    In a distributed run the first rank writes. Where ranks hold shares of the model, all of them
    must call this: tensors are gathered one at a time, and all return, or raise the same error,
    once the folder is complete.

    Args:
        self: The model. With adapters that transformers itself has loaded, only these are saved, as
            the stock method does.
        save_directory: The folder.
        is_main_process: False writes nothing, as does any but the first process of a distributed
            run.
        state_dict: What to save instead of `self.state_dict()`; a dictionary, or None, which under
            ZeRO-3 says that the first rank was given one.
        push_to_hub: Upload what was written, when all of it is.
        max_shard_size: Bytes, or such as "5GB".
        variant: Not supported.
        token: For the upload.
        **kwargs: As the stock method takes them; those that choose a layout have no meaning here.

    Raises:
        AdapterError: PEFT layers are in the model.
        CheckpointError: The folder cannot be written, a weight is on no device, or another rank
            was lost while tensors were gathered.
        ConfigError: `variant` or `distributed_checkpoint` is asked for.
    """
    if getattr(self, "_hf_peft_config_loaded", False):
        stock_dict = None if state_dict is NOT_GIVEN else state_dict
        options = (is_main_process, stock_dict, push_to_hub, max_shard_size, variant, token)
        type(self).save_pretrained(self, save_directory, *options, **kwargs)
        return
    unsupported = {"variant": variant, "distributed": kwargs.get("distributed_checkpoint")}
    for name, value in unsupported.items():
        if value:
            raise ConfigError(f"{name}={value!r} is not supported for a model with packed experts.")
    ranks = world_of(self)
    state_dict = ranks.state_dict_to_save(self, state_dict)
    if state_dict is None:
        return
    if not ranks.is_divided(self, state_dict) and not (ranks.first and is_main_process):
        return
    tensors = _tensors_to_save(self, state_dict, ranks)
    folder = absolute(os.fspath(save_directory))
    stock_kwargs = {key: kwargs[key] for key in ("save_peft_format",) if key in kwargs}

    def write(read: Callable[[str], Tensor]) -> None:
        if not is_main_process:
            return
        with _target(folder) as work:
            _write_auxiliary_files(self, work, stock_kwargs)
            _write_packed(work, self, tensors, read, max_shard_size)
            written = [str(f.relative_to(work).as_posix()) for f in work.rglob("*") if f.is_file()]
        if push_to_hub:
            from huggingface_hub import HfApi

            api, named = HfApi(token=token), kwargs.get("repo_id") or folder.name
            private = {key: kwargs[key] for key in ("private",) if key in kwargs}
            api.upload_folder(
                repo_id=api.create_repo(named, exist_ok=True, **private).repo_id,
                folder_path=folder,
                allow_patterns=[glob.escape(file) for file in sorted(written)],
                delete_patterns=[_SHARDS, _MANIFESTS],
                commit_message=kwargs.get("commit_message") or "Upload model",
                create_pr=kwargs.get("create_pr", False),
            )

    ranks.gather_to_first(tensors, write, f"Saving to {folder}")


def _tensors_to_save(
    model: nn.Module, state_dict: Mapping[str, Any], ranks: World
) -> dict[str, WholeTensor]:
    host: Any = model
    tied: Mapping[str, str] = getattr(host, "all_tied_weights_keys", None) or {}
    ignored = getattr(host, "_keys_to_ignore_on_save", None) or ()
    packed = {f"{module}.{name}".lstrip(".") for module, _, name in parametrize.iter_packed(model)}
    aliases = {name for name in packed if tied.get(name) in packed}
    saved: dict[str, WholeTensor] = {}
    for key, tensor in ranks.whole_tensors(model, state_dict).items():
        if ".lora_" in key or ".base_layer." in key or ".modules_to_save." in key:
            raise AdapterError(
                f"The model holds adapters of PEFT ({key}): save these with the PeftModel's "
                "save_pretrained, or take them off first with unload or merge_and_unload."
            )
        if ".parametrizations." in key:
            raise CheckpointError(
                f"{key} was packed by bitsandbytes' own helper, which cannot be saved: pack the "
                "model with moe_qlora.quantize_experts."
            )
        source = tied.get(key)
        if source is not None and _are_tied(model, state_dict, key, source):
            continue
        if key in ignored or any(key == name or key.startswith(f"{name}.") for name in aliases):
            continue
        if not isinstance(tensor.source, Tensor):
            kind = type(tensor.source).__name__
            raise CheckpointError(f"{key} is {kind} and no tensor: leave it out of state_dict.")
        if tensor.source.is_meta:
            raise CheckpointError(
                f"{key} is on the meta device and cannot be saved: load the model without "
                "offloading it."
            )
        saved[key] = tensor
    missing = packed - aliases - saved.keys()
    if missing:
        raise CheckpointError(f"The state dict to save lacks the packed weight {min(missing)}.")
    return saved


def _are_tied(model: nn.Module, state_dict: Mapping[str, Any], key: str, source: str) -> bool:
    """True if two entries of the state dict come from one tied parameter; copies count too."""
    one, other = state_dict.get(key), state_dict.get(source)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    sharded = hasattr(one, "full_tensor") or hasattr(one, "ds_id")
    if not sharded and one.data_ptr() == other.data_ptr():
        return True
    # Gathering makes two tensors of one parameter. Shares are not compared: some may be empty.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if key not in parameters or parameters[key] is not parameters.get(source):
        return False
    return sharded or torch.equal(one, other)


@contextmanager
def _target(folder: Path) -> Iterator[Path]:
    """Yield a staging folder; at the end it becomes `folder`, or its files move into it."""
    if not folder.is_dir():
        with new_folder(folder) as work:
            yield work
        return
    folder = folder.resolve()
    with staging(folder, inside=True) as work:
        yield work
        outdated: list[Path] = []
        with suppress(CheckpointError):  # a damaged config.json does not name its model's files
            if (folder / CONFIG).exists() and not is_packed(folder):
                outdated = plain_weights(folder)
        outdated += [file for file in folder.iterdir() if is_save_file(file.name)]
        new = {file.name for file in work.iterdir()}
        # the new config.json turns the old model into the new one
        move_files(work, folder, CONFIG)
        discard(*(file for file in outdated if file.name not in new))


def _write_auxiliary_files(model: Any, work: Path, kwargs: dict[str, Any]) -> None:
    quantizer, own = model.hf_quantizer, model.config.__dict__
    # The stock method gets no weights from the quantizer, and has no distributed_config by which it
    # would wait for all ranks to gather the model.
    quantizer.get_state_dict_and_metadata = lambda model: ({}, {})
    hidden = {key: own.pop(key) for key in ("distributed_config",) if key in own}
    try:
        type(model).save_pretrained(model, work, save_original_format=False, **kwargs)
    finally:
        del quantizer.get_state_dict_and_metadata
        own |= hidden
    (work / SINGLE).unlink(missing_ok=True)
    config = read_json(work / CONFIG)
    # The stock method notes the first parameter's dtype, to which a reload would cast all others.
    # That of most plain weights stands there instead, without those that the class has in fp32.
    fp32 = kept_dtypes(model, torch.bfloat16)
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and not isinstance(parameter, Params4bit)
        if plain and not fp32(name):
            sizes[dtype_name(parameter.dtype)] += parameter.numel()
    config["dtype"] = max(sizes, key=sizes.__getitem__, default=config.get("dtype"))
    (work / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _write_packed(
    work: Path,
    model: Any,
    tensors: Mapping[str, WholeTensor],
    read: Callable[[str], Tensor],
    max_shard_size: int | str,
) -> None:
    # Records are small and first of all read: their lengths are unknown before.
    records = {key: read(key) for key, tensor in tensors.items() if tensor.shape is None}
    shapes = {
        key: (tensor.dtype, tuple(records[key].shape) if tensor.shape is None else tensor.shape)
        for key, tensor in tensors.items()
    }
    nbytes = {key: dtype.itemsize * prod(shape) for key, (dtype, shape) in shapes.items()}
    files = []
    for number, keys in enumerate(plan_shards(nbytes, max_shard_size), 1):
        files.append(work / f"shard-{number:05d}.safetensors")
        with ShardWriter(files[-1], {key: shapes[key] for key in keys}, {"format": "pt"}) as writer:
            for key in keys:
                writer.write(key, records[key] if key in records else read(key))
    entries, settings = _packed_entries(model)
    experts = {name: entry for name, entry in entries.items() if name in tensors}
    # Linear layers that are unpacked here but that `from_pretrained` would pack
    quantizer: Any = model.hf_quantizer
    skips = quantizer.get_modules_to_not_convert(
        model, quantizer.quantization_config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    stock = world().stock_class
    plain = [name for name, module in model.named_modules() if stock(module) is nn.Linear]
    plain = [] if all(is_skipped(name, skips) for name in plain) else plain
    finish_packed(work, files, experts, settings, plain)


def finish_packed(
    work: Path,
    files: list[Path],
    experts: Mapping[str, PackedEntry],
    settings: CodecSettings,
    plain: Sequence[str] = (),
    source: dict[str, Any] | None = None,
) -> Manifest:
    """Name the shards of a save, and write its manifest and config.json.

    `work` contains config.json as transformers writes it. `plain` are unpacked Linear layers that a
    reload would pack: they are added to `llm_int8_skip_modules`.
    """
    codec = settings.to_dict()
    tensors = tensor_entries(files)
    identity = manifest_id(tensors, codec, experts)
    shards = [shard_entry(file) for file in files]
    names = shard_names(identity, shards)
    new_name = {file.name: name for file, name in zip(files, names, strict=True)}
    for file in files:
        file.rename(work / new_name[file.name])
    config = read_json(work / CONFIG)
    quantization = dict(config.get("quantization_config") or {})
    if plain:
        old = [n for n in quantization.get("llm_int8_skip_modules") or [] if n not in plain]
        exact = [rf"{re.escape(name)}$" for name in plain]
        quantization["llm_int8_skip_modules"] = list(dict.fromkeys([*old, *exact]))
    config["quantization_config"] = quantization
    for key in (CONFIG_KEY, "transformers_weights"):
        config.pop(key, None)
    manifest = Manifest(
        id=identity,
        # A plain checkout on the path has no metadata to ask.
        written_by=f"moe_qlora {installed_version('moe-qlora') or '(not installed)'}",
        model_type=str(config.get("model_type", "")),
        codec=codec,
        experts=dict(experts),
        shards=dict(zip(names, shards, strict=True)),
        tensors={key: replace(entry, file=new_name[entry.file]) for key, entry in tensors.items()},
        config=config,
        source=source,
    )
    check_experts(work, manifest)
    (work / manifest.file_name).write_bytes(manifest.to_bytes())
    (work / CONFIG).write_bytes(manifest.config_bytes())
    return manifest


def _packed_entries(model: nn.Module) -> tuple[dict[str, PackedEntry], CodecSettings]:
    weights: dict[int, tuple[PackedWeight, list[str]]] = {}  # tied names share a parameter
    for module_name, module, leaf in parametrize.iter_packed(model):
        key, name = id(parametrize.original_of(module, leaf)), f"{module_name}.{leaf}".lstrip(".")
        weights.setdefault(key, (parametrize.read_packed(module, leaf), []))[1].append(name)
    entries: dict[str, PackedEntry] = {}
    settings: dict[CodecSettings, str] = {}
    for weight, tied in weights.values():
        own = CodecSettings.of(weight)
        if not own.codec.is_kept:
            settings.setdefault(own, tied[0])
        for name in tied:
            aliases = tuple(other for other in tied if other != name)
            codec = own.to_dict() if own.codec.is_kept else None
            dtype = dtype_name(weight.dtype)
            entries[name] = PackedEntry(tuple(weight.shape), dtype, aliases, codec)
    if not settings:
        own = CodecSettings.from_config(cast(Any, model).hf_quantizer.quantization_config)
        settings[replace(own, skip_modules=())] = ""
    (first, _), *others = settings.items()
    if others:
        other, name = others[0]
        raise CheckpointError(
            f"{name} is packed otherwise than the weights before it ({other.to_dict()} and "
            f"{first.to_dict()}), and a folder holds one kind: pack the model again."
        )
    return entries, first
