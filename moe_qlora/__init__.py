"""4-bit LoRA fine-tuning (QLoRA) of Mixture-of-Experts models on transformers v5.

    with moe_qlora.enabled():                     experts are packed while they load
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bnb_config)
    model = moe_qlora.get_peft_model(model, LoraConfig(...), experts=True)
    moe_qlora.prepare_training(model, batch_size=1, seq_len=4096)     as fast as fits
    ...                                           train by Trainer, TRL or a loop of your own
    model.save_pretrained("adapter")              in PEFT's layout; load_adapter() reads it
    moe_qlora.merge_adapter(folder, "adapter", "merged")              a plain 16-bit checkpoint

Before a load: `plan`, `detect`, `doctor`. Of a model that is built: `quantize_experts`,
`offload_experts`, `fit_memory`. Of folders: `quantize_checkpoint`, `export_adapter`,
`write_report`. Several GPUs: `load_sharded`. Importing this package imports no torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0"

_NAMES = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES: dict[str, str] = dict(
    sorted((line.names[0].name, line.module) for line in _NAMES.body if hasattr(line, "module"))
)
__all__ = list(_MODULES)

_REMOVED = {  # Names of earlier versions, and what to use instead
    "expert_use": "moe-qlora report FOLDER --text FILE shows which experts a text goes to",
    "hot_experts": "get_peft_model(..., experts=True) puts LoRA on all experts; lower its rank",
    "AdamW": "torch.optim.AdamW(..., fused=True) takes the same arguments and state dicts",
    "shards_integers": "torch before 2.13 has it in moe_qlora.distributed.sharding",
    "expert_parallel": "shard the model by FSDP2, or train it whole on each rank under DDP",
    "graph_layers": "prepare_training(...) records layers as CUDA graphs",
    "serve_check": "ask the server with and without the adapter, and compare with the model here",
}
_REMOVED["expert_parallel_parameters"] = _REMOVED["expert_parallel"]
_REMOVED["LayerGraphs"], _REMOVED["ServeReport"] = _REMOVED["graph_layers"], _REMOVED["serve_check"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        if name in _REMOVED:
            raise AttributeError(f"moe_qlora.{name} is gone since version 0.3: {_REMOVED[name]}.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
