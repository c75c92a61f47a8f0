"""Plans with packed experts in host memory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.cli import app
from moe_qlora.planning.choice import LEVELS
from moe_qlora.planning.devices import CONTEXT_BYTES
from moe_qlora.planning.model import packed_parts
from moe_qlora.testing import tiny_model
from tests.helpers.plans import config_of, plan

pytestmark = pytest.mark.usefixtures("steps_run_once")

ASKED = {"targets": "attention,experts", "seq": 512, "search": False}


LARGE = config_of(layers=6, hidden_size=256, moe_intermediate_size=512, num_experts=128)
"""Its experts are most of what a step takes."""


@cache
def plan_of(gpus="1TiB", **changes):
    return plan(LARGE, gpus=gpus, **ASKED | changes)


def test_a_plan_has_what_offload_experts_moves():
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    config = config_of("deepseek_v3", 4)
    made = plan(config, quantization, gpus="1TiB", offload=True, **ASKED)
    plain = plan(config, quantization, gpus="1TiB", **ASKED)
    model = tiny_model("deepseek_v3", num_hidden_layers=4, layer_types=None)
    moe_qlora.quantize_experts(model, quantization)
    with moe_qlora.offload_experts(model) as off:
        moved = sum(part.weight.nbytes for part in packed_parts(model))
        layer = off.host_nbytes // len(off.layers)
        assert made.hosting.most == len(off.layers)
        assert made.as_dict()["offload"]["host"] == off.host_nbytes
        assert made.as_dict()["offload"]["slots"] == 2 * layer
    assert plain.resident - made.resident == moved
    assert plain.peak.nbytes - made.peak.nbytes == moved - 2 * layer
    assert made.peak.parts["packed experts"] == 2 * layer
    assert made.peak.moment == plain.peak.moment and made.load_peak < plain.load_peak
    (use,) = made.devices
    assert "offload" not in plain.as_dict() and "hosting" not in plain.as_dict()
    assert use.peak == made.peak and use.weights == made.resident + 2 * layer


def test_what_fits_is_nested_and_without_memory_to_spare_lies_on_the_host():
    plain, least = plan_of(), plan_of(offload=True)
    assert least.fit.counts == {"keep": 6, "part": 0, "recompute": 0, "host": 0}
    assert least.fit.layers == plain.fit.layers and least.fit.needed == plain.fit.needed
    low, high = least.devices[0].needed, plain.fit.needed
    seen = []
    for part in range(3):
        size = low + (high - low) * part // 2
        made = plan_of(f"{size}B", offload=True)
        assert made.fits and made.fit.fits
        assert made.fit.peak + CONTEXT_BYTES + int(0.04 * made.fit.peak) == made.fit.needed <= size
        hosts = [layer.experts == "host" for layer in made.fit.layers]
        assert hosts == sorted(hosts)  # The last ones
        seen.append((hosts, [LEVELS.index(layer.activations) for layer in made.fit.layers]))
    for (hosts, levels), (fewer, more) in pairwise(seen):
        assert all(a >= b for a, b in zip(hosts, fewer, strict=True))
        assert all(a <= b for a, b in zip(levels, more, strict=True))
    assert all(seen[0][0]) and not any(seen[-1][0])


def command(*words):
    with pytest.raises(SystemExit) as end:
        app.run(args=list(words))
    return end.value.code


def test_the_command_says_what_lies_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.largest", lambda *args: 64)
    LARGE.save_pretrained(tmp_path)
    folder = str(tmp_path / "config.json")
    size = plan_of(offload=True).devices[0].needed
    options = ["--seq", "512", "--targets", "attention,experts", "--gpus", f"{size}B"]
    options += ["--rank", "16", "--optimizer", "adamw", "--adapter-dtype", "float32"]  # no others
    assert command("plan", folder, *options) == 4
    printed = capsys.readouterr().out
    assert "--offload" in printed and "Packed experts" not in printed
    assert command("plan", folder, *options, "--offload") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "in host memory, " in printed and "of slots on the device; copies " in printed
    assert "experts of 6 lie in" in printed
