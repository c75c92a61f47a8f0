"""What a user of Trainer and TRL gets on one GPU, from a folder on disk: real tokens a second.

    python tools/bench/journey.py --folder /dev/shm/qwen --parts fixed,chat,batch8,bfd
    python tools/bench/journey.py --folder /tmp/tiny --tiny --parts chat,batch8    # on a CPU
    torchrun --nproc-per-node 2 tools/bench/journey.py --folder /dev/shm/qwen --parts bfd [--fsdp]

It writes a checkpoint of random weights in the shape of Qwen3-30B-A3B (`--model`, `--layers`),
loads it as a user would, and trains by these parts, each one line in results/journey.csv:

    fixed    Trainer, one row of --seq tokens, its defaults
    chat     TRL's SFTTrainer, one conversation a row, --accumulate of them
    batch8   8 conversations a batch, padded
    bfd      packing=True, TRL's best fit

Conversations have log-normal lengths, a median of 420 tokens; padding is not counted.
Under torchrun each rank has rows of its own, by DDP or, with `--fsdp`, by FSDP2; tokens are those
of all ranks. The checkpoint has to be there.
"""

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import transformers
from common import Rows, parser_of, release, synchronize, words
from datasets import Dataset
from peft import LoraConfig
from shapes import encode_bf16, quantization, whole_config, write_checkpoint, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
PARTS: dict[str, dict[str, Any]] = {
    "fixed": {"gradient_accumulation_steps": 1},
    "chat": {},
    "batch8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "bfd": {"packing": True},
}


class Clock(transformers.TrainerCallback):
    """The time at the begin, and at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        synchronize(self.device)
        self.times.append(time.time())

    on_step_end = on_train_begin


def write_model(options: argparse.Namespace) -> None:
    """Write the checkpoint, of random weights, and a tokenizer of bytes."""
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    if options.tiny:  # for all bytes, and for long conversations
        config.vocab_size, config.max_position_embeddings = 2048, 8192
    write_checkpoint(options.folder, config, options.device, encode_bf16)
    write_tokenizer(options.folder)


def chats(count: int, seq: int) -> list[dict[str, Any]]:
    """Return conversations of log-normal lengths; a character is a token."""
    made, lots = [], random.Random(0)
    for _ in range(count):
        length = max(24, min(seq - 16, int(lots.lognormvariate(math.log(420), 0.95))))
        asked = max(8, int(length * lots.uniform(0.2, 0.6)))
        parts = {"user": asked, "assistant": max(8, length - asked - 12)}
        texts = {role: "".join(lots.choices("etaoin shrdlu", k=n)) for role, n in parts.items()}
        made.append({"messages": [{"role": r, "content": text} for r, text in texts.items()]})
    return made


def train(name: str, model: Any, options: argparse.Namespace, rows: Rows) -> None:
    """Prepare and train one part; add its rows."""
    gpu, seq = options.device.type == "cuda", options.seq
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "max_steps": options.steps, "report_to": [],
        "optim": "adamw_torch_fused" if gpu else "adamw_torch", "logging_steps": 1,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": options.accumulate,
        "bf16": gpu, "use_cpu": not gpu, "learning_rate": 1e-4, "disable_tqdm": True,
        "gradient_checkpointing": False, "save_strategy": "no", **PARTS[name],
    }  # fmt: skip
    if options.fsdp:
        classes = list(model.get_base_model()._no_split_modules)
        sharding = {"version": 2, "transformer_layer_cls_to_wrap": classes}
        settings |= {"fsdp": True, "fsdp_config": sharding}
    elif WORLD > 1:
        settings["ddp_find_unused_parameters"] = False
    batch = settings["per_device_train_batch_size"]
    start, sizes = time.time(), {"batch_size": batch, "seq_len": seq}
    with moe_qlora.prepare_training(model, **sizes, memory=options.memory) as prepared:
        rows.add(f"prepare, {batch} rows", "s", time.time() - start)
        print(prepared, flush=True)
        clock = Clock(options.device)
        common: dict[str, Any] = {"model": model, "callbacks": [clock]}
        if name == "fixed":
            ids = torch.randint(0, 256, (64, seq))
            data: Any = [{"input_ids": row, "labels": row.clone()} for row in ids]
            arguments = transformers.TrainingArguments(
                **settings | {"max_steps": 3 * options.steps}
            )
            trainer: Any = transformers.Trainer(args=arguments, train_dataset=data, **common)
            mean: float = seq
        else:
            needed = WORLD * options.steps * settings["gradient_accumulation_steps"] * batch
            needed *= 7 if name == "bfd" else 1
            chat = {"max_length": seq, "router_aux_loss_coef": 0.0, "assistant_only_loss": True}
            trainer = SFTTrainer(
                args=SFTConfig(**settings, **chat),
                processing_class=AutoTokenizer.from_pretrained(options.folder),
                train_dataset=Dataset.from_list(chats(needed + 8, seq)),
                **common,
            )
            mean = statistics.mean(len(ids) for ids in trainer.train_dataset["input_ids"])
        with shards_integers():
            trainer.train()
    tokens = WORLD * mean * batch * settings["gradient_accumulation_steps"]
    steps = [after - before for before, after in pairwise(clock.times)]
    rows.add(f"{name}: first two steps", "s", sum(steps[:2]))
    rows.add(f"{name}: step", "s", *(steps[2:] or steps))
    rows.add(f"{name}: real tokens", "1/s", *(tokens / s for s in steps[2:] or steps))
    if gpu:
        rows.add(f"{name}: peak", "GB", torch.cuda.max_memory_allocated() / 1e9)
        rows.add(f"{name}: reserved", "GB", torch.cuda.max_memory_reserved() / 1e9)
    release(options.device)
    print("steps", [round(step, 3) for step in steps], flush=True)


def main() -> None:
    """Load the folder, which is written first where it is not there, and run the parts."""
    parser = parser_of(__doc__, "journey.csv")
    parser.add_argument("--folder", type=Path, required=True, help="the checkpoint, or where to")
    parser.add_argument("--parts", type=words(*PARTS), default=",".join(PARTS))
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="the first ones alone")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="three times as many of fixed")
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--memory", help="of prepare_training: 22GiB")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2, under torchrun")
    options = parser.parse_args()
    if options.tiny or not torch.cuda.is_available():
        options.device = torch.device("cpu")
    if not (options.folder / "model.safetensors.index.json").exists():
        write_model(options)
    start = time.time()
    gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    place = {"dtype": dtype, "device_map": {"": RANK} if gpu else None}
    packing = {"quantization_config": quantization(bnb_4bit_compute_dtype=dtype)}
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(options.folder, **place, **packing)
    loading = time.time() - start
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora: dict[str, Any] = {"lora_alpha": 32, "target_modules": targets, "task_type": "CAUSAL_LM"}
    config = LoraConfig(r=options.rank, **lora)
    model = moe_qlora.get_peft_model(model, config, experts=True)
    setting = f"peer=ours model={options.model} layers={options.layers} seq={options.seq}"
    setting += f" rank={options.rank} memory={options.memory}"
    setting += f" engine={'fsdp2' if options.fsdp else 'ddp'} {WORLD}" if WORLD > 1 else ""
    options.out = options.out if RANK == 0 else Path(os.devnull)
    rows = Rows(options, "journey", setting)
    rows.add("load", "s", loading)
    for name in options.parts:
        with rows.attempt(ours=False):
            train(name, model, options, rows)


if __name__ == "__main__":
    main()
