"""Which engine a plan says to take: what fits, what is quickest, what counts as alike."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import Qwen3MoeConfig

import moe_qlora
from moe_qlora.memory import advice
from moe_qlora.memory.advice import ERROR, work_of
from moe_qlora.memory.budget import Settings
from moe_qlora.memory.planner import Planner
from moe_qlora.memory.scaling import Way
from moe_qlora.memory.source import source_of
from moe_qlora.testing import tiny_model

ASKED = {"targets": "attention,experts", "adapter_dtype": "bfloat16", "search": False}


def config(layers: int = 4, **sizes) -> Qwen3MoeConfig:
    """A small model whose experts are most of it: 128 MiB packed in each of its layers."""
    usual = {"hidden_size": 512, "moe_intermediate_size": 1408, "num_experts": 128,
             "num_experts_per_tok": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 128, "vocab_size": 512}  # fmt: skip
    return Qwen3MoeConfig(**usual | {"num_hidden_layers": layers, "dtype": "bfloat16"} | sizes)


def advise(gpus: str, layers: int = 4, **asked):
    return moe_qlora.plan(config(layers), gpus=gpus, **ASKED | asked).advice


def test_work_by_hand():
    """Of all layers, though two of a kind are packed."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16,
             "num_experts_per_tok": 2, "vocab_size": 500}  # fmt: skip
    source = source_of(config(5, **sizes), None, None, False)
    settings = Settings(1, 128, 16, "attention,experts", "bfloat16")
    work = work_of(Planner(source, settings))
    attention, experts = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 32 * 2
    lora = 16 * (2 * (64 + 64) + 2 * (64 + 32))  # on q and o, on k and v
    of_experts = 16 * (64 + 64 + 32 + 64)  # on gate_up and down of each expert
    scores = 4 * 128 * 4 * (16 + 16)
    assert work.expert_flops == 5 * (6 * experts + 8 * 2 * of_experts)
    assert work.other_flops == 5 * (6 * attention + 8 * lora + scores) + 6 * 64 * 500
    assert (work.layers, work.expert_layers, work.top_k, work.trips) == (5, 5, 2, 6)
    assert work.token_bytes == 64 * 2
    assert work.expert_gradients == 5 * 8 * of_experts * 2
    assert work.other_gradients == 5 * lora * 2
    kept = work_of(Planner(source, Settings(1, 128, 16, "attention", checkpointing=False)))
    assert (kept.expert_flops, kept.expert_gradients, kept.trips) == (5 * 4 * experts, 0, 4)


def test_ddp_where_the_model_fits():
    found = advise("8xH200")
    assert (found.setting, found.copies, found.fits, found.offload) == ("ddp=8", 1, True, False)
    assert found.tokens_per_s == pytest.approx(8 * 4096 / found.seconds)
    others = {other.engine: other for other in found.alternatives}
    assert others.keys() == {"fsdp", "ep"}
    assert all(other.fits and other.seconds > found.seconds for other in others.values())
    assert found.reason.startswith("Take DDP (ddp=8) over 8 ranks: ")
    assert others["fsdp"].reason in found.reason and others["ep"].reason in found.reason
    ratio = others["fsdp"].seconds / found.seconds
    assert f"FSDP2 ({others['fsdp'].setting}) would take {ratio:.2f} times as long" in found.reason
    assert found.reason.endswith("rows of one and two H200s; nothing else was run.")


def test_what_does_not_fit_is_not_taken():
    """Shares are taken where the whole model does not fit, and what it needs is said."""
    size = "2600MiB"
    whole = moe_qlora.plan(config(16), gpus=f"8x{size}", ddp=8, **ASKED)
    assert whole.fits is False
    found = whole.advice  # though an engine was named
    assert found.engine in ("fsdp", "ep") and found.fits
    shared = moe_qlora.plan(config(16), gpus=f"8x{size}", **{found.engine: found.ranks}, **ASKED)
    assert shared.fits and shared.devices[0].needed == found.needed
    ddp = next(a for a in found.alternatives if a.engine == "ddp" and not a.offload)
    assert not ddp.fits and ddp.needed == whole.devices[0].needed > 2600 << 20
    assert "DDP (ddp=8) needs " in found.reason and "of a rank's 2.5 GiB." in found.reason
    hosted = next(a for a in found.alternatives if a.offload)
    assert hosted.setting == "ddp=8, offload=True"


def test_none_where_nothing_fits():
    assert advise("4x700MiB", 16) is None
    assert advise("H200") is None
    assert moe_qlora.plan(config(1), **ASKED).advice is None


def test_few_tokens_go_to_their_experts():
    """With few tokens weights are dearer to gather than tokens; with many it is the other way."""
    few, many = (
        {a.engine: a for a in (found, *found.alternatives) if not a.offload}
        for found in (advise("2xL40S", seq=256), advise("2xL40S", seq=8192, batch=8))
    )
    assert few["ep"].seconds < few["fsdp"].seconds
    assert many["ep"].seconds > many["fsdp"].seconds


