"""Train on rewards: GRPO by TRL, LoRA on attention and all experts.

    python tools/recipes/grpo.py data.jsonl out                 {"prompt": "...", "answer": "..."}

Put your own function in the place of `reward`. The model that trains generates; with `--server URL`
and a folder as `--model` a vLLM server does: see "RL with vLLM" in moe_qlora/docs/trainers.md.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

import moe_qlora
from moe_qlora.integrations.trl import adapters_to_vllm

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help="JSON Lines with prompt and answer")
parser.add_argument("out", type=Path, help="folder for the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="folder or hub id")
parser.add_argument("--length", type=int, default=512, help="tokens of a completion at most")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--server", help="address of a vLLM server")
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Whether the last line has the column `answer` of the data, and a little for being short."""
    pairs = zip(completions, answer, strict=True)
    return [(a in text.rstrip().split("\n")[-1]) - 1e-4 * len(text) for text, a in pairs]


tasks = [json.loads(line) for line in options.data.read_text("utf-8").splitlines()]
kept = min(16, max(1, len(tasks) // 10))  # held out
nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
bnb_config = BitsAndBytesConfig(load_in_4bit=True, **nf4)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
experts = ["experts.gate_up_proj", "experts.down_proj"]  # moe-qlora dump MODEL prints the names
lora_config = LoraConfig(
    r=8, lora_alpha=16, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM"
)
moe_qlora.enable()  # TRL's load packs experts
batch = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
evaluate = {"eval_strategy": "steps", "eval_steps": 0.25}  # of all steps
optimizer = {"learning_rate": 1e-5, "optim": "adamw_torch_fused"}
server = {"use_vllm": options.server is not None, "vllm_mode": "server"}
args = GRPOConfig(
    options.out,
    vllm_server_base_url=options.server,
    max_steps=options.steps,
    max_completion_length=options.length,
    num_generations=4,
    model_init_kwargs={"dtype": dtype},
    bf16=gpu,
    logging_steps=1,
    **batch | evaluate | optimizer | server,
)
with adapters_to_vllm(base=options.model):  # of use with a server alone
    trainer = GRPOTrainer(
        model=options.model,
        args=args,
        reward_funcs=reward,
        quantization_config=bnb_config,
        peft_config=lora_config,
        train_dataset=Dataset.from_list(tasks[kept:]),
        eval_dataset=Dataset.from_list(tasks[:kept]),
    )
print(moe_qlora.prepare_training(trainer.model, batch_size=4, seq_len=2 * options.length))
trainer.train()
trainer.save_model(options.out)
