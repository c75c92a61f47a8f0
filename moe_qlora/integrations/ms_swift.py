r"""ms-swift with packed experts: a tuner of its registry, for a plugin file of two lines.

    # experts.py
    from moe_qlora.integrations.ms_swift import register
    register({"lora_experts": True})

    swift sft --external_plugins experts.py --tuner_type moe_qlora \
        --quant_method bnb --quant_bits 4 --model FOLDER --dataset FILE

The tuner reads the options that ms-swift's own LoRA reads (`--lora_rank`, `--target_modules`,
`--target_parameters`, `--modules_to_save` ...). Nothing is patched: models that ms-swift knows get
a loader that packs experts as they load, through its table of models; any other model is packed
once it is built, which needs room for its 16-bit experts. `swift infer --adapters` and resuming
read the plugin file again from the checkpoint's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..models.trainer.checks import ExpertsSettings
from .host import ExpertsHost

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import nn

TUNER = "moe_qlora"

# Options for adapters outside of PEFT's config, and the values that leave them off.
_ELSEWHERE = {"tuner_backend": "peft", "use_swift_lora": False, "lorap_lr_ratio": None}

# ms-swift's tasks with another name in PEFT, or none.
_TASKS = {
    "EMBEDDING": None,
    "RERANKER": "SEQ_CLS",
    "GENERATIVE_RERANKER": "CAUSAL_LM",
    "DECISION": "CAUSAL_LM",
}


def register(settings: ExpertsSettings | Mapping[str, Any] | None = None) -> ExitStack:
    """Register `--tuner_type moe_qlora`, and loaders that pack experts in 4 or 8 bit.

    `close()` of the returned stack, or the end of a `with` block, undoes both. A wrong setting, or
    a tuner that is registered already, is a `ConfigError`.
    """
    from swift.model import MODEL_MAPPING
    from swift.tuner_plugin import tuners_map

    host = ExpertsHost(settings)
    if TUNER in tuners_map:
        raise ConfigError(
            f"The tuner {TUNER} is registered already: register it in one plugin file, or close "
            "the first registration."
        )
    undo = ExitStack()
    packing = cache(partial(_packing, host))
    for meta in MODEL_MAPPING.values():
        undo.callback(setattr, meta, "loader", meta.loader)
        meta.loader = packing(meta.loader)
    tuners_map[TUNER] = _tuner(host)
    undo.callback(tuners_map.pop, TUNER)
    return undo


def _packing(host: ExpertsHost, loader: Any) -> type:
    """Return a loader class that packs experts if it quantizes with bitsandbytes."""

    class PackingLoader(loader):
        def load(self) -> Any:
            config = (getattr(self, "model_kwargs", None) or {}).get("quantization_config")
            with host.loading(config):  # None: loads plain models and packed folders
                return super().load()

    PackingLoader.__name__ = PackingLoader.__qualname__ = loader.__name__
    return PackingLoader


def _tuner(host: ExpertsHost) -> type:
    from swift.tuner_plugin import PeftTuner
    from swift.tuners import Swift

    class PackedExpertsTuner(PeftTuner):
        @staticmethod
        def prepare_model(args: Any, model: nn.Module) -> PeftModel:
            _check(args)
            host.after_build(model, pack=True)
            config: Any = host.before_peft(model, _lora_config(args, model))
            config.lora_dtype = args.lora_dtype  # read by ms-swift's own LoraModel
            adapted = host.after_peft(Swift.prepare_model(model, config))
            if host.settings.prepare_training and args.max_length is None:
                raise ConfigError(
                    "prepare_training needs the length of a sequence: set --max_length."
                )
            host.before_training(
                adapted,
                batch_size=args.per_device_train_batch_size,
                seq_len=args.max_length,
                objective=getattr(args, "rlhf_type", None) or "sft",
            )
            return adapted

        @staticmethod
        def from_pretrained(model: nn.Module, model_id: str, **kwargs: Any) -> PeftModel:
            from ..lora.load import load_adapter

            host.after_build(model, pack=True)
            return host.after_peft(load_adapter(model, model_id, **kwargs))

    return PackedExpertsTuner


def _check(args: Any) -> None:
    for name, off in _ELSEWHERE.items():
        value = getattr(args, name, off)
        if value != off:
            raise ConfigError(
                f"--{name} {value} makes adapters by other code, which packed experts cannot "
                f"take: leave it out, or use another --tuner_type than {TUNER}."
            )


def _lora_config(args: Any, model: nn.Module) -> LoraConfig:
    """Return ms-swift's config for `--tuner_type lora`."""
    from peft import LoraConfig
    from swift.pipelines.train.tuner import get_modules_to_save, get_target_modules

    task = args.task_type.upper()
    return LoraConfig(
        task_type=_TASKS.get(task, task),
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        bias=args.lora_bias,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        init_lora_weights=args.init_weights,
        target_modules=get_target_modules(args, model),
        target_parameters=args.target_parameters,
        modules_to_save=get_modules_to_save(args, model, task) or None,
    )
