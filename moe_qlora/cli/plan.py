"""`moe-qlora plan MODEL`: print what a model takes on its devices, loading and in training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError
from ..layout import human_bytes, name_pattern
from . import options as opt
from . import render

if TYPE_CHECKING:
    from ..planning.budget import DeviceUse
    from ..planning.report import MemoryPlan

DOES_NOT_FIT = 4
EXAMPLES = (
    "moe-qlora plan qwen3-30b-a3b --gpus 24GiB",
    "moe-qlora plan ./model --gpus 4090 --seq 2048 --targets experts",
    "moe-qlora plan ./model --gpus 8xH100 --fsdp 8",
    "moe-qlora plan qwen3-30b-a3b --gpus 4090 --targets attention,experts",
)
_ALL = -1  # stands for a --ddp without a number
_BAR = 24
_DEVICES, _STEP, _LORA = "Devices", "A training step", "LoRA"  # panels of the help


class PlanCommand(opt.Subcommand):
    """The subcommand, whose `--ddp` may be without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put a number behind each `--ddp` that has none."""
        filled = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            filled.append(word)
            if word == "--ddp" and not following.isdecimal():
                filled.append(str(_ALL))
        return super().parse_args(ctx, filled)


def plan(
    model: opt.Model,
    gpus: str | None = opt.option(
        "Devices: 24GiB, 4090, 8xH100, or 24GiB,2x48GiB.", panel=_DEVICES
    ),
    ddp: int | None = opt.option(
        "Ranks under DDP; without a number as many as --gpus names.", panel=_DEVICES,
        metavar="[INTEGER]",
    ),
    fsdp: int | None = opt.option("Ranks that share the model under FSDP2.", panel=_DEVICES),
    offload: bool | None = opt.option("Packed experts in host memory.", panel=_DEVICES),
    seq: int | None = opt.option("Tokens in a sequence; default: 4096.", panel=_STEP),
    batch: int | None = opt.option("Sequences in a micro-batch; default: 1.", panel=_STEP),
    optimizer: str | None = opt.option(
        "adamw, adamw_8bit, paged_adamw or paged_adamw_8bit; default: adamw.", panel=_STEP
    ),
    checkpointing: bool | None = opt.option(
        "Compute layers again in backward; default: yes.", panel=_STEP
    ),
    attention: str | None = opt.option(
        "attn_implementation of from_pretrained: eager, sdpa, flex_attention or a flash kernel; "
        "default: transformers' choice.", panel=_STEP,
    ),
    prepared: bool | None = opt.option(
        "With prepare_training, whose loss is Liger's where it knows the model.", panel=_STEP
    ),
    rank: int | None = opt.option("LoRA rank; default: 16.", panel=_LORA),
    targets: str | None = opt.option(
        "What gets LoRA: attention, all-linear, experts, or names, by comma; default: attention.",
        panel=_LORA,
    ),
    adapter_dtype: str | None = opt.option(
        "Of the adapters: float32 (PEFT's default) or bfloat16; default: float32.", panel=_LORA
    ),
    quant: opt.ModelQuant = None,
    double_quant: opt.ModelDoubleQuant = None,
    as_json: opt.Json = False,
    trust_remote_code: Annotated[bool, opt.trust_remote_code_of("MODEL")] = False,
    color: opt.Colored = opt.Color.auto,
) -> None:  # fmt: skip
    """Show whether MODEL fits --gpus, the best settings that do, what it takes, and where.

    Layers are spread over --gpus in one process. With --ddp or --fsdp there is a process (a rank)
    on each GPU, and the figures are those of one of them.

    Settings that are left out are searched for the best combination that fits; those that are given
    change only where nothing fits with them.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 4 where it does not fit
    the devices of --gpus, and with 2 where MODEL or a setting cannot be read.
    """
    from ..models.files import refuse_yaml

    refuse_yaml(model, "plan")
    if ddp is not None and fsdp is not None:
        raise ConfigError("--ddp and --fsdp are two engines for one run; give one of them.")
    engine = None if fsdp is None else f"fsdp:{fsdp}"
    if ddp is not None:
        engine = "ddp" if ddp == _ALL else f"ddp:{ddp}"
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
            engine=engine,
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
    from ..planning.devices import CONTEXT_BYTES, FRAGMENTATION

    if report.verdict:
        out.print(f"[{'green' if report.fits else 'red'}]{escape(report.verdict)}[/]")
        out.line()
    if report.best is not None:
        for line in (f"{command} {report.best.options}".strip(), *report.best.python):
            out.print(f"    {line}", markup=False, soft_wrap=True)  # to be pasted
        out.line()
    settings, engine, peak = report.settings, report.settings.engine, report.peak
    where, share = "one device", ""
    if engine is not None:
        where = f"each of {engine.ranks} ranks ({ENGINES[engine.name]})"
        share = f"on each rank {human_bytes(report.resident)}, "
    bar = min(_BAR, max(out.width - 54, 4))
    rows: list[tuple[str, ...] | None] = [
        (
            name, human_bytes(most), human_bytes(now) if now else "-",
            "#" * round(bar * now / peak.nbytes),
        )
        for name, most, now in report.rows()
    ]  # fmt: skip
    rows += [None, ("sum", "", human_bytes(peak.nbytes), "")]
    title = f"{escape(report.label)}: memory in training, on {where}"
    render.show_table(out, title, ("component", ">at most", ">at the peak", ""), rows)

    whole = report.resident if report.whole is None else report.whole
    hosting = report.hosting
    if hosting is not None:
        whole += sum(layer.nbytes for layer in hosting.layers)
    nested = ", double quantization" if report.double_quant else ""
    packed = f"{human_bytes(whole)} as {report.kind}{nested}" if report.kind else "nothing packed"
    loading = f"{human_bytes(report.load_peak)} at most while loading"
    out.print(f"Model: {human_bytes(report.unpacked)} unpacked, {packed}; {share}{loading}.")
    if hosting is not None:
        held, slots = hosting.host_nbytes(hosting.most), hosting.slots(hosting.most)
        rest = f"{human_bytes(slots)} of slots on the device{hosting.sentence(hosting.most, {})}"
        out.print(f"Packed experts: {human_bytes(held)} in host memory, {rest}.")
    out.print(
        f"Training {report.trained_weights:,} weights (rank {settings.rank} on "
        f"{escape(settings.targets)}, {settings.adapter_dtype}, {settings.optimizer}), "
        f"{settings.batch} x {settings.seq} tokens, "
        f"{'with' if settings.checkpointing else 'without'} gradient checkpointing: "
        f"{human_bytes(peak.nbytes)} at the peak, which is {escape(peak.moment)}.",
    )
    if peak.paged:
        out.print(f"{human_bytes(peak.paged)} of optimizer states are in pages, and not counted.")
    out.print(
        f"Beside its tensors a process takes about {human_bytes(report.reserve)}: "
        f"{human_bytes(CONTEXT_BYTES)} of CUDA context, and gaps of {FRAGMENTATION:.0%} of the "
        "peak.",
    )
    if report.devices:
        out.line()
        _show_devices(report, out)
    for note in report.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")


def _show_devices(report: MemoryPlan, out: Console) -> None:
    engine, settings = report.settings.engine, report.settings
    uses = [*_alike(report)]
    rows = [
        (
            names,
            human_bytes(use.capacity),
            human_bytes(use.weights),
            human_bytes(0 if use.peak is None else use.peak.nbytes),
            f"{human_bytes(use.needed)} ({use.needed / use.capacity:.0%})",
            "[green]yes[/]" if use.fits else "[red]no[/]",
        )
        for names, use in uses
    ]
    headings = ("device", ">size", ">weights", ">at the peak", ">with reserve", "fits")
    render.show_table(out, f"Devices{', one rank each' * bool(engine)}", headings, rows)
    for names, use in uses if engine is None else ():
        out.print(f"On device {names}: {escape(_blocks(use))}.")
    if report.fit is not None and report.fit.fits:
        out.print(f"With moe_qlora.fit_memory {report.fit}.")
    if report.largest_seq:
        out.print(
            f"Longest sequence at batch {settings.batch}: {report.largest_seq:,} tokens; largest "
            f"batch at {settings.seq} tokens: {report.largest_batch:,}.",
        )


def _alike(report: MemoryPlan) -> Iterator[tuple[str, DeviceUse]]:
    """Yield a name and what is on it: each device, or runs of devices whose ranks are alike."""
    engine = report.settings.engine
    for _, uses in groupby(report.devices, key=lambda u: u.capacity if engine else u.index):
        run = list(uses)
        first, last = run[0].index, run[-1].index
        yield (str(first) if first == last else f"{first}-{last}"), run[0]


def _blocks(use: DeviceUse) -> str:
    """Return the names of a device's blocks, runs of layers folded: `model.layers.* (0-11)`."""
    parts = []
    for pattern, names in groupby(use.blocks, key=name_pattern):
        run = list(names)
        if len(run) > 1:
            place = pattern.split(".").index("*")
            first, last = (name.split(".")[place] for name in (run[0], run[-1]))
            parts.append(f"{pattern} ({first}-{last})")
        else:
            parts += run
    return ", ".join(parts) or "nothing"
