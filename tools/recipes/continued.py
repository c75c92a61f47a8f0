"""Continued pretraining with added tokens: a domain's words become tokens, and text trains them.

    python tools/recipes/continued.py data.jsonl out --tokens "<protein>,<ligand>"
        {"text": "..."} on each line

Rows of the embedding and of the head are trained for the added tokens alone
(`trainable_token_indices`), beside LoRA on attention and all experts; the adapter holds both.
A resumed run goes on from the last checkpoint in OUT: --resume.
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
parser.add_argument("out", type=Path, help="folder for checkpoints and the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B-Base", help="folder or hub id")
parser.add_argument("--tokens", default="<note>,<source>", help="new tokens, by comma")
parser.add_argument("--seq", type=int, default=2048, help="tokens in a row")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32

tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.add_tokens(options.tokens.split(","))
added = tokenizer.convert_tokens_to_ids(options.tokens.split(","))
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
if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # many models have spare rows
    model.resize_token_embeddings(len(tokenizer))
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
tied = model.config.get_text_config().tie_word_embeddings
places = {"embed_tokens": added} if tied else {"embed_tokens": added, "lm_head": added}
more = {"target_modules": attention, "trainable_token_indices": places}
lora_config = LoraConfig(r=32, lora_alpha=64, **more)
model = moe_qlora.get_peft_model(model, lora_config, experts=True)
model.config.use_cache = False
print(moe_qlora.prepare_training(model, batch_size=1, seq_len=options.seq))
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_steps": 0.25, "save_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 1e-4, "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine"}
steps = {"max_steps": options.steps, "logging_steps": 1}
args = transformers.TrainingArguments(options.out, **steps, **batch, **evaluate, **optimizer)
trainer = transformers.Trainer(model, args, train_dataset=rows[kept:], eval_dataset=rows[:kept])
trainer.train(resume_from_checkpoint=options.resume)
model.save_pretrained(options.out)
tokenizer.save_pretrained(options.out)
