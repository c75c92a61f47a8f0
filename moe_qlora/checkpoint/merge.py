"""Merge a LoRA adapter into a checkpoint folder, one slice of experts at a time.

    base W, on disk --convert--> parameter --(+ s B A, fp32)--> rounded once --restore--> on disk

The merged folder has the files, keys, shapes and dtypes of the original checkpoint. The model is
built on meta. Memory use is one slice (`conversion.SLICE_ELEMENTS` weights, or one expert) and the
LoRA factors of its parameter; a parameter that transformers can only convert as a whole is read
whole. Unchanged tensors are copied byte for byte.

A prequantized base (FP8, MXFP4, ...) is written dequantized: quantizing the result again would lose
most of the adapter. A delta of 1 % of a weight's norm has, after rounding to MXFP4, INT4 or NVFP4,
a cosine of 0.04 or less to itself before, 0.50 in block FP8, 0.99 in bfloat16.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ..errors import AdapterError, CheckpointError, ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name, human_bytes
from ..models.files import MAX_JSON, read_json
from ..models.named import quiet
from ..packing import codec
from ..progress import Progress, reporting
from . import adapter as adapters
from . import training_codec
from .adapter import Adapter, LoraDelta, Resolver, Updates, open_adapter, vocabulary
from .base import PACKED_KEYS, Base, PackedBase, auxiliary_files, copy_files, open_base
from .conversion import Group, restore, same_bits
from .manifest import CONFIG, canonical_name, is_packed
from .prequantized import parts_of, strip
from .reader import INDEX, SINGLE, Checkpoint, header_bytes, index_of
from .rows import Slot, filled, kept_dtypes
from .staging import ShardWriter, absolute, check_new, new_folder, plan_shards
from .training_codec import TrainingCodec

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MergeReport:
    """The result of a merge."""

    folder: Path
    tensors: int  # in the folder
    changed: int  # tensors that the adapter changed
    rounded: int  # parameters that were quantized and decoded, as in training
    nbytes: int  # of all tensors
    dequantized: str = ""  # quant_method of a prequantized base
    from_adapter: tuple[str, ...] = ()  # files of the tokenizer and the like
    new_config: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json

    def __str__(self) -> str:
        text = (
            f"{self.folder}: {self.tensors} tensors, {human_bytes(self.nbytes)}, {self.changed} of "
            "them changed by the adapter"
        )
        text += f"; {self.rounded} parameters rounded as in training." if self.rounded else "."
        if self.dequantized:
            text += (
                f" The base's maker had quantized it ({self.dequantized}), and all of it is written"
                " dequantized: rounded to that format again, most of the adapter would be lost."
            )
        if self.from_adapter:
            text += f" From the adapter's folder, not the base's: {', '.join(self.from_adapter)}."
        changes = ", ".join(f"{key}={value}" for key, value in self.new_config.items())
        return text + (f" In config.json: {changes}." if changes else "")


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like_training: bool = False,
    quantization_config: Any = None,
    max_shard_size: int | str = "5GB",
    any_base: bool = False,
    trust_remote_code: bool = False,
    progress: bool | Progress | None = None,
) -> MergeReport:
    """Merge a LoRA adapter into its base and write a plain checkpoint in the original layout.

    Sums are taken in fp32 (fp64 for fp64 weights) and rounded once. On a weight that the base ties
    to another (embeddings), LoRA changes both, as it does in PEFT's own merge.
    Embeddings and head that the adapter holds otherwise are untied. Tokenizer, processor, chat
    template and generation config come from the adapter's folder where that has them.

    Args:
        base: A 16-bit (or fp32) checkpoint folder in safetensors, which is exact; or a folder that
            this package packed, or that its maker quantized, whose weights are decoded.
        adapter: The folder that PEFT saved.
        out: The new folder; must not exist, or be empty. It appears whole or not at all.
        dtype: Of floating tensors; None leaves each as it is on disk. What transformers always
            keeps in fp32 stays so.
        like_training: Round the base through the codec that the adapter was trained on first, from
            the dtype that its note says the weights had then (from the base's own on disk without
            one). A packed base is rounded already.
        quantization_config: The `BitsAndBytesConfig` of the training, for `like_training` where
            neither the base nor the adapter's folder tells.
        max_shard_size: Of the files, where the base is packed or its maker quantized it; otherwise
            its own files are kept.
        any_base: True takes a base that is not the model in the adapter's note.
        trust_remote_code: Run model code that the base brings.
        progress: True shows a bar; a callable gets (tensors done, tensors in all, next key).

    Raises:
        CheckpointError: A folder is missing, damaged or of another kind, or `out` is not empty.
        AdapterError: The adapter does not fit the base, or cannot be merged.
        ConfigError: The codec of the training is not known, or `dtype` is no floating dtype.
    """
    source, adapter_folder, target = absolute(base), absolute(adapter), absolute(out)
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"dtype is {dtype}; give torch.bfloat16, torch.float16 or torch.float32.")
    if quantization_config is not None and (not like_training or is_packed(source)):
        raise ConfigError(
            "quantization_config is for like_training=True and a base that is not packed; leave it "
            "out."
        )
    check_new(target)
    with ExitStack() as stack:
        lora = open_adapter(adapter_folder)
        stack.enter_context(lora.file)
        opened = stack.enter_context(closing(open_base(source, lora, trust_remote_code)))
        model = opened.model
        if not any_base:
            training_codec.check_noted_base(lora.folder, model, str(base), opened.first_rows)
        singles = adapters.single_experts(lora.file)
        if any(canonical_name(model, f"{one}.weight", opened.disk) is None for one in singles):
            fused = stack.enter_context(adapters.fused_adapter(adapter_folder, model))
            lora = replace(open_adapter(fused), folder=adapter_folder)
            stack.enter_context(lora.file)
        training: TrainingCodec | None = None
        if like_training and not isinstance(opened, PackedBase):
            asked = quantization_config
            if asked is not None:
                asked = training_codec.from_config(copy.deepcopy(model), asked)
            training = training_codec.choose(lora.folder, asked)
            names = model.state_dict()
            experts, linears = (  # they may have been noted from this model's inner model
                frozenset(canonical_name(model, name, names) or name for name in noted)
                for noted in (training.experts, training.linears)
            )
            training = replace(training, experts=experts, linears=linears)
        merge = _Merge(opened, lora, training, dtype, max_shard_size)
        with (
            new_folder(target) as folder,
            reporting(progress, "Merging", "Merged", stderr=True) as tell,
        ):
            copied = _copy_side_files(source, adapter_folder, folder)
            merge.write(folder, tell)
            merge.write_config(folder)
    return MergeReport(
        target, len(opened.disk), len(merge.changed), len(merge.rounded), merge.nbytes,
        opened.checkpoint.method, copied,
        {key: value for key, value in merge.new_config.items() if key != "label2id"},
    )  # fmt: skip


class _Merge:
    def __init__(
        self,
        base: Base,
        adapter: Adapter,
        training: TrainingCodec | None,
        dtype: torch.dtype | None,
        max_shard_size: int | str,
    ) -> None:
        self._base, self._adapter, self._training, self._dtype = base, adapter, training, dtype
        head = _trained_head(adapter, base.model)
        shapes = {key: shape for key, (shape, _) in base.disk.items()}
        added = {} if head is None else head.state_dict()
        self._updates = updates = Resolver(base.model, shapes, adapter, added).updates
        _move_to_stored_names(updates, base, adapter)
        self.new_config = _reshape(base, updates, adapter, head)
        self.changed: set[str] = set()
        self.rounded: set[str] = set()
        noted = set[str]() if training is None else training.experts | training.linears
        for name in (*updates.deltas, *updates.replacements, *sorted(noted - updates.tied)):
            if name not in base.layout.by_name:
                changed = name in updates.deltas or name in updates.replacements
                raise (AdapterError if changed else CheckpointError)(
                    f"{adapter.folder} is for a model with {name}, which the base's files do not "
                    "hold: name the base that it was trained on."
                )
        self._dtypes = {key: stored for key, (_, stored) in base.disk.items()}
        if dtype is not None:
            fp32 = kept_dtypes(base.model, dtype)
            for group in base.layout.groups:
                wanted = torch.float32 if any(map(fp32, group.shapes)) else dtype
                floats = (key for key in group.keys if self._dtypes[key] in _FLOATS)
                self._dtypes |= dict.fromkeys(floats, wanted)
        sizes = {
            key: math.prod(shape) * self._dtypes[key].itemsize
            for key, (shape, _) in base.disk.items()
        }
        self.nbytes = sum(sizes.values())
        self._files: dict[str, list[str]] = {}  # keys by file
        if base.keeps_files:
            self._files = {file.name: [] for file in base.checkpoint.files}
            name = base.checkpoint.files[0].name
            for key in base.disk:
                if key in base.checkpoint:  # what is new follows the last one
                    name = base.checkpoint.info(key).file.name
                self._files[name].append(key)
        else:  # as transformers names and cuts files
            shards = plan_shards(sizes, max_shard_size)
            for number, keys in enumerate(shards, 1):
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                # The format wants tensors aligned to their dtype: the widest first.
                keys.sort(key=lambda key: -self._dtypes[key].itemsize)
                self._files[SINGLE if len(shards) == 1 else name] = keys

    def write(self, folder: Path, tell: Progress) -> None:
        base = self._base
        groups = {key: group for group in base.layout.groups for key in group.keys}
        done: set[str] = set()
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            for name, keys in self._files.items():
                metadata: dict[str, str] = {"format": "pt"}
                if base.keeps_files:
                    header = header_bytes(base.folder / name)
                    metadata = json.loads(header).get("__metadata__") or {}
                if keys:
                    specs = {key: (self._dtypes[key], base.disk[key][0]) for key in keys}
                    writer = ShardWriter(folder / name, specs, metadata)
                    writers |= dict.fromkeys(keys, stack.enter_context(writer))
            for key in writers:
                if key not in done:
                    tell(len(done), len(groups), key)
                    self._write_group(groups[key], writers)
                    done.update(groups[key].keys)
        tell(len(groups), len(groups), "")

    def _write_group(self, group: Group, writers: Mapping[str, ShardWriter]) -> None:
        base, updates, file = self._base, self._updates, self._adapter.file
        replaced = group.shapes.keys() & updates.replacements.keys()
        changes = bool(replaced or group.shapes.keys() & updates.deltas.keys())
        changes = changes or any(key in updates.disk_deltas for key in group.keys)
        packed = self._pack(group)
        if changes:
            self.changed.update(group.keys)
        elif not packed and group.target not in updates.untied and type(base) is Base:
            for key in group.keys:
                for start, stop in Group((key,), {key: base.disk[key][0]}).slices():
                    tensor = base.checkpoint.read(key, start, stop)
                    writers[key].write(key, tensor.to(self._dtypes[key]))
            return
        source = updates.untied.get(group.target, "")
        factors = cache(lambda delta, dtype: delta.factors(file, dtype))
        for start, stop in group.slices():
            values = {n: file.read(updates.replacements[n], start, stop) for n in replaced}
            if source and not replaced:
                values = {group.target: base.rows(source, start, stop)}
            elif not replaced or replaced < group.shapes.keys():
                values = base.values(group, start, stop) | values
            for name, weight in packed.items():
                last = weight.shape[0] if stop is None else stop
                wide = torch.promote_types(weight.dtype, values[name].dtype)
                values[name] = codec.unpack_range(weight, start, last).to(wide)
            for name, value in values.items():
                values[name] = _add(updates.deltas.get(name), value, start, factors)
            on_disk = restore(group, values, base.model)
            for key, stand_in, first, _ in group.places(start, stop):
                if changes and (stored := base.disk[key][1]) not in _FLOATS:
                    raise CheckpointError(
                        f"{key} is {stored}, which an adapter cannot be added to: name a base in "
                        "16 bit."
                    )
                own = updates.disk_deltas.get(key)
                tensor = _add(own, on_disk[stand_in], first, factors).to(self._dtypes[key])
                if (changes or packed) and not bool(tensor.isfinite().all()):
                    raise AdapterError(
                        f"Merged, {key} holds NaN or inf in {tensor.dtype}: the adapter, or the "
                        "base, is broken, or the dtype too narrow."
                    )
                writers[key].write(key, tensor)

    def _pack(self, group: Group) -> dict[str, PackedWeight]:
        """Round the group's parameters that were packed in training; before anything is added."""
        base, training, dtypes = self._base, self._training, dict[str, torch.dtype]()
        slots: dict[str, Slot] = {}
        for name in group.shapes.keys() - self._updates.replacements.keys():
            if training is not None and name in training:
                stored = base.disk[group.keys[0]][1]
                dtype, place = training.dtype or stored, torch.device("cpu")
                settings, linear = training.settings, name in training.linears
                dtypes[name] = stored if linear and settings.codec.linear_dtype else dtype
                form = name, group.shapes[name], dtype, place, settings
                slots[name] = Slot(*form, linear=linear)
        self.rounded.update(slots)
        weights = filled(base.checkpoint, base.layout, [group] if slots else [], slots)
        return {name: replace(weight, dtype=dtypes[name]) for name, weight in weights}

    def write_config(self, folder: Path) -> None:
        """Write config.json, and the index of several files."""

        def write(name: str, content: Any) -> None:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

        base, source, new = self._base, self._base.folder, self.new_config
        config = read_json(source / CONFIG)
        text = []
        for part in parts_of(config):
            if not base.keeps_files:
                strip(part)
            for name in PACKED_KEYS:
                part.pop(name, None)
            for name in ("dtype", "torch_dtype"):
                if self._dtype is not None and part.get(name):
                    part[name] = dtype_name(self._dtype)
            if part.get("model_type") == base.model.config.get_text_config().model_type:
                text.append(part)
        for key, value in new.items():
            of_text = key in ("vocab_size", "tie_word_embeddings")
            for part in [config] * (key != "vocab_size") + (text or [config]) * of_text:
                part[key] = value
        write(CONFIG, config)
        index = index_of(source) if base.keeps_files else source / INDEX
        if index is None or (not base.keeps_files and len(self._files) == 1):
            return
        content = read_json(index, MAX_JSON) if base.keeps_files else {}
        content["metadata"] = {**(content.get("metadata") or {}), "total_size": self.nbytes}
        files = self._files.items()
        content["weight_map"] = {key: name for name, keys in files for key in keys}
        write(index.name, content)


