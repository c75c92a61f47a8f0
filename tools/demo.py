"""The main job from end to end, on the CPU and offline, in minutes.

    bash tools/demo                     trains a small Mixture-of-Experts model, then does the job
    bash tools/demo --model FOLDER      does the job on a model of yours

1. A Qwen3-MoE language model is trained from scratch on the sources of Python's own standard
   library, and saved as a 16-bit checkpoint. This stands in for a model that one would download.
2. The checkpoint is loaded with a `BitsAndBytesConfig`, its experts are found and packed, LoRA goes
   on attention and experts, and that is trained on different text: the reference manual in English
   that `help()` shows.
3. A table says what each step did to bytes and loss; the curves are drawn to loss.png.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import moe_qlora

CONSOLE = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
SEED = 0


@dataclass(frozen=True)
class Scale:
    """How large the demo is.

    Attributes:
        hidden, layers, experts: Sizes of the small model; an expert is as wide as the model.
        batch, length: Rows of tokens in a step, and tokens in a row.
        pretrain_steps, steps: Steps of the two trainings.
        characters: How much code the first one draws its rows from.
    """

    hidden: int = 128
    layers: int = 4
    experts: int = 32
    batch: int = 8
    length: int = 128
    pretrain_steps: int = 400
    steps: int = 120
    characters: int = 3_000_000


QUICK = Scale(
    hidden=64,
    layers=2,
    experts=8,
    batch=8,
    length=64,
    pretrain_steps=80,
    steps=25,
    characters=300_000,
)


@dataclass
class Run:
    """What is measured on the way.

    Attributes:
        rows: Of the table: state, bytes of the experts, of all other weights and of the adapter,
            loss on held-out text.
        curves: Losses of each training, step by step.
    """

    rows: list[tuple[str, int, int, int, float]]
    curves: dict[str, list[float]]


def main() -> None:
    """Run the demo; raises where the loss did not fall or the experts were not packed."""
    options = _options()
    _silence()
    torch.manual_seed(SEED)
    scale = QUICK if options.quick else Scale()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    run = Run([], {})
    steps = options.steps or scale.steps
    folder = options.model
    if folder is None:
        folder = options.out / "model"
        run.curves["from scratch, on code"] = pretrain(folder, scale)
    packed_bytes, plain_bytes = fine_tune(folder, scale, steps, options.out, run)
    CONSOLE.print(_table(run))
    _draw(run.curves, options.out / "loss.png")
    CONSOLE.print(
        f"Written to {options.out}: loss.png, adapter/. "
        f"All in {time.perf_counter() - started:.0f} seconds."
    )
    _check(run, packed_bytes, plain_bytes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/demo", description="Pack a Mixture-of-Experts model and train LoRA on it."
    )
    parser.add_argument("--model", metavar="FOLDER", help="a model of yours, instead of a new one")
    parser.add_argument("--steps", type=int, help="steps of the LoRA training")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="where results go")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 10:
        parser.error("--steps must be at least 10, or there is no trend to see")
    if options.model is not None and not (Path(options.model) / "config.json").is_file():
        parser.error(f"--model {options.model} holds no config.json; name a checkpoint folder")
    return options


def _silence() -> None:
    """Leave out what libraries say about optional parts, and transformers' loading bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


# Step 1: a model to start from.


def pretrain(folder: Path, scale: Scale) -> list[float]:
    """Train a small Qwen3-MoE model on Python code and save it, with its tokenizer, to `folder`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    text = library_sources(scale.characters)
    tokenizer = _train_tokenizer(text + manual())
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=scale.hidden,
        intermediate_size=2 * scale.hidden,
        moe_intermediate_size=scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=scale.hidden // 4,
        num_experts=scale.experts,
        num_experts_per_tok=4,
        tie_word_embeddings=True,
        output_router_logits=True,
    )
    model = Qwen3MoeForCausalLM(config)
    tokens = encode(tokenizer, text)
    CONSOLE.print(
        f"[bold]1. A model to start from[/]: {sum(p.numel() for p in model.parameters()):,} "
        f"weights, {len(tokens):,} tokens of the standard library's sources"
    )
    losses = train(model, tokens, scale, scale.pretrain_steps, 3e-3, "from scratch")
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def library_sources(limit: int) -> str:
    """Sources of the standard library's own modules, at most `limit` characters."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")])
    skipped = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    parts: list[str] = []
    total = 0
    for file in files:
        if file.parent.name in skipped or total >= limit:
            continue
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        total += len(parts[-1])
    return "".join(parts)[:limit]


