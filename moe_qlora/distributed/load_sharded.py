"""Loads a model that no process holds whole: sharded by FSDP2 first, then filled share by share.

The model is built on meta (models/named.py), packed with blank weights, adapted (adapters.py),
sharded (sharding.py), allocated empty on this rank's device, and filled with this rank's shares
(filling.py): then it is as if it had been packed whole and sharded then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from transformers import GenerationConfig
from transformers import initialization as init

from ..checkpoint.base import file_facts
from ..checkpoint.manifest import FolderCheck, is_packed, warn_of_changes
from ..checkpoint.rows import reload_spec
from ..checkpoint.save import build_model, copy_config, open_to_pack
from ..checkpoint.staging import absolute
from ..checkpoint.training_codec import from_config
from ..errors import CheckpointError, ConfigError
from ..hf.fill import refuse_to_shard
from ..lora.config import record_base
from ..models import named
from .adapters import BlankAdapters
from .agreement import check_agreement
from .filling import ShardedFill
from .sharding import Wrap, allocate, device_of, shard_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    if mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise ConfigError(
            f"The mesh has {mesh.ndim} dimensions called {mesh.mesh_dim_names}; load_sharded "
            "takes (ranks,) or (copies, ranks), the latter with mesh_dim_names."
        )
    folder = Path()

    def facts() -> dict[str, Any]:
        nonlocal folder
        folder = _local_folder(source, download)
        config = None if quantization_config is None else copy_config(quantization_config)
        asked = {"dtype": dtype, "attn_implementation": attn_implementation}
        asked |= {"quantization_config": config, "lora_config": lora_config}
        return asked | file_facts(folder)

    check_agreement("load_sharded", facts, mesh)
    fill = _open(folder, quantization_config, dtype, device_of(mesh), trust_remote_code)
    base = fill.model
    if attn_implementation is not None:
        base.set_attn_implementation(attn_implementation)
    if base.can_generate() and (folder / "generation_config.json").is_file():
        base.generation_config = GenerationConfig.from_pretrained(folder)
    return shard_and_fill(fill, mesh, lora_config, wrap, fsdp_options, adapter_options)


def shard_and_fill(
    fill: ShardedFill,
    mesh: DeviceMesh,
    lora_config: Any = None,
    wrap: Wrap | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
    adapter_options: Mapping[str, Any] | None = None,
) -> Any:
    """Adapt and shard a model that is packed with blank weights, and fill it; return it."""
    model, options, device = fill.model.eval(), dict(fsdp_options or {}), device_of(mesh)
    with fill.files:
        adapters = None
        if lora_config is not None:
            adapters = BlankAdapters(model, lora_config, mesh, adapter_options or {})
            model = adapters.model
        shard_model(model, mesh, wrap, **options)
        offloaded = type(options.get("offload_policy")).__name__ == "CPUOffloadPolicy"
        allocate(model, device, torch.device("cpu") if offloaded else None)
        fill.fill(device)
    if adapters is not None:
        adapters.fill()
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
) -> ShardedFill:
    """Return the fill of a model on meta, which has its blank packed weights."""
    if not is_packed(folder):
        if config is None:
            raise ConfigError(f"{folder} is not packed: give a quantization_config.")
        config = copy_config(config)
        model = build_model(folder, dtype, trust_remote_code)
        compute_buffers(model, device)
        opened = open_to_pack(folder, model, config, device)
        fill = ShardedFill(model, opened.plan, opened.base.checkpoint, opened.dtypes, config)
        fill.pack(opened.base.layout)
        return fill
    if config is not None:
        raise ConfigError(
            f"{folder} is packed already, by the settings in its config.json: leave "
            "quantization_config out."
        )
    check = FolderCheck(folder, large=False)  # no rank reads all that a checksum is of
    check.finish()
    warn_of_changes(folder, check.manifest)
    source = named.resolve(str(folder), trust_remote_code=trust_remote_code)
    if dtype is not None:
        source.config.dtype = dtype
    with init.no_tie_weights():
        model = named.build(source, trust_remote_code=trust_remote_code)
    compute_buffers(model, device)
    config = copy_config(source.config.quantization_config)
    spec = reload_spec(model, config, model.dtype, check.manifest, folder)
    refuse_to_shard(spec.kept, "load it whole and call fully_shard")
    from_config(model, config)
    check.check_model(model)
    model.tie_weights()
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()} | spec.dtypes
    fill = ShardedFill(model, spec, check.checkpoint, dtypes, config)
    fill.pack()
    return fill
