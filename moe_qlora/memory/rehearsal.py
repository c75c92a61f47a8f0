"""A model's bytes by kind, for a report, from the models on meta that a plan is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import meta_model
from .source import source_of

KINDS = ("experts", "Linear layers", "embeddings and head", "routers", "norms and others")
"""Kinds of weights, in the order of tables. Linear layers are the packed ones."""


class KindBytes(NamedTuple):
    """The weights of one of `KINDS`."""

    kind: str
    weights: int  # Number of weights
    before: int  # Bytes in the dtype that the model is loaded in
    after: int  # Bytes packed, statistics included, or the same if the kind is not


class Inventory(NamedTuple):
    """The contents of a model."""

    packed: str | None  # The packed type; None if nothing is packed
    kinds: tuple[KindBytes, ...]  # Those that the model has
    notes: tuple[str, ...]  # What to know, a sentence each


def take_inventory(
    model: Any, quantization_config: Any = None, *, trust_remote_code: bool = False
) -> Inventory:
    """Count a model's weights by kind, before and after packing; arguments are those of `plan`."""
    source = source_of(model, quantization_config, None, trust_remote_code)
    meta = meta_model.pack(
        source.build(), source.quantization, linears=source.linears, native=source.native
    )
    plain = dict(_tensors(source.build()))
    weights, before, after = Counter[str](), Counter[str](), Counter[str]()
    held: set[int] = set()
    for part in meta.parts:
        kind = "Linear layers" if part.linear else "experts"
        if id(part.weight.owner) in held:
            continue
        tensors = (part.weight.codes, *part.weight.statistics)
        held |= {id(part.weight.owner)} | {tensor.untyped_storage()._cdata for tensor in tensors}
        weight = plain.get(f"{part.module}.{part.leaf}".lstrip("."))
        numel = part.weight.numel
        loaded = numel * part.weight.dtype.itemsize
        if weight is not None and weight.numel() == numel and weight.is_floating_point():
            loaded = weight.nbytes  # else it comes packed
        weights[kind] += numel
        before[kind] += loaded
        after[kind] += part.weight.codes.nbytes + part.statistics
    kind_of = _kind_of_plain(meta)
    for name, tensor in _tensors(meta.base):
        if id(tensor) in held or tensor.untyped_storage()._cdata in held:
            continue
        held.add(id(tensor))
        kind = kind_of.get(id(tensor)) or ("experts" if meta.layout.find(name) else KINDS[-1])
        weights[kind] += tensor.numel()
        before[kind] += tensor.nbytes
        after[kind] += tensor.nbytes
    kinds = tuple(KindBytes(k, weights[k], before[k], after[k]) for k in KINDS if weights[k])
    return Inventory(meta.kind, kinds, source.notes)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _kind_of_plain(meta: meta_model.MetaModel) -> dict[int, str]:
    """Return the kind of tensors that are not packed, by id, where their module tells it."""
    kinds: dict[int, str] = {}
    modules = dict(meta.base.named_modules())
    routers = {router.name for router in meta.layout.routers}
    try:
        head = meta.base.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    for name, module in modules.items():
        table = isinstance(module, nn.Embedding) or module is head
        kind = "embeddings and head" if table else "routers" if name in routers else None
        for key, tensor in module.named_parameters(recurse=kind == "routers"):
            if kind or f"{name}.{key}".lstrip(".") in routers:
                kinds.setdefault(id(tensor), kind or "routers")
    return kinds
