"""How packed stacks behave as part of a module: reads, moves, copies, state dicts, undoing."""

import copy
import pickle
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn

from moe_qlora.packing import decoders
from moe_qlora.packing import parametrize as storage
from moe_qlora.packing.codec import pack, unpack
from moe_qlora.packing.settings import CodecSettings

SETTINGS = {
    "nf4": CodecSettings("nf4", True, compute_dtype=torch.bfloat16),
    "fp4-bfloat16": CodecSettings("fp4", False, torch.bfloat16),
    "int8": CodecSettings("int8"),
}


class Experts(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.Parameter(torch.ones(40))
        self.gate_up = nn.Parameter(torch.randn(4, 48, 40, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(4, 48))
        self.down = nn.Parameter(torch.randn(4, 40, 24, dtype=torch.bfloat16))
        self.reads = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.reads):
            x = x + (x @ self.gate_up[0].T)[:, :24] @ self.down[1].T
        return x


def packed_experts(settings: CodecSettings, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    module, decoded = Experts(seed), {}
    for name in ("gate_up", "down"):
        stack = pack(getattr(module, name), settings)
        decoded[name] = unpack(stack)
        storage.attach(module, name, stack)
    return module, decoded


def assert_reads(module: nn.Module, decoded: dict[str, torch.Tensor]) -> None:
    for name, expected in decoded.items():
        assert torch.equal(getattr(module, name), expected)


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> CodecSettings:
    return SETTINGS[request.param]


def test_reads_give_the_decoded_stack(settings: CodecSettings) -> None:
    module, decoded = packed_experts(settings)
    assert_reads(module, decoded)
    assert storage.packed_names(module) == ("gate_up", "down")
    assert f"Packed({settings.kind}, (4, 40, 24))" in repr(module)
    for name in decoded:
        original, stack = storage.original_of(module, name), storage.read_packed(module, name)
        assert not original.requires_grad
        assert (stack.kind, stack.dtype) == (settings.kind, torch.bfloat16)
        assert stack.compute_dtype == settings.compute_dtype
        if settings.kind != "int8":
            assert type(original) is bnb.nn.Params4bit
            assert original.quant_state == module.parametrizations[name][0].quant_state


def test_a_call_decodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = packed_experts(SETTINGS["nf4"])
    decodes = []
    monkeypatch.setattr(
        decoders, "unpack", lambda stack, **kwargs: decodes.append(stack) or unpack(stack, **kwargs)
    )
    module.reads = 3
    module(torch.ones(2, 40, dtype=torch.bfloat16))
    assert len(decodes) == 2
    # A forward that is cut short, as under non-reentrant checkpointing, must not leave it on.
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(2, 3, dtype=torch.bfloat16))
    assert parametrize._cache_enabled == 0
    assert not parametrize._cache


def test_state_dict_has_bitsandbytes_keys_and_loads_back(settings: CodecSettings) -> None:
    module, decoded = packed_experts(settings)
    state = module.state_dict()
    stats, expected = {key[5:] for key in state if key.startswith("down.")}, {"SCB"}
    if settings.kind != "int8":
        form = settings.double_quant, settings.kind, settings.storage_dtype
        linear = bnb.nn.Linear4bit(64, 64, False, None, *form).to("cpu")
        expected = {key.removeprefix("weight.") for key in linear.state_dict()} - {"weight"}
    assert stats == expected and not [key for key in state if "parametrizations" in key]
    for assign in (False, True):
        other, _ = packed_experts(settings, seed=1)
        other.load_state_dict(state, assign=assign)
        assert_reads(other, decoded)
        if settings.kind != "int8":
            original = storage.original_of(other, "down")
            assert type(original) is bnb.nn.Params4bit
            assert other.parametrizations["down"][0].quant_state == original.quant_state
            # Its own copy of the statistics, not the dict's.
            assert original.quant_state.absmax.data_ptr() != state["down.absmax"].data_ptr()
        assert set(other.state_dict()) == set(state)
        with pytest.raises(RuntimeError, match=r"as its codes.*unpacked model"):
            other.load_state_dict(Experts().state_dict())
        assert_reads(copy.deepcopy(other), decoded)
    without = {key: value for key, value in state.items() if not key.startswith("down.")}
    with pytest.raises(RuntimeError, match=r"down has nothing as its \.(absmax|SCB); a weight of"):
        module.load_state_dict(without)
    assert_reads(module, {"gate_up": decoded["gate_up"]})


def test_tied_modules_share_one_packed_parameter_and_copies_stand_alone(settings) -> None:
    model, stack = nn.ModuleList([Experts(), Experts(1)]), pack(Experts().down, settings)
    decoded = {"down": unpack(stack)}
    for module in model:
        storage.attach(module, "down", stack)
    twin = copy.deepcopy(model)
    for pair in (model, twin):
        assert len([name for name, _ in pair.named_parameters() if "original" in name]) == 1
        assert len(list(pair.buffers())) == len(pair[0].parametrizations["down"][0]._buffers)
        for module in pair:
            assert_reads(module, decoded)
    codes = storage.original_of(twin[0], "down")
    if settings.kind != "int8":
        alone = pickle.loads(pickle.dumps(codes))  # noqa: S301 - our own bytes
        assert alone.quant_state == codes.quant_state
        assert twin[0].parametrizations["down"][0].quant_state == codes.quant_state
    codes.data.zero_()
    for module in twin:
        storage.detach(module, "down")
        assert type(module) is Experts and not module._load_state_dict_pre_hooks
    assert_reads(model[0], decoded)