def manual() -> str:
    """The reference manual that `help()` shows."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _train_tokenizer(text: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:1_000_000], text[-500_000:]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


# Step 2: the main job.


def fine_tune(folder: str | Path, scale: Scale, steps: int, out: Path, run: Run) -> tuple[int, int]:
    """Load, find, pack, adapt and train; returns the bytes of the experts packed and before."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    cuda = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = encode(tokenizer, manual())
    held_out, tokens = tokens[: len(tokens) // 10], tokens[len(tokens) // 10 :]
    CONSOLE.print(f"[bold]2. The main job[/]: {len(tokens):,} tokens of the reference manual")

    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if cuda else torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=bnb_config,
        device_map={"": 0} if cuda else None,
    )
    layout = moe_qlora.detect(model)
    CONSOLE.print(f"   detect: {len(layout)} expert parameters, such as {layout.experts[0].name}")
    CONSOLE.print(f"           {layout.experts[0].evidence}")
    loss = evaluate(model, held_out, scale)
    plain = layout.nbytes
    rest = weight_bytes(model) - plain
    run.rows.append(("load_in_4bit, stock", plain, rest, 0, loss))

    report = moe_qlora.quantize_experts(model)
    CONSOLE.print(f"   quantize_experts: {report}")
    loss = evaluate(model, held_out, scale)
    packed = report.bytes_after
    run.rows.append(("experts packed", packed, weight_bytes(model) - packed, 0, loss))

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora_config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules="all-linear",
        target_parameters=moe_qlora.target_parameters(model),
        task_type="CAUSAL_LM",
    )
    peft_model = moe_qlora.get_peft_model(model, lora_config)
    trainable, total = peft_model.get_nb_trainable_parameters()
    CONSOLE.print(f"   get_peft_model: {trainable:,} of {total:,} weights are trained")
    run.curves["LoRA on packed weights, on English"] = train(
        peft_model, tokens, scale, steps, 5e-3, "LoRA"
    )
    loss = evaluate(peft_model, held_out, scale)
    adapter = sum(p.nbytes for p in peft_model.parameters() if p.requires_grad)
    rest = weight_bytes(peft_model) - packed - adapter
    run.rows.append(("LoRA trained", packed, rest, adapter, loss))
    peft_model.save_pretrained(out / "adapter")
    return packed, plain


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, with the statistics of packed ones, and of all buffers."""
    from moe_qlora.packing.quant_state import state_tensors

    tensors: list[Tensor] = [*model.buffers()]
    for parameter in model.parameters():
        tensors.append(parameter)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += state_tensors(state)
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


# Training, the same for both.


def encode(tokenizer: Any, text: str) -> Tensor:
    """All tokens of `text`, (N,) int64."""
    pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    ids = [token for piece in tokenizer(pieces)["input_ids"] for token in piece]
    return torch.tensor(ids)


def batches(tokens: Tensor, scale: Scale, seed: int) -> Iterator[Tensor]:
    """Endless random (batch, length) slices of `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - scale.length, (scale.batch,), generator=generator)
        yield torch.stack([tokens[start : start + scale.length] for start in starts])


def train(
    model: Any, tokens: Tensor, scale: Scale, steps: int, rate: float, title: str
) -> list[float]:
    """Train whatever requires gradients; returns the loss of each step."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    device = parameters[0].device
    losses = []
    columns = (TextColumn("   {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal
    ) as progress:
        task = progress.add_task(title, total=steps)
        for _, batch in zip(range(steps), batches(tokens, scale, SEED), strict=False):
            ids = batch.to(device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"{title}: loss {losses[-1]:.3f}")
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    CONSOLE.print(
        f"   {title}: loss {first:.3f} in the first 10 steps, {last:.3f} in the last 10 of {steps}"
    )
    return losses


@torch.no_grad()
def evaluate(model: Any, tokens: Tensor, scale: Scale, rounds: int = 8) -> float:
    """Mean loss on the same random slices each time."""
    from bitsandbytes.nn import Linear4bit

    model.eval()
    for module in model.modules():
        # Before experts are packed: on some CPUs, bitsandbytes 0.50 turns the codes of its Linear
        # layers into another form in evaluation, and rounds their absmax.
        if isinstance(module, Linear4bit):
            module.train()
    device = next(model.parameters()).device
    losses = []
    for _, batch in zip(range(rounds), batches(tokens, scale, SEED + 1), strict=False):
        ids = batch.to(device)
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
    return sum(losses) / len(losses)


# Step 3: what came of it.


def _table(run: Run) -> Table:
    table = Table(title="Before and after")
    headings = ("", "experts", "other weights", "LoRA", "total bytes", "loss on held-out text")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for state, *sizes, loss in run.rows:
        table.add_row(state, *(f"{size:,}" for size in (*sizes, sum(sizes))), f"{loss:.3f}")
    return table


def _draw(curves: dict[str, list[float]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 3.8), squeeze=False)
    for axis, (title, losses) in zip(axes[0], curves.items(), strict=True):
        window = max(len(losses) // 20, 1)
        smooth = [
            sum(losses[max(0, i - window) : i + 1]) / len(losses[max(0, i - window) : i + 1])
            for i in range(len(losses))
        ]
        axis.plot(losses, color="tab:blue", alpha=0.3, label="each step")
        axis.plot(smooth, color="tab:blue", label=f"mean of {window + 1}")
        axis.set(title=title, xlabel="step", ylabel="loss")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _check(run: Run, packed_bytes: int, plain_bytes: int) -> None:
    """Hold the results against what they must be."""
    before, after = run.rows[1][-1], run.rows[-1][-1]
    if not after < before - 0.05:
        raise RuntimeError(f"The loss on held-out text did not fall: {before:.3f} -> {after:.3f}.")
    if not packed_bytes < 0.35 * plain_bytes:
        raise RuntimeError(f"The experts were not packed: {plain_bytes} -> {packed_bytes} bytes.")
    CONSOLE.print(
        f"[green]The experts take {plain_bytes / packed_bytes:.2f} times less memory, and the loss "
        f"fell from {before:.3f} to {after:.3f}.[/]"
    )


if __name__ == "__main__":
    main()
