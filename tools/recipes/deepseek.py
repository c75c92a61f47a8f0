"""Train LoRA on all Linear layers and all experts of DeepSeek-V2-Lite on one card of 24 GB.

    python tools/recipes/deepseek.py data.jsonl out                {"text": "..."} on each line

By the plan of its published sizes, 18.3 GB at 4,096 tokens. "all-linear" reaches what this family
has beside routed experts: the projections of latent attention (kv_a_proj_with_mqa, kv_b_proj, ...),
shared experts, and the MLP of the first, dense layer. llama.cpp takes no adapter with LoRA on
kv_b_proj: merge, or leave that layer out. Folders of DeepSeek-V3's kind, in block FP8, load with
the same lines, but need many GPUs: see two_gpus.py.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help='JSON Lines with a "text"')
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="deepseek-ai/DeepSeek-V2-Lite", help="folder or hub id")
parser.add_argument("--seq", type=int, default=4096, help="tokens in a row")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32

tokenizer = AutoTokenizer.from_pretrained(options.model)
texts = [json.loads(line)["text"] for line in options.data.read_text("utf-8").splitlines()]
ids = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
blocks = [ids[i : i + options.seq] for i in range(0, len(ids) - options.seq + 1, options.seq)]
rows = [{"input_ids": block, "labels": block} for block in blocks]
kept = min(64, max(1, len(rows) // 10))  # held out

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=dtype,
)
with moe_qlora.enabled():  # experts are packed while they load
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=bnb_config, dtype=dtype, device_map="auto"
    )
lora_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
model = moe_qlora.get_peft_model(model, lora_config, experts=True)
model.config.use_cache = False
print(moe_qlora.prepare_training(model, batch_size=1, seq_len=options.seq))
args = TrainingArguments(
    output_dir=options.out,
    max_steps=options.steps,
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    gradient_accumulation_steps=8,
    learning_rate=2e-4,
    optim="adamw_torch_fused",
    logging_steps=1,
    eval_strategy="steps",
    eval_on_start=True,
    eval_steps=0.25,  # of all steps
)
Trainer(model, args, train_dataset=rows[kept:], eval_dataset=rows[:kept]).train()
model.save_pretrained(options.out)
