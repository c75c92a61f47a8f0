"""Packed models train on several ranks as they do in one process, whatever engine shards them."""

from functools import cache

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn.parallel import DistributedDataParallel

from moe_qlora.testing import run_distributed, tiny_inputs, tiny_model
from tests.helpers import training
from tests.helpers.plans import plan
from tests.helpers.ranks import are_same, packed_bytes, said, sharded
from tests.helpers.training import NF4, adapted, assert_same_training, loaded

SETTINGS = {**training.SETTINGS, "fp32 storage": {**NF4, "bnb_4bit_quant_storage": torch.float32}}
EXACT = {
    "ddp, from rank 0": {"how": "ddp", "settings": "int8", "reentrant": False, "spoiled": True},
    "fsdp2, int8, reentrant": {"settings": "int8", "reentrant": True},
    "fsdp2, bf16 storage, non-reentrant": {"settings": "bf16 storage", "reentrant": False},
    "fsdp2, fp32 storage, offload": {
        "settings": "fp32 storage",
        "options": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    },
}
BF16 = {"options": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}}
MIXED = {"bf16": BF16, "bf16, fp32 storage": {**BF16, "settings": "fp32 storage"}}
# Experts stored (E, in, out), outside of the experts interface; experts that two stacks of layers
# share; a compiled layer.
FAMILIES = {"llama4_text": {}, "diffusion_gemma": {}, "qwen3_moe": {"num_hidden_layers": 1}}
PACKINGS = {"nf4 double": NF4, "int8": {"load_in_8bit": True}}
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "num_experts": 6, "num_hidden_layers": 2}


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 88, (12, 5), generator=generator) for _ in range(3)]


def run_case(folder, rank, world, *, settings="nf4", how="fsdp2", reentrant=None, spoiled=False,
             options=None):  # fmt: skip
    model = adapted(loaded(folder, SETTINGS[settings]))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    before = packed_bytes(model)
    if spoiled and rank > 0:  # DDP sends all that rank 0 has
        for name in before:
            model.get_parameter(name).data.zero_()
    model = DistributedDataParallel(model) if how == "ddp" else sharded(model, **(options or {}))
    run = training.record(model, batches(), rank, world)
    return run, are_same(before, packed_bytes(model))


def family(model_type):
    return adapted(training.packed(model_type, **FAMILIES[model_type]), [])


def run_family(model, rank=0, world=1):
    """Losses and the last step's gradients of two steps that use nothing but the logits."""
    inputs = tiny_inputs(model, batch=4)
    if "diffusion" not in model.config.model_type:  # which draws noise
        inputs = {key: value.chunk(world)[rank] for key, value in inputs.items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = model.train()(**inputs).logits.float().square().mean()
        losses.append(training.mean_of_ranks(loss, world))
        optimizer.zero_grad()
        loss.backward()
        gradients = training.whole_gradients(model)
        optimizer.step()
    return losses, gradients


def odd_model(packing):
    return training.packed("qwen3_moe", PACKINGS[packing], dtype=torch.bfloat16, **ODD)


def held(model):
    """Bytes that this rank holds: of weights, and of trained parameters."""
    sizes = {"weights": sum(buffer.nbytes for buffer in model.buffers()), "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sizes["trained" if parameter.requires_grad else "weights"] += local.nbytes
    return sizes


def refusals(folder):
    """What is said where packed weights cannot be computed with."""
    layer = sharded(adapted(loaded(folder))).get_base_model().model.layers[0]
    x, index = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.long)
    return {
        "experts": said(lambda: layer.mlp.experts(x, index, torch.ones(3, 2))),
        "read": said(lambda: layer.mlp.experts.down_proj),
        "linear": said(lambda: layer.self_attn.k_proj(x)),
        "fsdp1": said(lambda: Fsdp1(loaded(folder), device_id=torch.device("cpu"))),
    }


def run_two(rank, world, folder):
    results = {name: run_case(folder, rank, world, **how) for name, how in (EXACT | MIXED).items()}
    for name in FAMILIES:
        model = sharded(family(name))
        if name == "qwen3_moe":
            model.get_base_model().model.layers[0].compile(backend="eager")
        results[name] = run_family(model, rank, world)
    for packing in PACKINGS:
        results[packing] = held(
            sharded(adapted(odd_model(packing), ("q_proj", "k_proj", "v_proj", "o_proj")))
        )
    return results | {"refusals": refusals(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "model"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 3}
    tiny_model("qwen3_moe", **sizes).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def two(folder):
    return run_distributed(run_two, 2, folder)


@cache
def reference(folder, settings="nf4"):
    """What one process computes, where statistics are no parameters."""
    return training.record(adapted(loaded(folder, SETTINGS[settings])), batches())


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_train_as_one(two, folder, case):
    expected = reference(folder, EXACT[case].get("settings", "nf4"))
    for rank in two:
        run, intact = rank[case]
        assert_same_training(run, expected, 1e-4)
        assert intact


def test_mixed_precision_rounds_and_casts_no_codes(two, folder):
    for rank in two:
        for run, intact in (rank[case] for case in MIXED):
            assert run[0] == rank["bf16"][0][0] and intact
            assert_same_training(run, reference(folder), 0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_layouts_and_a_compiled_layer_train_as_in_one_process(two, name):
    expected = run_family(family(name))
    for rank in two:
        assert_same_training(rank[name], expected, 1e-4)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_rank_holds_what_is_planned_to_the_byte(two, packing):
    """The first one; FSDP2 pads the last one's share to the same size."""
    made = plan(odd_model(packing), engine="fsdp:2", seq=8, rank=3, targets="attention,experts")
    adapters = made.peak.parts["adapters"]
    assert two[0][packing] == {"weights": made.resident, "trained": adapters}
    assert two[1][packing]["weights"] <= made.resident


def test_what_is_not_gathered_is_named_and_not_computed_with(two):
    at, rest = "QuantizationError: model.layers.0.", " is sharded and not gathered now: call the "
    rest += "model that was given to fully_shard"
    for texts in (rank["refusals"] for rank in two):
        assert texts["experts"].startswith(f"{at}mlp.experts.gate_up_proj{rest}")
        assert texts["read"].startswith(f"{at}mlp.experts.down_proj{rest}")
        assert texts["linear"].startswith(f"{at}self_attn.k_proj.weight{rest}")
        # in torch's words, which troubleshooting.md explains
        assert "Must flatten tensors with uniform dtype" in texts["fsdp1"]
