"""Packed folders (FORMAT.md): of a model in memory, and of a checkpoint, parameter by parameter.

The stock `save_pretrained` splits fused experts again, which packed codes do not allow, and
overwrites files. Here tensors are written under the model's names, and no file of the folder
changes before the whole new model is on disk. Apart from shard boundaries, `quantize_checkpoint`
writes what a load under `enabled()` and `save_pretrained` write.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save

from ..errors import AdapterError, CheckpointError, ConfigError, first_line
from ..layout import dtype_name, listed
from ..models import named
from ..packing import parametrize
from ..packing.bnb4bit import SCALES
from ..packing.codecs import codec_of
from ..packing.decoders import Params4bit
from ..packing.settings import CodecSettings, packed_tensors
from ..progress import Progress, reporting
from ..world import NOT_GIVEN, WholeTensor, world
from .conversion import Base, auxiliary_files, copy_files, resolve_checkpoint
from .folder import absolute, check_new, discard, move_files, new_folder, staging
from .manifest import CONFIG, INT8_FORMAT, OURS, Manifest, PackedEntry, missing_names, write_packed
from .rows import PackingPlan, filled, kept_dtypes, packed_linears, packing_spec, slot_for
from .training_codec import from_config


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
    valid until the new config.json replaces the old one. A second process that saves into the
    folder meanwhile is refused.

    In a distributed run the first rank writes. Where ranks hold shares of the model, all must call
    this: tensors are gathered one at a time, and all return, or raise the same error, at the end.

    Arguments are the stock method's. `state_dict=None` says under ZeRO-3 that the first rank was
    given one. Of a model with adapters that transformers itself has loaded, only these are saved.
    """
    if getattr(self, "_hf_peft_config_loaded", False):
        stock_dict = None if state_dict is NOT_GIVEN else state_dict
        options = (is_main_process, stock_dict, push_to_hub, max_shard_size, variant, token)
        type(self).save_pretrained(self, save_directory, *options, **kwargs)
        return
    if variant or kwargs.get("distributed_checkpoint"):
        raise ConfigError("variant and distributed_checkpoint are not for packed experts.")
    if push_to_hub:
        raise ConfigError("push_to_hub=True is not for packed experts: call model.push_to_hub.")
    ranks = world()
    state_dict = ranks.state_dict_to_save(self, state_dict)
    writes = ranks.is_first() and is_main_process
    if state_dict is None or not (writes or ranks.is_divided(state_dict)):
        return
    tensors = _tensors_to_save(self, state_dict)
    folder = absolute(os.fspath(save_directory))

    def write(read: Callable[[str], Tensor]) -> None:
        if not is_main_process:
            return
        place = folder.resolve() if folder.is_dir() else None
        with new_folder(folder) if place is None else staging(place, inside=True) as work:
            _write_config(self, work)
            values = ((key, read(key)) for key in tensors)
            write_packed(work, values, max_shard_size, *_packed_entries(self, tensors), self)
            if place is not None:
                new = {file.name for file in work.iterdir()}
                old = [f for f in place.iterdir() if OURS.fullmatch(f.name) and f.name not in new]
                move_files(work, place, CONFIG)  # which turns the old model into the new one
                discard(*old)

    ranks.gather_to_first(tensors, write, f"Saving to {folder}")


def _tensors_to_save(model: Any, state_dict: Mapping[str, Any]) -> dict[str, WholeTensor]:
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    # whether parameters are one, which copies and shares of them do not tell
    own = dict(model.named_parameters(remove_duplicate=False))
    left_out = {k for k, one in tied.items() if k in own and own[k] is own.get(one)}
    left_out |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    packed = {f"{module}.{name}".lstrip(".") for module, _, name in parametrize.iter_packed(model)}
    aliases = {name for name in packed if tied.get(name) in packed}
    saved: dict[str, WholeTensor] = {}
    for key, tensor in world().whole_tensors(model, state_dict).items():
        if ".lora_" in key or ".base_layer." in key or ".modules_to_save." in key:
            raise AdapterError(
                f"The model holds adapters of PEFT ({key}): save these with the PeftModel's "
                "save_pretrained, or take them off first with unload or merge_and_unload."
            )
        if key in left_out or any(key == name or key.startswith(f"{name}.") for name in aliases):
            continue
        if getattr(tensor.source, "is_meta", True):
            raise CheckpointError(
                f"{key} is no tensor, or on the meta device: load the model without offloading it."
            )
        saved[key] = tensor
    for name in packed - aliases:
        weight = parametrize.read_packed(*parametrize.owner_of(model, name))
        for end in packed_tensors(weight.shape, CodecSettings.of(weight)):
            if name + end not in saved:
                raise CheckpointError(f"The state dict to save lacks {name + end}.")
    return saved


def _write_config(model: Any, work: Path) -> None:
    """Write config.json, generation_config.json and code of the model, as the stock method does."""
    config = copy.deepcopy(model.config)
    vars(config).pop("distributed_config", None)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    # The stock method notes the first parameter's dtype, to which a reload would cast all others.
    # That of most plain weights stands there instead, without those that the class has in fp32.
    fp32, sizes = kept_dtypes(model, torch.bfloat16), Counter[torch.dtype]()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not isinstance(parameter, Params4bit):
            sizes[parameter.dtype] += 0 if fp32(name) else parameter.numel()
    config.dtype = dtype_name(max(sizes, key=sizes.__getitem__, default=model.dtype))
    if model._auto_class is not None:
        custom_object_save(model, work, config=config)
    config.save_pretrained(work)
    if model.can_generate():
        model.generation_config.save_pretrained(work)


