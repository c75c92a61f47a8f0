"""Train LoRA on the attention and all experts of Qwen3-30B-A3B on one card of 24 GB.

    python tools/recipes/qwen3_24gb.py data.jsonl out              {"text": "..."} on each line
    moe-qlora plan Qwen/Qwen3-30B-A3B --gpus 24GiB --rank 8 --targets attention,experts

By the plan, weights take 16.7 GB; adapters in bf16, as TRL trains them on 4-bit models, their
gradients and AdamW's moments 2.6 GB (5.1 GB in float32).

    prepare_training   Liger's loss in chunks (pip install liger-kernel), compiled layers as CUDA
                       graphs, and as many activations as fit; the rest is computed again
    packed rows        all texts one after another, cut into rows of one length, for graphs
    fused AdamW        updates weights without copies
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help='JSON Lines with a "text"')
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="folder or hub id")
parser.add_argument("--seq", type=int, default=2048, help="tokens in a row")
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

nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
with moe_qlora.enabled():  # experts are packed while they load
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=bnb_config, dtype=dtype, device_map="auto"
    )
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=8, lora_alpha=16, target_modules=attention)
model = moe_qlora.get_peft_model(model, lora_config, experts=True, autocast_adapter_dtype=False)
model.config.use_cache = False
print(moe_qlora.prepare_training(model, batch_size=1, seq_len=options.seq))
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 2e-4, "optim": "adamw_torch_fused", "gradient_accumulation_steps": 8}
steps = {"max_steps": options.steps, "logging_steps": 1}
args = transformers.TrainingArguments(options.out, **steps, **batch, **evaluate, **optimizer)
transformers.Trainer(model, args, train_dataset=rows[kept:], eval_dataset=rows[:kept]).train()
model.save_pretrained(options.out)
