"""The weights of a load that transformers does not read: they are hidden from it, and filled here.

    whole                                       shares: FSDP2 shards the model before it is filled
    `hide`     finds the keys on disk that make these weights, takes the weights from the state
               dict, and gives the keys a name that no model has
                                                `pack` attaches blank packed weights
    transformers loads the rest, stock          and shards
    tie_weights: `fill`
    postprocess_model: `finish` attaches        `finish` allocates this rank's shares: `fill`

`fill` is one loop for all of them. A `Slot` packs a weight of rows in 16 bit, a `ShareSlot` one
rank's part of it; MXFP4 codes that are kept, and a packed folder's tensors, are copied. Without
safetensors files transformers loads experts in 16 bit, and `pack_parameter` packs them.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, distributed, nn
from transformers.core_model_loading import WeightRenaming

from ..checkpoint.conversion import DiskLayout
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import PackedWeights, canonical_name, packed_names
from ..checkpoint.prequantized import CODES as STORED_CODES
from ..checkpoint.prequantized import MXFP4, SCALE, PrequantizedCheckpoint
from ..checkpoint.rows import PackingPlan, Slot, ahead, filled, indexed, packed_linears, slot_for
from ..errors import (
    CheckpointError,
    ConfigError,
    MoeQloraError,
    NonFiniteWeightError,
    QuantizationError,
    UnsupportedWeightError,
    first_line,
)
from ..kernels.limits import cdiv
from ..kernels.weights import MX_BLOCK, PackedWeight
from ..layout import ExpertParam, listed
from ..packing import parametrize
from ..packing.bnb4bit import RECORD, SCALES, read_record
from ..packing.codec import LARGEST, Packer, first_nonfinite, pack
from ..packing.codecs import CODES
from ..packing.decoders import bits_of, write_linear
from ..packing.mxfp4 import MXFP4 as NATIVE
from ..packing.mxfp4 import KeptPacker
from ..packing.parametrize import Place
from ..packing.settings import CodecSettings, why_not
from ..world import offload, world
from .model import finish_packing

READ = "read_by_moe_qlora"
_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"

SLICE_BYTES = 8 << 20
"""Codes that are kept are read in slices of an expert, or as many small ones as fit in this."""


class Renamed(WeightRenaming):
    """Gives keys on disk other names, ahead of the model's own conversions."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__("on disk", "elsewhere")
        self.names = names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.names.get(source_key, source_key), None