def _add(
    deltas: Sequence[LoraDelta] | None, value: Tensor, start: int, factors: Callable[..., Any]
) -> Tensor:
    """Return rows from `start` on with these added, in fp32 or wider."""
    if not deltas:
        return value
    wide = torch.promote_types(value.dtype, torch.float32)
    total = value.to(wide, copy=True).contiguous()
    for delta in deltas:
        delta.add_rows(factors(delta, wide), total, start)
    return total


# Files of one kind: with the named file, all of them come from the adapter's folder.
_KINDS = {
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|tekken\.json|"
    r".*\.(model|tiktoken|jinja)|chat_template\.json|additional_chat_templates": (
        "tokenizer_config.json"
    ),
    r".*processor_config\.json": "processor_config.json",
    r"generation_config\.json": "",
}


def _copy_side_files(source: Path, adapter: Path, folder: Path) -> tuple[str, ...]:
    files, found = auxiliary_files(source), auxiliary_files(adapter)
    copied: list[Path] = []
    for kind, whole in _KINDS.items():
        if Path(whole) in found:
            files = {name: f for name, f in files.items() if not re.fullmatch(kind, name.parts[0])}
        copied += [name for name in found if re.fullmatch(kind, name.parts[0])]
    copy_files(files | {name: found[name] for name in copied}, folder)
    return tuple(map(str, copied))


