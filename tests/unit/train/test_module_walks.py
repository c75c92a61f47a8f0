"""Walks of the module tree give what the class's methods give, also after the tree has changed."""

import copy

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


@pytest.mark.parametrize("in_training", [False, True])
def test_as_the_class_after_each_change_of_the_tree(model: PeftModel, in_training: bool) -> None:
    """Changes between forwards are seen without looking."""
    undo, base = quicken_walks(model.train()), model.get_base_model()
    changes = [
        lambda: None,
        lambda: model.add_adapter("more", LoraConfig(r=3, target_modules=["v_proj"])),
        lambda: model.delete_adapter("more"),
        lambda: setattr(base, "lm_head", nn.Linear(64, 128)),  # As many modules as before
        lambda: next(model.parameters()).requires_grad_(True),
        lambda: setattr(base.lm_head, "weight", nn.Parameter(torch.zeros(128, 64))),
        lambda: model.to("meta"),
    ]
    for change in changes:
        if in_training:
            model(input_ids=torch.arange(4)[None])
        change()
        assert_as_class(model)
    assert [*model.named_parameters(recurse=False)] == []
    assert next(model.named_parameters(prefix="a"))[0].startswith("a.")
    undo()
    assert not {"train", "named_parameters"} & set(vars(model))
    assert "num_parameters" not in vars(base)


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