class Fill:
    """The weights of one load that this package reads."""

    def __init__(
        self, model: Any, spec: PackingPlan, files: Checkpoint | None,
        dtypes: Mapping[str, torch.dtype], config: Any,
        *, offloads: bool = False, shards: bool = False,
    ) -> None:  # fmt: skip
        # `dtypes` are those that the tensors of the model on meta are loaded in, were they plain.
        self.model, self.spec, self.dtypes = model, spec, dict(dtypes)
        self.files: Any = files  # None for files other than safetensors: nothing is read here
        self.config, self.shards, self._offloads = config, shards, offloads
        self._device_map: Any = None
        self.layout: Any = None  # `DiskLayout` of a folder that is not packed
        self.names: set[str] = set()  # of tensors that transformers does not read
        # of a packed folder: the stored name of a tensor of the model, and its keys
        self._stored: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._places: dict[str, Place] = {}  # of shares, by name
        # empty parameters, for packed experts that are attached last, and these
        self._pending: dict[int, tuple[nn.Parameter, PackedWeight]] = {}
        self._missing: set[str] = set()  # that no file holds
        self.error: MoeQloraError | None = None
        self.linears = packed_linears(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # transformers copies its quantizer for every tensor

    @property
    def _makers(self) -> PrequantizedCheckpoint | None:
        return self.files if isinstance(self.files, PrequantizedCheckpoint) else None

    def place(self, device_map: Any) -> None:
        if isinstance(device_map, Mapping) and "disk" in device_map.values() and self._makers:
            raise ConfigError(
                f"The device_map sends {next(k for k, v in device_map.items() if v == 'disk')} to "
                f"disk, and the checkpoint is quantized ({self._makers.method}): its tensors are "
                "dequantized as they are read, and not offloaded to disk; give a device_map "
                "without disk."
            )
        self._device_map = device_map

    def hide(self, conversions: list[Any], *, linears: bool) -> list[Any]:
        """Keep transformers from the weights that are filled; return a renaming to come first."""
        model, read = self.model, {}
        if self.spec.manifest is not None:
            self._find_stored()
            self.names = {*self._stored} & {*self.spec.params, *self.linears}
            read = dict.fromkeys((key for n in self.names for key in self._stored[n][1]), READ)
        elif self.files is not None:
            read = self._find_rows(conversions, linears)
        for name in self.names:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True
        if self.shards:
            self.pack()
            for name in {*self.names, *self.linears}:
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
            # transformers loads what is neither packed nor dequantized
            self._places = {
                name: place
                for name, place in self._places.items()
                if place.decoder or not self.names.isdisjoint(self._aliases[name])
            }
            own = {id(tensor) for place in self._places.values() for tensor in place.tensors()}
            self.names |= {name for name, tensor in model.named_parameters() if id(tensor) in own}
            # transformers shards next; a load that fails undoes this when it drops the fill
            self._sharding = ExitStack()
            self._sharding.enter_context(world().shards_integers())
        else:
            model.tie_weights = MethodType(self._tie_weights, model)

        def leave_out(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in self.names:
                state.pop(prefix + name, None)

        self._hook = model.register_state_dict_post_hook(leave_out)
        self._before = model.__dict__.get(_UNEXPECTED)
        setattr(model, _UNEXPECTED, {*(getattr(model, _UNEXPECTED) or ()), f"^{READ}$"})
        return [Renamed(read)] if read else []

    def _tie_weights(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Fill once transformers has loaded the rest: it then ties weights that are missing."""
        if kwargs.get("missing_keys") is not None:
            del model.__dict__["tie_weights"]
            self._missing = {*kwargs["missing_keys"]}
            try:
                self.fill()
            except MoeQloraError as error:  # raised once transformers has left out its names
                self.error = error
        return type(model).tie_weights(model, *args, **kwargs)

    @torch.no_grad()
    def fill(self) -> None:
        """Read, pack and put into place; all ranks that fill shares must call it."""
        for name, weight in self._weights():
            self._put(name, weight)
            del weight  # before the next is packed

    def fill_shares(self, model: nn.Module, device: torch.device, *, on_cpu: bool = False) -> None:
        """Allocate this rank's shares of the sharded model, and fill them, packed on `device`."""
        self._device_map = {"": device}
        owned = {id(parameter) for parameter in model.parameters()}

        def empty(tensor: Tensor) -> Tensor:
            is_parameter = id(tensor) in owned or isinstance(tensor, nn.Parameter)
            place = torch.device("cpu") if on_cpu and is_parameter else device
            return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

        model._apply(empty)
        with self.files:
            self.fill()

    def finish(self) -> None:
        """Attach what was packed, or fill shares; mark the model as bitsandbytes' own."""
        model, lost = self.model, []
        self._hook.remove()
        del model.__dict__[_UNEXPECTED]
        if self._before is not None:
            setattr(model, _UNEXPECTED, self._before)
        if self.shards:
            self._sharding.close()
            sharded = next(one.tensors()[0] for one in self._places.values() if one.decoder)
            device = indexed(torch.device(sharded.device_mesh.device_type))
            self.fill_shares(model, device, on_cpu=model.config.distributed_config.fsdp_cpu_offload)
            return
        for name, param in self.spec.params.items():  # a tied one under each of its names
            module, leaf = parametrize.owner_of(model, name)
            plain = module._parameters.get(leaf)
            absent = name in self.names or not self._missing.isdisjoint(param.names)
            if (known := self._pending.get(id(plain))) is not None:
                parametrize.attach(module, leaf, known[1])
            elif plain is not None and not plain.is_meta and not absent:  # loaded by transformers
                check_weight(name, plain, self.spec.settings)
                pack_parameter(model, param, plain, self.spec.settings, offloads=self._offloads)
            elif not parametrize.is_packed(module, leaf):
                lost.append(name)
        self._pending.clear()
        if lost:
            raise CheckpointError(
                f"{listed(lost)} was not loaded: the checkpoint does not hold it, and random "
                "numbers would be packed. Load the 16-bit checkpoint of this model; one that "
                "another tool has packed keeps its weights under other names."
            )
        if self.spec.manifest is not None:
            # Nothing was renamed on the way in; without a record, the model type's mapping is used.
            model.__dict__.pop("_weight_conversions", None)
        if self.spec.params:
            finish_packing(model, self.spec.layout, self.config, self.spec.settings)
            if self._offloads:
                offload(model)

    # Where values come from

    def _find_rows(self, conversions: list[Any], linears: bool) -> dict[str, str]:
        """Find the tensors on disk, 16 bit or a publisher's; return other names for them."""
        files, makers = self.files, self._makers
        wanted = {*self.spec.params, *(self.linears if linears else ())}

        def takes(names: Collection[str], keys: Collection[str]) -> bool:
            return any(map(files.is_dequantized, keys)) or bool(wanted.intersection(names))

        disk = {key: (files.info(key).shape, files.info(key).dtype) for key in files}
        self.layout = DiskLayout(self.model, disk, conversions, takes)
        groups = [group for group in self.layout.groups if group.shapes]
        self.names = {name for group in groups for name in group.shapes}
        keys = {key for group in groups for key in group.keys}
        if makers is None:
            return dict.fromkeys(keys, READ)
        plain = {key: makers.names.get(key, READ) for key in makers.stored}
        return {key: READ if name in keys else name for key, name in plain.items()}

    def _find_stored(self) -> None:
        files, manifest = self.files, self.spec.manifest
        assert manifest is not None
        owned = {name for name, _ in self._tensors()}
        for key, keys in (dict.fromkeys(files) | packed_names(manifest)).items():
            if (name := canonical_name(self.model, key, owned)) is not None:
                self._stored[name] = key, keys or (key,)
        # int8 layers are decoded to float16
        plain = {
            self._stored[name][0]: self.model.get_parameter(name).to(torch.float16)
            for name in self.linears & self._stored.keys()
        }
        self._packed = PackedWeights(manifest, files, plain)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers, tied ones under each of their names."""
        known = self.model.named_parameters, self.model.named_buffers
        return [item for named in known for item in named(remove_duplicate=False)]

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the weight or the shares of each name; the next ones are read meanwhile."""
        files, kept = self.files, self.spec.kept
        if self.spec.manifest is not None:
            for name, place in self._places.items():
                yield name, self._stored_share(place)
            names = () if self.shards else [n for n in self._stored if n in self.names]
            yield from ((name, one.result()) for name, one in ahead(self._read_stored, names))
        elif self.layout is not None:
            by_name = self.layout.by_name
            codes = {name: by_name[name].keys[0] for name in kept if name in by_name}
            for name, key in codes.items():
                yield name, self._kept_codes(name, key)
            if self._places:
                targets = {self._among(name, by_name): name for name in self._places}
                slots = {n: self._share_slot(n, place) for n, place in targets.items()}
            else:
                targets = {name: name for name in self.names - codes.keys()}
                known = self.model, self.spec, self.linears
                slots = {
                    name: slot_for(*known, name, self.dtypes[name], self._device(name))
                    for name in targets
                }
            groups = [group for group in self.layout.groups if slots.keys() & group.shapes]
            infos = {id(group): files.info(group.keys[0]) for group in groups}
            groups.sort(key=lambda one: (infos[id(one)].file, infos[id(one)].offset))
            for name, weight in filled(files, self.layout, groups, slots):
                yield targets[name], weight
                del weight  # before the next is packed

    def _device(self, name: str) -> torch.device:
        from transformers.integrations.accelerate import get_device

        place = get_device(self._device_map or {"": "cpu"}, name, valid_torch_device=True)
        return indexed(torch.device("cpu" if place == "disk" else place))

    def _kept_codes(self, name: str, key: str) -> PackedWeight:
        """Read one weight's codes, some experts at a time; `key` is the plain one in the files."""
        files, device = self.files, self._device(name)
        shape = tuple(self.spec.params[name].shape)
        stored, both = files.stored, [files.parts(key)[role] for role in (STORED_CODES, SCALE)]
        info = stored[both[0]]
        step = max(SLICE_BYTES * info.shape[0] // max(info.nbytes, 1), 1)

        def fetch(start: int) -> list[Callable[[], Tensor]]:
            rows = start, min(start + step, shape[0])
            return [stored.fetch(part, *rows, device) for part in both]

        packer = KeptPacker(shape, self.dtypes[name], device, self.spec.settings_of(name))
        for _, read in ahead(fetch, range(0, shape[0], step)):
            packer.add(*(part() for part in read.result()))
        return packer.finish()

    def _read_stored(self, name: str) -> Any:
        is_expert, (key, keys) = name in self.spec.params, self._stored[name]
        device = None if self._offloads and is_expert else self._device(name)
        if not is_expert and len(keys) == 1:
            plain = self.files.fetch(key, device=device)()
            return plain.to(self.dtypes[name]) if self.spec.recasts else plain
        packed = self._packed.read(key, device)
        if self.spec.recasts:
            packed.dtype = self.dtypes[name]
        return packed

    def _put(self, name: str, weight: Any) -> None:
        if name in self._places:
            place = self._places[name]
            values, statistics = weight if isinstance(weight, tuple) else (weight, {})
            put_local(place.tensors()[0], values)
            for part, share in statistics.items():
                put_local(getattr(place.decoder, part), share)
            return
        module, leaf = parametrize.owner_of(self.model, name)
        if isinstance(weight, Tensor):
            held: Any = weight
            if leaf in module._parameters:
                held = nn.Parameter(weight, requires_grad=weight.is_floating_point())
            held._is_hf_initialized = True
            setattr(module, leaf, held)
        elif name not in self.spec.params:
            write_linear(module, weight)
        else:
            empty = torch.empty(0, dtype=weight.codes.dtype, device=self._device(name))
            parameter = nn.Parameter(empty, requires_grad=False)
            self._pending[id(parameter)] = parameter, weight.to("cpu") if self._offloads else weight
            for one in self.spec.params[name].names:
                owner, leaf = parametrize.owner_of(self.model, one)
                owner._parameters[leaf] = parameter

    # Shares

    def pack(self, layout: DiskLayout | None = None) -> None:
        """Give the model on meta its blank packed weights, in the layout that FSDP2 shards."""
        model, spec, dtypes = self.model, self.spec, self.dtypes
        if spec.kept:
            raise CheckpointError(
                f"{min(spec.kept)} keeps the MXFP4 codes of its checkpoint, which are not sharded "
                "while they are read: fully_shard the model after it is loaded, or load the "
                "checkpoint without keep_codes=True."
            )
        self.layout = self.layout or layout
        owners: dict[int, list[str]] = {}
        for name, tensor in self._tensors():
            owners.setdefault(id(tensor), []).append(name)
        self._aliases = {name: names for names in owners.values() for name in names}
        if spec.manifest is not None:
            if not self._stored:
                self._find_stored()
            record = RECORD + spec.manifest.settings.kind
            for name, (key, _) in self._stored.items():
                if not spec.recasts and self.files and key + record in self.files:
                    dtype = getattr(torch, read_record(self.files.read(key + record))["dtype"])
                    dtypes |= dict.fromkeys(self._aliases[name], dtype)
        for name, tensor in self._tensors():
            wanted = dtypes.get(name, tensor.dtype)
            if tensor.is_meta and tensor.is_floating_point() and wanted.is_floating_point:
                tensor.data = tensor.data.to(wanted)
        for param in {id(param): param for param in spec.params.values()}.values():
            parametrize.pack_blank(model, param, spec.settings)
        for name in self.linears - spec.params.keys():
            module = model.get_submodule(name.rpartition(".")[0])
            parametrize.pack_blank_linear(module, dtypes[name], spec.settings)
        model.config.quantization_config = self.config
        finish_packing(model, spec.layout, self.config, spec.settings)  # which lays it out
        # Where tensors are, before adapters come; a tied one once
        seen: set[int] = set()
        for place in parametrize.packed_places(model):
            if not seen.issuperset(tensors := set(map(id, place.tensors()))):
                seen |= tensors
                self._places[place.name] = place
        stored = set(model.state_dict())
        for name, tensor in self._tensors():
            module, leaf = parametrize.owner_of(model, name)
            computed = leaf in module._buffers and name not in stored
            if id(tensor) not in seen and not computed:
                seen.add(id(tensor))
                self._places[name] = Place(name, module, leaf)

    def _among(self, target: str, names: Collection[str]) -> str:
        if found := [n for n in (target, *self._aliases.get(target, ())) if n in names]:
            return found[0]
        raise CheckpointError(f"The checkpoint has no tensor for {target}.")

    def _share_slot(self, name: str, target: str) -> Slot:
        place, device = self._places[target], self._device(target)
        tensor = place.tensors()[0]
        dtype = self.dtypes.get(target, tensor.dtype)
        if place.decoder is None:
            rows = Ranks.of(tensor).span(len(tensor)) if tensor.dim() else None
            # Joined on the host: pieces of an embedding and their sum take two shares of it
            decodes = any(map(self.files.is_dequantized, self.layout.by_name[name].keys))
            home = device if decodes else torch.device("cpu")
            return Slot(name, tensor.shape, dtype, home, rows=rows)
        form = name, place.decoder.weight_shape, dtype, device, self.spec.settings
        return ShareSlot(tensor, *form, linear=target in self.linears)

    def _stored_share(self, place: Place) -> tuple[Tensor, dict[str, Tensor]]:
        """Read values and, of a packed weight, statistics: each a range of bytes of a tensor."""
        files, settings, decoder = self.files, self.spec.settings, place.decoder
        key, keys = self._stored[self._among(place.name, self._stored)]
        values, codec = place.tensors()[0], settings.codec
        first, last = Ranks.of(values).span(len(values)) if values.dim() else (0, None)
        if decoder is None:
            if first == last:  # fewer rows than ranks
                return torch.empty((0, *values.shape[1:]), dtype=values.dtype), {}
            return files.read(key, first, last), {}
        assert last is not None
        row = values.shape[1:].numel()
        share = files.read_bytes(key, first * row, last * row)
        ends = {SCALES if one.endswith(SCALES) else one.removeprefix(key): one for one in keys}
        statistics = {}
        if codec.in_quant_state:
            blank = dict.fromkeys((CODES, codec.scales), torch.empty(0, dtype=torch.uint8))
            small = {end: files.read(one) for end, one in ends.items() if end not in blank}
            whole = codec.assemble({**small, **blank}, decoder.weight_shape, None, settings)
            statistics = bits_of(whole)
        for part, parameter in decoder.named_parameters():
            first, last = Ranks.of(parameter).span(len(parameter))
            if part == "nested":
                statistics[part] = statistics[part][first:last]
            else:
                span = first * parameter.itemsize, last * parameter.itemsize
                statistics[part] = files.read_bytes(ends[codec.scales], *span).view(parameter.dtype)
        return share.view(values.dtype).view(-1, *values.shape[1:]), statistics


@torch.no_grad()
def put_local(parameter: Any, values: Tensor) -> None:
    """Copy values into a parameter: into this rank's share where it is sharded."""
    local = parameter._local_tensor if hasattr(parameter, "placements") else parameter
    assert local.shape == values.shape, (local.shape, values.shape)
    local.copy_(values)


class Ranks(NamedTuple):
    """The ranks that hold one parameter together, and this one's number among them."""

    rank: int = 0
    size: int = 1
    group: Any = None  # their process group

    @classmethod
    def of(cls, parameter: Any) -> Self:
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard(0):
                mesh = parameter.device_mesh
                group = mesh.get_group(dimension)
                return cls(mesh.get_local_rank(dimension), mesh.size(dimension), group)
            if placement.is_shard():
                raise QuantizationError("Packed weights are sharded over dimension 0 only.")
        return cls()

    def span(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Return which rows of `length` a rank holds, as `torch.chunk` has it; maybe none."""
        step, rank = cdiv(length, self.size), self.rank if rank is None else rank
        return min(rank * step, length), min((rank + 1) * step, length)


class ShareSlot(Slot):
    """Packs this rank's shares of one weight, from the rows alone that they lie in."""

    # Each rank packs the blocks that its codes lie in, which depend on no others. All absmax are
    # then gathered in fp32 (1/16 byte a weight), quantized on every rank where that is asked for.

    settings: CodecSettings

    def __init__(self, codes: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings
        self.ranks, self._row = Ranks.of(codes), codes.shape[1:]  # of codes
        weights, in_byte = self.shape.numel(), 8 // settings.codec.bits
        unit = settings.codec.unit(self.shape, settings)
        spans = [self.ranks.span(len(codes), rank) for rank in range(self.ranks.size)]
        codes_of = [[end * self._row.numel() for end in span] for span in spans]  # bytes
        self._blocks = [
            (start * in_byte // unit, cdiv(stop * in_byte, unit)) if start < stop else (0, 0)
            for start, stop in codes_of
        ]
        first, last = self._blocks[self.ranks.rank]
        begin, end = self._weights = first * unit, min(last * unit, weights)
        start, stop = codes_of[self.ranks.rank]
        self._bytes = slice(start - begin // in_byte, stop - begin // in_byte)
        self._width = weights // self.shape[0]
        self.rows = begin // self._width, cdiv(end, self._width)
        self._part = (end - begin,) if (end - begin) % unit else ((end - begin) // unit, unit)
        self._plain = replace(settings, double_quant=False, storage_dtype=torch.uint8)
        self._error: MoeQloraError | None = None

    def _pack(self, start: int, piece: Tensor) -> None:
        begin, end = (max(weight - start * self._width, 0) for weight in self._weights)
        if self._packer is None:
            self._packer = Packer(self._part, self._cast, self.device, self._plain)
        self._packer.add(piece.reshape(-1)[begin:end])

    def fail(self, error: MoeQloraError) -> None:
        self._error = self._error or error

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's shares of codes and, by name, statistics; all ranks must call it."""
        codes = torch.empty(0, dtype=torch.uint8, device=self.device)
        longest = max(last - first for first, last in self._blocks)
        # The last number says whether this rank has failed.
        mine = torch.zeros(longest + 1, dtype=torch.float32, device=self.device)
        try:
            if self._packer is not None and self._error is None:
                packed = super().finish()
                codes = packed.codes.view(-1)[self._bytes]
                mine[: len(packed.absmax)] = packed.absmax
        except MoeQloraError as error:
            self._error = error
        mine[-1] = float(self._error is not None)
        parts = [mine]
        if self.ranks.size > 1:
            parts = [torch.empty_like(mine) for _ in range(self.ranks.size)]
            try:
                distributed.all_gather(parts, mine, group=self.ranks.group)
            except RuntimeError as error:
                raise QuantizationError(
                    f"Packing {self.name} failed on rank {distributed.get_rank()} while it "
                    f"gathered absmax from all ranks ({first_line(error)}): every rank must take "
                    "part to the end; load the model again."
                ) from error
        if self._error is not None:
            raise self._error
        if bool(torch.stack([part[-1] for part in parts]).any()):  # the device is waited for once
            raise QuantizationError(
                f"Another rank could not pack its share of {self.name}: see its error."
            )
        scales = mine.new_empty(max(last for _, last in self._blocks))
        for (first, last), part in zip(self._blocks, parts, strict=True):
            scales[first:last] = part[: last - first]
        codec, scales = self.settings.codec, scales.to(self.settings.codec.scale_dtype)
        whole = {"absmax": scales.view(torch.uint8)}
        if codec.in_quant_state:
            empty = codes[:0]
            whole = bits_of(codec.finish(empty, scales, self.shape, self.dtype, self.settings))
        for name in whole.keys() - {"tables"}:
            whole[name] = whole[name][slice(*self.ranks.span(len(whole[name])))].clone()
        return codes.view(-1, *self._row), whole


# Weights that are in memory


def check_weight(name: str, weight: Tensor, settings: CodecSettings) -> None:
    """Raise where a weight cannot be packed; it is read once."""
    if (reason := why_not(weight, settings)) is not None:
        raise UnsupportedWeightError(f"{name} {reason}. Nothing was changed.")
    if (index := first_nonfinite(weight, LARGEST)) is not None:
        raise NonFiniteWeightError(
            f"{name} holds {float(weight.detach()[index])} at index {list(index)}, and a block "
            "with it could not be decoded: repair the checkpoint. Nothing was changed."
        )


def pack_parameter(
    model: nn.Module, param: ExpertParam, weight: Tensor, settings: CodecSettings,
    *, offloads: bool = False,
) -> int:  # fmt: skip
    """Pack an expert weight of a model in place, under each of its names; return its bytes."""
    packed = pack(weight, settings)
    if offloads:  # So that the device holds one packed weight at a time
        packed = packed.to("cpu")
    done: list[tuple[nn.Module, str]] = []
    try:
        for owner in (parametrize.owner_of(model, name) for name in param.names):
            if not parametrize.is_packed(*owner):  # an alias through a shared module is by now
                done.append(owner)
                parametrize.attach(*owner, packed)
    except BaseException:
        for owner in done:
            if parametrize.is_packed(*owner):
                parametrize.detach(*owner, weight)
        raise
    return packed.nbytes


def weights_to_keep(
    model: Any, spec: PackingPlan, files: Checkpoint | None
) -> dict[str, CodecSettings]:
    """Return how the expert weights of a load are packed whose own codes are kept, by name."""
    # MXFP4 as gpt-oss has it, `N_blocks` and `N_scales` for the whole of a fused parameter N.
    kept: dict[str, CodecSettings] = {}
    how = replace(spec.settings, kind=NATIVE.kind, skip_modules=(), stored_transposed=True)
    if isinstance(files, PrequantizedCheckpoint) and files.method == MXFP4:
        for name, param in spec.params.items():
            key = canonical_name(model, name, files)
            parts = {} if key is None else files.parts(key)
            if parts.keys() != {STORED_CODES, SCALE}:
                continue
            blocks, scales = (files.stored[parts[role]].shape for role in (STORED_CODES, SCALE))
            whole = *param.shape, MX_BLOCK // 2
            turned = blocks[0], blocks[2] * MX_BLOCK, *blocks[1::2]
            if len(blocks) == 4 and turned == whole and scales == blocks[:3]:
                kept[name] = how
    if not kept:
        warnings.warn(
            "keep_codes=True: the checkpoint holds no experts in MXFP4 as gpt-oss has it, so that "
            f"all experts are packed to {spec.settings.kind}.",
            UserWarning,
            stacklevel=2,
        )
    return kept
