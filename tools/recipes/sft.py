"""Train LoRA on packed experts with TRL, under FSDP2 or DDP.

    torchrun --nproc-per-node 8 tools/recipes/sft.py FOLDER OUT           FSDP2, by arguments
    torchrun --nproc-per-node 8 tools/recipes/sft.py FOLDER OUT --ddp
    accelerate launch --config_file tools/recipes/fsdp2.yaml tools/recipes/sft.py FOLDER OUT --ddp

In the last line accelerate's file says how to shard, and the arguments say nothing.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers

folder, out = sys.argv[1:3]
gpus = torch.cuda.is_available()
dtype = torch.bfloat16 if gpus else torch.float32
nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, **nf4)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
experts = ["experts.gate_up_proj", "experts.down_proj"]  # moe-qlora dump MODEL prints the names
lora_config = LoraConfig(r=16, lora_alpha=32, target_modules=attention, target_parameters=experts)
moe_qlora.enable()
steps = {"max_steps": 10, "logging_steps": 1, "save_strategy": "no"}
steps |= {"eval_strategy": "steps", "eval_steps": 5}
args = SFTConfig(
    out,
    bf16=gpus,
    use_cpu=not gpus,
    model_init_kwargs={"dtype": dtype},
    ddp_find_unused_parameters=False,  # every expert has a gradient, if no token a zero one
    fsdp="--ddp" not in sys.argv,
    fsdp_config=None if "--ddp" in sys.argv else {"version": 2},
    **steps,
)
rows = torch.randint(0, 100, (80, 32)).tolist()  # put your data here
trainer = SFTTrainer(
    model=folder,
    args=args,
    quantization_config=bnb_config,
    peft_config=lora_config,
    train_dataset=Dataset.from_dict({"input_ids": rows[8:]}),
    eval_dataset=Dataset.from_dict({"input_ids": rows[:8]}),
)
print(moe_qlora.prepare_training(trainer.model, batch_size=8, seq_len=32))
with shards_integers():  # torch before 2.13 shards no packed weights by itself
    trainer.train()
trainer.save_model(out)
