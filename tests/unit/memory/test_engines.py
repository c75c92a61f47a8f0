"""Plans of many GPUs against sums done by hand: shares, gathered layers, buckets, errors, hints."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig, Qwen3MoeConfig

import moe_qlora
from moe_qlora.memory import devices, hints
from moe_qlora.memory.budget import Activity, Block, BlockTensor, Engine, Settings
from moe_qlora.memory.engines import ENGINES, REUSE_DISTANCE, Sharding
from moe_qlora.memory.hints import engine_hints
from moe_qlora.memory.meta_ops import dispatched
from moe_qlora.memory.planner import Planner
from moe_qlora.memory.report import MemoryPlan
from moe_qlora.memory.source import source_of
from moe_qlora.testing import tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
PACKINGS = {
    "nf4 double": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4 in bfloat16": {**NF4, "bnb_4bit_quant_type": "fp4",
                        "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}  # fmt: skip
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "num_experts": 6, "num_hidden_layers": 2}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


def small(**changes) -> Qwen3MoeConfig:
    sizes = {"num_hidden_layers": 3, "vocab_size": 512, "hidden_size": 64, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(**(sizes | {"dtype": "bfloat16"} | changes))


def packed_model(packing: str, **sizes) -> nn.Module:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **(ODD | sizes))
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**PACKINGS[packing]))
    return model


def pieces(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters and buffers that a distributed run has of a model."""
    shardable = moe_qlora.prepare_sharding(copy.deepcopy(model))
    return list(shardable.parameters()), list(shardable.buffers())


