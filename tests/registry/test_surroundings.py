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
    experts = registry.load(model_type).experts
    owners = {item["pattern"].rpartition(".")[0] for item in experts}
    shared = set()
    for item in experts:
        router, beside = item["router"], item["shared_experts"]
        if router is not None:
            assert router["weight"] in modules or router["weight"] in weights
            assert router["module"] in modules
        if beside["kind"] == "none":
            assert beside["module"] is None
            continue
        inside = list(modules[beside["module"]].modules())
        assert any(type(module) is nn.Linear for module in inside) == (beside["kind"] == "linear")
        shared.add(beside["module"])
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
    for item in registry.load(model_type).experts:
        blocks = item["tiny"]["count"]
        experts = max(group["experts"] for group in item["tiny"]["groups"])
        owner = item["pattern"].rpartition(".")[0]
        for key in item["checkpoint"]["keys"]:
            per_block = experts if item["checkpoint"]["layout"] == "per expert" else 1
            expected.setdefault(key, {})[owner] = blocks * per_block
    # Experts of two modules may share one list on disk (text, then vision experts).
    assert {key: written.get(key) for key in expected} == {
        key: sum(owners.values()) for key, owners in expected.items()
    }
