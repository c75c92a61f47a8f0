"""Loads a model that no process holds whole: sharded by FSDP2 first, then filled share by share.

The model is built on meta, packed with blank weights (`ShardedFill.pack`), adapted
(`_adapt`), sharded (sharding.py), allocated empty on this rank's device, and filled: then it
is as if it had been packed whole and sharded then. `Place` has noted where each weight sits,
whatever wraps its module since. Values come from

    checkpoint/rows   rows of a 16-bit checkpoint's parameters, which are packed here (`ShareSlot`)
    a packed folder   codes and statistics on disk are the bytes of the whole packed weight in order
                      (FORMAT.md), so that a share of one is a range of bytes of the other

By transformers' `DistributedConfig` (`RankLoad`) transformers shards, and reads all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import GenerationConfig

from ..checkpoint.conversion import DiskLayout
from ..checkpoint.folder import absolute, file_facts
from ..checkpoint.manifest import FolderCheck, canonical_name, is_packed, packed_names
from ..checkpoint.rows import Slot, filled, reload_spec
from ..checkpoint.save import build_model, copy_config, open_to_pack
from ..checkpoint.training_codec import from_config
from ..errors import CheckpointError, ConfigError, MoeQloraError, QuantizationError, first_line
from ..hf.fill import Fill
from ..hf.model import finish_packing
from ..kernels.limits import cdiv
from ..lora.config import record_base
from ..lora.model import get_peft_model
from ..packing import parametrize
from ..packing.bnb4bit import RECORD, SCALES, read_record
from ..packing.codec import Packer
from ..packing.codecs import CODES
from ..packing.decoders import bits_of
from ..packing.settings import CodecSettings
from . import sharding
from .gather import Facts, check_agreement, from_first
from .sharding import Place, Wrap


def load_sharded(
    source: str | Path,
    quantization_config: Any = None,
    mesh: DeviceMesh | None = None,
    *,
    lora_config: Any = None,
    wrap: Wrap | None = None,
    dtype: torch.dtype | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
    adapter_options: Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **download: Any,
) -> Any:
    """Load a model sharded by FSDP2; each rank reads, packs and keeps its share alone.

    All ranks call it, after `torch.distributed.init_process_group`. Weights and adapters are bit
    for bit those of a model that one process loads under `enabled()` and adapts. No rank ever holds
    more than its share, one piece of a weight, and one weight's first-level absmax; new adapters
    are drawn whole on each rank's CPU before they are sharded.

    Args:
        source: A folder, 16-bit, quantized by its maker or packed by this package; or a hub id.
        quantization_config: `BitsAndBytesConfig` or its dict; None for a packed folder.
        mesh: A `DeviceMesh`: `(ranks,)`, or `(copies, ranks)`; None is all ranks.
        lora_config: Adapters to put on the model, a `LoraConfig`; None leaves it without.
        wrap: The modules that FSDP2 gathers and frees by themselves: names of classes, or what
            tells of a module. By default the decoder layers (`_no_split_modules`).
        dtype: Of what is not packed, and of decoded weights; None is the checkpoint's own.
        fsdp_options: For `fully_shard`: reshard_after_forward, mp_policy, offload_policy.
        adapter_options: For `get_peft_model`.
        attn_implementation: As for `from_pretrained`.
        trust_remote_code: Run model code that the checkpoint brings.
        **download: For `huggingface_hub.snapshot_download` (revision, token, cache_dir, ...).

    Returns the model, or with a `lora_config` the `PeftModel`: an `FSDPModule`. Raises a
    `CheckpointError` for a checkpoint that is damaged or of another model, a `ConfigError` for an
    argument, and a `QuantizationError` where any rank cannot pack a weight.
    """
    if mesh is None:
        on_cpu = not torch.cuda.is_available() or distributed.get_backend() == "gloo"
        mesh = init_device_mesh("cpu" if on_cpu else "cuda", (distributed.get_world_size(),))
    folder = Path()

    def facts() -> dict[str, Any]:
        nonlocal folder
        folder = _local_folder(source, download)
        config = None if quantization_config is None else copy_config(quantization_config)
        asked = {"dtype": dtype, "attn_implementation": attn_implementation}
        asked |= {"quantization_config": config, "lora_config": lora_config}
        return asked | file_facts(folder)

    check_agreement("load_sharded", facts, mesh)
    fill = _open(folder, quantization_config, dtype, sharding.device_of(mesh), trust_remote_code)
    base = fill.model
    if attn_implementation is not None:
        base.set_attn_implementation(attn_implementation)
    if base.can_generate() and (folder / "generation_config.json").is_file():
        base.generation_config = GenerationConfig.from_pretrained(folder)
    return shard_and_fill(fill, mesh, lora_config, wrap, fsdp_options, adapter_options)


def shard_and_fill(
    fill: ShardedFill, mesh: DeviceMesh, lora_config: Any = None, wrap: Wrap | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
    adapter_options: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Adapt and shard a model that is packed with blank weights, and fill it; return it."""
    model, options, device = fill.model.eval(), dict(fsdp_options or {}), sharding.device_of(mesh)
    with fill.files:
        if lora_config is not None:
            model = _adapt(model, lora_config, mesh, adapter_options or {})
        sharding.shard_model(model, mesh, wrap, **options)
        offloaded = type(options.get("offload_policy")).__name__ == "CPUOffloadPolicy"
        sharding.allocate(model, device, torch.device("cpu") if offloaded else None)
        fill.fill(device)
    if lora_config is not None:
        _fill_copies(model)
        for config in model.peft_config.values():
            record_base(fill.model, config)
    return model


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers of a model on meta that no checkpoint holds, as transformers does."""
    stored = set(model.state_dict())
    for prefix, module in model.named_modules():
        names = [leaf for leaf, buffer in module._buffers.items() if buffer is not None]
        computed = [leaf for leaf in names if f"{prefix}.{leaf}".lstrip(".") not in stored]
        for leaf in computed:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device)
        if not computed:
            module._is_hf_initialized = True  # there is nothing to compute
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.initialize_weights()  # of parameters on meta it changes nothing


def _local_folder(source: str | Path, download: Mapping[str, Any]) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return absolute(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.safetensors", "*.json", "*.py", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=patterns, **download))
    except (OSError, HFValidationError) as error:
        raise CheckpointError(
            f"{source} is no folder, and is not to be had from the hub ({error})."
        ) from error


def _open(
    folder: Path, config: Any, dtype: torch.dtype | None, device: torch.device,
    trust_remote_code: bool,
) -> ShardedFill:  # fmt: skip
    packed = is_packed(folder)
    if packed != (config is None):
        raise ConfigError(
            f"{folder} is {'' if packed else 'not '}packed: give a quantization_config for a "
            "folder in 16 bit, and for no other."
        )
    # no rank reads all that a checksum is of
    check = FolderCheck(folder, large=False) if packed else None
    model: Any = build_model(folder, dtype, trust_remote_code, packed=packed)
    compute_buffers(model, device)
    config = copy_config(model.config.quantization_config if packed else config)
    if check is None:
        opened = open_to_pack(folder, model, config, device)
        fill = ShardedFill(model, opened.plan, opened.base.checkpoint, opened.dtypes, config)
        fill.pack(opened.base.layout)
        return fill
    spec = reload_spec(model, config, model.dtype, check.finish(), folder)
    from_config(model, config)
    check.check_model(model)
    model.tie_weights()
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()} | spec.dtypes
    fill = ShardedFill(model, spec, check.checkpoint, dtypes, config)
    fill.pack()
    return fill


class Ranks(NamedTuple):
    """The ranks that hold one parameter together, and this one's number among them."""

    rank: int = 0
    size: int = 1
    group: Any = None  # their process group

    def span(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Return which rows of `length` a rank holds, as `torch.chunk` has it; maybe none."""
        step, rank = cdiv(length, self.size), self.rank if rank is None else rank
        return min(rank * step, length), min((rank + 1) * step, length)


def ranks_of(parameter: Any) -> Ranks:
    """Return the ranks that hold a parameter together; one where it is not sharded."""
    for dimension, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard(0):
            mesh = parameter.device_mesh
            group = mesh.get_group(dimension)
            return Ranks(mesh.get_local_rank(dimension), mesh.size(dimension), group)
        if placement.is_shard():
            raise QuantizationError("Packed weights are sharded over dimension 0 only.")
    return Ranks()


class ShareSlot(Slot):
    """Packs this rank's shares of one weight, from the rows alone that they lie in.

    The shares are those of the whole packed weight, bit for bit: each rank packs the blocks that
    its codes lie in, which depend on no others. All absmax are then gathered in fp32 (1/16 byte a
    weight), quantized on every rank where that is asked for, and each keeps its share.
    """

    settings: CodecSettings

    def __init__(self, codes: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings
        self.ranks, self._row = ranks_of(codes), codes.shape[1:]  # of codes
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
        """Return this rank's shares of codes and, by name, statistics; and code tables.

        All ranks must call it.
        """
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
        scales = mine.new_empty(max(last for _, last in self._blocks))
        for (first, last), part in zip(self._blocks, self._gather(mine), strict=True):
            scales[first:last] = part[: last - first]
        codec, scales = self.settings.codec, scales.to(self.settings.codec.scale_dtype)
        whole = {"absmax": scales.view(torch.uint8)}
        if codec.in_quant_state:
            empty = codes[:0]
            whole = bits_of(codec.finish(empty, scales, self.shape, self.dtype, self.settings))
        for name in whole.keys() - {"tables"}:
            whole[name] = whole[name][slice(*self.ranks.span(len(whole[name])))].clone()
        return codes.view(-1, *self._row), whole

    def _gather(self, mine: Tensor) -> list[Tensor]:
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
        return parts


class ShardedFill(Fill):
    """Fills this rank's shares of a model that is sharded between `pack` and `fill`."""

    files: Any
    targets: list[Place]

    def pack(self, layout: DiskLayout | None = None) -> None:
        """Give the model on meta its blank packed weights, in the layout that FSDP2 shards.

        `layout` is how a 16-bit checkpoint lies on disk, where `hide` has not found it.
        """
        model, spec = self.model, self.spec
        if spec.kept:
            raise CheckpointError(
                f"{min(spec.kept)} keeps the MXFP4 codes of its checkpoint, which are not sharded "
                "while they are read: fully_shard the model after it is loaded, or load the "
                "checkpoint without keep_codes=True."
            )
        self.dtypes = dtypes = dict(self.dtypes)
        if layout is not None:
            self.layout = layout
        owners: dict[int, list[str]] = {}
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            owners.setdefault(id(tensor), []).append(name)
        self._aliases = {name: names for names in owners.values() for name in names}
        if spec.manifest is not None:
            dtypes |= self._find_stored()
        for name, tensor in named:
            wanted = dtypes.get(name, tensor.dtype)
            if tensor.is_meta and tensor.is_floating_point() and wanted.is_floating_point:
                tensor.data = tensor.data.to(wanted)
        for param in {id(param): param for param in spec.params.values()}.values():
            parametrize.pack_blank(model, param, spec.settings)
        for name in self.linears.keys() - spec.params.keys():
            module = model.get_submodule(name.rpartition(".")[0])
            parametrize.pack_blank_linear(module, dtypes[name], spec.settings)
        model.config.quantization_config = self.config
        finish_packing(model, spec.layout, self.config, spec.settings)
        sharding.prepare_sharding(model)
        self.targets = list(self._find_targets())

    def _find_targets(self) -> Iterator[Place]:
        """Yield where the model's weights sit, a tied one once, before adapters come."""
        seen: set[int] = set()
        for place in sharding.packed_places(self.model):
            if not seen.issuperset(tensors := set(map(id, place.tensors()))):
                seen |= tensors
                yield place
        stored = set(self.model.state_dict())
        for prefix, module in self.model.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = f"{prefix}.{leaf}".lstrip(".")
                computed = leaf in module._buffers and name not in stored
                if tensor is not None and id(tensor) not in seen and not computed:
                    seen.add(id(tensor))
                    yield Place(name, module, leaf)

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Fill this rank's shares; what is packed, on `device`.

        All ranks must call it, and raise together where one cannot.
        """
        if self.spec.manifest is not None:
            for place in self.targets:
                _put(place, *self._stored_share(place))
            return
        places: dict[str, Place] = {}
        slots: dict[str, Slot] = {}
        for place in self.targets:
            name, tensor = self._among(place.name, self.layout.by_name), place.tensors()[0]
            places[name], dtype = place, self.dtypes.get(place.name, tensor.dtype)
            if place.decoder is None:
                rows = ranks_of(tensor).span(len(tensor)) if tensor.dim() else None
                slots[name] = Slot(name, tensor.shape, dtype, device, rows=rows)
            else:
                form = name, place.decoder.weight_shape, dtype, device, self.spec.settings
                linear, turned = place.name in self.linears, self.linears.get(place.name, False)
                slots[name] = ShareSlot(tensor, *form, linear=linear, transposed=turned)
        groups = [group for group in self.layout.groups if slots.keys() & group.shapes]
        for name, value in filled(self.files, self.layout, groups, slots):
            _put(places[name], *(value if isinstance(value, tuple) else (value,)))
            del value  # before the next is packed

    def _among(self, target: str, names: Mapping[str, Any]) -> str:
        for name in (target, *self._aliases.get(target, ())):
            if name in names:
                return name
        raise CheckpointError(f"The checkpoint has no tensor for {target}.")

    def _find_stored(self) -> dict[str, torch.dtype]:
        """Note a packed folder's keys by weight and end; return what weights are decoded to."""
        files, manifest = self.files, self.spec.manifest
        assert manifest is not None

        def own(name: str) -> str:
            return canonical_name(self.model, name, self._aliases) or name

        self._keys = {own(key): {CODES: key} for key in files}
        dtypes: dict[str, torch.dtype] = {}
        for stored, parts in packed_names(manifest).items():
            ends = {SCALES if k.endswith(SCALES) else k.removeprefix(stored): k for k in parts}
            self._keys[name := own(stored)] = ends
            if (record := RECORD + manifest.settings.kind) in ends and not self.spec.recasts:
                dtype = getattr(torch, read_record(files.read(ends[record]))["dtype"])
                dtypes |= dict.fromkeys((name, *self._aliases.get(name, ())), dtype)
        return dtypes

    def _stored_share(self, place: Place) -> tuple[Any, ...]:
        """Read this rank's share of one weight: values, and of a packed one statistics."""
        files, keys = self.files, self._keys[self._among(place.name, self._keys)]
        values, settings, decoder = place.tensors()[0], self.spec.settings, place.decoder
        first, last = ranks_of(values).span(len(values)) if values.dim() else (0, None)
        if decoder is None:
            if first == last:  # fewer rows than ranks
                return (torch.empty((0, *values.shape[1:]), dtype=values.dtype),)
            return (files.read(keys[CODES], first, last),)
        assert last is not None
        row, codec = values.shape[1:].numel(), settings.codec
        share = files.read_bytes(keys[CODES], first * row, last * row)
        large = CODES, codec.scales
        small = {end: files.read(key) for end, key in keys.items() if end not in large}
        statistics = {}
        if codec.in_quant_state:
            blank = dict.fromkeys(large, torch.empty(0, dtype=torch.uint8))
            packed = codec.assemble({**small, **blank}, decoder.weight_shape, None, settings)
            statistics = bits_of(packed)
        for name, parameter in decoder.named_parameters():
            first, last = ranks_of(parameter).span(len(parameter))
            if name == "nested":
                statistics[name] = statistics[name][first:last]
            else:
                span = first * parameter.itemsize, last * parameter.itemsize
                statistics[name] = files.read_bytes(keys[codec.scales], *span).view(parameter.dtype)
        return share.view(values.dtype).view(-1, *values.shape[1:]), statistics


def _put(place: Place, values: Tensor, statistics: Mapping[str, Tensor] | None = None) -> None:
    put_local(place.tensors()[0], values)
    for name, share in (statistics or {}).items():
        put_local(getattr(place.decoder, name), share)


@torch.no_grad()
def put_local(parameter: Any, values: Tensor) -> None:
    """Copy values into a parameter: into this rank's share where it is sharded."""
    local = parameter._local_tensor if hasattr(parameter, "placements") else parameter
    assert local.shape == values.shape, (local.shape, values.shape)
    local.copy_(values)


def _adapt(base: nn.Module, config: Any, mesh: Any, options: Mapping[str, Any]) -> PeftModel:
    """Give a model on meta its adapters, the same on all ranks; they are on the CPU."""
    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"lora_config is a {type(config).__name__}: a model without values takes a LoraConfig "
            "only."
        )
    start = config.init_lora_weights
    if start not in (True, False, "gaussian") or config.use_dora:
        asked = "use_dora=True" if config.use_dora else f"init_lora_weights={start!r}"
        raise ConfigError(
            f"{asked} computes with the base weights, which no rank has whole: set "
            "init_lora_weights to True, False or 'gaussian', and use_dora to False."
        )
    state = [torch.get_rng_state()]
    from_first(mesh, distributed.broadcast_object_list, state)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    to: Any = nn.Module.to

    def stay(module: nn.Module, *args: Any, **named: Any) -> Any:
        return to(module, *(cpu if each == meta else each for each in args), **named)

    # PEFT would move them to the base layers' device, meta.
    move = "_move_adapter_to_device_of_base_layer"
    moved = partialmethod(vars(BaseTunerLayer)[move], device=cpu)
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        changes: tuple[Any, ...] = (BaseTunerLayer, move, moved), (nn.Module, "to", stay)
        for owner, name, changed in changes:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, changed)
        torch.set_rng_state(state[0])
        return get_peft_model(base, config, **options)


