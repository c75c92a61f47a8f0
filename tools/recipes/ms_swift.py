r"""ms-swift with packed experts and LoRA on them: a plugin file, which registers a tuner.

    swift sft --external_plugins tools/recipes/ms_swift.py --tuner_type moe_qlora \
        --quant_method bnb --quant_bits 4 --model FOLDER --dataset FILE

Models are packed as they load, for as long as this process runs. `--lora_rank`, `--target_modules`
and others of ms-swift's own LoRA hold.
"""

from typing import Any

from peft import LoraConfig, PeftModel
from swift.pipelines.train.tuner import get_modules_to_save, get_target_modules
from swift.tuner_plugin import PeftTuner, tuners_map
from swift.tuners import Swift

import moe_qlora


class PackedExperts(PeftTuner):
    """LoRA as `--tuner_type lora` has it, and on the experts."""

    @staticmethod
    def prepare_model(args: Any, model: Any) -> Any:
        task = args.task_type.upper()
        config: Any = LoraConfig(
            task_type=task,
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            use_rslora=args.use_rslora,
            target_modules=get_target_modules(args, model),
            modules_to_save=get_modules_to_save(args, model, task) or None,
        )
        config = moe_qlora.adapt_lora_config(model, config, experts=True)
        config.lora_dtype = args.lora_dtype  # read by ms-swift's own LoraModel
        adapted = moe_qlora.connect_adapters(Swift.prepare_model(model, config))
        if args.max_length is not None:
            rows = args.per_device_train_batch_size
            print(moe_qlora.prepare_training(adapted, batch_size=rows, seq_len=args.max_length))
        return adapted

    @staticmethod
    def from_pretrained(model: Any, model_id: str, **kwargs: Any) -> PeftModel:
        return moe_qlora.load_adapter(model, model_id, **kwargs)


moe_qlora.enable()
tuners_map["moe_qlora"] = PackedExperts
