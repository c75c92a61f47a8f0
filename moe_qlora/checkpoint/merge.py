"""Merge a LoRA adapter into a checkpoint folder, one slice of experts at a time.

    base W, on disk --convert--> parameter --(+ s B A, fp32)--> rounded once --restore--> on disk

The merged folder has the files, keys, shapes and dtypes of the original checkpoint; unchanged
tensors are copied byte for byte. Memory use is one slice (`conversion.SLICE_ELEMENTS` weights, or
one expert) and the LoRA factors of its parameter; a parameter that transformers can only convert as
a whole is read whole.

A prequantized base (FP8, MXFP4, ...) is written dequantized: quantizing the result again would lose
most of the adapter.
"""

import copy
import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import AdapterError, CheckpointError, ConfigError
from ..kernels.weights import PackedWeight
from ..layout import dtype_name, human_bytes
from ..models.files import read_json
from ..models.named import quiet
from ..packing import codec
from ..progress import Progress, reporting
from . import conversion
from .adapter import PREFIX, Adapter, Updates, open_adapter, vocabulary
from .conversion import Base, Group, PackedBase, same_bits
from .folder import INDEX, SINGLE, ShardWriter, absolute, check_new, new_folder, shard_limit
from .manifest import CONFIG, is_packed
from .prequantized import parts_of, strip
from .rows import Slot, filled, kept_dtypes
from .training_codec import TrainingCodec, check_noted_base, of_training