@torch.no_grad()
def _fill_copies(model: nn.Module) -> None:
    """Copy values to PEFT's copies of modules, `modules_to_save`."""
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and hasattr(module, "modules_to_save"):
            source: Any = module.original_module
            for copied in module.modules_to_save.values():
                own = dict((*copied.named_parameters(), *copied.named_buffers()))
                for name, tensor in (*source.named_parameters(), *source.named_buffers()):
                    put_local(own[name], getattr(tensor, "_local_tensor", tensor))


class ConfiguredFill(ShardedFill):
    """Fills this rank's shares, once transformers has sharded the model and loaded the rest."""

    def hide(self, conversions: list[Any], *, linears: bool) -> list[Any]:
        renamings, model = super().hide(conversions, linears=linears), self.model
        self.pack()
        # transformers loads what is neither packed nor dequantized
        self.targets = [
            place
            for place in self.targets
            if place.decoder or not self.names.isdisjoint(self._aliases[place.name])
        ]
        for name in {*self.names, *self.linears}:
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
        own = {id(tensor) for place in self.targets for tensor in place.tensors()}
        self.names |= {name for name, tensor in model.named_parameters() if id(tensor) in own}
        # transformers shards next; a load that fails undoes this when it drops the fill
        self._sharding = ExitStack()
        self._sharding.enter_context(sharding.shards_integers())
        return renamings

    def _fill(self, missing: Any) -> None:
        """Nothing is filled before all is loaded."""

    def finish(self) -> None:
        self._sharding.close()
        self.unhide()
        sharded = next(place.tensors()[0] for place in self.targets if place.decoder)
        device = sharding.device_of(sharded.device_mesh)
        offloaded = self.model.config.distributed_config.fsdp_cpu_offload
        sharding.allocate(self.model, device, torch.device("cpu") if offloaded else None)
        with self.files:
            self.fill(device)


class RankLoad:
    """One call of `from_pretrained` that gives each rank its part of the model."""

    fill = ConfiguredFill

    def __init__(self, config: Any) -> None:
        self.config = config
        # By FSDP2. `dp_size`, with its copies of the shards, is of transformers 5.23.
        self.shards = getattr(config, "dp_size", getattr(config, "fsdp_size", None) or 1) > 1

    def begin(self, facts: Facts) -> None:
        """Compare what the ranks were given; refuse a config that asks for more than FSDP2."""
        check_agreement("from_pretrained", facts)
        for field in ("tp_size", "pp_size", "ep_size"):
            if (size := getattr(self.config, field, None) or 1) > 1:
                raise ConfigError(
                    f"distributed_config has {field}={size}, which packed experts do not support: "
                    "shard by FSDP2 with DistributedConfig(fsdp_size=N), or load whole for DDP."
                )
