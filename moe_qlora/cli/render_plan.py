"""Print a plan as tables and sentences, for `moe-qlora plan`."""

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


def show(report: MemoryPlan, out: Console) -> None:
    """Print the table, the devices, what is the most that fits, and what to change."""
    for note in report.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(_table(report))
    settings = report.settings
    packed = report.kind or "nothing packed"
    nested = ", double quantization" if report.double_quant else ""
    out.print(
        f"Model: {human_bytes(report.unpacked)} unpacked, {human_bytes(report.resident)} as "
        f"{packed}{nested}; {human_bytes(report.load_peak)} at most while loading."
    )
    out.print(
        f"Training {report.trained_weights:,} weights (rank {settings.rank} on "
        f"{escape(settings.targets)}, {settings.adapter_dtype}, {settings.optimizer}), "
        f"{settings.batch} x {settings.seq} tokens, "
        f"{'with' if settings.checkpointing else 'without'} gradient checkpointing: "
        f"{human_bytes(report.peak.nbytes)} at the peak, which is {escape(report.peak.moment)}."
    )
    if report.peak.paged:
        out.print(
            f"{human_bytes(report.peak.paged)} of optimizer states are in pages, and not counted."
        )
    out.print(
        f"Beside its tensors a process takes about {human_bytes(report.reserve)}: "
        f"{human_bytes(CONTEXT_BYTES)} of CUDA context, and gaps of "
        f"{FRAGMENTATION:.0%} of the peak."
    )
    if report.devices:
        _devices(report, out)


def _table(report: MemoryPlan) -> Table:
    table = Table(title=f"{escape(report.label)}: memory in training, on one device")
    table.add_column("component")
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, most, now in report.rows():
        share = "#" * round(_BAR * now / report.peak.nbytes)
        table.add_row(name, human_bytes(most), human_bytes(now) if now else "-", share)
    table.add_section()
    table.add_row("sum", "", human_bytes(report.peak.nbytes), "")
    return table


def _devices(report: MemoryPlan, out: Console) -> None:
    table = Table(title="Devices")
    for heading in ("device", "size", "weights", "at the peak", "with reserve", "fits", "blocks"):
        right = heading in ("size", "weights", "at the peak", "with reserve")
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for use in report.devices:
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
    if report.fits:
        out.print("[green]It fits.[/]")
    elif all(use.fits for use in report.devices):
        out.print("[red]It would train, but does not fit while it is loaded.[/]")
    else:
        out.print("[red]It does not fit.[/]")
    if report.largest_seq is not None:
        out.print(_largest(report))
    if report.hints:
        out.print(_hints(report))


def _largest(report: MemoryPlan) -> str:
    settings = report.settings
    if not report.largest_seq:
        return "No sequence fits, however short."
    text = f"Longest sequence at batch {settings.batch}: {report.largest_seq:,} tokens"
    return f"{text}; largest batch at {settings.seq} tokens: {report.largest_batch}."


def _hints(report: MemoryPlan) -> Table:
    table = Table(title="What to change, each by itself; what costs least first")
    table.add_column("change")
    table.add_column("setting")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("then fits")
    for hint in report.hints:
        table.add_row(
            hint.what, hint.setting, human_bytes(hint.saves), "[green]yes[/]" if hint.fits else "no"
        )
    return table


def _blocks(use: DeviceUse) -> str:
    """Return the names of a device's blocks, runs of layers folded: `model.layers.* (0-11)`."""
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
