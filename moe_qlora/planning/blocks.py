"""The blocks of a model on meta, and what each of them holds.

A block is what a device map places whole: a module of a class that the model lists as not to be
split (a decoder layer), any other module without such layers inside (an embedding, the head), and
each parameter or buffer outside of all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.limits import DEQUANTIZED_WEIGHT_BYTES, cdiv
from ..kernels.weights import PackedWeight
from ..lora.config import top_k_of
from ..packing import parametrize
from ..packing.codecs import codec_of
from ..packing.decoders import bits_of, has_codes, linear_kind, read_linear
from .budget import Block, BlockTensor
from .hosting import ALIGNMENT


class PackedPart(NamedTuple):
    """One packed weight: of a Linear layer, or of experts."""

    module: str  # Full name of its module
    leaf: str  # Its name there
    linear: bool
    weight: PackedWeight

    @property
    def statistics(self) -> int:
        """Bytes of its statistics."""
        return sum(tensor.nbytes for tensor in self.weight.statistics)

    @property
    def slot(self) -> int:
        """Bytes of codes and statistics in a slot of `hosting.py`, each aligned."""
        return slot_nbytes((self.weight.codes, *bits_of(self.weight).values()))

    @property
    def dequantized(self) -> int:
        """Bytes of what of it is dequantized at once."""
        size = self.weight.numel * self.weight.dtype.itemsize
        whole = self.linear or size <= DEQUANTIZED_WEIGHT_BYTES
        return size if whole else size // self.weight.experts


def packed_parts(model: nn.Module) -> Iterator[PackedPart]:
    """Yield everything of a model that is packed: experts, then Linear layers."""
    for name, module, leaf in parametrize.iter_packed(model):
        yield PackedPart(name, leaf, False, parametrize.read_packed(module, leaf))
    for name, linear in model.named_modules():
        if parametrize.is_packed_linear(linear):
            yield PackedPart(name, "weight", True, _linear_weight(linear))


def _linear_weight(layer: Any) -> PackedWeight:
    if has_codes(layer):
        return read_linear(layer)
    weight, shape = layer.weight, (layer.out_features, layer.in_features)
    kind, dtype = linear_kind(layer), torch.float16
    return PackedWeight(weight, None, None, 0, None, shape, kind, dtype, owner=weight)  # type: ignore[arg-type]


def blocks_of(model: Any, parts: Sequence[PackedPart]) -> tuple[Block, ...]:
    """Return what each block holds; a tied tensor counts where it is first."""
    packed = {id(part.weight.owner): part for part in parts}
    classes = _layer_classes(model)
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    top_k = top_k_in(model)
    seen: set[int] = set()
    blocks = []
    for name, unit in units_of(model):
        tensors = {id(t): t for t in tensors_in(unit) if id(t) not in seen}
        seen |= tensors.keys()
        held = [packed[key] for key in tensors if key in packed]
        # Statistics may be buffers or parameters of the block as well.
        statistics = {
            tensor.untyped_storage()._cdata for part in held for tensor in part.weight.statistics
        }
        others = [
            tensor
            for key, tensor in tensors.items()
            if key not in packed and tensor.untyped_storage()._cdata not in statistics
        ]
        experts = [part for part in held if not part.linear]
        block = Block(
            name,
            tensors=(
                *(tensor for part in held for tensor in _packed_tensors(part)),
                *map(_other_tensor, others),
            ),
            statistics=sum(part.statistics for part in held),
            expert_statistics=sum(part.statistics for part in experts),
            dequantized=max((part.dequantized for part in held), default=0),
            # A layer is of a class not to be split; without these, an item of a ModuleList.
            layer=type(unit).__name__ in classes
            or (not classes and name.rpartition(".")[0] in lists),
            slot=sum(part.slot for part in experts),
            active=_active(unit, held, top_k),
        )
        blocks.append(block)
    return tuple(blocks)


def slot_nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in a slot of `hosting.py`, each aligned."""
    return sum(cdiv(tensor.nbytes, ALIGNMENT) * ALIGNMENT for tensor in tensors)


def top_k_in(model: Any) -> int:
    """Return how many experts a token is given to, 1 where the configuration does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return top_k_of(config) or top_k_of(text) or 1


def _active(unit: nn.Module | Tensor, held: Sequence[PackedPart], top_k: int) -> int:
    """Return the number of a block's active weights: those that one token is multiplied with."""
    packed = {id(part.weight.owner) for part in held}
    linears = unit.modules() if isinstance(unit, nn.Module) else ()
    plain = {id(m.weight): m.weight for m in linears if isinstance(m, nn.Linear)}
    frozen = [w for key, w in plain.items() if key not in packed and not w.requires_grad]
    active = sum(weight.numel() for weight in frozen)
    for part in held:
        numel, experts = part.weight.numel, part.weight.experts
        active += numel if part.linear else numel * min(top_k, experts) // experts
    return active


def _other_tensor(tensor: Tensor) -> BlockTensor:
    part = "trained" if tensor.requires_grad else "other"
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else 0
    return BlockTensor(part, rows, row, tensor.itemsize, isinstance(tensor, nn.Parameter))


def _packed_tensors(part: PackedPart) -> Iterator[BlockTensor]:
    """Yield codes and statistics as distributed runs have them (`distributed.sharding`)."""
    weight, kind = part.weight, "linear" if part.linear else "experts"
    in_rows = part.linear and not codec_of(weight.kind).in_quant_state
    rows = weight.shape[0] if in_rows else weight.codes.nbytes
    yield BlockTensor(kind, rows, weight.codes.nbytes // rows, 1)
    held = bits_of(weight) if part.statistics else {}  # none before it is packed
    for name, bits in held.items():
        yield BlockTensor("statistics", len(bits), 1, bits.itemsize, parameter=name != "tables")


def block_modules(model: Any) -> dict[str, nn.Module]:
    """Return the blocks that are modules, by name, in registration order."""
    return {name: unit for name, unit in units_of(model) if isinstance(unit, nn.Module)}


def tensors_in(unit: nn.Module | Tensor) -> list[Tensor]:
    """Return the parameters and buffers of a block."""
    return [unit] if isinstance(unit, Tensor) else [*unit.parameters(), *unit.buffers()]


def _layer_classes(model: Any) -> set[str]:
    return set(getattr(model, "_no_split_modules", None) or ())


def units_of(model: Any) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield each block by its full name, single tensors included, in registration order."""
    classes = _layer_classes(model)
    split_paths: set[str] = set()
    for name, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList) and not classes
        if type(module).__name__ in classes or listed:
            parts = name.split(".") + ([""] if listed else [])
            split_paths |= {".".join(parts[:end]) for end in range(len(parts))}

    def descend(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}".lstrip("."), tensor
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if inner in split_paths and type(child).__name__ not in classes:
                yield from descend(inner, child)
            elif any(True for tensors in (child.parameters(), child.buffers()) for _ in tensors):
                yield inner, child

    yield from descend("", model)
