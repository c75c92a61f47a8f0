"""Loads a model that no process holds whole: sharded by FSDP2 first, then filled share by share.

The model is built on meta, packed with blank weights (`Fill.pack`), adapted, sharded, allocated on
this rank's device, and filled (hf/fill.py). By transformers' `DistributedConfig` (`RankLoad`)
transformers shards, and reads all that is not packed.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import GenerationConfig

from ..checkpoint.folder import absolute, file_facts
from ..checkpoint.manifest import FolderCheck, is_packed
from ..checkpoint.rows import indexed, reload_spec
from ..checkpoint.save import build_model, copy_config, open_to_pack
from ..checkpoint.training_codec import from_config
from ..errors import CheckpointError, ConfigError
from ..hf.fill import Fill, put_local
from ..lora.config import record_base
from ..lora.model import get_peft_model
from .gather import Facts, check_agreement, from_first
from .sharding import Wrap, shard_model


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
    more than its share, one piece of a weight, one weight's first-level absmax, and new adapters.

    Args:
        source: A folder, 16-bit, quantized by its maker or packed by this package; or a hub id.
        quantization_config: `BitsAndBytesConfig` or its dict; None for a packed folder.
        mesh: A `DeviceMesh`: `(ranks,)`, or `(copies, ranks)`; None is all ranks.
        lora_config: Adapters to put on the model, a `LoraConfig`; None leaves it without.
        wrap: The modules that FSDP2 gathers and frees by themselves: names of classes, or what
            tells of a module. By default the decoder layers (`_no_split_modules`).
        dtype: Of plain and of decoded weights; None is the checkpoint's own.
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
    device = indexed(torch.device(mesh.device_type))
    fill = _open(folder, quantization_config, dtype, device, trust_remote_code)
    base = fill.model
    if attn_implementation is not None:
        base.set_attn_implementation(attn_implementation)
    if base.can_generate() and (folder / "generation_config.json").is_file():
        base.generation_config = GenerationConfig.from_pretrained(folder)
    model, options = base.eval(), dict(fsdp_options or {})
    if lora_config is not None:
        model = _adapt(base, lora_config, mesh, adapter_options or {})
    shard_model(model, mesh, wrap, **options)
    offloaded = type(options.get("offload_policy")).__name__ == "CPUOffloadPolicy"
    fill.fill_shares(model, device, on_cpu=offloaded)
    if lora_config is not None:
        _fill_copies(model)
        for config in model.peft_config.values():
            record_base(base, config)
    return model


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
) -> Fill:  # fmt: skip
    packed = is_packed(folder)
    if packed != (config is None):
        raise ConfigError(
            f"{folder} is {'' if packed else 'not '}packed: give a quantization_config for a "
            "folder in 16 bit, and for no other."
        )
    # no rank reads all that a checksum is of
    check = FolderCheck(folder, large=False) if packed else None
    model: Any = build_model(folder, dtype, trust_remote_code, packed=packed)
    # the buffers that no checkpoint holds, as transformers computes them
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
    config = copy_config(model.config.quantization_config if packed else config)
    if check is None:
        base, plan, dtypes, *_ = open_to_pack(folder, model, config, device)
        known = plan, base.checkpoint, dtypes
    else:
        spec = reload_spec(model, config, model.dtype, check.finish(), folder)
        from_config(model, config)
        check.check_model(model)
        model.tie_weights()
        own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        known = spec, check.checkpoint, own | spec.dtypes
    fill = Fill(model, *known, config, shards=True)
    fill.pack(base.layout if check is None else None)
    return fill


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


class RankLoad:
    """One call of `from_pretrained` that gives each rank its part of the model."""

    def __init__(self, config: Any) -> None:
        self.config = config
        # By FSDP2. `dp_size`, with its copies of the shards, is of transformers 5.23.
        self.shards = getattr(config, "dp_size", getattr(config, "fsdp_size", None) or 1) > 1

    def begin(self, facts: Facts) -> None:
        """Compare the ranks' arguments; refuse a config that asks for more than FSDP2."""
        check_agreement("from_pretrained", facts)
        for field in ("tp_size", "pp_size", "ep_size"):
            if (size := getattr(self.config, field, None) or 1) > 1:
                raise ConfigError(
                    f"distributed_config has {field}={size}, which packed experts do not support: "
                    "shard by FSDP2 with DistributedConfig(fsdp_size=N), or load whole for DDP."
                )
