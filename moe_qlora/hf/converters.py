"""Packs the checkpoint's tensors as transformers reads them, some experts at a time.

transformers' own `WeightConverter`s read all tensors of a parameter and run operations over them
(merge E matrices, concatenate gate and up, transpose) before a quantizer sees the result: a whole
fused weight in 16 bit, several times over. The converters here stand in their place. transformers
tells each what tensors make a weight; checkpoint/conversion.py cuts these into slices, runs the
same operations on one slice, and what comes out is packed before the next is read.

    per expert on disk   the tensors of n experts, through the operations: `(n, out, in)`
    fused on disk        n experts' slice of the file, through the operations: `(n, out, in)`
    anything else        the whole weight through the operations, then packed

The first two are taken only where every operation is known to treat experts apart. A slice has one
expert, or as many small ones as `conversion.SLICE_ELEMENTS` weights.

Of a folder that its maker quantized, stock transformers lets its own quantization_config win, and
walks the keys on disk. Here the caller's config wins, on copies; keys get the names that they have
in the 16-bit folder; and the reader (checkpoint/prequantized/) dequantizes every tensor:

    on disk     X.weight  X.weight_scale_inv                  N_blocks  N_scales
                   |          |  `PlainNames`                    |          |
    16 bit      X.weight   (dropped)                             N       (dropped)
                   |                                             |
                   v  the model's converters, and                v
                      `RestConverter` for the rest
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from ..checkpoint.conversion import convert, make_group
from ..checkpoint.integrity import canonical_name
from ..checkpoint.load_spec import LoadSpec, kept_dtypes
from ..checkpoint.prequantized import PrequantizedCheckpoint, maker_method, open_plain
from ..checkpoint.prequantized.config import MXFP4, MakerConfig
from ..checkpoint.prequantized.formats import CODES, SCALE
from ..checkpoint.quantize import copy_config
from ..checkpoint.reader import Checkpoint, check_plain
from ..errors import CheckpointError, NonFiniteWeightError, UnsupportedWeightError
from ..kernels.weights import MX_BLOCK, PackedWeight
from ..layout import ExpertParam
from ..packing import parametrize
from ..packing.codec import LARGEST, Packer, are_below, restore
from ..packing.int8 import SCALES
from ..packing.mxfp4 import KeptPacker, kept_settings
from ..packing.settings import CodecSettings, key_ends, problems

_MAKERS_CONFIG = "_makers_quantization_config"
COMPANION = "read_with_the_codes_that_it_belongs_to"


def preferring_bitsandbytes(stock: Any, is_on: Callable[[], bool]) -> Any:
    """Return a stand-in for `AutoHfQuantizer.merge_quantization_configs`, as the class holds it.

    While `is_on`, it returns a copy of the caller's bitsandbytes config where one is given for a
    folder that its maker quantized. All else is left to `stock`, the class's attribute as it was.

    Raises:
        CheckpointError: The maker's method is not read.
    """

    def merge_quantization_configs(cls: type, from_folder: Any, from_caller: Any) -> Any:
        if is_on() and _is_bitsandbytes(from_caller):
            makers = from_folder if isinstance(from_folder, Mapping) else from_folder.to_dict()
            if maker_method({"quantization_config": makers}) is not None:
                MakerConfig(makers)  # refuses what is not read, before anything is downloaded
                config = copy_config(from_caller)
                setattr(config, _MAKERS_CONFIG, makers)
                return config
        return stock.__get__(None, cls)(from_folder, from_caller)

    return classmethod(merge_quantization_configs)


def _is_bitsandbytes(config: Any) -> bool:
    if isinstance(config, Mapping):
        return bool(config.get("load_in_4bit") or config.get("load_in_8bit"))
    return isinstance(config, BitsAndBytesConfig)


def take_makers_config(config: Any) -> Mapping[str, Any] | None:
    """Remove from a bitsandbytes config what it stands in for, and return it; None if nothing."""
    makers: Mapping[str, Any] | None = getattr(config, "__dict__", {}).pop(_MAKERS_CONFIG, None)
    return makers


def open_files(
    files: list[str] | None, makers_config: Mapping[str, Any] | None
) -> Checkpoint | None:
    """Return a checkpoint's files as those of the 16-bit one; None if they are not safetensors."""
    if files and all(str(file).endswith(".safetensors") for file in files):
        paths = [Path(file) for file in files]
        return open_plain(paths[0].parent, paths, makers_config)
    if makers_config is not None:
        raise CheckpointError(
            f"The checkpoint is quantized ({maker_method({'quantization_config': makers_config})}) "
            "and is dequantized from safetensors files only: give a folder or a hub id with such "
            "files."
        )
    return None