# Tensors that a merged folder has in another shape than its base, or has instead.
#
# added tokens       embeddings and head have the adapter's number of rows; `vocab_size`
# an untied head     stored beside the embeddings; `tie_word_embeddings`
# another head       `score` of a reward model in place of `lm_head`; `architectures`, labels


def _trained_head(adapter: Adapter, model: Any) -> Any:
    """Return the meta model whose head the adapter holds, which this model lacks; or None."""
    held = model.state_dict()
    new = {name: shape for name, shape in adapter.whole_tensors().items() if name not in held}
    tasks = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
    for task in tasks if new else ():
        auto = getattr(transformers, f"AutoModelFor{task}")
        if (maker := auto._model_mapping.get(type(model.config), None)) is not None:
            config = copy.deepcopy(model.config)
            config.num_labels = max(shape[0] for shape in new.values())
            config.architectures = [maker.__name__]
            with torch.device("meta"), quiet():
                head = maker(config)
            shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
            if any(shapes.get(name) == shape for name, shape in new.items()):
                return head
    return None


def _reshape(base: Base, updates: Updates, adapter: Adapter, head: Any) -> dict[str, Any]:
    """Resize, add and leave out tensors of the merged folder; return changed config fields."""
    model, by_name, changes = base.model, base.layout.by_name, dict[str, Any]()
    names, new = vocabulary(model), {*updates.untied}
    first = next(name for name in (*names, *by_name) if name in by_name)
    dtype, count = base.disk[by_name[first].keys[0]][1], by_name[first].shapes[first][0]
    shapes = {name: by_name[stored].shapes[stored] for name, stored in updates.untied.items()}
    shapes |= {n: adapter.file.info(key).shape for n, key in updates.replacements.items()}
    if updates.untied:
        changes["tie_word_embeddings"] = False
    if head is not None:
        for name in by_name.keys() & vocabulary(model, inputs=False):
            group = by_name.pop(name)
            base.layout.groups.remove(group)
            for key in group.keys:
                del base.disk[key]
        new |= head.state_dict().keys() - model.state_dict().keys()
        fields = ("architectures", "id2label", "label2id")
        changes |= {key: getattr(head.config, key) for key in fields}
    for name, shape in shapes.items():
        old = by_name[name].shapes[name] if name in by_name else None
        if name in (new if old is None else names) and shape != old:
            base.put(name, shape, dtype)
    rows = {name: by_name[name].shapes[name][0] for name in names if name in by_name}
    if any(name in names and shape[0] != count for name, shape in shapes.items()):
        if len(set(rows.values())) > 1:
            raise AdapterError(
                f"{adapter.folder} was trained with a resized vocabulary, and does not hold all of "
                f"it ({', '.join(f'{name}: {count} rows' for name, count in rows.items())}): merge "
                "it in memory (merge_and_unload), or resize the embeddings of the base first."
            )
        changes["vocab_size"] = next(iter(rows.values()))
    return changes


