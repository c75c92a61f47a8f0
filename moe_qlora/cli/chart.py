"""Draw the stacked bar chart of `moe-qlora plan --chart FILE`; imports matplotlib only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from ..checkpoint.staging import replace_file, replaceable
from ..errors import ConfigError
from ..memory.budget import COMPONENTS
from ..memory.report import MemoryPlan


def check(file: Path, option: str = "--chart") -> None:
    """Refuse a file that cannot be drawn to before anything is computed; `option` named it."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} needs matplotlib, which is not installed: pip install matplotlib"
        )
    if file.suffix.lower() != ".png":
        raise ConfigError(f"{option} {file}: charts are PNG files; name one that ends in .png.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.absolute().parent}.")
    if not replaceable(file):
        raise ConfigError(f"{option} {file} is no file that can be written; name another.")


@contextmanager
def writing(file: Path, option: str = "--chart") -> Iterator[None]:
    """Turn the failure to write a file into a message of one sentence."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(f"{option} {file} cannot be written: {why}; name another.") from error


def draw(report: MemoryPlan, file: Path) -> None:
    """Write a PNG with one bar for each device of a plan, by component, in GiB or MiB."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    bars = [(f"device {use.index}", use.peak, use.reserve, use.capacity) for use in report.devices]
    bars = bars or [("one device", report.peak, report.reserve, 0)]
    most = max((0 if peak is None else peak.nbytes) + reserve for _, peak, reserve, _ in bars)
    unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    parts = [
        {} if peak is None else {**peak.parts, "context and gaps": reserve}
        for _, peak, reserve, _ in bars
    ]
    figure = Figure(figsize=(max(6.0, 2.2 + 1.3 * len(bars)), 5.5), layout="constrained")
    axes = figure.add_subplot()
    bottoms = [0.0] * len(bars)
    places, colors = range(len(bars)), colormaps["tab20"]
    for number, name in enumerate((*COMPONENTS, "context and gaps")):
        heights = [part.get(name, 0) / size for part in parts]
        if any(heights):
            axes.bar(places, heights, 0.6, bottoms, label=name, color=colors(number / 20))
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    for place, (*_, capacity) in zip(places, bars, strict=True):
        if capacity:
            line = capacity / size
            axes.hlines(line, place - 0.4, place + 0.4, colors="black", linestyles="dashed")
            axes.annotate(f"{line:.0f} {unit}", (place, line), ha="center", va="bottom")
    axes.set_xticks(list(places), [label for label, *_ in bars])
    axes.set_ylabel(f"{unit} at the peak")
    settings = report.settings
    axes.set_title(
        f"{report.label}: {settings.batch} x {settings.seq} tokens, {settings.optimizer}",
        parse_math=False,
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize="small")
    write_png(figure, file)


def write_png(figure: Any, file: Path) -> None:
    """Write a figure of matplotlib's; the file appears whole, or what was there stays."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    replace_file(file, image.getvalue())
