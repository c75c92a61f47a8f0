"""The main job from end to end, on the CPU and offline, in less than a minute on two free cores.

1. A Qwen3-MoE language model is trained from scratch on the sources of Python's own standard
   library, and saved as a 16-bit checkpoint.
2. The checkpoint is loaded with a `BitsAndBytesConfig`, its experts are found and packed, LoRA goes
   on attention and experts, and that is trained on the reference manual that `help()` shows.
3. A table says what each step did to bytes and loss; loss.png draws both.
"""

import argparse
import logging
import math
import os
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

if __name__ == "__main__":
    # OpenMP reads it when torch is imported. By default its threads wait at each barrier in a loop,
    # on a busy machine in place of the one that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from bitsandbytes.nn import Linear4bit
from matplotlib.figure import Figure
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import moe_qlora
from moe_qlora.layout import human_bytes

SEED = 0


class Scale(NamedTuple):
    """How large the demo is."""

    hidden: int = 128
    experts: int = 16
    pretrain_steps: int = 360
    steps: int = 120
    characters: int = 1_000_000  # of code, for the first training


BATCH, LENGTH = 8, 64  # rows of a step, tokens of a row
QUICK = Scale(hidden=64, experts=8, pretrain_steps=80, steps=25, characters=300_000)


@dataclass
class Run:
    """Points of the job, and each training's losses by step.

    A point: bytes of the expert weights, bytes of LoRA's, and the loss on held-out text.
    """

    states: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)


def say(text: str) -> None:
    """Print text, indented, in lines of at most 80 columns."""
    print(textwrap.fill(text, 80, initial_indent="   ", subsequent_indent="   "), flush=True)


def pretrain(folder: Path, scale: Scale, run: Run) -> None:
    """Train a small Qwen3-MoE model on Python code and save it, with its tokenizer, to `folder`."""
    text = library_sources(scale.characters)
    tokenizer = train_tokenizer(text + manual())
    tokens = encode(tokenizer, text)
    # The default initializer_range, 0.02, is for wide layers: after 200 steps of these narrow ones
    # the loss was 4.1 with it, and 3.7 with this.
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=scale.hidden, intermediate_size=2 * scale.hidden,
        moe_intermediate_size=scale.hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=scale.hidden // 4,
        num_experts=scale.experts, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=True, output_router_logits=True, initializer_range=0.06,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    say("1. A model to start from")
    weights = sum(p.numel() for p in model.parameters())
    say(f"{weights:,} weights, {len(tokens):,} tokens of the standard library's sources")
    run.curves["from scratch, on code"] = train(model, tokens, scale.pretrain_steps, 4e-3)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fine_tune(folder: Path, scale: Scale, out: Path, run: Run) -> None:
    """Load, find, pack, adapt and train."""
    cuda = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = encode(tokenizer, manual())
    held_out, tokens = tokens[: len(tokens) // 10], tokens[len(tokens) // 10 :]
    say(f"2. The main job: LoRA on {len(tokens):,} tokens of Python's manual")

    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if cuda else torch.float32,
    )  # fmt: skip
    place: dict[str, Any] = {"device_map": {"": 0} if cuda else None, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bnb_config, **place)
    layout = moe_qlora.detect(model)
    say(f"detect: {len(layout)} expert parameters, such as {layout.experts[0].name}")
    say(layout.experts[0].evidence)
    run.states["load_in_4bit, stock"] = layout.nbytes, 0, evaluate(model, held_out)
    report = moe_qlora.quantize_experts(model)
    say(f"quantize_experts: {report}")
    packed = report.bytes_after
    run.states["experts packed"] = packed, 0, evaluate(model, held_out)

    lora_config = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM",
        target_parameters=moe_qlora.target_parameters(model),
    )  # fmt: skip
    peft_model: Any = moe_qlora.get_peft_model(model, lora_config)
    trainable, total = peft_model.get_nb_trainable_parameters()
    say(f"get_peft_model: {trainable:,} of {total:,} weights are trained")
    title = "LoRA on packed weights, on English"
    run.curves[title] = train(peft_model, tokens, scale.steps, 1e-2)
    adapter = sum(p.nbytes for p in peft_model.parameters() if p.requires_grad)
    run.states["LoRA trained"] = packed, adapter, evaluate(peft_model, held_out)
    peft_model.save_pretrained(out / "adapter")