def load_dtypes(
    model: Any, dtype: torch.dtype | None, quantizes: Callable[[Any, str], bool]
) -> dict[str, torch.dtype]:
    """Return, by name, the dtypes that transformers casts a model's tensors to as it reads them."""
    kept = kept_dtypes(model, dtype)
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {
        name: kept(name) or (dtype if dtype and quantizes(model, name) else tensor.dtype)
        for name, tensor in tensors
    }


class PlainNames(WeightRenaming):
    """Gives each key on disk the name that the tensor has in the 16-bit folder.

    It comes first, so that the model's own renamings and converters see plain names. Scales, shapes
    and whatever else goes with codes get one name, which no model has.
    """

    files: PrequantizedCheckpoint

    def __init__(self, files: PrequantizedCheckpoint) -> None:
        super().__init__("on disk", "plain")
        self.files = files

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the plain name of a key."""
        return self.files.plain_name(source_key) or COMPANION, None


def check_read(model: Any, spec: LoadSpec) -> None:
    """Check that transformers read no codes by itself: what it cannot rename, it reads as it is."""
    files = spec.prequantized
    if files is None:
        return
    for key in model.state_dict():
        name = files.plain_name(key) if key in files.stored and key not in spec.read else None
        if name is not None and files.is_dequantized(name):
            raise CheckpointError(
                f"{key} was read without being dequantized, since transformers' conversions of a "
                f"{type(model).__name__} lead to no parameter of it: load the 16-bit checkpoint."
            )


class Deferred:
    """A tensor that transformers is about to read, and where it lies in the checkpoint."""

    def __init__(self, key: str, source: Any) -> None:
        self.key, self.source = key, source

    def __call__(self) -> Tensor | None:
        """Read it as transformers would: the whole tensor, on its device, in its dtype."""
        return self.source.result() if isinstance(self.source, Future) else self.source()


class Collected:
    """The tensors of one weight: in the load's files, or as transformers reads them."""

    def __init__(self, items: Mapping[str, Deferred], name: str, spec: LoadSpec) -> None:
        in_files = spec.files is not None and all(key in spec.files for key in items)
        self._files: Any = spec.files if in_files else None
        self._items = items
        self._name, self._dtype, self._device = name, spec.dtypes[name], spec.device(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by key; none where these are not known before a tensor is read."""
        files = self._files
        return {} if files is None else {key: files.info(key).shape for key in self._items}

    def expect(self, places: Iterable[tuple[str, int, int | None]]) -> None:
        """Read rows of tensors ahead, in this order."""
        for key, first, last in places if self._files is not None else ():
            self._files.expect([key], first, last)

    def read(self, key: str, start: int, stop: int | None) -> Tensor:
        """Return rows of a tensor on the weight's device, in the dtype it would be loaded in.

        Of what lies in no file it is the whole tensor.
        """
        files = self._files
        tensor = self._items[key]() if files is None else files.read(key, start, stop, self._device)
        if tensor is None:
            raise CheckpointError(f"{key} is not given to this process: it is sharded.")
        check_plain(self._name, tensor.dtype)
        return tensor.to(device=self._device, dtype=self._dtype)


class _Converter(WeightConverter):
    """A converter of one load, which transformers copies for every key.

    It collects tensors in one of the copies for each weight. The class it extends has slots; this
    one has a `__dict__`.
    """

    spec: LoadSpec

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = copy(self)
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        return new


class FillingConverter(_Converter):
    """A converter of transformers that packs the weights of a spec while it converts.

    For parameters that the spec does not name it does what the converter it replaces does.
    """

    stock: Any  # the converter that it replaces, None where it replaces none

    @classmethod
    def replacing(cls, stock: Any, spec: LoadSpec) -> FillingConverter:
        """Return a converter with the patterns, scope and operations of another."""
        new = cls.__new__(cls)
        for base in type(stock).__mro__:
            for slot in getattr(base, "__slots__", ()):
                if hasattr(stock, slot):
                    object.__setattr__(new, slot, getattr(stock, slot))
        new.__dict__ |= {**getattr(stock, "__dict__", {}), "spec": spec, "stock": stock}
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

    def convert(self, layer_name: str, model: Any = None, **rest: Any) -> Any:
        """Convert as `WeightConverter` does, with packed parameters for the spec's weights."""
        spec, names = self.spec, self._packed_names(layer_name)
        if not names:
            return super().convert(layer_name, model=model, **rest)
        collected: dict[str, list[Deferred]] = dict(self.collected_tensors)
        self.collected_tensors.clear()
        items = {item.key: item for found in collected.values() for item in found}
        if layer_name in spec.kept:
            [key] = items
            return {layer_name: keep_codes(layer_name, key, spec)}
        tensors = Collected(items, names[0], spec)
        sources = {
            pattern: tuple(item.key for item in found) for pattern, found in collected.items()
        }
        shapes = {name: tuple(spec.params[name].shape) for name in names}
        group = make_group(layer_name, self.stock, sources, shapes, tensors.shapes())
        if len(names) < len(self.target_patterns):
            group = replace(group, unit="")  # of the others no shape is known
        packers = {name: WeightPacker(name, spec) for name in names}
        result: dict[str, Any] = {}
        slices = list(group.slices())
        tensors.expect(place for piece in slices for place in group.places(*piece))
        for start, stop in slices:
            read = {place[0]: tensors.read(*place) for place in group.places(start, stop)}
            try:
                pieces = convert(group, read, model)
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                counts = ", ".join(f"{len(found)} of {p}" for p, found in collected.items())
                raise CheckpointError(
                    f"{layer_name}: the checkpoint's tensors ({counts}) do not make this weight: "
                    f"some are missing, or of another shape ({error})."
                ) from error
            for name, piece in pieces.items():
                if name in packers:
                    packers[name].add(piece)
                else:
                    result[name] = piece
        return result | {name: packer.finish() for name, packer in packers.items()}

    def _dequantized(self, files: Checkpoint, key: str, target_key: str) -> Tensor:
        on_cpu = getattr(self, "force_cpu", False)
        device = torch.device("cpu") if on_cpu else self.spec.device(target_key)
        return files.read(key, device=device).to(self.spec.dtypes.get(target_key))

    def _packed_names(self, layer_name: str) -> list[str]:
        first, *others = self.target_patterns
        names = [layer_name, *(layer_name.replace(first, target, 1) for target in others)]
        return [name for name in names if name in self.spec.params]


class RestConverter(FillingConverter):
    """Serves tensors that lie on disk as the model holds them; it comes after all others.

    These are weights to pack, and of a folder that its maker quantized all tensors, of which
    transformers would read the codes.
    """

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(["any key"], ["parameter"], [Keep()])
        self.spec, self.stock = spec, None
        self.names = keys_of(spec)

    def convert(self, layer_name: str, *args: Any, **context: Any) -> Any:
        """Convert as others do; every model has tensors that come here."""
        # There is nothing to report: what they belong to was read with them.
        context["loading_info"].unexpected_keys.discard(COMPANION)
        return super().convert(layer_name, *args, **context)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name as it is, and the pattern if the key is served here."""
        serves = self.spec.prequantized is not None or source_key in self.names
        return source_key, self.source_patterns[0] if serves else None


class PackedConverter(_Converter):
    """Puts packed weights together from their codes and statistics on disk; it comes first."""

    def __init__(self, spec: LoadSpec) -> None:
        ends = (end for how in (spec.settings, *spec.kept.values()) for end in key_ends(how))
        self.parts = {f"a packed weight{end}": end for end in dict.fromkeys(ends)}
        super().__init__(list(self.parts), ["weight"], [AsOnDisk()])
        self.spec, self.names = spec, keys_of(spec)
        self.keys: dict[str, str] = {}  # of codes on disk, by the weight's name

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name of the packed weight that a key is a part of, and which part."""
        for pattern, end in self.parts.items():
            if source_key.endswith(end) and source_key.removesuffix(end) in self.names:
                return source_key.removesuffix(end), pattern
        return source_key, None

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Any
    ) -> None:
        """Note the key of the codes, and keep transformers from reading what is not kept."""
        if self.parts[source_pattern] == "":
            self.keys[target_key] = source_key
        if self.spec.offloads:
            _cancel(future)
            future = Deferred(source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, future)

    def convert(self, layer_name: str, **rest: Any) -> Any:
        """Return the packed parameter, under its full name."""
        spec = self.spec
        if spec.offloads and spec.files is not None:
            collected: dict[str, list[Deferred]] = self.collected_tensors
            tensors = {self.parts[p]: spec.files.read(o.key) for p, [o] in collected.items()}
            self.collected_tensors.clear()
        else:
            tensors = {self.parts[p]: t[0] for p, t in self.materialize_tensors().items()}
        codes = tensors.pop("", None)
        if codes is None:
            raise CheckpointError(f"{layer_name}: the checkpoint has statistics, but no codes.")
        shape, dtype = spec.shape(layer_name), spec.dtypes[layer_name]
        settings, recorded = spec.settings_of(layer_name), dtype
        codec = settings.codec
        if spec.manifest is not None and (codec.has_record or codec.is_kept):
            recorded = getattr(torch, spec.manifest.experts[self.keys[layer_name]].dtype)
        dtype = dtype if spec.recasts else recorded
        stored = settings.storage_dtype
        if codes.dtype != stored and spec.files is not None:
            # transformers before 5.22 casts codes that are stored as floats: read them again
            codes = spec.files.read(self.keys[layer_name]).to(codes.device)
        known = recorded if codec.has_record else dtype
        try:
            packed = restore({"": codes, **tensors}, shape, known, settings)
        except ValueError as error:
            raise CheckpointError(f"{layer_name} {error}.") from error
        packed.dtype = dtype
        return {layer_name: spec.keep(layer_name, packed)}


