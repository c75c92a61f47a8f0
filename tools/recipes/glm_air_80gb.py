"""Train LoRA on the attention and all experts of GLM-4.5-Air on one card of 80 GB.

    hf download zai-org/GLM-4.5-Air --local-dir glm
    python tools/recipes/glm_air_80gb.py data.jsonl out --model glm
    moe-qlora plan glm --gpus 80GiB --rank 8 --targets attention,experts

The 16-bit checkpoint is packed once, a few experts at a time, to the folder `glm-packed` of 57 GB,
which later runs load. The plan says 73.3 GB at 4,096 tokens with the stock loss, as Liger 0.8 does
not know this architecture, and that 6,016 tokens fit.
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
parser.add_argument("--model", default="glm", help="folder or hub id")
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
packed = options.model.rstrip("/") + "-packed"
if not Path(packed).exists():
    moe_qlora.quantize_checkpoint(options.model, packed, bnb_config)
with moe_qlora.enabled():  # the folder says how it is packed
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, device_map="auto")
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=8, lora_alpha=16, target_modules=attention)
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
