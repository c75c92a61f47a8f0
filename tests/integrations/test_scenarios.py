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
import torch
import transformers
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.testing import tiny_model

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


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_model_of_ones_own(tmp_path, family):
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    names = ("FFT", "LoRA", "Q-LoRA + GC")
    asked = [word for name in names for word in ("--scenario", name)]
    done = scenarios("--cpu", "--steps", 1, "--model", tmp_path, *asked)
    assert done.returncode == 0, done.stderr[-2000:]

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    weights = sum(parameter.numel() for parameter in model.parameters())
    stacks = [one.shape for name, one in model.named_parameters() if one.dim() == 3]
    layers = [
        module.weight.shape
        for name, module in model.named_modules()
        if "self_attn" in name and isinstance(module, torch.nn.Linear)
    ]
    lora = R * (sum(map(sum, layers)) + sum(E * (a + b) for E, a, b in stacks))
    plain = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    share = f"{lora / 1000:.1f}K / {(lora + weights) / 1000:.1f}K"
    whole = f"{weights / 1000:.1f}K / {weights / 1000:.1f}K"
    # transformers keeps some weights in float32: gpt_oss' norms in float16, deepseek_v3's bias of
    # the choice since 5.24.
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    own, half = (
        "+".join(sorted({str(p.dtype) for p in one.parameters()})) for one in (model, half)
    )
    there = f"16-bit: {len(stacks)}"
    full, adapted, quantized = cells(done.stdout)[2:]
    observed = f"gc:off, lora:no, quant:no, dtype:{own}"
    assert full == ["FFT", observed, whole, there, f"{plain:,}"]
    observed = f"gc:off, lora:yes, quant:no, dtype:{own}"
    assert adapted == ["LoRA", observed, share, there, f"{plain + 4 * lora:,}"]
    observed = f"gc:on, lora:yes, quant:4bit, dtype:{half}"
    assert quantized[:-1] == ["Q-LoRA + GC", observed, share, f"packed nf4: {len(stacks)}"]
    assert int(quantized[-1].replace(",", "")) < plain


def test_a_scenario_that_fails_leaves_the_others_their_rows(tmp_path):
    """PEFT's wrapper hides the weights that dbrx's experts read from outside of their module."""
    tiny_model("dbrx", dtype=torch.bfloat16).save_pretrained(tmp_path)
    asked = ("--scenario", "LoRA", "--scenario", "FFT")
    done = scenarios("--cpu", "--steps", 1, "--model", tmp_path, *asked)
    assert done.returncode == 1
    assert [row[0] for row in cells(done.stdout)] == ["Scenario", "---", "FFT"]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: LoRA: AttributeError: ")


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


def test_bad_folders(tmp_path):
    from transformers import BitsAndBytesConfig, LlamaConfig

    gone = one_line(scenarios("--model", tmp_path / "gone"), 2)
    assert gone == f"error: --model {tmp_path / 'gone'} is no folder; name a checkpoint folder."

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    dense = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(dense).save_pretrained(tmp_path / "dense")
    said = one_line(scenarios("--model", tmp_path / "dense"), 3)
    assert said == f"error: --model {tmp_path / 'dense'} holds no expert parameters."

    whole = tmp_path / "whole"
    tiny_model("mixtral", dtype=torch.bfloat16).save_pretrained(whole)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    moe_qlora.quantize_checkpoint(whole, tmp_path / "packed", config)
    said = one_line(scenarios("--model", tmp_path / "packed"), 2)
    assert "is quantized already (bitsandbytes)" in said
