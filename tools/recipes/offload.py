"""Train LoRA with the experts in host memory: Qwen3-30B-A3B on 12 GB, GLM-4.5-Air on 24 GB.

    python tools/recipes/offload.py data.jsonl out                 {"text": "..."} on each line
    python tools/recipes/offload.py data.jsonl out --model zai-org/GLM-4.5-Air --attention-alone

Packed experts take 15 GB of host memory, of GLM-4.5-Air 51; each layer's are copied to the device
ahead of its use. By the plan of their sizes, 4,096 tokens take 9.2 and 17.3 GiB; prepare_training
brings experts to what is left of the card. A step takes at least as long as two copies of all
experts, of Qwen3-30B-A3B 0.5 s at 55 GB/s and 1.3 s at the 22 GB/s of PCIe 4. So prefer large
steps: more tokens in a row, and in a micro-batch, rather than gradient accumulation.
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
parser.add_argument("--attention-alone", action="store_true", help="no LoRA on experts")
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

nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
with moe_qlora.enabled(offload=True):  # experts are packed to host memory while they load
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        quantization_config=bnb_config,
        dtype=dtype,
        device_map={"": 0 if gpu else "cpu"},
    )
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=8, lora_alpha=16, target_modules=attention)
model = moe_qlora.get_peft_model(model, lora_config, experts=not options.attention_alone)
model.config.use_cache = False
print(moe_qlora.prepare_training(model, batch_size=1, seq_len=options.seq))
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 2e-4, "optim": "adamw_torch_fused"}
steps = {"max_steps": options.steps, "logging_steps": 1}
args = transformers.TrainingArguments(options.out, **steps, **batch, **evaluate, **optimizer)
transformers.Trainer(model, args, train_dataset=rows[kept:], eval_dataset=rows[:kept]).train()
model.save_pretrained(options.out)
