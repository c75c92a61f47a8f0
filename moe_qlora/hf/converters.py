"""Packs the checkpoint's tensors as transformers reads them, one expert at a time.

transformers' own `WeightConverter`s read all tensors of a parameter and run operations over them
(merge E matrices, concatenate gate and up, transpose) before a quantizer sees the result: a whole
fused weight in 16 bit, several times over. The converters here run the same operations on one
expert's tensors, and pack what comes out before they read the next.

    per expert on disk   one tensor of each source pattern, through the operations: `(1, out, in)`
    fused on disk        a few experts' slice of the file, through the operations: `(n, out, in)`
    anything else        the whole weight through the operations, then packed

The first two are taken only where every operation is known to treat experts apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..checkpoint.load_spec import LoadSpec
from ..checkpoint.reader import Checkpoint, check_plain
from ..errors import CheckpointError, NonFiniteWeightError
from ..kernels.weights import PackedWeight
from ..packing import parametrize
from ..packing.codec import LARGEST, Packer, are_below, restore
from ..packing.decoders import hold
from ..packing.int8 import SCALES
from ..packing.settings import key_ends, problems
from ..world import absmax_mean
from .kept import SLICE_BYTES, keep_codes


class Deferred:
    """A tensor that transformers is about to read, and where it lies in the checkpoint."""

    def __init__(self, key: str, source: Any) -> None:
        self.key, self.source = key, source

    def __call__(self) -> Tensor | None:
        """Read it as transformers would: the whole tensor, on its device, in its dtype."""
        return self.source.result() if isinstance(self.source, Future) else self.source()


class PackingConverter(WeightConverter):
    """A converter of transformers that packs the weights of a spec while it converts.

    For parameters that the spec does not name it does what the converter it replaces does.
    """

    # The class it extends has slots; this one has a `__dict__`.
    spec: LoadSpec

    @classmethod
    def replacing(cls, converter: Any, spec: LoadSpec) -> PackingConverter:
        """Return a converter with the patterns, scope and operations of another."""
        new = cls.__new__(cls)
        for base in type(converter).__mro__:
            for slot in getattr(base, "__slots__", ()):
                if hasattr(converter, slot):
                    object.__setattr__(new, slot, getattr(converter, slot))
        for name, value in getattr(converter, "__dict__", {}).items():
            object.__setattr__(new, name, value)
        new.spec = spec
        return new

    @classmethod
    def for_fused(cls, leaf: str, spec: LoadSpec) -> PackingConverter:
        """Return a converter for weights that lie on disk as the model holds them."""
        new = cls([_whole_name(leaf)], [leaf], [Keep()])
        new.spec = spec
        return new

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Any
    ) -> None:
        """Note where a tensor lies, and keep transformers from reading it ahead."""
        files, quantized = self.spec.files, self.spec.prequantized
        if quantized is not None:
            key = quantized.plain_name(source_key) or source_key
            self.spec.read.add(source_key)
            _cancel(future)
            future = Deferred(key, partial(self._dequantized, quantized, key, target_key))
        elif self._packed_names(target_key):
            if files is not None and source_key in files:
                _cancel(future)
            future = Deferred(source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, future)

    def convert(self, layer_name: str, model: Any = None, config: Any = None, **rest: Any) -> Any:
        """Convert as `WeightConverter` does, with packed parameters for the spec's weights."""
        if layer_name in self.spec.kept:
            [[item]] = self.collected_tensors.values()
            self.collected_tensors.clear()
            return {layer_name: keep_codes(layer_name, item.key, self.spec)}
        packers = {n: WeightPacker(n, self.spec) for n in self._packed_names(layer_name)}
        if not packers:
            return super().convert(layer_name, model=model, config=config, **rest)
        result: dict[str, Any] = {}
        context = {"full_layer_name": layer_name, "model": model, "config": config}
        for pieces in self._pieces(layer_name, context, list(packers)):
            for target, piece in pieces.items():
                name = self._full_name(layer_name, target)
                tensor = piece[0] if isinstance(piece, list) else piece
                if name in packers:
                    packers[name].add(tensor)
                else:
                    result[name] = tensor
        return result | {name: packer.finish() for name, packer in packers.items()}

    def _dequantized(self, files: Checkpoint, key: str, target_key: str) -> Tensor:
        """Read a tensor as transformers reads it from a 16-bit folder."""
        on_cpu = getattr(self, "force_cpu", False)
        device = torch.device("cpu") if on_cpu else self.spec.device(target_key)
        return files.read(key, device=device).to(self.spec.dtypes.get(target_key))

    def _full_name(self, layer_name: str, target: str) -> str:
        """Return the full name of a target, where `layer_name` is that of the first target."""
        first = self.target_patterns[0]
        if target == first or target not in self.target_patterns:
            return layer_name if target == first else target
        return layer_name.replace(first, target, 1)

    def _packed_names(self, layer_name: str) -> list[str]:
        """Return the full names of the weights to pack that this converter makes."""
        names = (self._full_name(layer_name, target) for target in self.target_patterns)
        return [name for name in names if name in self.spec.params]

    def _pieces(
        self, layer_name: str, context: dict[str, Any], packed: list[str]
    ) -> Iterator[dict[str, Any]]:
        """Run the operations over the collected tensors, expert by expert where that can be."""
        collected: dict[str, list[Deferred]] = dict(self.collected_tensors)
        self.collected_tensors.clear()
        reader = _Reader(self.spec, packed[0])
        whole: _Batch = {p: [(item,) for item in items] for p, items in collected.items()}
        operations, steps = self.operations, None
        if len(packed) == len(self.target_patterns):
            shapes = [tuple(self.spec.params[name].shape) for name in packed]
            rows = self.spec.rows(packed[0])
            steps = _steps(self.operations, collected, shapes, rows, self.spec.files)
        operations, batches = steps or (operations, [whole])
        reader.expect(batches)
        for batch in batches:
            tensors: dict[str, Any]
            tensors = {p: [reader.read(*item) for item in items] for p, items in batch.items()}
            try:
                for operation in operations:
                    tensors = operation.convert(
                        tensors,
                        source_patterns=self.source_patterns,
                        target_patterns=self.target_patterns,
                        missing_keys=None,
                        **context,
                    )
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                counts = ", ".join(f"{len(items)} of {p}" for p, items in collected.items())
                raise CheckpointError(
                    f"{layer_name}: the checkpoint's tensors ({counts}) do not make this weight: "
                    f"some are missing, or of another shape ({error})."
                ) from error
            yield tensors if steps else self._kept(layer_name, tensors)

    def _kept(self, layer_name: str, tensors: dict[str, Any]) -> dict[str, Any]:
        """Cut whole weights down to the rows that are kept of them."""
        kept = dict(tensors)
        for target, value in tensors.items():
            name = self._full_name(layer_name, target)
            tensor = value[0] if isinstance(value, list) else value
            # one of another shape is refused by WeightPacker
            if name in self.spec.shares and len(tensor) == self.spec.params[name].shape[0]:
                first, last = self.spec.rows(name)
                kept[target] = tensor[first:last]
        return kept


