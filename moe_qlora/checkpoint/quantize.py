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
from typing import Any

import torch
from torch import Tensor, nn
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
from .base import (
    Base,
    auxiliary_files,
    copy_files,
    describe_source,
    resolve_checkpoint,
)
from .conversion import Group
from .load_spec import PackingPlan, kept_dtypes, packing_spec
from .manifest import CONFIG, INT8_FORMAT, Manifest, PackedEntry
from .reader import check_plain
from .rows import Slot, filled
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
            that `checkpoint/prequantized/` reads.
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
    job = PackingJob(folder, model, config, place)
    with (
        closing(job.base),
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
        shards = job.write(work, max_shard_size, tell)
        origin = describe_source(folder, job.base.checkpoint.files)
        return save.finish_packed(work, shards, job.experts(), job.spec.settings, source=origin)


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


class PackingJob:
    """One conversion of a checkpoint: its groups of parameters, their codecs and dtypes."""

    def __init__(self, folder: Path, model: Any, config: Any, device: torch.device) -> None:
        self.device, self.config = device, config
        self.spec: PackingPlan = packing_spec(model, config, model.dtype, None)
        dtype = model.dtype
        own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self.fp32 = kept_dtypes(model, dtype)
        self.base = Base(folder, model, device=device)
        # Replaces the model's Linear layers that bitsandbytes packs.
        self.packed = from_config(model, config)
        linears = self.packed.linears
        model.tie_weights()
        # bitsandbytes also replaces Conv1D, which stores `(in, out)`.
        replaced = {
            n: getattr(model.get_submodule(n[:-7]), "source_cls", nn.Linear) for n in linears
        }
        self.transposed = {n for n, kind in replaced.items() if not issubclass(kind, nn.Linear)}
        self.dtypes = own | dict.fromkeys(linears & own.keys(), dtype)
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        disk = self.base.layout.by_name
        self.tied = {
            name: source
            for name, source in tied.items()
            if not self.base.stored_apart([n for n in (name, source) if n in disk])
        }
        on_disk = disk.keys()
        left_out = {name for name, source in self.tied.items() if source in on_disk}
        left_out |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        missing = [
            name
            for name in sorted(model.state_dict().keys() - on_disk - left_out - self.tied.keys())
            if not any(re.search(pattern, name) for pattern in optional)
        ]
        if missing:
            raise CheckpointError(
                f"{self.base.folder} has no tensor for {listed(missing)}, "
                f"which a {type(model).__name__} needs: config.json is of another model."
            )
        if not (on_disk - left_out) & self.spec.params.keys():
            folder, skipped = self.base.folder, self.config.llm_int8_skip_modules
            if skipped and len(detect(model)):
                raise CheckpointError(
                    f"{folder}: llm_int8_skip_modules ({', '.join(skipped)}) leaves every expert "
                    "weight unpacked; name fewer."
                )
            raise CheckpointError(
                f"{folder}: a {type(model).__name__} has no expert weights to pack; load it with "
                "transformers and its own bitsandbytes settings."
            )
        self.steps: list[tuple[Group, list[str]]] = [
            (group, names)
            for group in self.base.layout.groups
            if (names := [name for name in group.shapes if name not in left_out])
        ]
        floating = {name for name, dtype in own.items() if dtype.is_floating_point}
        for group, names in self.steps:
            for key in group.keys if floating & {*names} else ():
                check_plain(key, self.base.disk[key][1])

    def experts(self) -> dict[str, PackedEntry]:
        """Return the manifest's entries of packed expert weights."""
        entries = {}
        for name in (name for _, names in self.steps for name in names if name in self.spec.params):
            param = self.spec.params[name]
            tied = (alias for alias, source in self.tied.items() if source == name)
            others = tuple(sorted({*param.names, *tied} - {name}))
            entries[name] = PackedEntry(tuple(param.shape), dtype_name(self.dtype(name)), others)
        return entries

    def write(self, work: Path, max_shard_size: int | str, tell: Progress) -> list[Path]:
        """Write the shards; return them in order."""
        packed = self.spec.params.keys() | self.packed.linears
        settings = self.spec.settings

        def nbytes(name: str, shape: tuple[int, ...]) -> int:
            plain = math.prod(shape) * self.dtype(name).itemsize
            return packed_nbytes(shape, settings) if name in packed else plain

        sizes = {
            index: sum(nbytes(name, group.shapes[name]) for name in names)
            for index, (group, names) in enumerate(self.steps)
        }
        ends = key_ends(settings)
        shards = []
        for number, indices in enumerate(plan_shards(sizes, max_shard_size), 1):
            path = work / f"shard-{number:05d}.safetensors"
            shards.append(path)
            steps = [self.steps[index] for index in indices]
            owners = [(name, name.rpartition(".")[0]) for _, names in steps for name in names]
            keys = [f"{name}{end}" for name, _ in owners for end in ends]
            keys += [f"{module}{end}" for _, module in owners for end in (SCALES, INT8_FORMAT)]
            with ShardWriter(path, {}, {"format": "pt"}, keys) as shard:
                slots = {
                    name: self._slot(name, group, name in packed)
                    for group, names in steps
                    for name in names
                }
                groups = [group for group, _ in steps]
                weights = filled(self.base.checkpoint, self.base.layout, groups, slots)
                for index, (_, names) in zip(indices, steps, strict=True):
                    tell(index, len(self.steps), names[0])
                    for name, weight in itertools.islice(weights, len(names)):
                        for key, tensor in self._entries(name, weight):
                            shard.write(key, tensor)
                        del weight  # before the next is packed
        tell(len(self.steps), len(self.steps), "")
        return shards

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter after loading."""
        return self.spec.dtypes.get(name) or self.fp32(name) or self.dtypes[name]

    def _slot(self, name: str, group: Group, packs: bool) -> Slot:
        shape, turned = group.shapes[name], name in self.transposed
        if not packs:
            device = self.device if self.base.decodes(group) else torch.device("cpu")
            return Slot(name, shape, self.dtype(name), device)
        dtype = self.spec.settings.codec.linear_dtype if name in self.packed.linears else None
        return Slot(
            name, shape[:: -1 if turned else 1], dtype or self.dtype(name), self.device,
            self.spec.settings, transposed=turned,
        )  # fmt: skip

    def _entries(self, name: str, weight: PackedWeight | Tensor) -> Iterator[tuple[str, Tensor]]:
        if isinstance(weight, Tensor):
            yield name, weight
            return
        yield name, weight.codes
        codec = codec_of(weight.kind)
        if name in self.spec.params or not codec.loads_in_8bit:
            weight = replace(weight, dtype=self.dtype(name))
            for end, value in codec.entries(weight).items():
                yield f"{name}{end}", value
        else:
            module = name.rpartition(".")[0]
            yield f"{module}{SCALES}", weight.absmax
            # bitsandbytes' number of the row-major layout
            yield f"{module}{INT8_FORMAT}", torch.tensor(0, dtype=torch.uint8)
