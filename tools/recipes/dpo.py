"""Align a model to preferences: DPO by TRL, LoRA on attention and all experts.

    python tools/recipes/dpo.py data.jsonl out     {"prompt": "", "chosen": "", "rejected": ""}

The reference is the packed model with its adapter switched off: no second model is loaded. TRL
loads the model itself; one line is added for packed experts. A pair is two sequences, so plan
with `--batch 2`: 24.8 GB for Qwen3-30B-A3B with rank 8 and 1,024 tokens.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help="JSON Lines with prompt, chosen and rejected")
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="folder or hub id")
parser.add_argument("--seq", type=int, default=1024, help="tokens of prompt and answer at most")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32

pairs = [json.loads(line) for line in options.data.read_text("utf-8").splitlines()]
kept = min(64, max(1, len(pairs) // 10))  # held out
nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
experts = ["experts.gate_up_proj", "experts.down_proj"]  # moe-qlora dump MODEL prints the names
lora_config = LoraConfig(
    r=8, lora_alpha=16, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM"
)
moe_qlora.enable()  # TRL's load packs experts
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 5e-6, "optim": "adamw_torch_fused", "gradient_accumulation_steps": 8}
args = DPOConfig(
    options.out,
    max_steps=options.steps,
    max_length=options.seq,
    beta=0.1,
    model_init_kwargs={"dtype": dtype},
    bf16=gpu,
    use_cpu=not gpu,
    logging_steps=1,
    **batch | evaluate | optimizer,
)
trainer = DPOTrainer(
    model=options.model,
    args=args,
    quantization_config=bnb_config,
    peft_config=lora_config,
    train_dataset=Dataset.from_list(pairs[kept:]),
    eval_dataset=Dataset.from_list(pairs[:kept]),
)
# A pair is two sequences
print(moe_qlora.prepare_training(trainer.model, batch_size=2, seq_len=options.seq))
trainer.train()
trainer.save_model(options.out)
