"""Print a plan as tables and sentences, for `moe-qlora plan`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from ..layout import human_bytes, name_pattern
from ..memory.budget import DeviceUse
from ..memory.devices import CONTEXT_BYTES, FRAGMENTATION
from ..memory.engines import ENGINES
from ..memory.plan import OWN_DEFAULT
from ..memory.report import MemoryPlan
from ..models.trainer.file import DEFAULT as AXOLOTL_DEFAULT
from .render import say, show_table

_BAR = 24


def show(report: MemoryPlan, out: Console) -> None:
    """Print the table, the devices, what is the most that fits, and what to change."""
    for note in report.notes:
        say(out, f"[yellow]note:[/] {escape(note)}")
    if report.notes:
        out.line()
    _show_table(report, out)
    _origins(report, out)
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


def _origins(report: MemoryPlan, out: Console) -> None:
    """Say of a trainer's file which settings come from where."""
    if report.origins is None:
        return
    values = report.values()
    said: dict[str, list[str]] = {}
    for name, origin in report.origins.items():
        if values.get(name) is None:
            continue
        known = origin in ("option", AXOLOTL_DEFAULT, OWN_DEFAULT)
        shown = f"{name} {values[name]}" + ("" if known else f" ({origin})")
        said.setdefault(origin if known else "file", []).append(shown)
    titles = {"file": f"From {report.label}", "option": "From options"}
    titles |= {AXOLOTL_DEFAULT: "Left out, axolotl's default", OWN_DEFAULT: "Said nowhere"}
    for origin, title in titles.items():
        if origin in said:
            say(out, f"{escape(title)}: {escape(', '.join(said[origin]))}.")


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
    if report.fits:
        say(out, "[green]It fits.[/]")
    elif all(use.fits for use in report.devices):
        say(out, "[red]It would train, but does not fit while it is loaded.[/]")
    else:
        say(out, "[red]It does not fit.[/]")
    if report.fit is not None and report.fit.fits:
        say(out, f"With moe_qlora.fit_memory {report.fit}.")
    settings = report.settings
    if report.largest_seq:
        say(
            out,
            f"Longest sequence at batch {settings.batch}: {report.largest_seq:,} tokens; largest "
            f"batch at {settings.seq} tokens: {report.largest_batch:,}.",
        )
    elif report.largest_seq == 0:
        say(out, "No sequence fits, however short.")
    if report.advice is not None:
        say(out, escape(report.advice.reason))
    if report.hints:
        out.line()
        title = "What to change, each by itself; what costs least first"
        rows = [
            (
                hint.what, escape(_as_options(hint.setting)), human_bytes(hint.saves),
                "[green]yes[/]" if hint.fits else "no",
            )
            for hint in report.hints
        ]  # fmt: skip
        show_table(out, title, ("change", "option", ">saves", "then fits"), rows)


def _as_options(settings: str) -> str:
    """Return arguments of `plan`, "rank=8, seq=64", as options of the command line."""
    own = {"bnb_4bit_use_double_quant=True": "--double-quant", "load_in_4bit=True": "--quant nf4"}
    options = []
    for setting in settings.split(", "):
        name, _, value = setting.partition("=")
        if setting in own:
            options.append(own[setting])
        elif value.endswith("(Trainer)"):  # of other programs
            options.append(setting)
        else:
            option = f"--{name.replace('_', '-')}"
            options.append(option if value == "True" else f"{option} {value.strip(chr(39))}")
    return " ".join(options)


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