def _packed_entries(
    model: Any, stored: Mapping[str, Any]
) -> tuple[dict[str, PackedEntry], CodecSettings]:
    """Return the packed experts among the stored tensors, and how most of them are packed."""
    asked = CodecSettings.from_config(model.hf_quantizer.quantization_config)
    places = {f"{name}.{leaf}".lstrip("."): (module, leaf)
              for name, module, leaf in parametrize.iter_packed(model)}  # fmt: skip
    weights = {name: parametrize.read_packed(*place) for name, place in places.items()}
    owners = {name: id(parametrize.original_of(*place)) for name, place in places.items()}
    forms = {name: CodecSettings.of(weight) for name, weight in weights.items()}
    first = (form for form in forms.values() if not form.codec.is_kept)
    settings, entries = next(first, replace(asked, skip_modules=())), {}
    for name in filter(stored.__contains__, weights):
        weight, form = weights[name], forms[name]
        tied = tuple(n for n in owners if n != name and owners[n] == owners[name])
        own = None if form == settings else form.to_dict()
        entries[name] = PackedEntry(tuple(weight.shape), dtype_name(weight.dtype), tied, own)
    return entries, settings


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
    """Pack a checkpoint into a new folder, which loads under `enabled()`; return its manifest.

    The source is a 16-bit or prequantized folder in safetensors, the destination a new one. `dtype`
    is that of plain and of decoded weights (None: the checkpoint's own), `device` where to pack
    (None: a GPU where there is one). `progress`: True shows a bar; a callable gets (parameters
    done, in all, the last one's name). Memory use is a few experts, or one other parameter.
    """
    folder, out = absolute(source), absolute(destination)
    check_new(out)
    config = copy_config(quantization_config)
    model = build_model(folder, dtype, trust_remote_code)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device is {str(device)!r}: {first_line(error)}.") from error
    base, plan, dtypes, linears, tied, names = open_to_pack(folder, model, config, place)
    slots = {}
    for name in names:
        on_gpu = name in plan.params or name in linears or base.decodes(base.layout.by_name[name])
        own = place if on_gpu else torch.device("cpu")
        slots[name] = slot_for(model, plan, linears, name, dtypes[name], own)
    groups = [group for group in base.layout.groups if slots.keys() & group.shapes]

    def packed() -> Iterator[tuple[str, Tensor]]:
        weights = filled(base.checkpoint, base.layout, groups, slots)
        for number, (name, weight) in enumerate(weights):
            tell(number, len(names), name)
            if isinstance(weight, Tensor):
                yield name, weight
                continue
            parts, module = codec_of(weight.kind).entries(weight), name.removesuffix(".weight")
            int8 = name not in plan.params and SCALES in parts
            if int8:  # bitsandbytes' number of this layout: rows
                parts[INT8_FORMAT] = torch.tensor(0, dtype=torch.uint8)
            yield name, weight.codes
            yield from (((module if int8 else name) + end, part) for end, part in parts.items())
        tell(len(names), len(names), "")

    with closing(base), new_folder(out) as work, reporting(progress, "Packing", "Packed") as tell:
        model.config.quantization_config = config
        _write_config(model, work)
        copy_files(auxiliary_files(folder), work)
        experts = {}
        for name in filter(plan.params.__contains__, names):
            aliases = {*plan.params[name].names, *(n for n, one in tied.items() if one == name)}
            shape, stored_dtype = base.layout.by_name[name].shapes[name], dtype_name(dtypes[name])
            experts[name] = PackedEntry(shape, stored_dtype, tuple(sorted(aliases - {name})))
        return write_packed(work, packed(), max_shard_size, experts, plan.settings, model)


def copy_config(config: Any) -> Any:
    """Return a copy of a `BitsAndBytesConfig` or of its dict, as the class."""
    CodecSettings.from_config(config)  # refuses what is neither
    is_dict = isinstance(config, Mapping)
    return BitsAndBytesConfig.from_dict(dict(config)) if is_dict else copy.deepcopy(config)


def build_model(
    folder: Path, dtype: torch.dtype | None, trust_remote_code: bool, *, packed: bool = False
) -> Any:
    """Build the checkpoint's model on meta; that of a `packed` folder where that is allowed."""
    source = resolve_checkpoint(folder, trust_remote_code, packed=packed)
    if dtype is not None:
        source.config.dtype = dtype
        for name in source.config.sub_configs:
            if getattr(source.config, name, None) is not None:
                getattr(source.config, name).dtype = dtype
    # As in a load: weights are tied last, after the unpacked layers are chosen.
    with init.no_tie_weights():
        return named.build(source, trust_remote_code=trust_remote_code)


def open_to_pack(
    folder: Path, model: Any, config: Any, device: torch.device
) -> tuple[Base, PackingPlan, dict[str, torch.dtype], set[str], dict[str, str], list[str]]:
    """Open a checkpoint that is to be packed, given its model on meta, whose Linears are replaced.

    Returns it; what is packed; the dtypes of all parameters, were they not; its packed Linear
    layers; the names that are stored under another; and the names that are written.
    """
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
    tied = {
        name: source
        for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if not base.stored_apart([n for n in (name, source) if n in disk])
    }
    left_out = {name for name, source in tied.items() if source in disk}
    left_out |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    if missing := missing_names(model, disk.keys() | left_out | tied.keys()):
        raise CheckpointError(
            f"{folder} has no tensor for {listed(missing)}, which a {type(model).__name__} needs: "
            "config.json is of another model."
        )
    names = [name for group in base.layout.groups for name in group.shapes if name not in left_out]
    if not plan.params.keys() & names:
        raise CheckpointError(
            f"{folder}: a {type(model).__name__} has no expert weights to pack, or "
            "llm_int8_skip_modules leaves all of them unpacked."
        )
    return base, plan, dtypes, linears, tied, names
