"""tools/scenarios.py: every cell of its table, against sums done here by hand."""

from __future__ import annotations

import contextlib
import io
import math
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/scenarios.py"

# The model that the tool makes: vocabulary, hidden size, layers, experts, width of an expert;
# 4 heads and 2 key-value heads of 32; embeddings tied; bfloat16.
V, H, L, E, W = 2048, 128, 4, 16, 128
Q, KV, HEAD = 4 * 32, 2 * 32, 32
R = 4  # LoRA's rank

ATTENTION = [(Q, H), (KV, H), (KV, H), (H, Q)]
STACKS = [(E, 2 * W, H), (E, H, W)]
LINEAR = L * sum(math.prod(shape) for shape in ATTENTION)
EXPERTS = L * sum(math.prod(shape) for shape in STACKS)
OTHER = V * H + L * (E * H + 2 * H + 2 * HEAD) + H  # embeddings, routers, norms
WEIGHTS = LINEAR + EXPERTS + OTHER
LORA = L * R * (sum(map(sum, ATTENTION)) + E * sum(out + inp for _, out, inp in STACKS))
ROPE = 2 * (HEAD // 2) * 4  # the frequencies, and the original ones beside them, in float32


def packed_bytes(count: int) -> int:
    """nf4 with double quantization: codes, a uint8 for each 64, a float32 for each 256 of those,
    the offset, and the two tables."""
    blocks = -(-count // 64)
    return count // 2 + blocks + 4 * -(-blocks // 256) + 4 + 4 * 16 + 4 * 256


PACKED = L * sum(packed_bytes(math.prod(shape)) for shape in ATTENTION + STACKS)


def row(name: str, gc: str, lora: bool, packed: bool, dtype: str) -> list[str]:
    kind = f"lora:{'yes' if lora else 'no'}, quant:{'4bit' if packed else 'no'}"
    base = 2 * OTHER + PACKED if packed else 2 * WEIGHTS
    return [
        name,
        f"gc:{gc}, {kind}, dtype:torch.{dtype}",
        "178.2K / 3.8M" if lora else "3.6M / 3.6M",
        "packed nf4: 8" if packed else "16-bit: 8",
        f"{base + ROPE + (4 * LORA if lora else 0):,}",
    ]


TABLE = [
    row("FFT", "off", False, False, "bfloat16"),
    row("FFT + FP16", "off", False, False, "float16"),
    row("FFT + GC", "on", False, False, "bfloat16"),
    row("LoRA", "off", True, False, "bfloat16"),
    row("LoRA + GC", "on", True, False, "bfloat16"),
    row("Q-LoRA", "off", True, True, "float16"),
    row("Q-LoRA + GC", "on", True, True, "float16"),
]


def scenarios(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The tool as a program, in this process, which has imported everything."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    level = transformers.logging.get_verbosity()
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
        try:
            runpy.run_path(str(TOOL), run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            transformers.logging.set_verbosity(level)
            transformers.logging.enable_progress_bar()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def cells(table: str) -> list[list[str]]:
    return [line.strip("| \n").split(" | ") for line in table.splitlines()]


def test_every_cell():
    assert (LORA, LORA + WEIGHTS, WEIGHTS) == (178_176, 3_792_256, 3_614_080)
    done = scenarios("--cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    head, rule, *rows = cells(done.stdout)
    assert head == ["Scenario", "Observed", "Trainable", "Experts", "Bytes"]
    assert rule == ["---"] * 5
    assert rows == TABLE
    told = [line.split() for line in done.stderr.splitlines() if ": loss " in line]
    assert len(told) == 7
    for *_, first, arrow, last, _, steps, _ in told:
        assert arrow == "->" and steps == "4"
        assert float(last) < float(first) - 0.02


def test_the_page_of_trainers_shows_this_table():
    page = (ROOT / "moe_qlora/docs/trainers.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| Scenario |")
    assert cells(rest.partition("\n\n")[0])[2:] == TABLE
