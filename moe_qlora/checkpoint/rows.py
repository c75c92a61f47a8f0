"""What one load packs, and the one loop that packs it: for a load, a rank's share, a packed folder.

`packing_spec` serves 16-bit checkpoints and `reload_spec` folders that this package packed; both
decide from the meta model. The loop, `filled`, takes groups of tensors on disk (conversion.py) in
slices of a few experts, which threads read ahead: to page-locked memory where a GPU packs. On
their device they are dequantized if the maker quantized the folder, converted by transformers'
operations, and taken by a `Slot` for each parameter, which packs them, or collects plain ones.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..detection.detect import detect
from ..errors import (
    CheckpointError,
    ConfigError,
    MoeQloraError,
    NonFiniteWeightError,
    UnsupportedWeightError,
)
from ..layout import ExpertParam, ModelLayout
from ..packing import parametrize
from ..packing.codec import LARGEST, Packer, are_below
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings, why_not_packed
from .conversion import DiskLayout, Group, convert
from .folder import Checkpoint, check_plain
from .manifest import Manifest, canonical_name


@dataclass(frozen=True)
class PackingPlan:
    """The expert weights that a load packs, and how."""

    params: dict[str, ExpertParam]  # a tied weight under each of its names
    settings: CodecSettings
    # that weights would be loaded in, were they not packed; of dequantized files, and where the
    # load `recasts`, all tensors'
    dtypes: dict[str, torch.dtype]
    layout: ModelLayout
    manifest: Manifest | None = None  # of a folder that this package packed
    recasts: bool = False  # such a folder into another dtype than its config.json names
    # how weights are packed that keep their checkpoint's own codes, by each of their names
    kept: dict[str, CodecSettings] = field(default_factory=dict)

    def settings_of(self, name: str) -> CodecSettings:
        """Return how a weight is packed."""
        return self.kept.get(name, self.settings)


def packing_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, device_map: Any
) -> PackingPlan:
    """Return what to pack of a 16-bit checkpoint, loaded in `dtype`, given its model on meta."""
    from transformers.integrations.accelerate import get_device

    settings, layout, dtypes = _examine(model, config, dtype)
    # Linear layers that bitsandbytes leaves in 16 bit on the CPU, experts beside them
    offload = getattr(config, "llm_int8_enable_fp32_cpu_offload", False)
    places = device_map if offload and isinstance(device_map, Mapping) else {}
    places = {} if {*places.values()} == {"cpu"} else dict(places)
    params: dict[str, ExpertParam] = {}
    for param in weights_to_pack(model, layout, settings):
        if places and get_device(places, param.name) in ("cpu", "disk", torch.device("cpu")):
            continue
        if hasattr(model.get_parameter(param.name), "device_mesh"):
            raise UnsupportedWeightError(
                f"{param.name} is sharded by a tensor or expert parallel plan, which packing while "
                "loading does not support: load without tp_plan or distributed_config."
            )
        reason = why_not_packed(param.shape, dtypes[param.name], settings)
        if reason is not None:
            raise UnsupportedWeightError(f"{param.name} {reason}. Nothing was loaded.")
        params |= dict.fromkeys(param.names, param)
    return PackingPlan(params, settings, dtypes, layout)


def reload_spec(
    model: nn.Module, config: Any, dtype: torch.dtype | None, manifest: Manifest, folder: Path
) -> PackingPlan:
    """Return the plan of a packed folder's weights, for the model on meta as it was built."""
    settings, layout, dtypes = _examine(model, config, dtype)
    by_name = {name: param for param in layout.experts for name in param.names}
    params: dict[str, ExpertParam] = {}
    kept: dict[str, CodecSettings] = {}
    for name, entry in manifest.experts.items():
        if (own := canonical_name(model, name, by_name)) is None:
            raise CheckpointError(
                f"{folder} holds the packed weight {name}, which a {type(model).__name__} does not "
                "have: load it with the class that it was saved from."
            )
        param = by_name[own]
        # Nothing is tied on the meta device yet: a weight's aliases are parameters by themselves.
        for tied in (own, *(canonical_name(model, alias, by_name) for alias in entry.aliases)):
            if tied is not None:
                params |= dict.fromkeys(by_name[tied].names, by_name[tied])
        if (how := manifest.settings_of(name)).codec.is_kept:
            kept |= dict.fromkeys(param.names, how)
    # PEFT nests its layers in the order of parameters, which need not be that of the files.
    params = {name: params[name] for name in by_name if name in params}
    saved, asked = manifest.settings.to_dict(), settings.to_dict()
    differ = [k for k in saved if saved[k] != asked[k] and k != "compute_dtype"]
    if params and differ:
        what = "; ".join(f"{k}={saved[k]!r}, config.json {asked[k]!r}" for k in differ)
        raise CheckpointError(
            f"{folder}: the manifest says {what}: one of them is not of this save."
        )
    own = manifest.config.get("dtype")
    recasts = bool(dtype and own) and dtype != getattr(torch, str(own), None)
    return PackingPlan(params, settings, dtypes, layout, manifest, recasts, kept)


