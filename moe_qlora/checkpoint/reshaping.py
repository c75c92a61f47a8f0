"""Tensors that a merged folder has in another shape than its base, or has instead.

added tokens       embeddings and head have the adapter's number of rows; `vocab_size`
an untied head     stored beside the embeddings; `tie_word_embeddings`
another head       `score` of a reward model in place of `lm_head`; `architectures`, labels
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from ..errors import AdapterError
from ..models.named import quiet
from .adapter import Adapter, Updates, vocabulary
from .base import Base

_HEADS = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)


def trained_head(adapter: Adapter, model: Any) -> Any:
    """Return the meta model whose head the adapter holds, which this model lacks; or None."""
    held = model.state_dict()
    new = {name: shape for name, shape in adapter.whole_tensors().items() if name not in held}
    for auto in _HEADS:
        maker = getattr(transformers, auto)._model_mapping.get(type(model.config), None)
        if not new or maker is None:
            continue
        config = copy.deepcopy(model.config)
        config.num_labels = max(shape[0] for shape in new.values())
        config.architectures = [maker.__name__]
        with torch.device("meta"), quiet():
            head = maker(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        if any(shapes.get(name) == shape for name, shape in new.items()):
            return head
    return None


def reshape(
    base: Base, updates: Updates, adapter: Adapter, model: Any, head: Any
) -> dict[str, Any]:
    """Resize, add and leave out tensors of the merged folder; return changed config fields."""
    layout, changes = base.layout, dict[str, Any]()
    shapes = {n: adapter.file.info(key).shape for n, key in updates.replacements.items()}
    names = vocabulary(model)
    first = next(name for name in (*names, *layout.by_name) if name in layout.by_name)
    dtype = base.disk[layout.by_name[first].keys[0]][1]
    if updates.untied:
        changes["tie_word_embeddings"] = False
    for name, stored in updates.untied.items():
        if name not in layout.by_name:
            base.add(name, layout.by_name[stored].shapes[stored], dtype)
    added = [name for name in shapes if head is not None and name not in model.state_dict()]
    if added:
        for name in layout.by_name.keys() & vocabulary(model, inputs=False):
            base.drop(name)
        config = head.config
        changes["architectures"] = config.architectures
        changes["id2label"], changes["label2id"] = config.id2label, config.label2id
    for name in added:
        base.add(name, shapes[name], dtype)
    resized = {n: s for n, s in shapes.items() if n in names and s != layout.by_name[n].shapes[n]}
    for name, shape in resized.items():
        base.resize(name, shape)
    if resized:
        held = [name for name in names if name in layout.by_name]
        rows = {name: layout.by_name[name].shapes[name][0] for name in held}
        if len(set(rows.values())) > 1:
            raise AdapterError(
                f"{adapter.folder} was trained with a resized vocabulary, and does not hold all of "
                f"it ({', '.join(f'{name}: {count} rows' for name, count in rows.items())}): merge "
                "it in memory (merge_and_unload), or resize the embeddings of the base first."
            )
        changes["vocab_size"] = next(iter(rows.values()))
    return changes


def write_changes(config: dict[str, Any], changes: Mapping[str, Any], text_type: str) -> None:
    """Set the changed fields in the JSON of a configuration, and of its text model's in it."""
    text = [part for part in _parts(config) if part.get("model_type") == text_type]
    config.update({key: value for key, value in changes.items() if key != "vocab_size"})
    for key in changes.keys() & {"vocab_size", "tie_word_embeddings"}:
        for part in text or [config]:
            part[key] = changes[key]


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)
