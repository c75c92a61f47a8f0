"""Compare LoRA on attention alone, on experts alone, and on both, on your own text.

    python tools/recipes/attention_or_experts.py data.jsonl out       {"text": "..."} on each line

The packed model is loaded once. Each of the three adapters starts anew, trains on the same rows,
and is measured on the last tenth of all rows, which none was trained on. Attention has a higher
rank, since it has fewer weights. All three are saved; the table says what each costs and gives.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help='JSON Lines with a "text"')
parser.add_argument("out", type=Path, help="folder for the adapters")
parser.add_argument("--model", default="allenai/OLMoE-1B-7B-0924", help="folder or hub id")
parser.add_argument("--seq", type=int, default=1024, help="tokens in a row")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")

tokenizer = AutoTokenizer.from_pretrained(options.model)
texts = [json.loads(line)["text"] for line in options.data.read_text("utf-8").splitlines()]
ids = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
whole = len(ids) // options.seq * options.seq
rows = torch.tensor(ids[:whole], device=device).view(-1, options.seq)
kept = max(1, len(rows) // 10)
held_out, rows = rows[-kept:], rows[:-kept]

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=dtype,
)
with moe_qlora.enabled():
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=bnb_config, dtype=dtype, device_map={"": device}
    )


@torch.no_grad()
def measure() -> float:
    """Return the mean loss on the held-out rows."""
    model.eval()
    return sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in held_out) / kept


attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
print(f"{'LoRA on':10}{'rank':>6}{'trained':>14}{'loss':>9}\n{'nothing':30}{measure():9.3f}")
for name, rank, modules, experts in (
    ("attention", 64, attention, False),
    ("experts", 8, [], True),
    ("both", 8, attention, True),
):
    torch.manual_seed(0)
    lora_config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
    peft_model = moe_qlora.get_peft_model(model, lora_config, experts=experts).train()
    trained = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    for step in range(options.steps):
        row = rows[step % len(rows)][None]
        peft_model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{name:10}{rank:6}{sum(p.numel() for p in trained):14,}{measure():9.3f}", flush=True)
    peft_model.save_pretrained(options.out / name)
    model = peft_model.unload()
