"""The main job from end to end, on the CPU and offline, in less than a minute on two free cores.

    bash tools/demo                     trains a small Mixture-of-Experts model, then does the job
    bash tools/demo --model FOLDER      does the job on a model of yours

1. A Qwen3-MoE language model is trained from scratch on the sources of Python's own standard
   library, and saved as a 16-bit checkpoint. This stands in for a model that one would download.
2. The checkpoint is loaded with a `BitsAndBytesConfig`, its experts are found and packed, LoRA goes
   on attention and experts, and that is trained on different text: the reference manual in English
   that `help()` shows.
3. A table says what each step did to bytes and loss, a line each what the model wrote before and
   after; loss.png draws both.

The work is in demo_parts/: corpus.py, job.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from tools.demo_parts.job import Run


def main() -> int:
    """Run the demo; raises where the loss did not fall or the experts were not packed."""
    options = _options()
    # One thread for a model so small that its threads would do little but wait for each other.
    set_threads(1 if options.model is None else len(os.sched_getaffinity(0)))
    try:
        _run(options)
    except KeyboardInterrupt:
        print("Stopped.")
        return 130
    return 0


def set_threads(threads: int) -> None:
    """Have OpenMP use so many threads, that sleep while they wait; what is set already stays.

    OpenMP reads this once, when torch is imported: it must not have been. By default its threads
    wait at each barrier in a loop, on a busy machine in place of the one that they wait for.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _run(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    _silence()
    import torch

    from tools.demo_parts.job import QUICK, SEED, Run, Scale, fine_tune, pretrain, say

    torch.manual_seed(SEED)
    scale = QUICK if options.quick else Scale()
    scale = replace(scale, steps=options.steps or scale.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run()
    folder = options.model
    if folder is None:
        folder = options.out / "model"
        pretrain(folder, scale, run)
    fine_tune(folder, scale, options.out, run, own=options.model is None)
    print(_table(run))
    _draw(run, options.out / "loss.png")
    _conclude(run)
    seconds = time.perf_counter() - started
    say(f"Written to {options.out}: loss.png, adapter/. All in {seconds:.0f} seconds.")


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
    for name in ("bitsandbytes", "moe_qlora"):  # the demo's own lines fit 80 columns
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _table(run: Run) -> str:
    """The bytes and the loss of each state."""
    from moe_qlora.layout import human_bytes

    rows: list[tuple[str, ...]] = [("", "experts", "others", "LoRA", "total", "loss")]
    for state in run.states:
        sizes = (state.experts, state.rest, state.adapter)
        cells = [human_bytes(size) if size else "-" for size in (*sizes, sum(sizes))]
        rows.append((state.name, *cells, f"{state.loss:.3f}"))
    lines = (f"   {name:20s}" + "".join(f"{cell:>11s}" for cell in cells) for name, *cells in rows)
    return "Bytes of weights, and loss on held-out text\n" + "\n".join(lines)


def _draw(run: Run, file: Path) -> None:
    """Draw the losses of each training, and of the states on held-out text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * (len(run.curves) + 1), 3.9), layout="constrained")
    *curves, bars = figure.subplots(1, len(run.curves) + 1)
    for axis, (title, losses) in zip(curves, run.curves.items(), strict=True):
        axis.plot(range(1, len(losses) + 1), losses, linewidth=1)
        axis.set(title=f"Training {title}", xlabel="step", ylabel="loss")
        axis.grid(alpha=0.3)
    names = [state.name.replace(" ", "\n", 1) for state in run.states]
    drawn = bars.bar(names, [state.loss for state in run.states])
    bars.bar_label(drawn, fmt="%.3f")
    bars.set(title="Loss on held-out English, lower is better")
    figure.savefig(file, dpi=120)


def _conclude(run: Run) -> None:
    """Show what the model writes, and hold the results against what they must be."""
    from tools.demo_parts.job import PROMPT, say

    say(f'After "{PROMPT}" the packed model writes:')
    for when, text in run.texts.items():
        say(f"{when + ':':<12} {text}")
    stock, packed, tuned = run.states
    if not tuned.loss < packed.loss - 0.05:
        raise RuntimeError(
            f"The loss on held-out text did not fall: {packed.loss:.3f} -> {tuned.loss:.3f}."
        )
    if not packed.experts < 0.35 * stock.experts:
        raise RuntimeError(
            f"The experts were not packed: {stock.experts} -> {packed.experts} bytes."
        )
    say(
        f"The experts take {stock.experts / packed.experts:.2f} times less memory, and the loss "
        f"fell from {packed.loss:.3f} to {tuned.loss:.3f}."
    )


if __name__ == "__main__":
    sys.exit(main())
