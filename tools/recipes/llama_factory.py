"""LLaMA-Factory with packed experts and LoRA on them: its own YAML file, started by this script.

    python tools/recipes/llama_factory.py config.yaml [key=value ...]
    torchrun --nproc-per-node 8 tools/recipes/llama_factory.py config.yaml

The file says `finetuning_type: lora`, `quantization_bit: 4` and `quantization_method: bnb`.
LLaMA-Factory has no hook between building a model and adding adapters: one name of its module is
replaced.
"""

from typing import Any

import peft
from llamafactory.hparams import read_args
from llamafactory.model import adapter
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

import moe_qlora

PREPARE = True  # quicker steps; False leaves the trainer's own


class Prepares(TrainerCallback):
    """Prepares training when it begins: LLaMA-Factory casts adapters before."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def on_train_begin(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        rows = args.per_device_train_batch_size
        print(moe_qlora.prepare_training(model, batch_size=rows, seq_len=self.seq_len))


def with_experts(model: Any, config: peft.PeftConfig) -> peft.PeftModel:
    """Put LoRA on the experts too, in place of `peft.get_peft_model`."""
    return moe_qlora.get_peft_model(model, config, experts=True)


def main() -> None:
    args: Any = read_args()
    adapter.get_peft_model = with_experts
    prepares = Prepares(int(args.get("cutoff_len", 2048)))
    with moe_qlora.enabled():  # from_pretrained packs experts
        run_exp(args, callbacks=[prepares] if PREPARE else [])


if __name__ == "__main__":
    main()