def _move_to_stored_names(updates: Updates, base: Base, adapter: Adapter) -> None:
    """Put changes of weights that the model ties under names on disk, or untie these."""
    model, file, by_tensor = base.model, adapter.file, dict[int, list[str]]()
    deltas, replaced = updates.deltas, updates.replacements
    shared: list[tuple[str, str]] = []  # A changed name, and one tied to it
    for name, tensor in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(tensor), []).append(name)
    for names in (names for names in by_tensor.values() if len(names) > 1):
        stored = [name for name in names if name in base.layout.by_name]
        updates.tied.update(set(names) - set(stored))
        for name in names:  # PEFT saves the base's own embeddings beside LoRA on them
            if name in replaced and stored:
                shape, dtype = base.disk[base.layout.by_name[stored[0]].keys[0]]
                own = file.read(replaced[name]).to(dtype)
                if own.shape == shape and base.holds(stored[0], own):
                    del replaced[name]
        keys = [replaced[name] for name in names if name in replaced]
        if len(keys) == 1 and keys[0].endswith(".base_layer.weight"):  # resized, beside LoRA on it
            replaced |= dict.fromkeys(names, keys[0])
        tokens = {n: [one for one in deltas.get(n, ()) if one.tokens] for n in names}
        inputs = set(names) - set(vocabulary(model, inputs=False))
        trained = next((tokens[name] for name in names if name in inputs and tokens[name]), [])
        for name in names if trained else ():
            if not tokens[name]:
                deltas[name] = [*trained, *deltas.get(name, ())]
        changed = [n for n in names if n in deltas or n in replaced]
        if not changed or base.stored_apart(stored):
            continue
        if not _agree(file, updates, names):
            config = model.config
            both = {config.tie_word_embeddings, config.get_text_config().tie_word_embeddings}
            if True not in both or not stored or not set(names) <= set(vocabulary(model)):
                raise AdapterError(
                    f"{adapter.folder} changes {names[0]} and {names[1]} in different ways, and "
                    "the base ties them: one tensor on disk cannot hold both; untie them in the "
                    "base first."
                )
            updates.untied |= dict.fromkeys(names, stored[0])
            updates.tied.difference_update(names)
            continue
        adapted = [name for name in names if name in deltas]
        if adapted and len(adapted) < len(names):
            shared.append((adapted[0], next(name for name in names if name not in deltas)))
        kinds: tuple[dict[str, Any], ...] = (deltas, replaced)
        for kind in kinds:
            moved = [kind.pop(name) for name in changed if name in kind]
            kind.update(dict.fromkeys(stored, moved[0]) if moved else {})  # all alike
    if shared:
        name, other = shared[0]
        more = f" (and {len(shared) - 1} more such pairs)" if len(shared) > 1 else ""
        warnings.warn(
            f"{name} is tied to {other}{more}: merging LoRA into one changes both, as PEFT's own "
            "merge does.",
            UserWarning,
            stacklevel=4,
        )


def _agree(file: Checkpoint, updates: Updates, names: list[str]) -> bool:
    """Whether one tensor can hold all changes; LoRA on one of the names counts for all."""
    replaced = [updates.replacements[name] for name in names if name in updates.replacements]
    adapted = [updates.deltas[name] for name in names if name in updates.deltas]
    tokens = any(one.tokens for deltas in adapted for one in deltas)
    if len(replaced) not in (0, len(names)) or (tokens and len(adapted) < len(names)):
        return False
    how = {tuple((one.scaling, one.tokens) for one in deltas) for deltas in adapted}
    factors = [
        [factor for one in deltas for factor in one.factors(file, torch.float32)]
        for deltas in adapted
    ]
    tensors = [[file.read(key)] for key in replaced]
    return len(how) < 2 and all(
        all(map(same_bits, alike[0], other)) for alike in (tensors, factors) for other in alike[1:]
    )
