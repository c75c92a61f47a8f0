"""Train LoRA on pictures and text: Qwen3-VL-MoE, or --model google/gemma-4-26B-A4B-it.

    pip install pillow torchvision                             what transformers' processors need
    python tools/recipes/vision.py data.jsonl out
        {"image": "a.png", "question": "...", "answer": "..."} on each line; paths from data.jsonl

LoRA is on the language model's attention and all experts; the vision tower stays frozen, in 16 bit.
The loss is on the answer alone.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help="JSON Lines with image, question and answer")
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-VL-30B-A3B-Instruct", help="folder or hub id")
parser.add_argument("--seq", type=int, default=2048, help="tokens of a picture and text at most")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32

processor = AutoProcessor.from_pretrained(options.model)
rows = [json.loads(line) for line in options.data.read_text("utf-8").splitlines()]
kept = max(1, len(rows) // 10)  # held out


def collate(batch: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    (row,) = batch  # one a batch: what comes before the answer is cut off the labels
    image = Image.open(options.data.parent / row["image"]).convert("RGB")
    asked = [{"type": "image", "image": image}, {"type": "text", "text": row["question"]}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}
    chat = [{"role": "user", "content": asked}, answer]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(chat[:1], add_generation_prompt=True, **how)
    inputs = processor.apply_chat_template(chat, **how)
    labels = inputs["input_ids"].clone()
    labels[:, : prompt["input_ids"].shape[1]] = -100
    return {**inputs, "labels": labels}


nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
tower = ["lm_head", r".*(visual|vision).*"]  # stays in 16 bit
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=tower, **nf4
)
with moe_qlora.enabled():  # experts are packed while they load
    model = AutoModelForImageTextToText.from_pretrained(
        options.model, quantization_config=bnb_config, dtype=dtype, device_map="auto"
    )
attention = r".*language_model.*\.(q|k|v|o)_proj"  # not the tower's
lora_config = LoraConfig(r=16, lora_alpha=32, target_modules=attention)
model = moe_qlora.get_peft_model(model, lora_config, experts=True)
print(moe_qlora.prepare_training(model, batch_size=1, seq_len=options.seq))
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 2e-4, "optim": "adamw_torch_fused"}
steps = {"max_steps": options.steps, "logging_steps": 1}
args = transformers.TrainingArguments(options.out, **steps, **batch, **evaluate, **optimizer)
args.remove_unused_columns = False  # collate reads them
data = {"train_dataset": rows[kept:], "eval_dataset": rows[:kept], "data_collator": collate}
transformers.Trainer(model, args, **data).train()
model.save_pretrained(options.out)
processor.save_pretrained(options.out)
