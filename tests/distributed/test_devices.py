"""Packed models over two GPUs of one process: even, complete, and as right as on one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_qlora.packing import parametrize
from tests.helpers.plans import plan
from tests.helpers.training import NF4, adapted, assert_same_training, loaded

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "model"
    config = Qwen3MoeConfig(
        num_hidden_layers=16, num_experts=32, num_experts_per_tok=4, hidden_size=512,
        moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def load(folder, device_map, settings=None):
    given = settings or NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16}
    return loaded(folder, given, device_map=device_map, dtype=torch.bfloat16)


def tensors_of(module):
    """Parameters, buffers and statistics by address."""
    found = [*module.parameters(), *module.buffers()]
    for _, owner, name in parametrize.iter_packed(module):
        stack = parametrize.read_packed(owner, name)
        found += [stack.codes, *stack.statistics]
    return {tensor.data_ptr(): tensor for tensor in found}.values()


def assert_even(model):
    """Both devices hold as much, and everything of a layer is on one of them."""
    total = {0: 0, 1: 0}
    for tensor in tensors_of(model):
        assert tensor.device.type == "cuda"
        total[tensor.device.index] += tensor.nbytes
    assert max(total.values()) < 1.15 * sum(total.values()) / 2
    for layer in model.model.layers:
        assert len({tensor.device for tensor in tensors_of(layer)}) == 1


@pytest.mark.parametrize("settings", [None, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_two_devices_compute_what_one_does(folder, settings):
    ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0)).cuda(0)
    runs, weights = [], {}
    for device_map in ({"": 0}, "auto"):
        model = adapted(load(folder, device_map, settings)).train()
        for name, p in model.named_parameters():  # Each device draws numbers of its own
            p.data.copy_(weights.setdefault(name, p.data.cpu()) if p.requires_grad else p.data)
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        runs.append((loss.item(), grads))
    assert runs[0][1]
    assert_same_training(runs[1], runs[0], 0.05)


def test_a_packed_model_is_planned_and_dispatched_evenly(folder):
    from accelerate import dispatch_model

    model = load(folder, {"": 0})
    ids = torch.arange(32, device="cuda:0")[None]
    before = model(ids).logits
    made = plan(model, gpus="2x24GiB", seq=64)
    model = dispatch_model(model, made.device_map)
    assert_even(model)
    assert_even(load(folder, "auto"))
    torch.testing.assert_close(model(ids).logits.to(before.device), before, rtol=0.02, atol=0.05)
