"""Layers that differ in nothing but their place: a plan packs and runs two of them, for all.

Packing and adapting a model on meta takes time by its modules, and most of these are in layers that
are alike. Of each kind the first and the last stay, since what is alive when they run differs; the
rest are emptied, and counted as the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..models.trainer.file import AskedLora
from .blocks import block_modules, block_names, tensors_in
from .budget import Block

_PLACES = {"layer_idx", "layer_number", "layer_id", "block_idx", "layer_index", "training"}
_NAMES_NOTHING = {"r", "lora_alpha", "lora_dropout"}  # Fields of a `LoraConfig` that are numbers


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model on meta whose repeated layers are empty."""

    model: nn.Module
    names: tuple[str, ...]  # All blocks of the whole model, in order
    groups: tuple[tuple[str, ...], ...]  # Of these, layers that are alike
    nbytes: int  # Bytes of the whole model

    @property
    def emptied(self) -> dict[str, str]:
        """The layers that are empty, with the layer that each is counted as."""
        return {name: group[-1] for group in self.groups for name in group[1:-1]}


def skeleton_of(model: nn.Module) -> Skeleton:
    """Empty the repeated layers of a model on meta that nothing else holds."""
    nbytes = nbytes_of(model)
    blocks = block_modules(model)
    held = {name: [id(t) for t in tensors_in(block)] for name, block in blocks.items()}
    owners = Counter(key for keys in held.values() for key in keys)
    free = {name for name, keys in held.items() if all(owners[key] == 1 for key in keys)}
    names = block_names(model)
    groups = tuple(tuple(group) for group in alike(blocks) if free.issuperset(group))
    for layer in (blocks[name] for group in groups for name in group[1:-1]):
        for content in (layer._modules, layer._parameters, layer._buffers):
            content.clear()
    return Skeleton(model, names, groups, nbytes)


def nbytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors_in(model)}.values())


def alike(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return groups of three or more blocks that differ in nothing but their place, in order."""
    groups: dict[Any, list[str]] = {}
    for name, module in blocks.items():
        shapes = tuple(
            (path, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for path, tensor in (*module.named_parameters(), *module.named_buffers())
        )
        settings = tuple(
            # Wrappers of PEFT keep the full name of what they wrap.
            (path, type(part).__name__, key, str(value).replace(f"{name}.", ""))
            for path, part in module.named_modules()
            for key, value in sorted(vars(part).items())
            if isinstance(value, (bool, int, float, str)) and not (key in _PLACES or key[0] == "_")
        )
        groups.setdefault((type(module), shapes, settings), []).append(name)
    return [names for names in groups.values() if len(names) > 2]


def tells_layers_apart(targets: str, lora_config: Any, quantization: Any) -> bool:
    """Whether settings may name a layer by its number, so that layers need not be packed alike."""
    said: list[Any] = [getattr(quantization, "llm_int8_skip_modules", None)]
    if isinstance(lora_config, AskedLora):
        fields = lora_config.fields.items()
        said += [value for name, value in fields if name not in _NAMES_NOTHING]
    elif lora_config is not None:
        return True
    else:
        said.append(targets)
    return re.search(r"\d", repr(said)) is not None


def filled(skeleton: Skeleton, found: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks of the whole model in order, given those of its skeleton."""
    by_name = {block.name: block for block in found}
    by_name |= {name: replace(by_name[as_], name=name) for name, as_ in skeleton.emptied.items()}
    return tuple(by_name[name] for name in dict.fromkeys((*skeleton.names, *by_name)))