def _examine(
    model: nn.Module, config: Any, dtype: torch.dtype | None
) -> tuple[CodecSettings, ModelLayout, dict[str, torch.dtype]]:
    settings = CodecSettings.from_config(config)
    # transformers builds the model, and asks its quantizer, under a default device of meta.
    with torch.device("cpu"):
        layout = detect(model)
    kept = kept_dtypes(model, dtype)
    dtypes: dict[str, torch.dtype] = {}
    for param in layout.experts:
        wanted = kept(param.name) or model.get_parameter(param.name).dtype
        dtypes |= dict.fromkeys(param.names, wanted)
    return settings, layout, dtypes


def kept_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Return what gives the dtype that a model loaded in `dtype` keeps a parameter in, or None."""
    by_glob: Mapping[str, torch.dtype] = {}
    if dtype is not None and hasattr(model, "_get_dtype_plan"):
        by_glob = model._get_dtype_plan(dtype) or {}
    patterns = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in by_glob.items()]
    return lambda name: next((kept for pattern, kept in patterns if pattern.search(name)), None)


# Threads that read for a GPU, and slices that they read ahead; for a CPU one maps them.
WORKERS = 4
_SHARE_ELEMENTS = 2**18  # of a slice, where many ranks of one host read at once

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Slot:
    """A parameter to fill: takes its rows in order; packs them, or without settings keeps them.

    `linear`: bitsandbytes packs it, which casts some; `rows` of the first dimension are taken.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        settings: CodecSettings | None = None,
        *,
        linear: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.shape, self.dtype = name, torch.Size(shape), dtype
        self.device = indexed(device)
        self.settings, self.rows = settings, rows
        self._cast = (linear and settings is not None and settings.codec.linear_dtype) or dtype
        self._pieces: list[Tensor] = []
        self._packer: Packer | None = None
        self._extremes: list[tuple[int, Tensor]] = []

    def take(self, start: int, piece: Tensor) -> None:
        """Take rows that begin at `start`, those of them that are wanted."""
        if self.rows is not None:
            first, last = (max(row - start, 0) for row in self.rows)
            start, piece = start + first, piece[first:last]
        piece = piece.to(self.device, self.dtype).to(self._cast)
        if self.settings is None:
            self._pieces.append(piece)
            return
        # of each expert: over one dimension alone the CPU takes twenty times as long
        for row, part in enumerate(piece if piece.dim() > 2 else [piece], start):
            self._extremes.append((row, torch.stack(torch.aminmax(part))))
        self._pack(start, piece)

    def _pack(self, start: int, piece: Tensor) -> None:
        if self._packer is None:
            assert self.settings is not None
            self._packer = Packer(self.shape, self._cast, self.device, self.settings)
        self._packer.add(piece)

    def fail(self, error: MoeQloraError) -> None:
        """Rows could not be read or converted."""
        raise error

    def finish(self) -> Any:
        """Return the weight, and hold it no longer; raise where it cannot be packed."""
        packer, pieces = self._packer, self._pieces
        self._packer, self._pieces = None, []
        if packer is None:
            empty = torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [empty])
        rows, extremes = zip(*self._extremes, strict=True)
        self._extremes = []
        # once a weight, as it waits for the device; such a block could not be decoded
        finite = are_below(torch.stack(extremes)).all(1).tolist()
        if not all(finite):
            raise NonFiniteWeightError(
                f"{self.name} holds NaN or inf in row {rows[finite.index(False)]} or soon after "
                f"(or {LARGEST:.0e} and more), and cannot be packed: repair the checkpoint."
            )
        return packer.finish()


