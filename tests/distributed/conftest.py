"""Ranks are forked from one process, which imports once what takes each of them six seconds. One
group of ranks runs all cases of a file: starting it takes longer than a case."""

import multiprocessing

multiprocessing.set_forkserver_preload([
    "accelerate", "bitsandbytes", "moe_qlora.distributed.load_sharded", "moe_qlora.hf.switch",
    "moe_qlora.lora.model", "peft", "pytest", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.trainer", "trl.trainer.sft_trainer",
])  # fmt: skip
