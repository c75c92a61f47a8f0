"""Walks of the module tree give what the class's methods give, also after the tree has changed."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

import moe_qlora
from moe_qlora.testing import tiny_model
from moe_qlora.train.module_walks import quicken_walks


@pytest.fixture
def model() -> PeftModel:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    return moe_qlora.get_peft_model(tiny_model("qwen3_moe"), lora, unpacked_ok=True)


def assert_as_class(model: PeftModel) -> None:
    base = model.get_base_model()
    named = list(type(model).named_parameters(model))
    found = list(model.named_parameters())
    assert [name for name, _ in found] == [name for name, _ in named]
    assert all(one is other for (_, one), (_, other) in zip(found, named, strict=True))
    for trainable in (False, True):
        for without in (False, True):
            counted = base.num_parameters(trainable, without)
            assert counted == type(base).num_parameters(base, trainable, without)


def test_as_the_class_after_each_change_of_the_tree(model: PeftModel) -> None:
    undo = quicken_walks(model)
    assert_as_class(model)
    assert [*model.named_parameters(recurse=False)] == []
    assert next(model.named_parameters(prefix="a"))[0].startswith("a.")
    model.add_adapter("more", LoraConfig(r=3, target_modules=["v_proj"]))
    assert_as_class(model)
    model.delete_adapter("more")
    assert_as_class(model)
    model.get_base_model().lm_head = nn.Linear(8, 4)  # as many modules as before
    assert_as_class(model)
    next(model.parameters()).requires_grad_(True)
    assert_as_class(model)
    model.get_base_model().lm_head.weight = nn.Parameter(torch.zeros(4, 8))
    assert_as_class(model)
    undo()
    assert not {"train", "named_parameters"} & set(vars(model))
    assert "num_parameters" not in vars(model.get_base_model())


def test_between_forwards_changes_are_seen_without_looking(model: PeftModel) -> None:
    undo = quicken_walks(model.train())
    base, forward = model.get_base_model(), partial(model, input_ids=torch.arange(4)[None])
    forward()
    assert_as_class(model)
    model.add_adapter("more", LoraConfig(r=3, target_modules=["v_proj"]))
    assert_as_class(model)
    forward()
    model.delete_adapter("more")
    assert_as_class(model)
    forward()
    base.lm_head.weight = nn.Parameter(torch.zeros_like(base.lm_head.weight))
    assert_as_class(model)
    forward()
    model.to("meta")
    assert_as_class(model)
    undo()


def test_train_reaches_a_module_that_was_switched_by_itself(model: PeftModel) -> None:
    quicken_walks(model)
    assert model.train() is model
    inner = model.get_base_model().model.layers[1]
    inner.eval()
    model.train()
    assert all(module.training for module in model.modules())
    assert model.eval() is model
    assert not any(module.training for module in model.modules())


def test_a_copy_walks_its_own_modules(model: PeftModel) -> None:
    quicken_walks(model)
    list(model.parameters())
    twin = copy.deepcopy(model)
    assert not set(twin.modules()) & set(model.modules())
    assert_as_class(twin)
    twin.eval()
    assert model.train().training
    assert not twin.training
