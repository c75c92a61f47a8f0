"""What layers save on each level of a step on meta, and what a plan's devices let them keep."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.kernels.limits import cdiv
from moe_qlora.kernels.routing import ints_size
from moe_qlora.planning.budget import Settings
from moe_qlora.planning.choice import LEVELS
from moe_qlora.planning.devices import CONTEXT_BYTES
from moe_qlora.planning.model import packed_parts, source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import tiny_model
from tests.helpers.plans import config_of, plan

pytestmark = pytest.mark.usefixtures("steps_run_once")

SEQ = 512
ASKED = {"targets": "attention,experts", "seq": SEQ, "search": False}


def planner_of(family, **settings):
    settings = {"seq": SEQ, "targets": "attention,experts"} | settings
    return Planner(source_of(config_of(family), None), Settings(**settings))


def step(planner, level=None):
    return {a.name: a for a in planner.step(level=level)[0]}


def allocated(*nbytes):
    """Bytes of tensors of these sizes on a GPU."""
    return sum(cdiv(each, 512) * 512 for each in nbytes)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("qwen3_moe", None),
        ("deepseek_v3", None),
        ("gpt_oss", "flex_attention"),
        ("gpt_oss", "eager"),
    ],
)
def test_the_inner_levels_keep_what_experts_and_attention_save(family, attention):
    planner = planner_of(family, attention=attention)
    saved = {level: step(planner, level)["model.layers.3"].saved for level in LEVELS}
    config, gate_up = planner.meta.base.config, planner.meta.layout.modules[-1].parameters[0]
    rows = SEQ * config.num_experts_per_tok
    of_experts = allocated(
        4 * ints_size(rows, gate_up.num_experts),  # routing
        2 * rows * gate_up.out_features,  # what the gate takes
        2 * rows * 2 * 16,  # x a^T of the adapters of both projections, of rank 16
    )
    heads = config.num_attention_heads
    own = config.hidden_size // heads
    size = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", own)
    of_attention = allocated(2 * SEQ * heads * size, 4 * SEQ * heads)  # output, log-sum-exp
    # Eager attention has no operator to keep.
    assert saved["attention"] - saved["recompute"] == (attention != "eager") * of_attention
    assert saved["part"] - saved["attention"] == of_experts
    assert saved["keep"] > saved["part"]


@cache
def fit_at(gpus, **changes):
    return plan(config_of(), gpus=gpus, **ASKED | changes)


def needs(made):
    """Bytes that a plan's fit takes on the fullest device."""
    return made.fit.peak + CONTEXT_BYTES + int(0.04 * made.fit.peak)


def test_a_plan_keeps_all_that_its_device_holds_and_never_more():
    every, least = (fit_at("1TiB", checkpointing=on) for on in (False, True))
    most, reserve = every.devices[0].needed, least.devices[0].needed
    # With checkpointing the embeddings' output has a gradient too.
    assert every.fit.peak == pytest.approx(least.fit.peak, rel=0.005)
    assert needs(every) == every.fit.needed
    assert every.fit.counts == {"keep": 4, "part": 0, "recompute": 0, "host": 0}
    peak = every.devices[0].peak.nbytes
    # By the embeddings' output at most, which a layer that is computed again keeps.
    assert peak <= every.fit.peak <= peak + 2 * 2 * SEQ * config_of().hidden_size
    before = None
    for part in range(3):
        size = reserve + (most - reserve) * part // 2
        made = fit_at(f"{size}B")
        levels = [LEVELS.index(layer.activations) for layer in made.fit.layers]
        assert made.fits and needs(made) == made.fit.needed <= made.fit.memory == size
        assert before is None or all(now >= old for now, old in zip(levels, before, strict=True))
        before = levels
        assert levels == sorted(levels)  # from the last layer on
    assert made.fit.counts["keep"] >= 3
    assert 1.0 <= made.fit.gain <= 1.36
    # Where nothing fits all is computed again, and without devices nothing is said.
    made = fit_at("700MiB", seq=1 << 16)
    assert made.fits is made.fit.fits is False
    assert made.as_dict()["fit"] == {"keep": 0, "part": 0, "recompute": 4, "host": 0}
    assert fit_at(None).as_dict()["fit"] is None


def test_layers_over_devices_keep_what_the_fullest_holds():
    alone = fit_at("2x1TiB", checkpointing=True)
    assert alone.fit.counts["keep"] == 4
    # The first device holds the embeddings, the second the loss.
    sizes = tuple(use.needed + (1 << 20) for use in alone.devices)
    made = fit_at(sizes)
    kept = made.fit.counts
    assert kept["keep"] < 4 and sum(kept.values()) == 4
    assert [use.blocks for use in made.devices] == [use.blocks for use in alone.devices]
    assert made.fit.needed <= made.fit.memory in sizes


# With packed experts in host memory.

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
    assert "offload" not in plain.as_dict()
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


def test_the_command_says_what_lies_where(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.largest", lambda *args: 64)
    LARGE.save_pretrained(tmp_path)
    folder = str(tmp_path / "config.json")
    size = plan_of(offload=True).devices[0].needed
    options = f"--seq 512 --targets attention,experts --gpus {size}B --rank 16 --optimizer adamw"
    options = [*options.split(), "--adapter-dtype", "float32"]  # no others
    code, printed, _ = cli("plan", folder, *options)
    assert code == 4 and "--offload" in printed and "Packed experts" not in printed
    code, printed, _ = cli("plan", folder, *options, "--offload")
    printed = " ".join(printed.split())
    assert code == 0 and "experts of 6 lie in" in printed
    assert "in host memory, " in printed and "of slots on the device; copies " in printed
