"""Train LoRA on a model that two GPUs hold together: GLM-4.5-Air on two cards of 48 GB, FSDP2.

    torchrun --nproc-per-node 2 tools/recipes/two_gpus.py data.jsonl out --model glm
    moe-qlora plan glm --gpus 2x48GiB --fsdp 2 --seq 2048 --rank 8 --targets attention,experts

Each process reads and packs its half of every weight, gathers a layer while that computes, and
trains on rows of its own. The plan says 40.5 GB on each card. With four cards, say
--nproc-per-node 4 and --fsdp 4. Where a card holds the model, loop.py with --ddp is quicker.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig
from torch import distributed
from transformers import AutoTokenizer, BitsAndBytesConfig

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help='JSON Lines with a "text"')
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="glm", help="folder, in 16 bit or packed")
parser.add_argument("--seq", type=int, default=2048, help="tokens in a row")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32
distributed.init_process_group()
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)

tokenizer = AutoTokenizer.from_pretrained(options.model)
texts = [json.loads(line)["text"] for line in options.data.read_text("utf-8").splitlines()]
ids = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
whole = len(ids) // options.seq * options.seq
rows = torch.tensor(ids[:whole], device=device).view(-1, options.seq)
kept = min(64, max(1, len(rows) // 10))
held_out, rows = rows[:kept], rows[kept:]

nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=8, lora_alpha=16, target_modules=attention)
model = moe_qlora.load_sharded(
    options.model, bnb_config, lora_config=lora_config, adapter_options={"experts": True}
)
enable = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.24 on
(enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


@torch.no_grad()
def measure() -> float:
    """Return the mean loss on the held-out rows, the same on all ranks."""
    model.eval()
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in held_out]
    model.train()
    return sum(losses) / kept


before = measure()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(options.steps):
    batch = rows[(step * world + rank) % len(rows)][None]  # each rank its own rows
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    distributed.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item() / world:.3f}")
after = measure()
if rank == 0:
    print(f"held-out loss: {before:.3f} before, {after:.3f} after")
model.save_pretrained(options.out)  # on all ranks
distributed.destroy_process_group()
