"""What expert parallelism refuses, and how it divides experts: one process is enough."""

from __future__ import annotations

import pytest
from torch import nn

import moe_qlora
from moe_qlora.detection.detect import detect
from moe_qlora.distributed.expert_parallel import modules_to_divide
from moe_qlora.errors import ConfigError
from moe_qlora.testing import tiny_model


def test_experts_that_ranks_cannot_hold_in_equal_numbers_are_refused():
    model = tiny_model("qwen3_moe", num_experts=8, device="meta")
    modules = modules_to_divide(model, detect(model), 4)
    assert [entry.name for entry in modules] == [
        f"model.layers.{n}.mlp.experts" for n in range(len(modules))
    ]
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts has 8 experts, which 3 ranks"):
        modules_to_divide(model, detect(model), 3)


def test_experts_outside_the_interface_are_refused():
    model = tiny_model("llama4_text", device="meta")
    with pytest.raises(ConfigError, match="Llama4TextExperts, which does not compute through"):
        modules_to_divide(model, detect(model), 2)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match="no routed expert weights"):
        modules_to_divide(nn.Linear(2, 2), detect(nn.Linear(2, 2)), 2)


def test_a_model_that_is_not_divided_has_no_parameters_of_its_own():
    assert moe_qlora.expert_parallel_parameters(tiny_model("qwen3_moe")) == set()
