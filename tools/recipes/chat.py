"""Fine-tune a chat model on conversations, from data to a served adapter.

    pip install ".[trl]" liger-kernel tensorboard            in the checkout
    python tools/recipes/chat.py tools/recipes/chat.jsonl out --log tensorboard
    python tools/recipes/chat.py tools/recipes/chat.jsonl out --log tensorboard --resume

Each line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}, ...]}; chat.jsonl is a sample, whose replies end with "In short: ...". A tenth of
it is held out. Each --every steps the held-out loss is computed and a checkpoint is saved, from
which --resume goes on; the best one is kept at the end. Then the adapter is loaded again, answers a
held-out question, and is written as vLLM serves it.

The loss is on the assistant's tokens alone. TRL knows which these are for the chat templates of
Qwen3, gpt-oss, GLM-4.5 and many more. For any other, each reply becomes a row, with the messages
before it as its prompt. --pack puts whole conversations one after another into rows.
"""

import argparse
import gc
import importlib.util
import json
import random
import shutil
from pathlib import Path

import torch
from datasets import Dataset
from huggingface_hub import snapshot_download
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer, get_training_chat_template

import moe_qlora

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path, help='JSON Lines with "messages"')
parser.add_argument("out", type=Path, help="folder for checkpoints, logs and the adapter")
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="folder or hub id")
parser.add_argument("--seq", type=int, default=2048, help="tokens in a row at most")
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--steps", type=int, default=-1, help="stop here, whatever --epochs says")
parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
parser.add_argument("--pack", action="store_true", help="several conversations in a row")
parser.add_argument("--log", choices=["none", "tensorboard", "wandb", "trackio"], default="none")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
options = parser.parse_args()
gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if gpu else torch.float32
if options.log != "none" and importlib.util.find_spec(options.log) is None:
    parser.error(f"--log {options.log} needs a package: pip install {options.log}")
if not options.resume and any(options.out.glob("checkpoint-*")):
    parser.error(f"{options.out} holds checkpoints: add --resume, or name another folder")

folder = options.model if Path(options.model).is_dir() else snapshot_download(options.model)
tokenizer = AutoTokenizer.from_pretrained(folder)
if not tokenizer.chat_template:
    parser.error(f"--model {options.model} has no chat template: take one that is made for chat")

rows = [json.loads(line) for line in options.data.read_text("utf-8").splitlines()]
chats = [row.get("messages", []) for row in rows]
for number, chat in enumerate(chats, 1):
    if "assistant" not in (message["role"] for message in chat):
        parser.error(f'{options.data}, line {number} has no "messages" with a reply')
random.Random(0).shuffle(chats)
question = chats[0][: [message["role"] for message in chats[0]].index("assistant")]
try:
    get_training_chat_template(tokenizer)
    marked = True
except ValueError:
    marked = False
    print("TRL cannot tell replies in this chat template: each reply becomes a row of its own.")


def rows_of(part: list[list[dict[str, str]]]) -> Dataset:
    """Return conversations as TRL takes them, so that the loss is on replies alone."""
    if marked:
        return Dataset.from_list([{"messages": chat} for chat in part])
    cuts = [(chat, i) for chat in part for i, m in enumerate(chat) if m["role"] == "assistant"]
    return Dataset.from_list([{"prompt": c[:i], "completion": [c[i]]} for c, i in cuts])


def load() -> torch.nn.Module:
    """Return the model with all experts packed."""
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=bnb_config, dtype=dtype, device_map="auto"
        )


attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_config = LoraConfig(r=8, lora_alpha=16, target_modules=attention, task_type="CAUSAL_LM")
batch = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
evaluate = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": options.every}
save = {"save_steps": options.every, "save_total_limit": 2, "load_best_model_at_end": True}
steps = {"num_train_epochs": options.epochs, "max_steps": options.steps, "warmup_steps": 5}
steps |= {"learning_rate": 2e-4, "optim": "adamw_torch_fused", "gradient_accumulation_steps": 8}
args = SFTConfig(
    options.out,
    max_length=options.seq,
    packing=options.pack,
    assistant_only_loss=marked,
    bf16=gpu,
    use_cpu=not gpu,
    router_aux_loss_coef=0.0,  # routers are frozen, and with router logits no layer is compiled
    logging_steps=1,
    report_to=options.log,
    **batch | evaluate | save | steps,
)
held_out = max(1, len(chats) // 10)
model = moe_qlora.get_peft_model(load(), lora_config, experts=True)
trainer = SFTTrainer(
    model=model,
    args=args,
    processing_class=tokenizer,
    train_dataset=rows_of(chats[held_out:]),
    eval_dataset=rows_of(chats[:held_out]),
)
print(moe_qlora.prepare_training(trainer.model, batch_size=1, seq_len=options.seq))
trainer.train(resume_from_checkpoint=options.resume)
print(f"held-out loss: {trainer.evaluate()['eval_loss']:.3f}")
trainer.save_model(options.out)

del trainer
gc.collect()
torch.cuda.empty_cache()  # for the model that is loaded again
model = moe_qlora.load_adapter(load(), str(options.out)).eval()
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
).to(model.device)
reply = model.generate(**inputs, max_new_tokens=128, do_sample=False)[0]
print(f"\n{tokenizer.decode(reply)}\n")

served = options.out / "vllm"
shutil.rmtree(served, ignore_errors=True)  # of the run that is resumed
moe_qlora.export_adapter(options.out, served, base=folder, target="vllm")
print(f"vllm serve {options.model} --enable-lora --max-lora-rank 8 --lora-modules chat={served}")