class PackedConverter(WeightConverter):
    """Puts a packed weight together from its codes and statistics on disk."""

    spec: LoadSpec
    parts: dict[str, str]
    keys: dict[str, str]

    def __init__(self, leaf: str, spec: LoadSpec) -> None:
        ends = (end for how in (spec.settings, *spec.kept.values()) for end in key_ends(how))
        self.parts = {_whole_name(leaf + end): end for end in dict.fromkeys(ends)}
        super().__init__(list(self.parts), [leaf], [AsOnDisk()])
        self.spec, self.keys = spec, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedConverter:
        return type(self)(self.target_patterns[0], self.spec)

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Any
    ) -> None:
        """Note the key of the codes, and keep transformers from reading what is not kept."""
        if self.parts[source_pattern] == "":
            self.keys[target_key] = source_key
        if target_key in self.spec.shares:
            _cancel(future)
            future = Deferred(source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, future)

    def convert(self, layer_name: str, **rest: Any) -> Any:
        """Return the packed parameter, under its full name."""
        spec = self.spec
        if layer_name in spec.shares:
            tensors = self._read_share(layer_name)
        else:
            tensors = {self.parts[p]: t[0] for p, t in self.materialize_tensors().items()}
        codes = tensors.pop("", None)
        if layer_name not in spec.params:
            shapes = [tuple(p.shape) for p in spec.layout.experts if layer_name in p.names]
            plain = codes is not None and codes.is_floating_point() and not tensors
            if codes is not None and plain and tuple(codes.shape) in shapes:
                return {layer_name: spec.recast(layer_name, codes)}  # one that the user has skipped
            raise CheckpointError(
                f"{layer_name} is packed in the checkpoint, but the manifest does not name it."
            )
        if codes is None:
            raise CheckpointError(f"{layer_name}: the checkpoint has statistics, but no codes.")
        shape, dtype = spec.kept_shape(layer_name), spec.dtypes[layer_name]
        settings, recorded = spec.settings_of(layer_name), dtype
        codec = settings.codec
        if spec.manifest is not None and (codec.has_record or codec.is_kept):
            recorded = getattr(torch, spec.manifest.experts[self.keys[layer_name]].dtype)
        dtype = dtype if spec.recasts else recorded
        stored = settings.storage_dtype
        if codes.dtype != stored and spec.files is not None and layer_name not in spec.shares:
            # transformers before 5.22 casts codes that are stored as floats: read them again
            codes = spec.files.read(self.keys[layer_name]).to(codes.device)
        known = recorded if codec.has_record else dtype
        try:
            packed = restore({"": codes, **tensors}, shape, known, settings)
        except ValueError as error:
            raise CheckpointError(f"{layer_name} {error}.") from error
        packed.dtype = dtype
        spec.keep(layer_name, packed)
        return {layer_name: hold(packed)}

    def _read_share(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a weight's experts that are kept, by the ends of their keys."""
        collected: dict[str, list[Deferred]] = self.collected_tensors
        items = {self.parts[pattern]: one for pattern, [one] in collected.items()}
        self.collected_tensors.clear()
        files, device = self.spec.files, self.spec.device(name)
        missing = set(key_ends(self.spec.settings_of(name))) - items.keys()
        if missing or files is None:
            raise CheckpointError(f"{name}: the checkpoint has no {min(missing) or 'codes'}.")

        def read(end: str, start: int, stop: int | None) -> Tensor:
            return files.read(items[end].key, start, stop).to(device)

        whole, settings = tuple(self.spec.params[name].shape), self.spec.settings_of(name)
        return settings.codec.cut_tensors(read, whole, *self.spec.rows(name), settings)


class WeightPacker:
    """Packs one weight of a spec from the pieces that come out of a converter."""

    def __init__(self, name: str, spec: LoadSpec) -> None:
        self.name, self.spec = name, spec
        self.shape = spec.kept_shape(name)
        self.rows = 0
        self.packer: Packer | None = None
        self.extremes: list[tuple[int, Tensor]] = []

    def add(self, piece: Tensor) -> None:
        """Pack the next rows of the first dimension; refuse other shapes, and packed weights."""
        check_plain(self.name, piece.dtype)
        if tuple(piece.shape[1:]) != self.shape[1:] or self.rows + len(piece) > self.shape[0]:
            seen = (self.rows + len(piece), *piece.shape[1:])
            raise CheckpointError(
                f"{self.name}: the checkpoint gives a weight of shape {seen} or more, the model's "
                f"config asks for {self.shape}: they are not of one model."
            )
        self.extremes.append((self.rows, torch.stack(torch.aminmax(piece))))
        if self.packer is None:
            weights = self.spec.dtypes[self.name]
            mean = absmax_mean(self.spec.shares.get(self.name), self.name)
            self.packer = Packer(self.shape, weights, piece.device, self.spec.settings, mean)
        self.packer.add(piece)
        self.rows += len(piece)

    def finish(self) -> nn.Parameter:
        """Give the spec the packed weight, and return the parameter that holds its codes."""
        if self.packer is None or self.rows != self.shape[0]:
            raise CheckpointError(
                f"{self.name}: the checkpoint gives {self.rows} rows of its first dimension, the "
                f"model's config asks for {self.shape[0]}: tensors are missing."
            )
        # Once a weight: asking after each expert would wait for the device each time.
        finite = are_below(torch.stack([extreme for _, extreme in self.extremes])).all(1).tolist()
        if not all(finite):
            row = self.extremes[finite.index(False)][0]
            raise NonFiniteWeightError(
                f"{self.name} holds NaN or inf in row {row} of its first dimension or soon after "
                f"(or {LARGEST:.0e} and more), and cannot be packed: repair the checkpoint."
            )
        packed: PackedWeight = self.packer.finish()
        self.spec.keep(self.name, packed)
        return hold(packed)


class Keep(ConversionOps):
    """The operation of a tensor that lies on disk as the model holds it."""

    def convert(self, input_dict: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return the one tensor, under its target's name."""
        [value] = input_dict.values()
        return {context["target_patterns"][0]: value[0] if isinstance(value, list) else value}


class AsOnDisk(Keep):
    """The operation of packed tensors, which stay as they lie on disk."""

    hf_quantizer = True  # transformers casts no tensor of an operation with this attribute


class WholeNames(ConversionOps):
    """An operation of bitsandbytes' Linear layers whose keys match by whole components.

    The stock pattern "weight" also matches in the middle of `block_inject_weight.weight.absmax`,
    which is then lost, and with it the layer's statistics.
    """

    def __init__(self, stock: Any, names: dict[str, str]) -> None:
        self.stock, self.names = stock, names
        self.hf_quantizer = stock.hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeNames:
        return self  # transformers copies a converter for each layer, and all of this is constant

    def convert(self, input_dict: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Run the stock operation on the same tensors under its own patterns."""
        tensors = {self.names[pattern]: tensor for pattern, tensor in input_dict.items()}
        result: dict[str, Any] = self.stock.convert(tensors, **context)
        return result


class LinearConverter(WeightConverter):
    """The stock converter of packed Linear layers, which sees to it that they can be decoded.

    What it makes is read by kernels that trust every size. An operation could not refuse: its
    exceptions end up in a table.
    """

    spec: LoadSpec

    @classmethod
    def of(cls, stock: Any, spec: LoadSpec) -> LinearConverter:
        """Return a copy of the stock one, with patterns for whole components of a name."""
        names = {_whole_name(pattern): pattern for pattern in stock._original_source_patterns}
        [operation] = stock.operations
        new = cls(list(names), list(stock.target_patterns), [WholeNames(operation, names)])
        new.spec = spec
        return new

    def convert(self, layer_name: str, model: Any = None, **rest: Any) -> Any:
        """Convert as the stock one does, having checked codes and statistics."""
        self.collected_tensors = tensors = self.materialize_tensors()
        module = model.get_submodule(layer_name.rpartition(".")[0])
        if len(tensors) > 1 and parametrize.is_packed_linear(module):  # else a plain weight
            names = {self.operations[0].names[pattern]: t[0] for pattern, t in tensors.items()}
            ends = {SCALES if n == "SCB" else n.removeprefix("weight"): t for n, t in names.items()}
            form = ends.pop("_format", None)
            problem = next(problems(ends, module.weight.shape, self.spec.settings), None)
            if form is not None and form.flatten().tolist() != [0]:
                problem = "has another weight_format than 0, which stands for rows"
            if problem is not None:
                raise CheckpointError(f"{layer_name} {problem}.")
        made = super().convert(layer_name, model=model, **rest)
        return {name: self.spec.recast(name, value) for name, value in made.items()}


class _Reader:
    """Reads tensors of one weight to its device, in the dtype it would be loaded in."""

    def __init__(self, spec: LoadSpec, name: str) -> None:
        self.files, self.dtype, self.device = spec.files, spec.dtypes[name], spec.device(name)

    def expect(self, batches: Iterable[_Batch]) -> None:
        """Read the weight ahead, in the order in which its experts are packed."""
        if self.files is None:
            return
        for batch in batches:
            for items in zip_longest(*batch.values()):
                for item, *rows in (one for one in items if one is not None):
                    self.files.expect([item.key], *rows)

    def read(self, item: Deferred, start: int = 0, stop: int | None = None) -> Tensor:
        if self.files is None or item.key not in self.files:
            tensor = item()
            if tensor is None:
                raise CheckpointError(f"{item.key} is not given to this process: it is sharded.")
            return tensor
        tensor = self.files.read(item.key, start, stop, self.device)
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            return tensor  # refused by WeightPacker, with the weight's name
        return tensor.to(device=self.device, dtype=self.dtype)


_Batch = dict[str, list[tuple[Any, ...]]]


def _steps(
    operations: Sequence[Any],
    collected: dict[str, list[Deferred]],
    shapes: list[tuple[int, ...]],
    kept: tuple[int, int],
    files: Any,
) -> tuple[Sequence[Any], list[_Batch]] | None:
    """Return operations, and what to read in each step; None if experts cannot be told apart.

    Only the rows `kept` of the weights' first dimension are read.
    """
    rows = shapes[0][0]
    if any(shape[0] != rows for shape in shapes):
        return None
    counts = {len(items) for items in collected.values()}
    if counts == {1} and files is not None:
        keys = [item.key for [item] in collected.values()]
        if not all(key in files and files.info(key).shape[:1] == (rows,) for key in keys):
            return None
        by_rows = _by_rows(operations, tuple(files.info(keys[0]).shape), shapes[0])
        step = max(SLICE_BYTES * rows // max(sum(files.info(key).nbytes for key in keys), 1), 1)
        slices = [
            {name: [(item, at, min(at + step, kept[1]))] for name, [item] in collected.items()}
            for at in range(*kept, step)
        ]
        return None if by_rows is None else (by_rows, slices)
    groups = _groups(operations, len(shapes))
    if groups is None or counts != {rows * groups} or any(len(shape) != 3 for shape in shapes):
        return None
    # One expert of each list; of a list that holds several weights in turn, one of each.
    return operations, [
        {pattern: [(item,) for item in items[expert::rows]] for pattern, items in collected.items()}
        for expert in range(*kept)
    ]


def _name(operation: Any) -> str:
    """Return the operation's class name where transformers or this file defines it, else ""."""
    cls = type(operation)
    known = cls is Keep or cls.__module__ == "transformers.core_model_loading"
    return cls.__name__ if known else ""


def _groups(operations: Sequence[Any], targets: int) -> int | None:
    """Return how many weights one list of per-expert tensors holds; None if it is no such list."""
    first, *others = operations
    kind = _name(first)
    if kind == "MergeModulelist" and first.dim == 0 and all(map(_keeps_rows, others)):
        return 1
    if kind == "ErnieFuseAndSplitTextVisionExperts" and not others:
        return targets if first.stack_dim == 0 and first.concat_dim >= 1 else None
    return None


def _by_rows(
    operations: Sequence[Any], shape: tuple[int, ...], target: tuple[int, ...]
) -> Sequence[Any] | None:
    """Return operations that make a slice of rows of the same slice; None if none do."""
    if len(operations) == 1 and getattr(operations[0], "check_dims", False):
        # It asks whether the tensor has the parameter's shape already, which a slice never has.
        [transpose] = operations
        if shape == target:
            return [Keep()]
        operations = [type(transpose)(transpose.dim0, transpose.dim1)]
    return operations if all(map(_keeps_rows, operations)) else None


def _keeps_rows(operation: Any) -> bool:
    """Return whether an operation works within the rows of the first dimension."""
    kind = _name(operation)
    if kind == "Keep":
        return True
    if kind == "Transpose":
        return min(operation.dim0, operation.dim1) >= 1 and not operation.check_dims
    if kind in ("Chunk", "Concatenate"):
        return operation.dim >= 1 and operation.num_shards_attribute is None
    return kind == "Interleave" and operation.dim >= 1


def _cancel(future: Any) -> None:
    """Keep transformers from reading a tensor in a thread, where it does."""
    if isinstance(future, Future):
        future.cancel()


def _whole_name(leaf: str) -> str:
    """Return a pattern for names that end in these components."""
    return rf"(?<![^.]){re.escape(leaf)}$"
