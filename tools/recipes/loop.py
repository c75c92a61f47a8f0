"""Train LoRA on packed experts in a loop of one's own, on all GPUs of a machine, or on CPUs.

torchrun --nproc-per-node 8 tools/recipes/loop.py FOLDER OUT          FSDP2
torchrun --nproc-per-node 8 tools/recipes/loop.py FOLDER OUT --ddp
"""

import sys

import torch
from peft import LoraConfig
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers

folder, out = sys.argv[1:3]
distributed.init_process_group()
rank, gpus = distributed.get_rank(), torch.cuda.is_available()
dtype = torch.bfloat16 if gpus else torch.float32
if gpus:
    torch.cuda.set_device(rank % torch.cuda.device_count())
nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
packing = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4), "dtype": dtype}
with moe_qlora.enabled():
    model = AutoModelForCausalLM.from_pretrained(folder, **packing)
torch.manual_seed(0)  # equal adapters on all ranks
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=16, lora_alpha=32, target_modules=attention)
model = moe_qlora.get_peft_model(model, lora_config, experts=True).train()
if "--ddp" in sys.argv:
    print(moe_qlora.prepare_training(model, batch_size=2, seq_len=32))
    model = DistributedDataParallel(model)
else:
    with shards_integers():  # torch before 2.13 shards no packed weights by itself
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
torch.manual_seed(rank)  # other rows on each rank: put your data here
rows = torch.randint(0, 100, (3, 32), device="cuda" if gpus else "cpu")
held_out, rows = rows[:1], rows[1:]
for step in range(10):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
model.eval()
with torch.no_grad():
    loss = model(input_ids=held_out, labels=held_out).loss  # on all ranks
if rank == 0:
    print(f"held-out loss: {loss.item():.3f}")
getattr(model, "module", model).save_pretrained(out)  # on all ranks
distributed.destroy_process_group()
