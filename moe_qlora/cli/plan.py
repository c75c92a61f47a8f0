"""`moe-qlora plan MODEL`: print what a model takes on its devices, loading and in training."""

from __future__ import annotations

from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..errors import ConfigError, visible
from ..layout import human_bytes
from . import options as opt
from . import render

if TYPE_CHECKING:
    from ..planning.report import MemoryPlan

DOES_NOT_FIT = 4
EXAMPLES = (
    "moe-qlora plan qwen3-30b-a3b --gpus 24GiB",
    "moe-qlora plan ./model --gpus 4090 --seq 2048 --targets experts",
    "moe-qlora plan ./model --gpus 8xH100 --fsdp 8",
    "moe-qlora plan qwen3-30b-a3b --gpus 4090 --targets attention,experts",
)


def plan(
    model: opt.Model,
    gpus: str | None = opt.option("Devices: 24GiB, 4090, 8xH100, or 24GiB,2x48GiB."),
    ddp: bool = opt.flag("--ddp", "DDP, with a rank on each of --gpus."),
    fsdp: int | None = opt.option("Ranks that share the model under FSDP2."),
    offload: bool | None = opt.option("Packed experts in host memory."),
    seq: int | None = opt.option("Tokens in a sequence; default: 4096."),
    batch: int | None = opt.option("Sequences in a micro-batch; default: 1."),
    optimizer: str | None = opt.option(
        "adamw, adamw_8bit, paged_adamw or paged_adamw_8bit; default: adamw."
    ),
    checkpointing: bool | None = opt.option("Compute layers again in backward; default: yes."),
    attention: str | None = opt.option(
        "attn_implementation of from_pretrained: eager, sdpa, flex_attention or a flash kernel; "
        "default: transformers' choice."
    ),
    prepared: bool | None = opt.option(
        "With prepare_training, whose loss is Liger's where it knows the model."
    ),
    rank: int | None = opt.option("LoRA rank; default: 16."),
    targets: str | None = opt.option(
        "What gets LoRA: attention, all-linear, experts, or names, by comma; default: attention."
    ),
    adapter_dtype: str | None = opt.option(
        "Of the adapters: float32 (PEFT's default) or bfloat16; default: float32."
    ),
    quant: opt.ModelQuant = None,
    double_quant: opt.ModelDoubleQuant = None,
    as_json: opt.Json = False,
    trust_remote_code: opt.Remote = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Show whether MODEL fits --gpus, the best settings that do, what it takes, and where.

    Layers are spread over --gpus in one process. With --ddp or --fsdp there is a process (a rank)
    on each GPU, and the figures are those of one of them.

    Settings that are left out are searched for the best combination that fits; those that are given
    change only where nothing fits with them.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 4 where it does not fit
    the devices of --gpus, and with 2 where MODEL or a setting cannot be read.
    """
    if ddp and fsdp is not None:
        raise ConfigError("--ddp and --fsdp are two engines for one run; give one of them.")
    settings = {
        "batch": batch, "seq": seq, "rank": rank, "targets": targets,
        "adapter_dtype": adapter_dtype, "optimizer": optimizer, "checkpointing": checkpointing,
        "attention": attention, "prepared": prepared, "offload": offload,
    }  # fmt: skip
    with render.working(f"Rehearsing a training step of {model}"):
        from ..models import named
        from ..planning.plan import plan_settings

        source = named.resolve(model, trust_remote_code=trust_remote_code)
        report = plan_settings(
            source,
            opt.packed_as(source.settings, quant, double_quant),
            {name: value for name, value in settings.items() if value is not None},
            gpus=gpus,
            engine="ddp" if ddp else None if fsdp is None else f"fsdp:{fsdp}",
            trust_remote_code=trust_remote_code,
        )
    paste = ["moe-qlora plan", quote(model), *(["--gpus", quote(gpus)] if gpus else [])]
    paste += [f"--quant {quant.value}"] if quant is not None else []
    paste += [f"--{'' if double_quant else 'no-'}double-quant"] * (double_quant is not None)
    show(report, " ".join(paste), as_json=as_json, color=color)


def show(report: MemoryPlan, command: str, *, as_json: bool, color: opt.Color) -> None:
    """Print a plan, with its best settings as options of a command; end with 4 without a fit."""
    if as_json:
        render.print_json(report.as_dict())
    else:
        _show(report, render.console(color.value), command)
    if report.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _show(report: MemoryPlan, out: Console, command: str) -> None:
    """Print the verdict, the best settings as options of a command, tables, and notes."""
    from ..planning.budget import ENGINES
    from ..planning.choice import copies_sentence

    if report.verdict:
        render.say(out, report.verdict, "green" if report.fits else "red")
        out.line()
    if report.best is not None:  # to be pasted
        pasted = visible(f"    {command} {report.best.options}".rstrip())
        out.print(pasted, markup=False, soft_wrap=True)
        out.line()
    settings, engine, peak = report.settings, report.settings.engine, report.peak
    where, share = "one device", ""
    if engine is not None:
        where = f"each of {engine.ranks} ranks ({ENGINES[engine.name]})"
        share = f"on each rank {human_bytes(report.resident)}, "
    rows: list[tuple[str, ...] | None] = [
        (name, human_bytes(most), human_bytes(now) if now else "-")
        for name, most, now in report.rows()
    ]
    rows += [None, ("sum", "", human_bytes(peak.nbytes))]
    title = f"{report.label}: memory in training, on {where}"
    render.show_table(out, title, ("component", ">at most", ">at the peak"), rows)

    whole, hosting = report.resident if report.whole is None else report.whole, report.hosting
    whole += 0 if hosting is None else sum(layer.nbytes for layer in hosting.experts)
    nested = ", double quantization" if report.double_quant else ""
    packed = f"{human_bytes(whole)} as {report.kind}{nested}" if report.kind else "nothing packed"
    loading = f"{human_bytes(report.load_peak)} at most while loading"
    said = [f"Model: {human_bytes(report.unpacked)} unpacked, {packed}; {share}{loading}."]
    if hosting is not None:
        times = copies_sentence(*hosting.times(hosting.most, {}))
        rest = f"{human_bytes(hosting.slots)} of slots on the device{times}"
        held = human_bytes(hosting.host_nbytes(hosting.most))
        said.append(f"Packed experts: {held} in host memory, {rest}.")
    said.append(
        f"Training {report.trained_weights:,} weights (rank {settings.rank} on "
        f"{settings.targets}, {settings.adapter_dtype}, {settings.optimizer}), "
        f"{settings.batch} x {settings.seq} tokens, "
        f"{'with' if settings.checkpointing else 'without'} gradient checkpointing: "
        f"{human_bytes(peak.nbytes)} at the peak, which is {peak.moment}."
    )
    if peak.paged:
        said.append(f"{human_bytes(peak.paged)} of optimizer states are in pages, and not counted.")
    reserve = f"{human_bytes(report.reserve)} (CUDA's context, and gaps between blocks)"
    said.append(f"Beside its tensors a process takes about {reserve}.")
    for line in said:
        render.say(out, line)
    if report.devices:
        out.line()
        _show_devices(report, out)
    for note in report.notes:
        render.say(out, f"note: {note}")


def _show_devices(report: MemoryPlan, out: Console) -> None:
    engine, settings = report.settings.engine, report.settings
    rows = []
    # Under an engine, ranks on devices of one size are alike.
    for _, uses in groupby(report.devices, key=lambda u: u.capacity if engine else u.index):
        first, *others = uses
        rows.append(
            (
                f"{first.index}-{others[-1].index}" if others else str(first.index),
                human_bytes(first.capacity),
                human_bytes(first.weights),
                human_bytes(0 if first.peak is None else first.peak.nbytes),
                f"{human_bytes(first.needed)} ({first.needed / first.capacity:.0%})",
                "yes" if first.fits else "no",
            )
        )
    headings = ("device", ">size", ">weights", ">at the peak", ">with reserve", "fits")
    render.show_table(out, f"Devices{', one rank each' * bool(engine)}", headings, rows)
    for use in report.devices if engine is None else ():
        render.say(out, f"On device {use.index}: {render.patterns(use.blocks)}.")
    if report.fit is not None and report.fit.fits:
        render.say(out, f"With moe_qlora.fit_memory {report.fit}.")
    if report.largest_seq:
        longest = f"Longest sequence at batch {settings.batch}: {report.largest_seq:,} tokens"
        largest = f"largest batch at {settings.seq} tokens: {report.largest_batch:,}"
        render.say(out, f"{longest}; {largest}.")
