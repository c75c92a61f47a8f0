"""What a registry file says besides the stacks: routers, shared experts, keys on disk."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch import nn

from moe_qlora import registry
from moe_qlora.layout import name_pattern
from moe_qlora.testing import registry_families, tiny_model

TYPES = registry_families()

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", TYPES)
def test_routers_and_shared_experts_are_there(model_type):
    model = tiny_model(model_type, device="meta")
    modules = {name_pattern(name): module for name, module in model.named_modules()}
    weights = {name_pattern(name) for name, _ in model.named_parameters()}
    owners = {param.pattern.rpartition(".")[0] for param in registry.load(model_type).params}
    shared = set()
    for param in registry.load(model_type).params:
        if param.router is not None:
            assert param.router in modules or param.router in weights
            assert param.router_module in modules
        if param.shared_kind == "none":
            assert param.shared_module is None
            continue
        inside = list(modules[param.shared_module].modules())
        assert any(type(module) is nn.Linear for module in inside) == (
            param.shared_kind == "linear"
        )
        shared.add(param.shared_module)
    named = {
        name
        for name, module in modules.items()
        if "shared_exper" in name.rpartition(".")[2]
        and not name.endswith("gate")
        and any(parameter.dim() >= 2 for parameter in module.parameters())
        and any(name.startswith(owner.rpartition(".")[0].removesuffix("_moe")) for owner in owners)
    }
    assert named <= shared | owners


@pytest.mark.parametrize("model_type", TYPES)
def test_checkpoint_keys_are_what_is_saved(model_type, tmp_path):
    model = tiny_model(model_type, seed=1, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    written: dict[str, int] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                written[name_pattern(key)] = written.get(name_pattern(key), 0) + 1
    expected: dict[str, dict[str, int]] = {}
    for param in registry.load(model_type).params:
        blocks = sum(len(group.at) for group in param.tiny)
        experts = max(group.num_experts for group in param.tiny)
        owner = param.pattern.rpartition(".")[0]
        for key in param.checkpoint_keys:
            per_block = experts if param.checkpoint_layout == "per expert" else 1
            expected.setdefault(key, {})[owner] = blocks * per_block
    # Two banks may share one list on disk (text and vision experts, one after the other).
    assert {key: written.get(key) for key in expected} == {
        key: sum(owners.values()) for key, owners in expected.items()
    }
