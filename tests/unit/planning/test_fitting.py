"""What layers keep, and where experts lie, in plans of given devices."""

from functools import cache, partial
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

SEQ = 512
SIZES = {"targets": "attention,experts", "seq": SEQ}
ASKED = {**SIZES, "search": False}
LARGE = config_of(layers=6, hidden_size=256, moe_intermediate_size=512, num_experts=128)
"""Its experts are most of what a step takes."""


@cache
def plan_of(gpus="1TiB", **changes):
    return plan(LARGE, gpus=gpus, **ASKED | changes)


@pytest.mark.parametrize("offload", [False, True])
def test_what_fits_is_kept_by_the_last_layers_and_is_never_more(offload):
    every = plan_of()
    least = plan_of(offload=True) if offload else plan_of(checkpointing=True)
    assert every.fit.counts == {"keep": 6, "part": 0, "recompute": 0, "host": 0}
    assert least.fit.layers == every.fit.layers
    # With checkpointing the embeddings' output has a gradient too.
    assert least.fit.needed == pytest.approx(every.fit.needed, rel=0.005)
    peak = every.devices[0].peak.nbytes
    assert peak <= every.fit.peak <= peak + 2 * 2 * SEQ * LARGE.hidden_size
    low, high, seen = least.devices[0].needed, every.fit.needed, []
    for part in range(3):
        size = low + (high - low) * part // 2
        made = plan_of(f"{size}B", offload=offload)
        needed = made.fit.peak + CONTEXT_BYTES + int(0.04 * made.fit.peak)
        assert made.fits and needed == made.fit.needed <= made.fit.memory == size
        assert made.fit.gain >= 1
        kept = [LEVELS.index(layer.activations) for layer in made.fit.layers]
        hosted = [layer.experts == "host" for layer in made.fit.layers]
        assert (kept, hosted) == (sorted(kept), sorted(hosted))
        seen.append((kept, [not each for each in hosted]))
    for fewer, more in pairwise(seen):
        for one, other in zip(fewer, more, strict=True):
            assert all(a <= b for a, b in zip(one, other, strict=True))
    assert seen[0][1] == [not offload] * 6 and all(seen[-1][1])


def test_where_nothing_fits_all_is_computed_again_and_without_devices_nothing_is_said():
    made = plan_of("700MiB", seq=1 << 16)
    assert made.fits is made.fit.fits is False
    assert made.as_dict()["fit"] == {"keep": 0, "part": 0, "recompute": 6, "host": 0}
    assert plan_of(None).as_dict()["fit"] is None


def test_layers_over_devices_keep_what_the_fullest_holds():
    asked = partial(plan, config_of(), **ASKED)
    alone = asked(gpus="2x1TiB", checkpointing=True)
    assert alone.fit.counts["keep"] == 4
    # The first device holds the embeddings, the second the loss.
    sizes = tuple(use.needed + (1 << 20) for use in alone.devices)
    made = asked(gpus=sizes)
    kept = made.fit.counts
    assert kept["keep"] < 4 and sum(kept.values()) == 4
    assert [use.blocks for use in made.devices] == [use.blocks for use in alone.devices]
    assert made.fit.needed <= made.fit.memory in sizes


def allocated(*nbytes):
    """Bytes of tensors of these sizes on a GPU."""
    return sum(cdiv(each, 512) * 512 for each in nbytes)


@pytest.mark.parametrize(("family", "attention"), [("deepseek_v3", None), ("gpt_oss", "eager")])
def test_the_inner_levels_keep_what_experts_and_attention_save(family, attention):
    planner = Planner(source_of(config_of(family), None), Settings(**SIZES, attention=attention))
    saved = {
        level: {a.name: a.saved for a in planner.step(level=level)[0]}["model.layers.3"]
        for level in LEVELS
    }
    config, gate_up = planner.meta.base.config, planner.meta.layout.modules[-1].parameters[0]
    rows = SEQ * config.num_experts_per_tok
    of_experts = allocated(
        4 * ints_size(rows, gate_up.num_experts),  # routing
        2 * rows * gate_up.out_features,  # what the gate takes
        2 * rows * 2 * 16,  # x a^T of the adapters of both projections, of rank 16
    )
    heads, size = config.num_attention_heads, getattr(config, "v_head_dim", None)
    # Output and log-sum-exp; eager attention has no operator to keep.
    of_attention = allocated(2 * SEQ * heads * size, 4 * SEQ * heads) if not attention else 0
    assert saved["attention"] - saved["recompute"] == of_attention
    assert saved["part"] - saved["attention"] == of_experts
    assert saved["keep"] > saved["part"]


def test_a_plan_has_what_offload_experts_moves():
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    config = config_of("deepseek_v3", 4)
    asked = partial(plan, config, quantization, gpus="1TiB", **ASKED)
    made, plain = asked(offload=True), asked()
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


def test_the_command_says_what_lies_where(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.largest", lambda *args: 64)
    LARGE.save_pretrained(tmp_path)
    size = plan_of(offload=True).devices[0].needed
    options = f"--seq 512 --targets attention,experts --gpus {size}B --rank 16 --optimizer adamw"
    options = [tmp_path / "config.json", *options.split(), "--adapter-dtype", "float32"]
    code, printed, _ = cli("plan", *options)
    assert code == 4 and "--offload" in printed and "Packed experts" not in printed
    code, printed, _ = cli("plan", *options, "--offload")
    printed = " ".join(printed.split())
    assert code == 0 and "experts of 6 lie in" in printed
    assert "in host memory, " in printed and "of slots on the device; copies " in printed
