"""Loads a model that no process holds whole: sharded by FSDP2 first, then filled share by share.

load_sharded(folder, config, mesh)
  |
  v
the model on meta, as its config.json says          models/named.py
  |   packed with blank weights                     packing/parametrize.py
  |   adapters, their values kept back              distributed/adapters.py
  v
fully_shard of each decoder layer and the rest      distributed/sharding.py
  v
empty shares on this rank's device
  |   16-bit checkpoint: packs the rows it needs    filling.py, checkpoint/rows.py
  |   packed folder: reads its bytes                filling.py
  v
the model, as if it had been packed whole and sharded then
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn
from transformers import GenerationConfig
from transformers import initialization as init

from ..checkpoint.base import file_facts
from ..checkpoint.conversion import Group
from ..checkpoint.load_spec import reload_spec
from ..checkpoint.manifest import (
    FolderCheck,
    Manifest,
    canonical_name,
    is_packed,
    packed_names,
    warn_of_changes,
)
from ..checkpoint.quantize import PackingJob, build_model, copy_config
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import absolute
from ..checkpoint.training_codec import from_config
from ..detection.detect import detect
from ..errors import CheckpointError, ConfigError
from ..hf.fill import refuse_to_shard
from ..hf.model import finish_packing
from ..layout import ExpertParam, ModelLayout
from ..lora.config import record_base
from ..models import named
from ..packing.bnb4bit import RECORD, read_record
from ..packing.int8 import SCALES
from ..packing.parametrize import is_packed_linear, pack_blank, pack_blank_linear
from ..packing.selection import weights_to_pack
from ..packing.settings import CodecSettings
from .adapters import BlankAdapters
from .agreement import check_agreement
from .filling import ShardedWeights, fill_stored, ranks_of, targets_of
from .sharding import Wrap, allocate, prepare_sharding, shard_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


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
    more than its share, one piece of a weight, and one weight's first-level absmax.

    Args:
        source: Folder of a 16-bit checkpoint, of one that its maker quantized, or of one that this
            package packed; or a hub id.
        quantization_config: `BitsAndBytesConfig` or its dict; None for a packed folder.
        mesh: A `DeviceMesh`: `(ranks,)`, or `(copies, ranks)`; None is all ranks.
        lora_config: Adapters to put on the model, a `LoraConfig`; None leaves it without.
        wrap: The modules that FSDP2 gathers and frees by themselves: names of classes, or what
            tells of a module. By default the decoder layers (`_no_split_modules`).
        dtype: Of what is not packed, and of decoded weights; None is the checkpoint's own.
        fsdp_options: Passed on to `fully_shard`: reshard_after_forward, mp_policy, offload_policy.
        adapter_options: Passed on to `get_peft_model`.
        attn_implementation: As for `from_pretrained`.
        trust_remote_code: Run model code that the checkpoint brings.
        **download: Passed on to `huggingface_hub.snapshot_download` for a hub id (revision,
            token, cache_dir, ...).

    Returns:
        The model, or with a `lora_config` the `PeftModel`: an `FSDPModule`.

    Raises:
        CheckpointError: The checkpoint is damaged, or not of this model.
        ConfigError: An argument cannot be followed.
        QuantizationError: A weight cannot be packed, on this rank or on another.
    """
    mesh = all_ranks() if mesh is None else mesh
    folder = Path()

    def facts() -> dict[str, Any]:
        nonlocal folder
        folder = _local_folder(source, download)
        config = None if quantization_config is None else copy_config(quantization_config)
        asked = {"dtype": dtype, "attn_implementation": attn_implementation}
        asked |= {"quantization_config": config, "lora_config": lora_config}
        return asked | file_facts(folder)

    check_agreement("load_sharded", facts, mesh)
    opened = _open(folder, quantization_config, dtype, device_of(mesh), trust_remote_code)
    with closing(opened.files):
        if attn_implementation is not None:
            opened.model.set_attn_implementation(attn_implementation)
        sharded = ShardedModel(
            opened, mesh, lora_config, wrap, fsdp_options or {}, adapter_options or {}
        )
        opened.fill(sharded.weights, sharded.device)
    model = sharded.finish()
    if opened.model.can_generate() and (folder / "generation_config.json").is_file():
        opened.model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@dataclass
class BlankModel:
    """A model on meta whose Linear layers are bitsandbytes' own, and what of it is packed."""

    model: Any
    config: Any  # a `BitsAndBytesConfig`
    settings: CodecSettings
    layout: ModelLayout
    params: tuple[ExpertParam, ...]  # to pack
    dtypes: dict[str, torch.dtype]  # of parameters and buffers by name, as they are loaded


