"""Packed folders (FORMAT.md): of a model in memory, and of a checkpoint, parameter by parameter.

`save_pretrained`: the stock method splits fused experts again, which packed codes do not allow, and
overwrites files. Here tensors are written under the model's names, and no file of the folder
changes before the whole new model is on disk.

`quantize_checkpoint`: the checkpoint is in 16 bit, or prequantized: then rows are dequantized as
they are read. Apart from shard boundaries, the folder equals that of a load under `enabled()` and
`save_pretrained`.
"""

from __future__ import annotations

import copy
import glob
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..detection.detect import detect
from ..errors import AdapterError, CheckpointError, ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name, listed
from ..models import named
from ..models.files import read_json
from ..packing import parametrize
from ..packing.bnb4bit import SCALES
from ..packing.codecs import codec_of
from ..packing.decoders import Params4bit
from ..packing.selection import is_skipped
from ..packing.settings import CodecSettings, key_ends, packed_nbytes
from ..progress import Progress, reporting
from ..versions import installed_version
from ..world import NOT_GIVEN, WholeTensor, World, world, world_of
from .base import Base, auxiliary_files, copy_files, describe_source, resolve_checkpoint
from .manifest import (
    CONFIG,
    CONFIG_KEY,
    INT8_FORMAT,
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
from .rows import PackingPlan, filled, kept_dtypes, packed_linears, packing_spec, slot_for
from .staging import (
    ShardWriter,
    absolute,
    check_new,
    discard,
    move_files,
    new_folder,
    plan_shards,
    staging,
)
from .training_codec import from_config

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

    Arguments are the stock method's; `variant` and `distributed_checkpoint` are not supported, and
    those that choose a layout have no meaning. `state_dict=None` says under ZeRO-3 that the first
    rank was given one. Of a model with adapters that transformers itself has loaded, only these are
    saved, as the stock method does.

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


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    quantization_config: Any,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    max_shard_size: int | str = "5GB",
    progress: bool | Progress | None = None,
    trust_remote_code: bool = False,
) -> Manifest:
    """Pack a checkpoint into a new folder, which loads under `enabled()`.

    Memory use is one parameter at a time; for a fused expert weight, a few experts and the packed
    weight.

    Args:
        source: Folder of a 16-bit checkpoint in safetensors, or of a prequantized one in a format
            that `checkpoint/prequantized.py` reads.
        destination: New folder; nothing is overwritten.
        quantization_config: `BitsAndBytesConfig` or its dict.
        dtype: Of what is not packed, and of decoded weights; None is the checkpoint's own.
        device: Where to pack; None is a GPU where there is one. Blocks are the same everywhere but
            for rounding of ties.
        max_shard_size: Bytes, or such as "5GB".
        progress: True shows a bar; a callable gets (parameters done, in all, next one's name).
        trust_remote_code: Run model code that the checkpoint brings.

    Returns:
        The manifest of the new folder.

    Raises:
        CheckpointError: The source is quantized in a way that is not read, or is damaged,
            parameters are missing, or the destination exists.
        ConfigError: The config cannot be followed.
        NonFiniteWeightError: A weight that is packed holds NaN or inf.
        UnsupportedWeightError: An expert weight cannot be packed.
    """
    folder, out = absolute(source), absolute(destination)
    check_new(out)
    config = copy_config(quantization_config)
    model = build_model(folder, dtype, trust_remote_code)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device is {str(device)!r}, which cannot be used: {reason}") from error
    opened = open_to_pack(folder, model, config, place)
    base, plan = opened.base, opened.plan
    with closing(base), new_folder(out) as work, reporting(progress, "Packing", "Packed") as tell:
        copy_files(auxiliary_files(folder), work)
        model.config.quantization_config = config
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(work)
        if not read_json(work / CONFIG).get("quantization_config"):
            raise CheckpointError(f"{type(model.config).__name__} does not store its quantization.")
        if model.can_generate() and not (work / "generation_config.json").exists():
            model.generation_config.save_pretrained(work)
        shards, entries = _write(opened, place, work, max_shard_size, tell)
        origin = describe_source(folder, base.checkpoint.files)
        return finish_packed(work, shards, entries, plan.settings, source=origin)


def copy_config(config: Any) -> Any:
    """Return a copy of a `BitsAndBytesConfig` or of its dict, as the class."""
    from transformers import BitsAndBytesConfig

    if isinstance(config, Mapping):
        return BitsAndBytesConfig.from_dict(dict(config))
    if not isinstance(config, BitsAndBytesConfig):
        raise ConfigError(
            f"quantization_config is {type(config).__name__}: give a BitsAndBytesConfig or a dict."
        )
    return copy.deepcopy(config)


