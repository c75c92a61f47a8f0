"""Pack a checkpoint into a packed folder, parameter by parameter.

The checkpoint is in 16 bit, or prequantized: then rows are dequantized as they are read.

Apart from shard boundaries, the folder equals that of a load under `enabled()` and
`save_pretrained`.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import initialization as init

from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name, listed
from ..models import named
from ..models.files import read_json
from ..packing.codecs import codec_of
from ..packing.int8 import SCALES
from ..packing.settings import key_ends, packed_nbytes
from ..progress import Progress, reporting
from . import save
from .base import Base, auxiliary_files, copy_files, describe_source, resolve_checkpoint
from .manifest import CONFIG, INT8_FORMAT, Manifest, PackedEntry
from .rows import PackingPlan, filled, kept_dtypes, packed_linears, packing_spec, slot_for
from .staging import ShardWriter, absolute, check_new, new_folder, plan_shards
from .training_codec import from_config


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
    with (
        closing(base),
        new_folder(out) as work,
        reporting(progress, "Packing", "Packed") as tell,
    ):
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
        return save.finish_packed(work, shards, entries, plan.settings, source=origin)


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
    """Write the shards; return them in order, and the manifest's entries of expert weights."""
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
            else math.prod(shape) * dtypes[name].itemsize
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
