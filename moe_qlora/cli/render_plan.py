"""Print a plan as tables and sentences, for `moe-qlora plan`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from ..layout import human_bytes, name_pattern
from ..planning.budget import ENGINES, DeviceUse
from ..planning.devices import CONTEXT_BYTES, FRAGMENTATION
from ..planning.report import MemoryPlan
from .render import paste, say, show_table

_BAR = 24


def show(report: MemoryPlan, out: Console, command: str) -> None:
    """Print the verdict, the best settings as options of a command, the table and the devices."""
    show_verdict(report, out, command)
    for note in report.notes:
        say(out, f"[yellow]note:[/] {escape(note)}")
    if report.notes:
        out.line()
    _show_table(report, out)
    settings = report.settings
    nested = ", double quantization" if report.double_quant else ""
    whole = report.resident if report.whole is None else report.whole
    if report.hosting is not None:
        whole += sum(layer.nbytes for layer in report.hosting.layers)
    packed = f"{human_bytes(whole)} as {report.kind}{nested}" if report.kind else "nothing packed"
    share = "" if settings.engine is None else f"on each rank {human_bytes(report.resident)}, "
    say(
        out,
        f"Model: {human_bytes(report.unpacked)} unpacked, {packed}; {share}"
        f"{human_bytes(report.load_peak)} at most while loading.",
    )
    if (hosting := report.hosting) is not None:
        say(
            out,
            f"Packed experts: {human_bytes(hosting.host_nbytes(hosting.most))} in host memory, "
            f"{human_bytes(hosting.slots(hosting.most))} of slots on the device"
            f"{hosting.sentence(hosting.most, {})}.",
        )
    say(
        out,
        f"Training {report.trained_weights:,} weights (rank {settings.rank} on "
        f"{escape(settings.targets)}, {settings.adapter_dtype}, {settings.optimizer}), "
        f"{settings.batch} x {settings.seq} tokens, "
        f"{'with' if settings.checkpointing else 'without'} gradient checkpointing: "
        f"{human_bytes(report.peak.nbytes)} at the peak, which is {escape(report.peak.moment)}.",
    )
    if report.peak.paged:
        say(
            out,
            f"{human_bytes(report.peak.paged)} of optimizer states are in pages, and not counted.",
        )
    say(
        out,
        f"Beside its tensors a process takes about {human_bytes(report.reserve)}: "
        f"{human_bytes(CONTEXT_BYTES)} of CUDA context, and gaps of "
        f"{FRAGMENTATION:.0%} of the peak.",
    )
    if report.devices:
        _devices(report, out)


def show_verdict(report: MemoryPlan, out: Console, command: str) -> None:
    """Print whether it fits, and what does, ready to paste."""
    if not report.verdict:
        return
    say(out, f"[{'green' if report.fits else 'red'}]{escape(report.verdict)}[/]")
    if report.best is not None:
        out.line()
        for line in (f"{command} {report.best.options}".strip(), *report.best.python):
            paste(out, line)
    out.line()


def _show_table(report: MemoryPlan, out: Console) -> None:
    where, engine = "one device", report.settings.engine
    if engine is not None:
        where = f"each of {engine.ranks} ranks ({ENGINES[engine.name]})"
    bar = min(_BAR, max(out.width - 54, 4))
    rows: list[tuple[str, ...] | None] = [
        (
            name, human_bytes(most), human_bytes(now) if now else "-",
            "#" * round(bar * now / report.peak.nbytes),
        )
        for name, most, now in report.rows()
    ]  # fmt: skip
    rows += [None, ("sum", "", human_bytes(report.peak.nbytes), "")]
    title = f"{escape(report.label)}: memory in training, on {where}"
    show_table(out, title, ("component", ">at most", ">at the peak", ""), rows)


def _devices(report: MemoryPlan, out: Console) -> None:
    out.line()
    alone = report.settings.engine is None
    rows = [
        (
            names,
            human_bytes(use.capacity),
            human_bytes(use.weights),
            human_bytes(0 if use.peak is None else use.peak.nbytes),
            f"{human_bytes(use.needed)} ({use.needed / use.capacity:.0%})",
            "[green]yes[/]" if use.fits else "[red]no[/]",
            *([escape(_blocks(use))] if alone else []),
        )
        for names, use in _rows_of(report)
    ]
    headings = (">size", ">weights", ">at the peak", ">with reserve", "fits")
    if alone:
        show_table(out, "Devices", ("device", *headings, "blocks"), rows)
    else:
        show_table(out, "Devices, one rank each", ("devices", *headings), rows)
    if report.fit is not None and report.fit.fits:
        say(out, f"With moe_qlora.fit_memory {report.fit}.")
    settings = report.settings
    if report.largest_seq:
        say(
            out,
            f"Longest sequence at batch {settings.batch}: {report.largest_seq:,} tokens; largest "
            f"batch at {settings.seq} tokens: {report.largest_batch:,}.",
        )


def _rows_of(report: MemoryPlan) -> Iterator[tuple[str, DeviceUse]]:
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
        if len(run) == 1:
            parts.append(run[0])
        else:
            place = pattern.split(".").index("*")
            first, last = (name.split(".")[place] for name in (run[0], run[-1]))
            parts.append(f"{pattern} ({first}-{last})")
    return ", ".join(parts) or "none"