def case(**seconds) -> advice._Case:
    """Eight GPUs, four in a machine; FSDP2 over so many ranks takes these seconds, from `least`."""

    class Case(advice._Case):
        def __init__(self):
            self.links = type("Links", (), {"node": 4})

        def _seconds(self, way):
            return seconds[f"of_{way.group}"]

        def advice(self, way, *, offload=False):
            fits = way.group >= seconds["least"]
            step = self._seconds(way)
            return moe_qlora.memory.report.Advice(
                way.engine, way.group, 8 // way.group, offload, step, 1.0, 1, fits, ""
            )

    return Case()


@pytest.mark.parametrize(
    ("seconds", "ranks"),
    [
        ({"least": 2, "of_2": 1.0, "of_4": 1.0 + ERROR / 2, "of_8": 1.0}, 4),  # alike: a machine
        ({"least": 2, "of_2": 1.0, "of_4": 1.0 + 2 * ERROR, "of_8": 1.1}, 2),
        ({"least": 4, "of_2": 1.0, "of_4": 1.1, "of_8": 1.3}, 4),
        ({"least": 8, "of_2": 1.0, "of_4": 1.1, "of_8": 1.3}, 8),
        ({"least": 16, "of_2": 1.0, "of_4": 1.1, "of_8": 1.3}, 8),  # which does not fit either
    ],
)
def test_groups_of_ranks(seconds, ranks):
    found = case(**seconds).best([Way("fsdp", 8, group) for group in (2, 4, 8)])
    assert found.ranks == ranks and found.fits is (ranks >= seconds["least"])


def test_nodes():
    """Between machines an all-gather is slower; groups keep to one of them."""
    near, far = (advise("8xH200", 2, nodes=nodes) for nodes in (None, 8))
    sharded = [next(a for a in found.alternatives if a.engine == "fsdp") for found in (near, far)]
    assert sharded[0].seconds < sharded[1].seconds
    assert advise("8xH200", 2, nodes=1) == near


@pytest.mark.parametrize(
    ("nodes", "gpus", "names"),
    [(3, "8xH200", 8), (0, "8xH200", 8), (True, "8xH200", 8), (1.0, "8xH200", 8)],
)
def test_nodes_that_make_no_sense(nodes, gpus, names):
    with pytest.raises(moe_qlora.ConfigError) as caught:
        moe_qlora.plan(config(1), gpus=gpus, nodes=nodes, **ASKED)
    assert str(caught.value) == (
        f"nodes is {nodes!r}, and gpus names {names}: give a whole number of 1 or more that "
        "divides them."
    )


def test_nodes_without_gpus():
    with pytest.raises(moe_qlora.ConfigError, match=r"^nodes is 2 without gpus: name those"):
        moe_qlora.plan(config(1), nodes=2, **ASKED)


def test_experts_that_cannot_be_divided_are_named():
    """Three GPUs share no experts evenly, and two do."""
    said = "Expert parallelism cannot divide these experts over these GPUs."
    found = advise("3xH200", 2)
    assert said in found.reason and all(each.engine != "ep" for each in found.alternatives)
    assert said not in advise("2xH200", 2).reason


def test_json():
    plan = moe_qlora.plan(config(2), gpus="2xH200", **ASKED)
    said = json.loads(json.dumps(plan.as_dict()))["advice"]
    assert (said["engine"], said["ranks"], said["fits"]) == ("ddp", 2, True)
    assert said["seconds"] == plan.advice.seconds and said["reason"] == plan.advice.reason
    assert [other["engine"] for other in said["alternatives"]] == ["fsdp", "ep"]
    one = moe_qlora.plan(config(2), gpus="H200", **ASKED)
    assert one.as_dict()["advice"] is None


def test_layers_whose_heads_differ():
    """A configuration by layers; an attribute that differs cannot be asked of the whole."""
    model = tiny_model("gemma4_text", device="meta", dtype=torch.bfloat16, sliding_window=64)
    layers = model.config.per_layer_config
    heads = [layer.num_attention_heads * 2 * layer.head_dim for layer in layers]
    made = [
        work_of(Planner(source_of(copy.deepcopy(model), None, None, False), Settings(1, seq)))
        for seq in (16, 32)
    ]
    assert made[1].other_flops - made[0].other_flops == 4 * 16 * sum(heads)
    assert len(set(heads)) > 1


def test_the_engine_of_the_plan_does_not_matter():
    """Not even what it counts: shares of experts, or experts in host memory."""
    found = advise("2xH200", 2)
    for asked in ({"ep": 2}, {"zero3": 2}, {"ddp": 2, "offload": True}):
        assert advise("2xH200", 2, **asked) == found