class WeightPacker:
    """Packs one weight of a spec from the pieces that come out of a converter."""

    def __init__(self, name: str, spec: LoadSpec) -> None:
        self.name, self.spec = name, spec
        self.shape = spec.shape(name)
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
        # of each expert: over one dimension alone the CPU takes twenty times as long
        for row, part in enumerate(piece if piece.dim() > 2 else [piece], self.rows):
            self.extremes.append((row, torch.stack(torch.aminmax(part))))
        if self.packer is None:
            weights = self.spec.dtypes[self.name]
            self.packer = Packer(self.shape, weights, piece.device, self.spec.settings)
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
        return self.spec.keep(self.name, packed)


class Keep(ConversionOps):
    """The operation of a tensor that lies on disk as the model holds it."""

    def convert(self, input_dict: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return the one tensor, under the parameter's full name."""
        [value] = input_dict.values()
        return {context["full_layer_name"]: value[0] if isinstance(value, list) else value}


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


def keys_of(spec: LoadSpec) -> set[str]:
    """Return the keys that weights may have on disk: with and without the prefix of the body."""
    body = f"{spec.prefix}."
    return {key for n in spec.params for key in (n, body + n, n.removeprefix(body))}


def _cancel(future: Any) -> None:
    """Keep transformers from reading a tensor in a thread, where it does."""
    if isinstance(future, Future):
        future.cancel()


def _whole_name(leaf: str) -> str:
    return rf"(?<![^.]){re.escape(leaf)}$"


# Loads of folders whose experts' own codes are kept: nothing is dequantized and packed anew.
#
# Kept is what packing/mxfp4.py can compute with: MXFP4 as gpt-oss has it, `N_blocks` and
# `N_scales` for the whole of a fused parameter N. Experts that the folder holds in another form are
# dequantized and packed as those of any other folder.

# Least size of a slice of a fused tensor: an expert, or as many small ones as fit in this.
SLICE_BYTES = 8 << 20


def weights_to_keep(model: Any, spec: LoadSpec) -> dict[str, CodecSettings]:
    """Return how the expert weights of a load are packed whose codes can be kept, by name."""
    files, kept = spec.prequantized, {}
    if files is not None and files.method == MXFP4:
        settings = kept_settings(spec.settings)
        keys = {name: canonical_name(model, name, files) for name in spec.params}
        kept = {
            name: settings
            for name, key in keys.items()
            if key is not None and _is_whole(files, key, spec.params[name])
        }
    if not kept:
        warnings.warn(
            "keep_codes=True: the checkpoint holds no experts in MXFP4 as gpt-oss has it, so that "
            f"all experts are packed to {spec.settings.kind}.",
            UserWarning,
            stacklevel=2,
        )
    return kept


def _is_whole(files: PrequantizedCheckpoint, key: str, param: ExpertParam) -> bool:
    if files.parts(key).keys() != {CODES, SCALE}:
        return False
    blocks = files.stored[files.parts(key)[CODES]].shape
    if len(blocks) != 4 or blocks[3] != MX_BLOCK // 2:
        return False
    experts, rows, groups, _ = blocks
    return (experts, groups * MX_BLOCK, rows) == tuple(param.shape)


def refuse_to_shard(kept: Collection[str], advice: str) -> None:
    """Raise where a load that gives each rank its share at once meets weights with own codes."""
    if kept:
        raise CheckpointError(
            f"{min(kept)} keeps the MXFP4 codes of its checkpoint, which are not sharded while "
            f"they are read: {advice}, or load the checkpoint without keep_codes=True."
        )


def keep_codes(name: str, key: str, spec: LoadSpec) -> nn.Parameter:
    """Read one weight's codes, some experts at a time; return the parameter that holds them.

    Args:
        name: Of the parameter.
        key: Plain key in the files.
        spec: Of the load, which gets the packed weight.

    Raises:
        CheckpointError: Codes or scales are not of this weight, or a scale is NaN.
    """
    files = spec.prequantized
    assert files is not None
    parts, device = files.parts(key), spec.device(name)
    rows = spec.shape(name)[0]
    try:
        packer = KeptPacker(spec.shape(name), spec.dtypes[name], device, spec.settings_of(name))
        info = files.stored[parts[CODES]]
        step = max(SLICE_BYTES * info.shape[0] // max(info.nbytes, 1), 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            blocks, scales = (
                files.read_stored(parts[role], start, stop, device) for role in (CODES, SCALE)
            )
            packer.add(blocks, scales)
        packed = packer.finish()
    except UnsupportedWeightError as error:
        raise CheckpointError(f"{name}: {error} Copy the files again.") from error
    return spec.keep(name, packed)