def build_model(folder: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> Any:
    """Build the checkpoint's model on meta."""
    source = resolve_checkpoint(folder, trust_remote_code)
    if dtype is not None:
        source.config.dtype = dtype
        for name in source.config.sub_configs:
            if getattr(source.config, name, None) is not None:
                getattr(source.config, name).dtype = dtype
    # As in a load: weights are tied last, after the unpacked layers are chosen.
    with init.no_tie_weights():
        return named.build(source, trust_remote_code=trust_remote_code)


class Opened(NamedTuple):
    """A checkpoint that is to be packed."""

    base: Base
    plan: PackingPlan
    dtypes: dict[str, torch.dtype]  # of all parameters, were they not packed
    linears: dict[str, bool]  # weights of Linear layers that are packed: see `packed_linears`
    tied: dict[str, str]  # names that are stored under another
    left_out: set[str]  # names that are not written


def open_to_pack(folder: Path, model: Any, config: Any, device: torch.device) -> Opened:
    """Open a checkpoint, given its model on meta, whose Linear layers are replaced."""
    plan = packing_spec(model, config, model.dtype, None)
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    dtype, fp32 = model.dtype, kept_dtypes(model, model.dtype)
    base = Base(folder, model, device=device)
    from_config(model, config)
    linears = packed_linears(model)
    model.tie_weights()
    dtypes = {
        name: plan.dtypes.get(name) or fp32(name) or (dtype if name in linears else stored)
        for name, stored in own.items()
    }
    disk = base.layout.by_name
    all_tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {
        name: source
        for name, source in all_tied.items()
        if not base.stored_apart([n for n in (name, source) if n in disk])
    }
    left_out = {name for name, source in tied.items() if source in disk}
    left_out |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [
        name
        for name in sorted(model.state_dict().keys() - disk.keys() - left_out - tied.keys())
        if not any(re.search(pattern, name) for pattern in optional)
    ]
    if missing:
        raise CheckpointError(
            f"{folder} has no tensor for {listed(missing)}, which a {type(model).__name__} needs: "
            "config.json is of another model."
        )
    if not (disk.keys() - left_out) & plan.params.keys():
        skipped = config.llm_int8_skip_modules
        if skipped and len(detect(model)):
            raise CheckpointError(
                f"{folder}: llm_int8_skip_modules ({', '.join(skipped)}) leaves every expert "
                "weight unpacked; name fewer."
            )
        raise CheckpointError(
            f"{folder}: a {type(model).__name__} has no expert weights to pack; load it with "
            "transformers and its own bitsandbytes settings."
        )
    return Opened(base, plan, dtypes, linears, tied, left_out)


def _write(
    opened: Opened, device: torch.device, work: Path, max_shard_size: int | str, tell: Progress
) -> tuple[list[Path], dict[str, PackedEntry]]:
    base, plan, dtypes, linears, tied, left_out = opened
    steps = [
        (group, names)
        for group in base.layout.groups
        if (names := [name for name in group.shapes if name not in left_out])
    ]
    packed = plan.params.keys() | linears.keys()
    cpu, sizes, entries = torch.device("cpu"), dict[int, int](), dict[str, PackedEntry]()
    for index, (group, names) in enumerate(steps):
        shapes = {name: group.shapes[name] for name in names}
        sizes[index] = sum(
            packed_nbytes(shape, plan.settings)
            if name in packed
            else prod(shape) * dtypes[name].itemsize
            for name, shape in shapes.items()
        )
        for name in (name for name in names if name in plan.params):
            aliases = {*plan.params[name].names, *(n for n, other in tied.items() if other == name)}
            shape, dtype = tuple(plan.params[name].shape), dtype_name(dtypes[name])
            entries[name] = PackedEntry(shape, dtype, tuple(sorted(aliases - {name})))
    shards = []
    for number, indices in enumerate(plan_shards(sizes, max_shard_size), 1):
        path = work / f"shard-{number:05d}.safetensors"
        shards.append(path)
        ends, later, slots = key_ends(plan.settings), [], {}
        for group, names in (steps[index] for index in indices):
            for name in names:
                later += [f"{name}{end}" for end in ends]
                later += [f"{name.rpartition('.')[0]}{end}" for end in (SCALES, INT8_FORMAT)]
                place = device if name in packed or base.decodes(group) else cpu
                slots[name] = slot_for(base.model, plan, linears, name, dtypes[name], place)
        with ShardWriter(path, {}, {"format": "pt"}, later) as shard:
            groups = [steps[index][0] for index in indices]
            weights = filled(base.checkpoint, base.layout, groups, slots)
            for index in indices:
                names = steps[index][1]
                tell(index, len(steps), names[0])
                for name, weight in itertools.islice(weights, len(names)):
                    for key, tensor in _entries(name, weight, dtypes[name], name in plan.params):
                        shard.write(key, tensor)
                    del weight  # before the next is packed
    tell(len(steps), len(steps), "")
    return shards, entries


def _entries(
    name: str, weight: PackedWeight | Tensor, dtype: torch.dtype, is_expert: bool
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, Tensor):
        yield name, weight
        return
    yield name, weight.codes
    codec = codec_of(weight.kind)
    if is_expert or not codec.loads_in_8bit:
        for end, value in codec.entries(replace(weight, dtype=dtype)).items():
            yield f"{name}{end}", value
    else:
        module = name.rpartition(".")[0]
        yield f"{module}{SCALES}", weight.absmax
        # bitsandbytes' number of the row-major layout
        yield f"{module}{INT8_FORMAT}", torch.tensor(0, dtype=torch.uint8)
