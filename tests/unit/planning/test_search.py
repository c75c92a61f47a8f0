"""The search for the best combination of settings that fits."""

import json
from functools import cache
from importlib.util import find_spec
from shlex import split

import pytest
from peft import LoraConfig

from moe_qlora.planning.plan import RUNGS
from moe_qlora.planning.planner import LIGER_LOSS
from moe_qlora.versions import installed_version
from tests.helpers.plans import config_of
from tests.helpers.plans import plan as plan_of

BOTH = "attention,experts"
LARGE = config_of(hidden_size=256, moe_intermediate_size=512, num_experts=128, vocab_size=4096)
"""Its experts, and LoRA on them, are most of what a step takes."""


def plan(gpus, config=LARGE, **given):
    return plan_of(config, gpus=gpus, **{"seq": 512, **given})


@pytest.fixture(autouse=True)
def _no_longest_sequence_and_no_levels(monkeypatch):
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.largest", lambda *args: 64)
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.fit", lambda *args: None)


@cache
def needed(**given):
    """The bytes of a device that settings need."""
    made = plan("1TiB", search=False, prepared=True, **given)
    return max(use.needed for use in made.devices)


def values(made):
    return {name: v for name, v in made.best.values().items() if name not in ("seq", "prepared")}


def test_readmes_models_on_24_gb_are_found_from_plans_defaults():
    """Rows of docs/memory.md: gpt-oss-20b in 18.1 GiB, Qwen3-30B-A3B in 21.2."""
    made = plan_of("gpt-oss-20b", gpus="4090")
    assert made.best.needed / 2**30 == pytest.approx(18.1, abs=0.05)
    assert made.best.values() == {"targets": BOTH, "attention": "flex_attention", "prepared": True}
    made = plan_of("qwen3-30b-a3b", gpus="4090", targets=BOTH)
    assert made.fits is False and made.best.needed / 2**30 == pytest.approx(21.2, abs=0.05)
    small = {"adapter_dtype": "bfloat16", "optimizer": "adamw_8bit"}
    assert made.best.values() == {"targets": BOTH, "prepared": True, **small}
    assert made.verdict.startswith(
        "It does not fit as asked: 32.4 GiB of 23.0 GiB. This fits: 21.2"
    )


@pytest.mark.parametrize("rung", [0, 4, pytest.param(6, marks=pytest.mark.nightly)])
def test_the_first_rung_that_fits_is_taken(rung):
    """A device with what a rung needs is given that rung, or one before it that needs no more."""
    size = needed(**RUNGS[rung])
    best = plan(f"{size}B").best
    want = next(each for each in RUNGS if needed(**each) <= size)
    assert all(getattr(best.settings, name) == value for name, value in want.items())
    assert best.needed == needed(**want)
    assert (best.host > 0) is bool(want.get("offload"))


def test_what_is_given_changes_only_where_nothing_fits_with_it():
    size = f"{needed(**RUNGS[1])}B"
    assert values(plan(size)) == RUNGS[1]
    made = plan(size, optimizer="adamw", rank=16, adapter_dtype="float32", offload=False)
    assert values(made) == {}  # which is attention alone
    hosted = {**RUNGS[5], "rank": 16}
    made = plan(f"{needed(**hosted)}B", rank=16, targets=BOTH)
    assert made.best.settings.rank == 16 and made.best.host > 0
    made = plan(size, targets=BOTH, offload=False, optimizer="adamw", rank=16)
    assert values(made) == RUNGS[1]  # nothing fits with all that is given
    config = LoraConfig(r=3, target_modules=["q_proj"])
    assert plan(size, lora_config=config, checkpointing=False).best.settings.rank == 3


def test_options_and_command_give_the_same_plan(cli, tmp_path):
    LARGE.save_pretrained(tmp_path)
    size = f"{needed(**RUNGS[5])}B"
    code, out, _ = cli("plan", tmp_path, "--gpus", size, "--seq", 512, "--json")
    best = json.loads(out)["best"]
    assert code == 0 or not json.loads(out)["fits"]
    code, out, err = cli("plan", tmp_path, "--gpus", size, *split(best["options"]), "--json")
    again = json.loads(out)
    assert (code, err) == (0, "") and again["fits"] and again["best"] == best
    code, out, _ = cli("plan", tmp_path, "--gpus", size, "--seq", 512)
    assert out.splitlines()[0].startswith("It ")  # the verdict
    said = " ".join(out.replace("\\\n", " ").split())
    assert f"moe-qlora plan {tmp_path} --gpus {size} {best['options']} " in said


def test_a_shorter_sequence_is_the_last_resort():
    size = f"{needed(**RUNGS[-1], seq=1024) - 1}B"
    made = plan(size, seq=2048, batch=2)
    assert (made.best.settings.seq, made.best.settings.batch) == (512, 1)
    made = plan("610MiB")
    assert made.best is None and made.verdict.endswith("take larger GPUs, or more of them.")


def test_several_gpus_hold_it_whole_or_share_it():
    whole = needed(**RUNGS[0]) + (1 << 29)
    assert plan(f"2x{whole}B").best.settings.engine.name == "ddp"
    best = plan(f"4x{needed(**RUNGS[0])}B").best  # DDP has buckets beside it
    assert best.settings.engine.name == "fsdp" and best.values()["targets"] == BOTH
    made = plan(f"2x{whole}B", engine="fsdp:2")
    assert made.best.values()["fsdp"] == 2


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_knows_the_models_that_its_loss_is_taken_for():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    from moe_qlora.registry import model_types

    lacking = {"deepseek_v2"} if installed_version("liger-kernel") == "0.8.4" else set()
    assert {name for name in model_types() if name in KNOWN} == LIGER_LOSS - lacking


def test_a_model_without_experts_is_searched_too():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    made = plan("1GiB", LlamaConfig(vocab_size=64, **sizes, dtype="bfloat16"))
    assert made.fits and made.best.settings.targets == "attention"