@dataclass
class OpenedModel(BlankModel):
    """A blank model, and the files and the way to fill it."""

    files: Any
    fill: Callable[[ShardedWeights, torch.device], None]


class ShardedModel:
    """A model that is packed, adapted and sharded, with empty shares until they are filled."""

    def __init__(
        self,
        blank: BlankModel,
        mesh: DeviceMesh,
        lora_config: Any = None,
        wrap: Wrap | None = None,
        fsdp_options: Mapping[str, Any] | None = None,
        adapter_options: Mapping[str, Any] | None = None,
    ) -> None:
        if mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
            raise ConfigError(
                f"The mesh has {mesh.ndim} dimensions called {mesh.mesh_dim_names}; load_sharded "
                "takes (ranks,) or (copies, ranks), the latter with mesh_dim_names."
            )
        options = dict(fsdp_options or {})
        self.device = device_of(mesh)
        pack_blanks(blank)
        self.base = blank.model
        self.weights = targets_of(self.base, blank.settings, blank.dtypes)
        self._adapters: BlankAdapters | None = None
        self.model: Any = self.base.eval()
        if lora_config is not None:
            self._adapters = BlankAdapters(self.base, lora_config, mesh, adapter_options or {})
            self.model = self._adapters.model
        shard_model(self.model, mesh, wrap, **options)
        offloaded = type(options.get("offload_policy")).__name__ == "CPUOffloadPolicy"
        allocate(self.model, self.device, torch.device("cpu") if offloaded else None)

    def fill(self, read: Callable[[str, int, int], torch.Tensor]) -> Any:
        """Fill the shares from rows of the 16-bit weights, and return the model.

        `read` returns rows `[start, stop)` of the first dimension of a parameter, by its name.
        """
        shapes = {name: target.shape for name, target in self.weights.packed.items()}
        shapes |= {name: tuple(one.tensor().shape) for name, one in self.weights.plain.items()}
        groups = {n: Group((n,), {n: shape}, target=n) for n, shape in shapes.items()}

        def fetch(name: str, start: int, stop: int | None, device: Any) -> Any:
            rows = shapes[name][0] if shapes[name] else 1
            return lambda: read(name, start, rows if stop is None else stop).to(device)

        files = SimpleNamespace(fetch=fetch, info=lambda name: SimpleNamespace(dtype=torch.float32))
        layout = SimpleNamespace(
            groups=groups.values(), by_name=groups, convert=lambda _, rows: rows
        )
        self.weights.fill(files, layout, self.device, {})
        return self.finish()

    def finish(self) -> Any:
        """Fill the adapters, once the weights are filled, and return the model."""
        if self._adapters is not None:
            self._adapters.fill()
            for config in self.model.peft_config.values():
                record_base(self.model.get_base_model(), config)
        return self.model


def blank_model(model: Any, config: Any) -> BlankModel:
    """Return a model on meta, as it was built in the dtype to load it in, as one to pack."""
    config = copy_config(config)
    settings = CodecSettings.from_config(config)
    layout = detect(model)
    params = tuple(weights_to_pack(model, layout, config, settings))
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    compute_buffers(model, torch.device("cpu"))
    from_config(model, config)
    model.tie_weights()
    return BlankModel(model, config, settings, layout, params, dtypes)


def pack_blanks(blank: BlankModel) -> None:
    """Give a model on meta its blank packed weights, in the layout that FSDP2 shards."""
    model, settings = blank.model, blank.settings
    packed = {name for param in blank.params for name in param.names}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = blank.dtypes.get(name, tensor.dtype)
        if tensor.is_meta and tensor.is_floating_point() and wanted.is_floating_point:
            tensor.data = tensor.data.to(wanted)
    for param in blank.params:
        pack_blank(model, param, settings)
    for name, module in model.named_modules():
        if is_packed_linear(module) and f"{name}.weight" not in packed:
            pack_blank_linear(module, blank.dtypes[f"{name}.weight"], settings)
            cast = settings.codec.linear_dtype
            blank.dtypes[f"{name}.weight"] = cast or blank.dtypes[f"{name}.weight"]
    model.config.quantization_config = blank.config
    finish_packing(model, blank.layout, blank.config, settings)
    prepare_sharding(model)


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


def all_ranks() -> DeviceMesh:
    """Return a mesh of all ranks, on the accelerator where the process group has one."""
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_initialized():
        raise ConfigError(
            "No process group is initialized: start the program with torchrun and call "
            "torch.distributed.init_process_group() before load_sharded."
        )
    on_cpu = not torch.cuda.is_available() or distributed.get_backend() == "gloo"
    return init_device_mesh("cpu" if on_cpu else "cuda", (distributed.get_world_size(),))