def indexed(device: torch.device) -> torch.device:
    """Return a device with its number: threads that read have another current one."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def packed_linears(model: nn.Module) -> set[str]:
    """Return the names of the weights of bitsandbytes' Linear layers."""
    names = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if parametrize.is_packed_linear(module):
            if getattr(module, "source_cls", nn.Linear) is Conv1D:  # stored (in, out)
                raise ConfigError(f"{name} is a Conv1D: name it in llm_int8_skip_modules.")
            names.add(f"{name}.weight")
    return names


def slot_for(
    model: Any,
    plan: PackingPlan,
    linears: Collection[str],
    name: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Slot:
    """Return the slot of a parameter that is loaded in this dtype, were it not packed."""
    linear, shape = name in linears, model.get_parameter_or_buffer(name).shape
    settings = plan.settings if linear or name in plan.params else None
    return Slot(name, shape, dtype, device, settings, linear=linear)


def filled(
    files: Checkpoint, layout: DiskLayout, groups: Iterable[Group], slots: Mapping[str, Slot]
) -> Iterator[tuple[str, Any]]:
    """Yield each parameter's result of its slot, as soon as it is read."""

    def slices() -> Iterator[tuple[Group, list[Slot], int, int | None, bool]]:
        for group in groups:
            mine = [slots[name] for name in group.shapes if name in slots]
            parts = _parts(group, mine)
            yield from ((group, mine, *part, part == parts[-1]) for part in parts)

    def read(item: tuple[Group, list[Slot], int, int | None, bool]) -> dict[str, Any]:
        group, mine, start, stop, _ = item
        if mine[0].settings is not None or mine[0].dtype.is_floating_point:
            for key in group.keys:
                check_plain(mine[0].name, files.info(key).dtype)
        on_cpu = getattr(group.converter, "force_cpu", False)
        device = torch.device("cpu") if on_cpu else mine[0].device
        places = group.places(start, stop) if start != stop else ()
        return {key: files.fetch(key, first, last, device) for key, _, first, last in places}

    on_gpu = any(slot.device.type != "cpu" for slot in slots.values())
    for item, reading in ahead(read, slices(), WORKERS if on_gpu else 1):
        group, mine, start, _, is_last = item
        try:
            fetched = {key: one() for key, one in reading.result().items()}
            values = convert(group, fetched, layout.model) if fetched else {}
            for slot in mine if fetched else ():
                slot.take(start, values[slot.name])
        except MoeQloraError as error:
            for slot in mine:
                slot.fail(error)
        if is_last:
            yield from ((slot.name, slot.finish()) for slot in mine)


def _parts(group: Group, slots: Sequence[Slot]) -> list[tuple[int, int | None]]:
    spans = [slot.rows for slot in slots]
    wanted = [span for span in spans if span is not None and span[0] < span[1]]
    if None not in spans and not wanted:
        return [(0, 0)]
    if None in spans:
        return list(group.slices())
    return list(group.slices(min(wanted)[0], max(last for _, last in wanted), _SHARE_ELEMENTS))


def ahead(
    read: Callable[[_Item], _Result], items: Iterable[_Item], workers: int = WORKERS
) -> Iterator[tuple[_Item, Future[_Result]]]:
    """Yield each item with the future of what `read` returns of it; the next ones are read too."""
    pool = ThreadPoolExecutor(workers)
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(read, item)))
            if len(waiting) > workers:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
