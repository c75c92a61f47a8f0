"""The weights of a load that transformers does not read: they are hidden from it, and filled here.

    the model on meta, its conversions   `Fill.hide`: which keys on disk make which weights; these
                                         leave the state dict, the keys get a name no model has
    transformers loads the rest, stock
    tie_weights                          `Fill._fill`: reads rows, packs, puts into place
    postprocess_model                    `Fill.finish`: attaches what was packed

What is filled: expert weights that are packed, bitsandbytes' Linear layers, and whatever a maker
stores as codes. Where from: rows of a 16-bit folder or a maker's (checkpoint/rows.py), MXFP4 codes
that are kept, or a packed folder's own bytes. Without safetensors files (a `state_dict`, .bin
files) transformers loads experts in 16 bit, and they are packed then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming

from ..checkpoint.conversion import DiskLayout
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import PackedWeights, canonical_name, packed_names
from ..checkpoint.prequantized import CODES, MXFP4, SCALE, PrequantizedCheckpoint
from ..checkpoint.rows import PackingPlan, Slot, ahead, filled, indexed, packed_linears, slot_for
from ..errors import CheckpointError, ConfigError, MoeQloraError
from ..kernels.weights import MX_BLOCK, PackedWeight
from ..layout import listed
from ..packing import parametrize
from ..packing.decoders import write_linear
from ..packing.mxfp4 import KeptPacker, kept_settings
from ..packing.settings import CodecSettings
from ..world import offload
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
        dtypes: Mapping[str, torch.dtype], config: Any, offloads: bool = False,
    ) -> None:  # fmt: skip
        """Take a model on meta with bitsandbytes' Linear layers.

        `dtypes` are those that its parameters are loaded in, were they not packed.
        """
        self.model, self.spec, self.files, self.dtypes = model, spec, files, dtypes
        self.config, self._offloads, self._device_map = config, offloads, None
        self.layout: Any = None  # `DiskLayout` of a folder that is not packed
        self.names: set[str] = set()  # of the weights that are filled
        self._weights: Iterator[tuple[str, PackedWeight | Tensor]] = iter(())
        # empty parameters, for packed experts that are attached last, and these
        self._pending: dict[int, tuple[nn.Parameter, PackedWeight]] = {}
        self._hook: Any = None
        self.error: MoeQloraError | None = None
        self.linears = packed_linears(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fill:
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
        """Keep transformers from the weights that are filled; return a renaming to come first.

        `linears`: whether Linear layers lie in 16 bit on disk, and are packed.
        """
        model, read = self.model, {}
        if self.spec.manifest is not None:
            read = self._from_packed_folder()
        elif self.files is not None:
            read = self._from_rows(conversions, linears)
        model.tie_weights = MethodType(self._tie_weights, model)
        for name in self.names:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True

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
            try:
                self._fill(kwargs["missing_keys"])
            except MoeQloraError as error:  # raised once transformers has left out its names
                self.error = error
        return type(model).tie_weights(model, *args, **kwargs)

    @torch.no_grad()
    def _fill(self, missing: Collection[str]) -> None:
        for name, weight in self._weights:
            self._put(name, weight)
            del weight  # before the next is packed
        for name, param in self.spec.params.items():
            module, leaf = self._owner(name)
            plain = module._parameters.get(leaf)
            known = name in self.names or {*param.names} & {*missing} or id(plain) in self._pending
            if not known and plain is not None and not plain.is_meta:  # transformers has loaded it
                slot = self._slot(name)
                slot.take(0, plain.detach())
                self._put(name, slot.finish())

    def unhide(self) -> None:
        self._hook.remove()
        del self.model.__dict__[_UNEXPECTED]
        if self._before is not None:
            setattr(self.model, _UNEXPECTED, self._before)

    def finish(self) -> None:
        model, lost = self.model, []
        self.unhide()
        for name in self.spec.params:  # a tied one under each of its names
            module, leaf = self._owner(name)
            if (known := self._pending.get(id(module._parameters.get(leaf)))) is not None:
                parametrize.attach(module, leaf, known[1])
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

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        return parametrize.owner_of(self.model, name)

    def _slot(self, name: str) -> Slot:
        known = self.model, self.spec, self.linears, name
        return slot_for(*known, self.dtypes[name], self._device(name))

    def _device(self, name: str) -> torch.device:
        from transformers.integrations.accelerate import get_device

        place = get_device(self._device_map or {"": "cpu"}, name, valid_torch_device=True)
        return indexed(torch.device("cpu" if place == "disk" else place))

    def _put(self, name: str, weight: PackedWeight | Tensor) -> None:
        module, leaf = self._owner(name)
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
            for owner, leaf in map(self._owner, self.spec.params[name].names):
                owner._parameters[leaf] = parameter

    # 16-bit folders, and those that their makers quantized

    def _from_rows(self, conversions: list[Any], linears: bool) -> dict[str, str]:
        files, makers, kept = self.files, self._makers, self.spec.kept
        assert files is not None
        wanted = {*self.spec.params, *(self.linears if linears else ())}

        def takes(names: Collection[str], keys: Collection[str]) -> bool:
            return any(map(files.is_dequantized, keys)) or bool(wanted.intersection(names))

        disk = {key: (files.info(key).shape, files.info(key).dtype) for key in files}
        turned = {name for name, is_turned in self.linears.items() if is_turned}
        layout = self.layout = DiskLayout(self.model, disk, conversions, takes, turned)
        groups = [group for group in layout.groups if group.shapes]
        places = {id(group): files.info(group.keys[0]) for group in groups}
        groups.sort(key=lambda one: (places[id(one)].file, places[id(one)].offset))
        self.names = {name for group in groups for name in group.shapes}
        keys = {key for group in groups for key in group.keys}
        codes = {name: layout.by_name[name].keys[0] for name in kept if name in layout.by_name}

        def weights() -> Iterator[tuple[str, PackedWeight | Tensor]]:
            for name, key in codes.items():
                yield name, self._kept_codes(name, key)
            slots = {name: self._slot(name) for name in self.names - codes.keys()}
            yield from filled(files, layout, [g for g in groups if slots.keys() & g.shapes], slots)

        self._weights = weights()
        if makers is None:
            return dict.fromkeys(keys, READ)
        plain = {key: makers.names.get(key, READ) for key in makers.stored}
        return {key: READ if name in keys else name for key, name in plain.items()}

    def _kept_codes(self, name: str, key: str) -> PackedWeight:
        """Read one weight's codes, some experts at a time; `key` is the plain one in the files."""
        files, device = self._makers, self._device(name)
        shape = tuple(self.spec.params[name].shape)
        assert files is not None
        parts = files.parts(key)
        info = files.stored[parts[CODES]]
        step = max(SLICE_BYTES * info.shape[0] // max(info.nbytes, 1), 1)

        def fetch(start: int) -> list[Callable[[], Tensor]]:
            rows = start, min(start + step, shape[0])
            return [files.stored.fetch(parts[role], *rows, device) for role in (CODES, SCALE)]

        packer = KeptPacker(shape, self.dtypes[name], device, self.spec.settings_of(name))
        for _, both in ahead(fetch, range(0, shape[0], step)):
            packer.add(*(part() for part in both.result()))
        return packer.finish()

    # folders that this package packed

    def _from_packed_folder(self) -> dict[str, str]:
        files, manifest, params = self.files, self.spec.manifest, self.spec.params
        assert files is not None and manifest is not None
        stored = {}
        for name, keys in packed_names(manifest).items():
            known = params if name in manifest.experts else self.linears
            if (own := canonical_name(self.model, name, known)) is not None:
                stored[own] = name, keys
        for name in self.linears.keys() - stored.keys():  # as they lie in 16 bit
            if (key := canonical_name(self.model, name, files)) is not None:
                stored[name] = key, (key,)
        self.names, plain = {*stored}, {}
        for name in self.linears.keys() & stored.keys():  # int8 layers are decoded to float16
            plain[stored[name][0]] = self.model.get_parameter(name).to(torch.float16)
        weights = PackedWeights(manifest, files, plain)

        def read(item: tuple[str, tuple[str, tuple[str, ...]]]) -> PackedWeight | Tensor:
            name, (key, keys) = item
            device = None if self._offloads and name in params else self._device(name)
            if name not in params and len(keys) == 1:
                plain = files.fetch(key, device=device)()
                return plain.to(self.dtypes[name]) if self.spec.recasts else plain
            packed = weights.read(key, device)
            if self.spec.recasts:
                packed.dtype = self.dtypes[name]
            return packed

        self._weights = ((item[0], one.result()) for item, one in ahead(read, stored.items()))
        return dict.fromkeys((key for _, keys in stored.values() for key in keys), READ)


def weights_to_keep(
    model: Any, spec: PackingPlan, files: Checkpoint | None
) -> dict[str, CodecSettings]:
    """Return how the expert weights of a load are packed whose own codes are kept, by name.

    That is MXFP4 as gpt-oss has it, `N_blocks` and `N_scales` for the whole of a fused parameter N.
    Experts that the folder holds in another form are dequantized and packed anew.
    """
    kept = {}
    if isinstance(files, PrequantizedCheckpoint) and files.method == MXFP4:
        for name, param in spec.params.items():
            key = canonical_name(model, name, files)
            if key is None or files.parts(key).keys() != {CODES, SCALE}:
                continue
            blocks, scales = (files.stored[files.parts(key)[role]].shape for role in (CODES, SCALE))
            whole = *param.shape, MX_BLOCK // 2
            turned = blocks[0], blocks[2] * MX_BLOCK, *blocks[1::2]
            if len(blocks) == 4 and turned == whole and scales == blocks[:3]:
                kept[name] = kept_settings(spec.settings)
    if not kept:
        warnings.warn(
            "keep_codes=True: the checkpoint holds no experts in MXFP4 as gpt-oss has it, so that "
            f"all experts are packed to {spec.settings.kind}.",
            UserWarning,
            stacklevel=2,
        )
    return kept