def train(model: Any, tokens: Tensor, steps: int, rate: float) -> list[float]:
    """Train whatever requires gradients; returns the loss of each step."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    for batch in batches(tokens, steps, SEED):
        ids = batch.to(parameters[0].device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % 60 == 0:
            say(f"step {len(losses)} of {steps}: loss {losses[-1]:.3f}")
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    say(f"loss {first:.3f} in the first 10 steps, {last:.3f} in the last 10 of {steps}")
    return losses


@torch.no_grad()
def evaluate(model: Any, tokens: Tensor) -> float:
    """Mean loss on the same random slices each time."""
    model.eval()
    for module in model.modules():
        # Before experts are packed: on some CPUs, bitsandbytes 0.50 turns the codes of its Linear
        # layers into another form in evaluation, and rounds their absmax.
        if isinstance(module, Linear4bit):
            module.train()
    device = next(model.parameters()).device
    rows = [batch.to(device) for batch in batches(tokens, 8, SEED + 1)]
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in rows]
    return sum(losses) / len(losses)


def library_sources(limit: int) -> str:
    """Sources of the standard library's own modules, at most `limit` characters."""
    root, text = Path(sysconfig.get_path("stdlib")), ""
    skipped = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    for file in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        if file.parent.name not in skipped and len(text) < limit:
            text += file.read_text(encoding="utf-8", errors="replace")
    return text[:limit]


def manual() -> str:
    """The reference manual that `help()` shows."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def train_tokenizer(text: str) -> Any:
    """Return a tokenizer of 1,024 pieces of words, learned from the ends of `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([text[:300_000], text[-300_000:]], trainer)
    make = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, eos_token="<|end|>")


def encode(tokenizer: Any, text: str) -> Tensor:
    """All tokens of `text`, (N,) int64."""
    return torch.tensor(tokenizer(text)["input_ids"])


def batches(tokens: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Yield so many batches of random slices of `tokens`, (BATCH, LENGTH)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + LENGTH] for start in starts])


def main() -> int:
    """Run the demo; raises where the loss did not fall or the experts were not packed."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="tools/demo", description="Pack a Mixture-of-Experts model and train LoRA on it."
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="where results go")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        # So small a model's threads would do little but wait for each other.
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("bitsandbytes", "moe_qlora"):  # the demo's own lines fit 80 columns
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    scale = QUICK if options.quick else Scale()
    run, folder = Run(), options.out / "model"
    torch.manual_seed(SEED)
    pretrain(folder, scale, run)
    fine_tune(folder, scale, options.out, run)
    draw(run, options.out / "loss.png")
    conclude(run)
    seconds = time.perf_counter() - started
    say(f"Written to {options.out}: loss.png, adapter/. All in {seconds:.0f} seconds.")
    return 0


def draw(run: Run, file: Path) -> None:
    """Draw the losses of each training."""
    figure = Figure(figsize=(5.2 * len(run.curves), 3.9), layout="constrained")
    axes = figure.subplots(1, len(run.curves), squeeze=False)[0]
    for axis, (title, losses) in zip(axes, run.curves.items(), strict=True):
        axis.plot(range(1, len(losses) + 1), losses, linewidth=1)
        axis.set(title=f"Training {title}", xlabel="step", ylabel="loss")
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def conclude(run: Run) -> None:
    """Print the bytes and the loss of each state, and hold them against what they must be."""
    print("Bytes of weights, and loss on held-out text")
    print(f"{'experts':>34s}{'LoRA':>11s}{'loss':>11s}")
    for name, (*sizes, loss) in run.states.items():
        experts, lora = (human_bytes(size) if size else "-" for size in sizes)
        print(f"   {name:20s}{experts:>11s}{lora:>11s}{loss:>11.3f}")
    (stock, *_), (packed, _, before), (*_, after) = run.states.values()
    if not after < before - 0.05:
        raise RuntimeError(f"The loss on held-out text did not fall: {before} to {after}.")
    if not packed < 0.35 * stock:
        raise RuntimeError(f"{stock} bytes of experts are {packed} packed.")
    less = f"{stock / packed:.2f} times less memory"
    say(f"The experts take {less}, and the loss fell from {before:.3f} to {after:.3f}.")


if __name__ == "__main__":
    sys.exit(main())