def device_of(mesh: Any) -> torch.device:
    """Return this rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _local_folder(source: str | Path, download: Mapping[str, Any]) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        if download:
            raise ConfigError(
                f"{source} is a folder, and {', '.join(sorted(download))} is for models of the hub."
            )
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
    folder: Path,
    config: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> OpenedModel:
    if is_packed(folder):
        if config is not None:
            raise ConfigError(
                f"{folder} is packed already, by the settings in its config.json: leave "
                "quantization_config out."
            )
        return _open_packed(folder, dtype, device, trust_remote_code)
    if config is None:
        raise ConfigError(f"{folder} is not packed: give a quantization_config.")
    config = copy_config(config)
    model = build_model(folder, dtype, trust_remote_code)
    compute_buffers(model, device)
    job = PackingJob(folder, model, config, device)
    dtypes = {name: job.dtype(name) for name in model.state_dict()}
    aliases = aliases_of(model)
    params = {id(param): param for param in job.spec.params.values()}
    return OpenedModel(
        model, config, job.spec.settings, job.spec.layout, tuple(params.values()), dtypes,
        job.base,
        lambda weights, place: weights.fill(
            job.base.checkpoint, job.base.layout, place, aliases, job.transposed
        ),
    )  # fmt: skip


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter that has several, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _open_packed(
    folder: Path, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool
) -> OpenedModel:
    """Open a packed folder; large tensors are not compared with their checksums."""
    check = FolderCheck(folder, large=False)
    check.finish()
    manifest = check.manifest
    warn_of_changes(folder, manifest)
    source = named.resolve(str(folder), trust_remote_code=trust_remote_code)
    if dtype is not None:
        source.config.dtype = dtype
    with init.no_tie_weights():
        model: Any = named.build(source, trust_remote_code=trust_remote_code)
    compute_buffers(model, device)
    config = copy_config(source.config.quantization_config)
    spec = reload_spec(model, config, model.dtype, manifest, folder)
    from_config(model, config)
    check.check_model(model)
    model.tie_weights()
    files = check.checkpoint
    stored = StoredWeights(model, manifest, files)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()} | spec.dtypes
    dtypes |= {} if spec.recasts else stored.dtypes()
    params = {id(param): param for param in spec.params.values()}
    return OpenedModel(
        model, config, spec.settings, spec.layout, tuple(params.values()), dtypes,
        files, lambda weights, _: stored.fill(weights),
    )  # fmt: skip


class StoredWeights:
    """The weights of a packed folder by the names that the model, plain on meta, has for them."""

    def __init__(self, model: Any, manifest: Manifest, files: Checkpoint) -> None:
        kept = [name for name, entry in manifest.experts.items() if entry.codec is not None]
        refuse_to_shard(kept, "load it whole and call fully_shard")
        self._settings, self._files = manifest.settings, files
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        keys = {}
        for stored, parts in packed_names(manifest).items():
            ends = {
                SCALES if key.endswith(SCALES) else key.removeprefix(stored): key for key in parts
            }
            keys[canonical_name(model, stored, known) or stored] = ends
        self._aliases, self._packed = aliases_of(model), keys
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._plain = {canonical_name(model, key, names) or key: key for key in files}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes that 4-bit weights are decoded to, by their names."""
        record, dtypes = RECORD + self._settings.kind, {}
        for name, ends in self._packed.items():
            if record in ends:
                said = read_record(self._files.read(ends[record]))
                for other in (name, *self._aliases.get(name, ())):
                    dtypes[other] = getattr(torch, said["dtype"])
        return dtypes

    def fill(self, weights: ShardedWeights) -> None:
        """Fill this rank's shares of packed weights, and of plain ones where they are asked for."""
        for target in weights.packed.values():
            fill_stored(target, self._of(target.name, self._packed), self._files)
        for plain in weights.plain.values():
            key, tensor = self._of(plain.name, self._plain), plain.tensor()
            rows = ranks_of(tensor).span(len(tensor)) if tensor.dim() else (0, None)
            if rows[0] != rows[1]:
                plain.put(self._files.read(key, *rows))

    def _of(self, name: str, by_name: Mapping[str, _T]) -> _T:
        for other in (name, *self._aliases.get(name, ())):
            if other in by_name:
                return by_name[other]
        raise CheckpointError(f"{self._files.files[0].parent} has no tensor for {name}.")