_TIED = "tie_word_embeddings"
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
        size = f"{self.tensors} tensors, {human_bytes(self.nbytes)}"
        text = f"{self.folder}: {size}, {self.changed} of them changed by the adapter"
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

    Sums are taken in fp32 (fp64 for fp64 weights) and rounded once. LoRA on one of two tied weights
    changes both, as in PEFT's own merge; embeddings and head that the adapter holds otherwise are
    untied. Tokenizer, processor, chat template and generation config come from the adapter's folder
    if it has them.

    Args:
        base: A 16-bit (or fp32) checkpoint folder in safetensors, which is exact; or a folder that
            this package packed, or that its maker quantized, whose weights are decoded.
        adapter: The folder that PEFT saved.
        out: The new folder; must not exist, or be empty. It appears whole or not at all.
        dtype: Of floating tensors; None leaves each as it is on disk. What transformers always
            keeps in fp32 stays so.
        like_training: Round the base first, through the codec that the adapter was trained on and
            from the dtype in its note (or the base's own). A packed base is rounded already.
        quantization_config: The `BitsAndBytesConfig` of the training, for `like_training` where
            neither the base nor the adapter's folder tells.
        max_shard_size: Of the files, where the base is packed or prequantized; else its own stay.
        any_base: True takes a base that is not the model in the adapter's note.
        trust_remote_code: Run model code that the base brings.
        progress: True shows a bar; a callable gets (tensors done, tensors in all, next key).

    Raises a `CheckpointError` where a folder is missing or damaged, or `out` is not empty; an
    `AdapterError` where the adapter does not fit the base, or cannot be merged; a `ConfigError`
    where the codec of the training is not known, or `dtype` is no floating dtype.
    """
    source, adapter_folder, target = absolute(base), absolute(adapter), absolute(out)
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"dtype is {dtype}; give torch.bfloat16, torch.float16 or torch.float32.")
    if quantization_config is not None and (not like_training or is_packed(source)):
        raise ConfigError(
            "quantization_config is for like_training on a 16-bit base; leave it out."
        )
    check_new(target)
    with ExitStack() as stack:
        lora = open_adapter(adapter_folder)
        stack.enter_context(lora.file)
        opened = stack.enter_context(closing(conversion.open_base(source, lora, trust_remote_code)))
        if not any_base:
            check_noted_base(adapter_folder, opened.model, str(base), opened.first_rows)
        training: TrainingCodec | None = None
        if like_training and not isinstance(opened, PackedBase):
            training = of_training(adapter_folder, opened.model, quantization_config)
        merge = _Merge(opened, lora, training, dtype, max_shard_size)
        with (
            new_folder(target) as folder,
            reporting(progress, "Merging", "Merged", stderr=True) as tell,
        ):
            files, found = map(conversion.auxiliary_files, (source, adapter_folder))
            copied: dict[Path, Path] = {}
            for main, kind in _KINDS.items():
                if Path(main) in found:
                    files = {n: f for n, f in files.items() if not re.fullmatch(kind, n.parts[0])}
                copied |= {n: f for n, f in found.items() if re.fullmatch(kind, n.parts[0])}
            conversion.copy_files(files | copied, folder)
            merge.write(folder, tell)
            merge.write_config(folder)
    return MergeReport(
        target, len(opened.disk), len(merge.changed), len(merge.rounded), merge.nbytes,
        opened.checkpoint.method, tuple(map(str, copied)),
        {key: value for key, value in merge.new_config.items() if key != "label2id"},
    )  # fmt: skip


class _Merge:
    def __init__(
        self, base: Base, adapter: Adapter, training: TrainingCodec | None,
        dtype: torch.dtype | None, max_shard_size: int | str,
    ) -> None:  # fmt: skip
        self._base, self._adapter, self._training, self._dtype = base, adapter, training, dtype
        head = _trained_head(adapter, base.model)
        added = {} if head is None else head.state_dict()
        self._updates = updates = Updates(base.model, adapter, added)
        _move_to_stored_names(updates, base, adapter)
        self.new_config = _reshape(base, updates, adapter, head)
        self.changed: set[str] = set()
        self.rounded: set[str] = set()
        noted = set[str]() if training is None else training.experts | training.linears
        changed = [*updates.deltas, *updates.replacements]
        for name in (*changed, *sorted(noted - updates.tied)):
            if name not in base.layout.by_name:
                raise (AdapterError if name in changed else CheckpointError)(
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
        self.nbytes, room = 0, 0
        self._files: dict[str, list[str]] = {}  # keys by file
        shards: list[list[str]] = []
        name = base.checkpoint.files[0].name
        for key, (shape, _) in base.disk.items():
            size = math.prod(shape) * self._dtypes[key].itemsize
            self.nbytes += size
            if base.keeps_files:
                if key in base.checkpoint:  # what is new follows the last one
                    name = base.checkpoint.info(key).file.name
                self._files.setdefault(name, []).append(key)
                continue
            if not shards or size > room:
                shards.append([])
                room = shard_limit(max_shard_size)
            shards[-1].append(key)
            room -= size
        for number, keys in enumerate(shards, 1):  # as transformers names and cuts files
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # The format wants tensors aligned to their dtype: the widest first.
            keys.sort(key=lambda key: -self._dtypes[key].itemsize)
            self._files[SINGLE if len(shards) == 1 else name] = keys

    def write(self, folder: Path, tell: Progress) -> None:
        base, writers = self._base, dict[str, ShardWriter]()
        groups = {key: group for group in base.layout.groups for key in group.keys}
        done: set[str] = set()
        with ExitStack() as stack:
            for name, keys in self._files.items():
                specs = {key: (self._dtypes[key], base.disk[key][0]) for key in keys}
                writer = stack.enter_context(ShardWriter(folder / name, specs))
                writers |= dict.fromkeys(keys, writer)
            for key in writers:
                if key not in done:
                    tell(len(done), len(groups), key)
                    self._write_group(groups[key], writers)
                    done.update(groups[key].keys)
        tell(len(groups), len(groups), "")

    def _write_group(self, group: Group, writers: Mapping[str, ShardWriter]) -> None:
        base, updates, file = self._base, self._updates, self._adapter.file
        replaced = group.shapes.keys() & updates.replacements.keys()
        deltas = {name: updates.deltas[name] for name in group.shapes if name in updates.deltas}
        changes = bool(replaced or deltas)
        packed = self._pack(group)
        if changes:
            self.changed.update(group.keys)
            for key in group.keys:
                if (stored := base.disk[key][1]) not in _FLOATS:
                    raise CheckpointError(
                        f"{key} is {stored}, which an adapter cannot be added to: name a base in "
                        "16 bit."
                    )
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
            for name, added in deltas.items():
                wide = torch.promote_types(values[name].dtype, torch.float32)
                values[name] = values[name].to(wide, copy=True).contiguous()
                for delta in added:
                    delta.add_rows(factors(delta, wide), values[name], start)
            on_disk = conversion.restore(group, values, base.model)
            for key, stand_in, _, _ in group.places(start, stop):
                tensor = on_disk[stand_in].to(self._dtypes[key])
                if (changes or packed) and not bool(tensor.isfinite().all()):
                    raise AdapterError(
                        f"Merged, {key} holds NaN or inf in {tensor.dtype}: the adapter, or the "
                        "base, is broken, or the dtype too narrow."
                    )
                writers[key].write(key, tensor)

    def _pack(self, group: Group) -> dict[str, PackedWeight]:
        """Round the group's parameters that were packed in training; before anything is added."""
        base, training = self._base, self._training
        if training is None:
            return {}
        slots, dtypes = dict[str, Slot](), dict[str, torch.dtype]()
        stored, settings = base.disk[group.keys[0]][1], training.settings
        dtype = training.dtype or stored
        for name in group.shapes.keys() - self._updates.replacements.keys():
            if name in training:
                linear = name in training.linears
                dtypes[name] = stored if linear and settings.codec.linear_dtype else dtype
                form = name, group.shapes[name], dtype, torch.device("cpu"), settings
                slots[name] = Slot(*form, linear=linear)
        self.rounded.update(slots)
        weights = filled(base.checkpoint, base.layout, [group] if slots else [], slots)
        return {name: replace(weight, dtype=dtypes[name]) for name, weight in weights}

    def write_config(self, folder: Path) -> None:
        base, config, text = self._base, read_json(self._base.folder / CONFIG), list[Any]()
        for part in parts_of(config):
            if not base.keeps_files:
                strip(part)
            for name in conversion.PACKED_KEYS:
                part.pop(name, None)
            for name in ("dtype", "torch_dtype"):
                if self._dtype is not None and part.get(name):
                    part[name] = dtype_name(self._dtype)
            if part.get("model_type") == base.model.config.get_text_config().model_type:
                text.append(part)
        for key, value in self.new_config.items():
            of_text = key in ("vocab_size", _TIED)
            for part in [config] * (key != "vocab_size") + (text or [config]) * of_text:
                part[key] = value
        written = {CONFIG: config}
        if [*self._files] != [SINGLE]:
            places = {key: name for name, keys in self._files.items() for key in keys}
            written[INDEX] = {"metadata": {"total_size": self.nbytes}, "weight_map": places}
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Files of one kind, by one of them: with that, all come from the adapter's folder.
_KINDS = {
    "tokenizer_config.json": (
        r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|tekken\.json|"
        r".*\.(model|tiktoken|jinja)|chat_template\.json|additional_chat_templates"
    ),
    "processor_config.json": r".*processor_config\.json",
    "": r"generation_config\.json",
}


def _trained_head(adapter: Adapter, model: Any) -> Any:
    """Return the meta model with the head that the adapter holds, as of a reward model, or None."""
    held = model.state_dict()
    plain = {key.removeprefix(PREFIX): key for key in adapter.file if "lora_" not in key}
    new = {name: adapter.file.info(key).shape for name, key in plain.items() if name not in held}
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
    """Give embeddings and head the adapter's shapes, untied ones both; return changed fields."""
    names, by_name, changes = vocabulary(base.model), base.layout.by_name, dict[str, Any]()
    first = next(name for name in (*names, *by_name) if name in by_name)
    dtype, count = base.disk[by_name[first].keys[0]][1], by_name[first].shapes[first][0]
    shapes = {name: by_name[stored].shapes[stored] for name, stored in updates.untied.items()}
    replaced = {n: adapter.file.info(key).shape for n, key in updates.replacements.items()}
    shapes |= {name: shape for name, shape in replaced.items() if name in names}
    if updates.untied:
        changes[_TIED] = False
    if head is not None:  # in place of the base's
        for name in by_name.keys() & vocabulary(base.model, inputs=False):
            group = by_name.pop(name)
            base.layout.groups.remove(group)
            for key in group.keys:
                del base.disk[key]
        for name in replaced.keys() & (head.state_dict().keys() - base.model.state_dict().keys()):
            base.put(name, replaced[name], dtype)
        fields = ("architectures", "id2label", "label2id")
        changes |= {key: getattr(head.config, key) for key in fields}
    for name, shape in shapes.items():
        if name in updates.untied if name not in by_name else by_name[name].shapes[name] != shape:
            base.put(name, shape, dtype)
    rows = {name: by_name[name].shapes[name][0] for name in names if name in by_name}
    if any(shape[0] != count for shape in shapes.values()):
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
    for name, tensor in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(tensor), []).append(name)
    for names in (names for names in by_tensor.values() if len(names) > 1):
        stored = [name for name in names if name in base.layout.by_name]
        updates.tied.update(set(names) - set(stored))
        for name in names if stored else ():  # PEFT saves the base's own embeddings beside LoRA
            if name in replaced:
                shape, dtype = base.disk[base.layout.by_name[stored[0]].keys[0]]
                own = file.read(replaced[name]).to(dtype)
                if own.shape == shape and base.equals(stored[0], own):
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
        if not _agree(adapter, updates, names):
            config = model.config
            both = {config.tie_word_embeddings, config.get_text_config().tie_word_embeddings}
            if True not in both or not stored or not set(names) <= set(vocabulary(model)):
                raise AdapterError(
                    f"{adapter.folder} changes {names[0]} and {names[1]} in different ways, and "
                    "the base ties them: untie them in the base first."
                )
            updates.untied |= dict.fromkeys(names, stored[0])
            updates.tied.difference_update(names)
            continue
        kinds: tuple[dict[str, Any], ...] = (deltas, replaced)
        for kind in kinds:
            moved = [kind.pop(name) for name in changed if name in kind]
            kind.update(dict.fromkeys(stored, moved[0]) if moved else {})  # all alike


def _agree(adapter: Adapter, updates: Updates, names: list[str]) -> bool:
    """Whether one tensor can hold all changes; LoRA on one of the names counts for all."""
    replaced = [[updates.replacements[name]] for name in names if name in updates.replacements]
    adapted = [updates.deltas[name] for name in names if name in updates.deltas]
    tokens = any(one.tokens for deltas in adapted for one in deltas)
    if len(replaced) not in (0, len(names)) or (tokens and len(adapted) < len(names)):
        return False
    how = {tuple((one.scaling, one.tokens) for one in deltas) for deltas in adapted}
    factors = [[key for one in deltas for key in (one.a, one.b)] for deltas in adapted]
    return len(how) < 2 and all(
        same_bits(*map(adapter.file.read, both))
        for keys in (replaced, factors)
        for other in keys[1:]
        for both in zip(keys[0], other, strict=True)
    )
