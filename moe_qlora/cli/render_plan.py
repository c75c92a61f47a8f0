"""How `moe-qlora plan` prints a plan."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..layout import human_bytes, name_pattern
from ..memory.budget import DeviceUse
from ..memory.devices import CONTEXT_BYTES, FRAGMENTATION
from ..memory.report import MemoryPlan

_BAR = 24


def show(made: MemoryPlan, out: Console) -> None:
    """Print the table, the devices, what is the most that fits, and what to change."""
    for note in made.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(_table(made))
    settings = made.settings
    packed = made.kind or "nothing packed"
    nested = ", double quantization" if made.double_quant else ""
    out.print(
        f"Model: {human_bytes(made.unpacked)} unpacked, {human_bytes(made.resident)} as "
        f"{packed}{nested}; {human_bytes(made.load_peak)} at most while loading."
    )
    out.print(
        f"Training {made.trained_weights:,} weights (rank {settings.rank} on "
        f"{escape(settings.targets)}, {settings.adapter_dtype}, {settings.optimizer}), "
        f"{settings.batch} x {settings.seq} tokens, "
        f"{'with' if settings.checkpointing else 'without'} gradient checkpointing: "
        f"{human_bytes(made.peak.nbytes)} at the peak, which is {escape(made.peak.moment)}."
    )
    if made.peak.paged:
        out.print(
            f"{human_bytes(made.peak.paged)} of optimizer states are in pages, and not counted."
        )
    out.print(
        f"Beside its tensors a process takes about {human_bytes(made.reserve)}: "
        f"{human_bytes(CONTEXT_BYTES)} of CUDA context, and gaps of "
        f"{FRAGMENTATION:.0%} of the peak."
    )
    if made.devices:
        _devices(made, out)


def _table(made: MemoryPlan) -> Table:
    table = Table(title=f"{escape(made.label)}: memory in training, on one device")
    table.add_column("component")
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, most, now in made.rows():
        share = "#" * round(_BAR * now / made.peak.nbytes)
        table.add_row(name, human_bytes(most), human_bytes(now) if now else "-", share)
    table.add_section()
    table.add_row("sum", "", human_bytes(made.peak.nbytes), "")
    return table


def _devices(made: MemoryPlan, out: Console) -> None:
    table = Table(title="Devices")
    for heading in ("device", "size", "weights", "at the peak", "with reserve", "fits", "blocks"):
        right = heading in ("size", "weights", "at the peak", "with reserve")
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for use in made.devices:
        full = f"{use.needed / use.capacity:.0%}"
        table.add_row(
            str(use.index),
            human_bytes(use.capacity),
            human_bytes(use.weights),
            human_bytes(0 if use.peak is None else use.peak.nbytes),
            f"{human_bytes(use.needed)} ({full})",
            "[green]yes[/]" if use.fits else "[red]no[/]",
            escape(_blocks(use)),
        )
    out.print(table)
    if made.fits:
        out.print("[green]It fits.[/]")
    elif all(use.fits for use in made.devices):
        out.print("[red]It would train, but does not fit while it is loaded.[/]")
    else:
        out.print("[red]It does not fit.[/]")
    if made.largest_seq is not None:
        out.print(_most(made))
    if made.hints:
        out.print(_hints(made))


def _most(made: MemoryPlan) -> str:
    settings = made.settings
    longest, most = made.largest_seq, made.largest_batch
    if not longest:
        return "No sequence fits, however short."
    text = f"Longest sequence at batch {settings.batch}: {longest:,} tokens"
    return f"{text}; largest batch at {settings.seq} tokens: {most}."


def _hints(made: MemoryPlan) -> Table:
    table = Table(title="What to change, each by itself; what costs least first")
    table.add_column("change")
    table.add_column("setting")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("then fits")
    for hint in made.hints:
        table.add_row(
            hint.what, hint.setting, human_bytes(hint.saves), "[green]yes[/]" if hint.fits else "no"
        )
    return table


def _blocks(use: DeviceUse) -> str:
    """Names, runs of layers folded: `model.embed_tokens, model.layers.* (0-11)`."""
    parts = []
    for pattern, names in groupby(use.blocks, key=name_pattern):
        run = list(names)
        if len(run) == 1:
            parts.append(run[0])
        else:
            first, last = (_number(pattern, name) for name in (run[0], run[-1]))
            parts.append(f"{pattern} ({first}-{last})")
    return ", ".join(parts) or "none"


def _number(pattern: str, name: str) -> str:
    pairs = zip(pattern.split("."), name.split("."), strict=True)
    return next((part for mark, part in pairs if mark == "*"), name)