def planner(model, engine: Engine | None = None, quantization=None, **settings) -> Planner:
    source = source_of(model, quantization, None, False)
    return Planner(source, Settings(**({"seq": 16, "engine": engine} | settings)))


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# Shares


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_fsdp_holds_the_first_chunk_of_every_parameter(packing, ranks):
    """torch.chunk's first chunk is the largest, and FSDP2 pads the others to its size."""
    model = packed_model(packing)
    cut, whole = pieces(model)
    by_hand = nbytes(torch.chunk(tensor, ranks)[0] for tensor in cut) + nbytes(whole)
    made = planner(model, Engine("fsdp", ranks))
    assert made.resident == by_hand
    one = made.with_engine(None)
    assert one.resident == planner(model).resident
    assert made.load_peak - made.resident == one.load_peak - one.resident


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("engine", [None, Engine("fsdp", 3), Engine("ep", 2), Engine("zero3", 2)])
def test_models_of_distributed_runs_are_planned_alike(packing, engine):
    """Statistics that are parameters count once."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}
    model = packed_model(packing, **sizes)
    prepared = moe_qlora.prepare_sharding(copy.deepcopy(model))
    assert planner(prepared, engine).resident == planner(model, engine).resident


@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp_cuts_adapters_gradients_and_moments(ranks):
    model = packed_model("nf4 double")
    made = moe_qlora.plan(
        model, fsdp=ranks, seq=16, rank=5, targets="attention,experts", accumulation=2
    )
    config = LoraConfig(r=5, target_modules=MODULES)
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    share = sum(torch.chunk(p, ranks)[0].numel() for p in trained)
    assert made.peak.parts["adapters"] == 4 * share
    assert made.peak.parts["optimizer states"] == 2 * 4 * share
    assert made.peak.largest["gradients"] == 4 * share
    assert made.peak.largest["optimizer step"] == 4 * share
    assert made.trained_weights == sum(p.numel() for p in trained)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_zero3_cuts_flat_parameters_but_small_ones(ranks):
    model = packed_model("nf4 double")
    cut, whole = pieces(model)
    by_hand = sum(
        t.nbytes if t.numel() <= 10 * 72 else math.ceil(t.numel() / ranks) * t.itemsize for t in cut
    )
    made = planner(model, Engine("zero3", ranks))
    assert made.resident == by_hand + nbytes(whole)
    assert made.load_peak == planner(model).load_peak  # all is loaded before it is cut


def test_ddp_has_all_and_its_buckets():
    asked = {"seq": 16, "targets": "attention,experts", "accumulation": 2}
    one, made = (moe_qlora.plan(small(), **asked, **more) for more in ({}, {"ddp": 4}))
    # In distributed runs the offset of double quantization, 4 bytes, is padded to 16.
    padding = 12 * 3 * (2 + 4)  # experts and attention of three layers
    assert made.whole == one.resident
    assert made.resident == one.resident + padding
    assert made.load_peak == one.load_peak + padding
    buckets = 4 * one.trained_weights
    assert made.peak.nbytes == one.peak.nbytes + buckets + padding
    changed = {"gradient buckets": buckets, "gathered weights": 0}
    changed["quantization statistics"] = one.peak.parts["quantization statistics"] + padding
    assert made.peak.parts == one.peak.parts | changed


@pytest.mark.parametrize("packing", ["nf4 double", "int8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_expert_parallel_ranks_hold_whole_experts(packing, ranks):
    """Packing E / N experts alone gives as many bytes as a rank is said to hold of them."""
    config = BitsAndBytesConfig(**PACKINGS[packing])
    sizes = {**ODD, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes)
    few = tiny_model("qwen3_moe", dtype=torch.bfloat16, **{**sizes, "num_experts": 8 // ranks})
    routers = nbytes(p for n, p in plain.named_parameters() if n.endswith("mlp.gate.weight"))
    moe_qlora.quantize_experts(few, config)
    made = moe_qlora.plan(plain, config, ep=ranks, seq=16, targets="attention,experts", rank=3)
    tensors = [tensor for tensors in pieces(few) for tensor in tensors]
    assert made.resident == nbytes(tensors) + routers - routers // ranks

    adapted = moe_qlora.get_peft_model(few, LoraConfig(r=3, target_modules=MODULES), experts=True)
    trained = {n: p.numel() for n, p in adapted.named_parameters() if p.requires_grad}
    of_experts = sum(numel for name, numel in trained.items() if ".experts." in name)
    rest = sum(trained.values()) - of_experts
    assert made.peak.parts["adapters"] == 4 * (of_experts + rest)
    assert made.peak.parts["gradient buckets"] == 4 * rest
    assert made.trained_weights == ranks * of_experts + rest


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_biases_and_shared_experts_of_expert_parallel_ranks(family):
    """Routed experts and their biases are halved, nothing else is."""
    model = tiny_model(family, dtype=torch.bfloat16)
    layout = moe_qlora.detect(model)
    names = {param.name for param in layout.experts}
    names |= {f"{entry.name}.{bias}" for entry in layout.modules for bias in entry.bias_names}
    quantization = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["experts"])
    one, made = (planner(model, engine, quantization) for engine in (None, Engine("ep", 2)))
    halved = nbytes(p for name, p in model.named_parameters() if name in names)
    assert halved > 0
    assert one.resident - made.resident == halved // 2


# What is gathered


def layers_by_hand() -> tuple[dict[str, Block], list[Activity]]:
    def tensors(*rows: int, trained: int = 0) -> tuple[BlockTensor, ...]:
        own = tuple(BlockTensor("other", count, 10, 2) for count in rows)
        return (*own, BlockTensor("trained", trained, 1, 4)) if trained else own

    blocks = [
        Block("embed", tensors=tensors(100)),
        *(Block(f"layers.{i}", layer=True, tensors=tensors(7 + i, trained=9)) for i in range(3)),
        Block("norm", tensors=tensors(1)),
        Block("head", tensors=tensors(50)),
    ]
    activities = [Activity(block.name, 0, 0, 0) for block in blocks]
    return {block.name: block for block in blocks}, activities


def test_fsdp_gathers_the_root_and_two_layers():
    blocks, activities = layers_by_hand()
    counted = Sharding(Engine("fsdp", 4), 0).with_gathered(activities, blocks, checkpointing=True)
    # Padded to multiples of 4 rows: 100 + 4 + 52 of the root, 8, 8 and 12 of the layers, and of
    # their 9 trained ones 12.
    root, trained = (100 + 4 + 52) * 20, 12 * 4
    layers = [8 * 20 + trained, 8 * 20 + trained, 12 * 20 + trained]
    assert [activity.gathered for activity in counted] == [
        2 * root,
        root + layers[0] + layers[1],
        root + layers[1] + layers[2],
        root + layers[2] + layers[2],
        root + layers[2],
        root + layers[2],
    ]
    assert [activity.reduced for activity in counted] == [trained] * 4 + [0, 0]


def test_zero3_keeps_what_is_used_again_soon():
    half = REUSE_DISTANCE // 2
    blocks = {
        f"layers.{i}": Block(f"layers.{i}", tensors=(BlockTensor("other", 1, numel, 2),))
        for i, numel in enumerate((half, half, half + 1, 3 * half, 5))
    }
    activities = [Activity(name, 0, 0, 0) for name in blocks]
    sharding = Sharding(Engine("zero3", 5), 0)

    def whole(*numels: int) -> int:
        return sum(math.ceil(numel / 5) * 5 * 2 for numel in numels)

    counted = sharding.with_gathered(activities, blocks, checkpointing=True)
    assert [activity.gathered for activity in counted] == [
        whole(half, half),
        whole(half, half),
        whole(half + 1),
        whole(3 * half),
        whole(5),
    ]
    every = sharding.with_gathered(activities, blocks, checkpointing=False)
    total = whole(half, half, half + 1, 3 * half, 5)
    assert {activity.gathered for activity in every} == {total}


def test_zero3_without_checkpointing_keeps_what_is_not_packed():
    """Packed weights are gathered for a forward alone; within the reuse distance they stay."""
    size = REUSE_DISTANCE // 2
    parts = ["experts", "linear", "statistics", "other", "trained"]
    blocks = {
        part: Block(part, tensors=(BlockTensor(part, 1, size, 1), BlockTensor("other", 1, 44, 2)))
        for part in parts
    }
    activities = [Activity(part, 0, 0, 0) for part in parts]
    sharding = Sharding(Engine("zero3", 4), 0)
    counted = sharding.with_gathered(activities, blocks, checkpointing=False)
    plain = 2 * size + len(parts) * 88  # of all blocks
    # No two blocks are within the distance, by 88 elements.
    assert [activity.gathered for activity in counted] == [plain + size] * 3 + [plain] * 2


def test_zero3_optimizer_works_on_float32_copies():
    asked = {"seq": 16, "adapter_dtype": "bfloat16", "targets": "attention"}
    made = moe_qlora.plan(small(), zero3=2, **asked)
    meta = planner(small(), **asked).meta
    # What is not over 10 x 64 elements is not cut.
    trained = [n for block in meta.blocks for n in block.trained]
    share = sum(n if n <= 640 else math.ceil(n / 2) for n in trained)
    assert made.peak.parts["adapters"] == 2 * share
    assert made.peak.parts["optimizer states"] == (4 + 8) * share
    assert made.peak.parts["gradients"] == 2 * share
    assert made.peak.parts["gradient buckets"] == 2 * 64**2


def test_dispatched_rows_by_hand():
    """Between forward and backward: rows received, rows in the tokens' order, and their order."""
    tokens, top_k, hidden = 24, 2, 16
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(0, 4, (tokens, top_k))
    weights = torch.rand(tokens, top_k, dtype=torch.bfloat16, requires_grad=True)
    own = {t.untyped_storage()._cdata for t in (x, index, weights)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def squared(rows, local_index, row_weights):
        assert (rows.shape, local_index.shape) == ((tokens * top_k, hidden), (tokens * top_k, 1))
        return rows * rows  # which keeps its input

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = dispatched(squared, x, index, weights)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    rows = tokens * top_k
    assert sum(saved.values()) == 2 * rows * hidden * 2 + 2 * rows * 8  # order, order // top-k
    out.sum().backward()
    assert x.grad is not None and weights.grad is not None


# The whole plan


def test_measured_on_two_h200s():
    """Qwen3-30B-A3B under FSDP2, float32 adapters: 10.3 GB of shares, 22.9 GB at the peak."""
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
    sizes |= {"moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
    config = small(**sizes, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
    skips = [r"model.layers.\d+.self_attn", "lm_head"]
    quantization = BitsAndBytesConfig(**PACKINGS["nf4 double"], llm_int8_skip_modules=skips)
    made = moe_qlora.plan(config, quantization, fsdp=2, targets="attention,experts")
    assert made.resident + made.peak.parts["adapters"] == pytest.approx(10.3e9, rel=0.01)
    assert made.peak.nbytes == pytest.approx(22.9e9, rel=0.01)


@pytest.mark.parametrize("name", ENGINES)
def test_parts_of_a_rank_make_its_peak(name):
    asked = {"seq": 64, "targets": "attention,experts", "search": False}
    made = moe_qlora.plan(small(num_hidden_layers=1), **{name: 4}, gpus="4x2GiB", **asked)
    assert sum(made.peak.parts.values()) == made.peak.nbytes
    assert len(made.devices) == 4
    assert {use.peak.nbytes for use in made.devices} == {made.peak.nbytes}
    assert made.fits and made.device_map is None
    said = made.as_dict()
    assert said["engine"] == {"name": name, "ranks": 4, "whole": made.whole}
    json.dumps(said)


def test_one_process_says_nothing_of_engines():
    made = moe_qlora.plan(small(), gpus="2GiB", seq=64, search=False)
    said = made.as_dict()
    assert not {"engine", "whole"} & (said.keys() | said["training"].keys())
    assert not {"gathered weights", "gradient buckets"} & said["peak"]["at_peak"].keys()
    assert not any("device_map" in note for note in made.notes)


def test_several_gpus_alone_are_one_process():
    (note,) = moe_qlora.plan(small(), gpus="8x1GiB", seq=64, search=False).notes
    assert "spread over the 8 GPUs in one process (device_map)" in note
    assert note.endswith("compute one after the other.")


def test_groups_of_ranks():
    made = moe_qlora.plan(small(), gpus="8x1GiB", fsdp=4, seq=64, search=False)
    assert made.notes[0] == "2 groups of 4 ranks; each group holds the whole model."
    assert len(made.devices) == 8
    same = moe_qlora.plan(small(), gpus="4x1GiB", fsdp=4, seq=64, search=False)
    assert same.peak == made.peak


def test_what_accelerates_plugin_loads():
    made = moe_qlora.plan(small(), fsdp=2, seq=64)
    one = moe_qlora.plan(small(), seq=64)
    (note,) = made.notes
    assert f"loads the whole packed model, {moe_qlora.layout.human_bytes(one.load_peak)}." in note


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ddp": 2, "fsdp": 4}, "ddp=2 and fsdp=4 are 2 engines for one run; give one of them."),
        ({"ddp": True}, "ddp takes the number of ranks from gpus: give gpus, or ddp=2."),
        ({"ddp": True, "gpus": "1x80GiB"}, "ddp is 1; give the number of ranks, 2 or more."),
        ({"fsdp": 1}, "fsdp is 1; give the number of ranks, 2 or more."),
        ({"fsdp": True}, "fsdp is True; give the number of ranks, 2 or more."),
        ({"zero3": 2.5}, "zero3 is 2.5; give the number of ranks, 2 or more."),
        ({"fsdp": 4, "gpus": "2x80GiB"}, "fsdp is 4, and gpus names 2: a rank has a GPU to itself"),
        ({"ep": 2, "gpus": "24GiB"}, "at least 2 GPUs, or leave ep out."),
        ({"ddp": 4, "gpus": "8x80GiB"}, "its layers are not spread over several; give ddp=8, or 4"),
        ({"zero3": 4, "gpus": "8x80GiB"}, "zero3 is 4, and gpus names 8: a rank has one GPU"),
        ({"fsdp": 3, "gpus": "8x80GiB"}, "fsdp is 3, which does not divide the 8 GPUs of gpus"),
        ({"ep": 3}, "model.layers.0.mlp.experts has 8 experts, which 3 ranks cannot hold in equal"),
    ],
)
def test_engines_that_make_no_sense(asked, message):
    with pytest.raises(moe_qlora.ConfigError) as caught:
        moe_qlora.plan(small(), **asked)
    assert message in str(caught.value)


def test_expert_parallel_that_cannot_be():
    with pytest.raises(moe_qlora.ConfigError, match="does not compute through transformers'"):
        moe_qlora.plan(tiny_model("dbrx", device="meta", dtype=torch.bfloat16), ep=2)
    with pytest.raises(moe_qlora.ConfigError, match="no routed expert weights"):
        moe_qlora.plan(tiny_model("qwen3_moe", device="meta", mlp_only_layers=[0, 1]), ep=2)
    odd = small(hidden_size=60, moe_intermediate_size=36)
    with pytest.raises(moe_qlora.QuantizationError, match="no whole blocks of 64"):
        moe_qlora.plan(odd, ep=8)


def test_hints_name_the_fewest_ranks():
    """FSDP2 and experts on several ranks fit where a whole model on each does not."""
    config = small(num_experts=8, moe_intermediate_size=512, hidden_size=256, num_hidden_layers=5)
    settings = {"rank": 1, "optimizer": "paged_adamw_8bit", "adapter_dtype": "bfloat16"}
    whole = planner(config, Engine("ddp", 2), **settings)
    peak = whole.peak(1, 16)
    size = devices.reserve_nbytes(peak.nbytes) + peak.nbytes - whole.resident * 4 // 10
    report = MemoryPlan(
        "", "", "nf4", True, whole.settings, 0, 0, 0, 0, peak, 0, whole.uses(1, 16, [size] * 2)
    )
    hints = {hint.setting: hint for hint in engine_hints(whole, report, [size, size])}
    assert all(hint.fits for hint in hints.values())
    names = set()
    for setting in hints:
        name, _, ranks = setting.rpartition(", ")[2].partition("=")
        names.add(name)
        assert ("gpus" in setting) is (int(ranks) > 2)
        enough = whole.with_engine(Engine(name, int(ranks)))
        assert enough.fits(1, 16, [size] * int(ranks))
        fewer = int(ranks) // 2 if name == "ep" else int(ranks) - 1
        less = whole.with_engine(Engine(name, fewer)) if fewer > 1 else whole
        assert fewer < 2 or not less.fits(1, 16, [size] * fewer)
    assert {"fsdp", "ep"} <= names
    assert "ddp" not in names


@pytest.mark.parametrize("first", [*range(1, 12), 1023, 1024, 1025])
def test_the_first_that_fits_is_found(first):
    tried = []

    def needed(count):
        tried.append(count)
        return 1 if count >= first else None

    found = hints._first(range(1, 1025), needed)
    assert found == (first if first <= 1024 else None)
    assert len(tried) <= 2 * max(first, 1).bit_length() + 2


def test_no_layers_of_a_rank_are_spread():
    config = small(num_hidden_layers=1)
    made = moe_qlora.plan(config, gpus="2x650MiB", ddp=2, seq=64, batch=8, search=False)
    assert made.fits is False
    assert made.hints
    assert not any(hint.what.startswith("spread") for hint in made.hints)


def test_planners_share_what_engines_do_not_change():
    one = planner(small(num_hidden_layers=1))
    fsdp = one.with_engine(Engine("fsdp", 2))
    assert fsdp.meta is one.meta
    assert one.with_engine(Engine("ep", 2)).meta is not one.meta
    assert fsdp.with_engine(None).resident == one.resident
    assert replace(fsdp.settings, engine=None) == one.settings


# The command line


@pytest.fixture
def cli(cli, tmp_path, monkeypatch):
    """Run `moe-qlora plan FOLDER ARGUMENTS` without a search: exit code, stdout, stderr."""
    small(num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr("moe_qlora.memory.plan._largest", lambda *args: 64)
    return partial(cli, "plan", tmp_path, "--seq", 64)


def test_cli_plans_a_rank(cli, tmp_path):
    code, out, err = cli("--gpus", "2x1GiB", "--fsdp", 2)
    assert (code, err) == (0, "")
    out = " ".join(out.split())
    for words in ("on each of 2 ranks (FSDP2)", "; on each rank", "gathered weights", "It fits."):
        assert words in out
    assert "0-1 " in out  # both devices in one row
    code, out, err = cli("--ep", 4, "--json")
    assert (code, err) == (0, "")
    made = moe_qlora.plan(str(tmp_path), seq=64, ep=4)
    assert json.loads(out) == json.loads(json.dumps(made.as_dict()))


@pytest.mark.parametrize("arguments", [("--ddp", "--json"), ("--json", "--ddp"),
                                       ("--ddp", 3, "--json")])  # fmt: skip
def test_cli_takes_ddp_with_and_without_a_number(cli, arguments):
    code, out, err = cli("--gpus", "3x1GiB", *arguments)
    assert (code, err) == (0, "")
    assert json.loads(out)["engine"]["ranks"] == 3


def test_cli_errors_of_engines_are_one_line(cli):
    for arguments in (("--ddp",), ("--fsdp", 1), ("--ep", 3), ("--ddp", 2, "--zero3", 2)):
        code, out, err = cli(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: ") and err.count("\n") == 1
