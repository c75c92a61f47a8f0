"""What a user of Trainer and TRL gets on one GPU, from a folder on disk: real tokens a second.

    python tools/bench/journey.py --folder /dev/shm/qwen --parts fixed,chat,batch8,bfd
    python tools/bench/journey.py --folder /tmp/tiny --tiny --parts chat,batch8    # on a CPU
    torchrun --nproc-per-node 2 tools/bench/journey.py --folder /dev/shm/qwen --parts bfd  [--fsdp]

It writes a checkpoint of random weights in the shape of Qwen3-30B-A3B (`--model`, `--layers`),
loads it as a user would, and trains by these parts, each one line in results/journey.csv:

    fixed    Trainer, one row of --seq tokens, its defaults
    chat     TRL's SFTTrainer, one conversation a row, --accumulate of them
    batch8   8 conversations a batch, padded
    bfd      packing=True, TRL's best fit

Conversations have log-normal lengths, a median of 420 tokens; padding is not counted. With
`--no-prepare` the same parts run without `prepare_training`; `--stock` trains bf16 experts by PEFT;
`--ampere` chooses kernels as on an A100. Under torchrun each rank has rows of its own, by DDP or,
with `--fsdp`, by FSDP2; tokens are those of all ranks. The checkpoint has to be there.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from common import Rows, environment, parser_of
from peft import LoraConfig
from peft import get_peft_model as stock_peft_model
from shapes import encode_bf16, quantization, whole_config, write_checkpoint, write_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import moe_qlora
from moe_qlora.distributed.sharding import shards_integers
from moe_qlora.kernels import cards

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))


def encode(key: str, shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """Make random matrices, and norms of ones."""
    if len(shape) == 1:
        return {key: torch.ones(shape, dtype=torch.bfloat16)}
    return encode_bf16(key, shape, device)


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times = [time.time()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())


class Journey:
    """One model, and the parts of its training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.o, self.gpu = options, torch.cuda.is_available() and not options.tiny
        self.random = random.Random(0)
        if self.gpu and options.memory:
            limit = float(options.memory.removesuffix("GiB")) * 2**30
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / whole)
        if not (options.folder / "model.safetensors.index.json").exists():
            config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
            if options.tiny:  # for all bytes, and for long conversations
                config.vocab_size, config.max_position_embeddings = 2048, 8192
            causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
            config.architectures, config.dtype = [causal], "bfloat16"
            write_checkpoint(options.folder, config, "cuda" if self.gpu else "cpu", encode)
            write_tokenizer(options.folder)
        dtype = torch.bfloat16 if self.gpu else torch.float32
        packs = quantization(bnb_4bit_compute_dtype=dtype)
        loading = {} if options.stock else {"quantization_config": packs}
        start = time.time()
        with nullcontext() if options.stock else moe_qlora.enabled():
            model = AutoModelForCausalLM.from_pretrained(
                options.folder, dtype=dtype, device_map={"": RANK} if self.gpu else None, **loading
            )
        self.loading = time.time() - start
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = LoraConfig(
            r=options.rank, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"
        )
        if options.stock:
            self.model = stock_peft_model(model, lora)
        else:
            self.model = moe_qlora.get_peft_model(model, lora, experts=True)
        self.tokenizer = AutoTokenizer.from_pretrained(options.folder)
        where = environment(torch.device("cuda" if self.gpu else "cpu"), options.commit)
        engine = f" engine={'fsdp2' if options.fsdp else 'ddp'} {WORLD}" if WORLD > 1 else ""
        peer = "stock" if options.stock else "ours" if options.prepare else "ours, not prepared"
        setting = f"peer={peer} model={options.model} layers={options.layers} seq={options.seq}"
        setting += f" rank={options.rank} memory={options.memory}{' ampere' * options.ampere}"
        setting += engine
        self.rows = Rows(options.out if RANK == 0 else Path(os.devnull), where, "journey", setting)
        self.rows.add("load", "s", self.loading)

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return settings that all parts share."""
        own = {
            "output_dir": tempfile.mkdtemp(), "max_steps": self.o.steps, "report_to": [],
            "optim": "adamw_torch_fused" if self.gpu else "adamw_torch", "logging_steps": 1,
            "per_device_train_batch_size": 1, "save_strategy": "no",
            "bf16": self.gpu, "use_cpu": not self.gpu, "learning_rate": 1e-4, "disable_tqdm": True,
            "gradient_checkpointing": not self.o.prepare,
        }  # fmt: skip
        if self.o.fsdp:
            classes = list(self.model.get_base_model()._no_split_modules)
            sharding = {"version": 2, "transformer_layer_cls_to_wrap": classes}
            own |= {"fsdp": True, "fsdp_config": sharding}
        elif WORLD > 1:
            own |= {"ddp_find_unused_parameters": False}
        return own | more

    def prepared(self, batch_size: int = 1) -> Any:
        """Prepare training, where it is asked for."""
        if not self.o.prepare:
            return nullcontext()
        start = time.time()
        prepared = moe_qlora.prepare_training(
            self.model, batch_size=batch_size, seq_len=self.o.seq, memory=self.o.memory
        )
        self.rows.add(f"prepare, {batch_size} rows", "s", time.time() - start)
        print(prepared, flush=True)
        return prepared

    def chats(self, count: int) -> list[dict[str, Any]]:
        """Return conversations of log-normal lengths; a character is a token."""
        made = []
        for _ in range(count):
            drawn = int(self.random.lognormvariate(math.log(420), 0.95))
            length = max(24, min(self.o.seq - 16, drawn))
            asked = max(8, int(length * self.random.uniform(0.2, 0.6)))
            parts = {"user": asked, "assistant": max(8, length - asked - 12)}
            messages = [
                {"role": role, "content": "".join(self.random.choices("etaoin shrdlu", k=size))}
                for role, size in parts.items()
            ]
            made.append({"messages": messages})
        return made

    def report(self, name: str, clock: Clock, tokens: float) -> None:
        """Add the rows of a part of so many real tokens a step."""
        steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        self.rows.add(f"{name}: first two steps", "s", sum(steps[:2]))
        self.rows.add(f"{name}: step", "s", *(steps[2:] or steps))
        self.rows.add(f"{name}: real tokens", "1/s", *(tokens / s for s in steps[2:] or steps))
        if self.gpu:
            peak = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
            self.rows.add(f"{name}: peak", "GB", peak[0])
            self.rows.add(f"{name}: reserved", "GB", peak[1])
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print("steps", [round(step, 3) for step in steps], flush=True)

    def fixed(self) -> None:
        """Train on rows of one length by Trainer."""
        ids = torch.randint(0, 256, (64, self.o.seq))
        data = [{"input_ids": row, "labels": row.clone()} for row in ids]
        clock, args = Clock(), TrainingArguments(**self.arguments(max_steps=3 * self.o.steps))
        with self.prepared():
            Trainer(self.model, args, train_dataset=data, callbacks=[clock]).train()
        self.report("fixed", clock, self.o.seq)

    def sft(self, name: str, rows: int = 1, accumulate: int | None = None, **more: Any) -> None:
        """Train on conversations by TRL."""
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        accumulate = accumulate or self.o.accumulate
        needed = WORLD * self.o.steps * accumulate * rows * (7 if more.get("packing") else 1)
        data = Dataset.from_list(self.chats(needed + 8))
        args = SFTConfig(
            **self.arguments(
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=accumulate,
                max_length=self.o.seq,
                router_aux_loss_coef=0.0,
                assistant_only_loss=True,
                **more,
            )
        )
        with self.prepared(rows):
            clock = Clock()
            trainer = SFTTrainer(
                self.model, args, processing_class=self.tokenizer, train_dataset=data,
                callbacks=[clock],
            )  # fmt: skip
            mean = statistics.mean(len(ids) for ids in trainer.train_dataset["input_ids"])
            with shards_integers():
                trainer.train()
        self.report(name, clock, mean * rows * accumulate * WORLD)


def main() -> None:
    """Read the options and run the parts."""
    parser = parser_of(__doc__, "journey.csv")
    parser.add_argument("--folder", type=Path, required=True, help="the checkpoint, or where to")
    parser.add_argument("--parts", default="fixed,chat,batch8,bfd")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="the first ones alone")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--memory", help="of prepare_training, and of this process: 22GiB")
    parser.add_argument("--no-prepare", dest="prepare", action="store_false")
    parser.add_argument("--stock", action="store_true", help="bf16 experts, by PEFT")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2, under torchrun")
    parser.add_argument("--ampere", action="store_true", help="without Hopper's kernels")
    options = parser.parse_args()
    options.prepare = options.prepare and not options.stock
    card = cards.of_capability((8, 0)) if options.ampere else None
    with nullcontext() if card is None else cards.acting_as(card):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Run the parts with these options."""
    journey = Journey(options)
    parts: dict[str, Any] = {
        "fixed": journey.fixed,
        "chat": lambda: journey.sft("chat"),
        "batch8": lambda: journey.sft("batch8", 8, 1),
        "bfd": lambda: journey.sft("bfd", packing=True),
    }
    for name in options.parts.split(","):
        try:
            parts[name]()
        except Exception as error:  # noqa: BLE001 - a part that fails is a row too
            traceback.print_exc(limit=-6)
            journey.rows.fail(error)


if __name__ == "__main__":
    main()
