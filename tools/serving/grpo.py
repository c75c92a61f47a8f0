"""Trains a tiny model on rewards with vLLM as the sampler.

    python tools/serving/grpo.py --python SERVERS [--steps 20]     vLLM's server, another process
    python tools/serving/grpo.py --colocate                        vLLM in this process

SERVERS is the interpreter of an environment with vLLM. The engine holds the base as training rounds
it, and takes the adapter after each step. The reward is the share of lower case letters. Exit code
1: the reward does not rise, or the engine's logprobs are not the trainer's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import moe_qlora
from moe_qlora.integrations.trl import adapters_to_vllm
from moe_qlora.serving import vllm_worker
from moe_qlora.testing import tiny_model

BNB = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
_MEAN, _MAX = (f"sampling/sampling_logp_difference/{which}" for which in ("mean", "max"))
_NOISE = 1e-4  # nats; both compute in float32


def main() -> int:
    """Train, print each step, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--python", help="of an environment with vLLM")
    where.add_argument("--colocate", action="store_true", help="vLLM is in this environment")
    parser.add_argument("--family", default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder, base = make_models(work, options.family)
        if options.colocate:
            vllm_worker._compute_experts_in_torch()
            log = train(folder, base, None, work / "out", options.steps)
        else:
            with served(base, options.python, work) as url:
                log = train(folder, base, url, work / "out", options.steps)
    for row in log:
        print(
            f"step {row['step']}: reward {row['reward']:.3f}, sampler to trainer: mean "
            f"{row[_MEAN]:.2g}, most {row[_MAX]:.2g} nats"
        )
    rewards = [row["reward"] for row in log]
    tenth = max(1, len(rewards) // 5)
    first, last = (sum(part) / tenth for part in (rewards[:tenth], rewards[-tenth:]))
    most = max(row[_MAX] for row in log)
    print(f"reward from {first:.3f} to {last:.3f}; at most {most:.2g} nats apart")
    return 0 if last > first + 0.1 and most < _NOISE else 1


def make_models(work: Path, family: str) -> tuple[Path, Path]:
    """Write a tiny model with a tokenizer of bytes, and the same as training rounds it."""
    folder, base = work / "model", work / "base"
    vocabulary = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    model: Any = tiny_model(
        family, hidden_size=64, head_dim=32, vocab_size=len(vocabulary), initializer_range=0.1,
        max_position_embeddings=128, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model.save_pretrained(folder)
    untrained = moe_qlora.get_peft_model(load(folder), lora(), experts=True)
    untrained.save_pretrained(str(work / "untrained"))
    moe_qlora.merge_adapter(folder, work / "untrained", base, like_training=True)
    return folder, base


def load(folder: Path) -> Any:
    """Load a model with its experts packed."""
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BNB, dtype=torch.float32
        )


def lora() -> LoraConfig:
    """Return LoRA on the attention, to which LoRA on experts is added."""
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM")


@contextmanager
def served(base: Path, python: str, work: Path) -> Iterator[str]:
    """Start vLLM's server on a base, and yield its address; its log is in `work`."""
    plugin = work / "plugin"
    facts = plugin / "experts_in_torch-0.dist-info"
    facts.mkdir(parents=True)
    shutil.copy(Path(vllm_worker.__file__), plugin / "vllm_worker.py")
    (facts / "METADATA").write_text("Name: experts-in-torch\nVersion: 0\n", "utf-8")
    entry = "[vllm.general_plugins]\nexperts = vllm_worker:_compute_experts_in_torch\n"
    (facts / "entry_points.txt").write_text(entry, "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(plugin),  # vLLM has LoRA on experts for GPUs only
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # TRL asks for the mode of logprobs
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = (
        "--dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 32 --enable-lora "
        f"--max-lora-rank 8 --logprobs-mode processed_logprobs --host 127.0.0.1 --port {port}"
    )
    call = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base)]
    log = work / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*call, *arguments.split()], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            sys.stderr.write(log.read_text("utf-8", "replace")[-8000:])
            raise
        finally:
            server.terminate()
            server.wait(60)


def letters(completions: list[str], **_: Any) -> list[float]:
    """Return the share of lower case letters in each completion."""
    return [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in completions]


def train(
    folder: Path, base: Path, url: str | None, out: Path, steps: int
) -> list[dict[str, float]]:
    """Train by GRPO with the server at an address, or vLLM here; return the log of each step."""
    model = load(folder)
    args = GRPOConfig(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=32, num_generations=16,
        max_completion_length=16, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.0,
        use_vllm=True, vllm_mode="server" if url else "colocate", vllm_server_base_url=url,
        vllm_server_timeout=300, vllm_max_model_length=64,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        bf16=False,
    )  # fmt: skip
    with adapters_to_vllm(base=base, any_base=True, dtype="float32", enforce_eager=True):
        trainer = GRPOTrainer(
            model=model,
            args=args,
            reward_funcs=letters,
            peft_config=moe_qlora.adapt_lora_config(model, lora(), experts=True),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            train_dataset=Dataset.from_list([{"prompt": f"say {at}"} for at in range(64)]),
        )
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            weight.data = (
                weight.data.float()
            )  # TRL made them bfloat16, which vLLM does not round to
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


if __name__ == "__main__":
    sys.exit(main())
