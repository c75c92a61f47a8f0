"""What Trainer repeats each step: walks of the module tree, and a look for NaN in the loss."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import moe_qlora
from moe_qlora.testing import tiny_inputs, tiny_model
from moe_qlora.train.trainer_loop import EarlyLoss, copy_losses_early, quicken_walks


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


def test_as_the_class_after_each_change_of_the_tree(model):
    undo, base = quicken_walks(model.train()), model.get_base_model()
    changes = [
        lambda: None,
        lambda: model.add_adapter("more", LoraConfig(r=3, target_modules=["v_proj"])),
        lambda: model.delete_adapter("more"),
        lambda: setattr(base, "lm_head", nn.Linear(64, 128)),  # As many modules as before
        lambda: next(model.parameters()).requires_grad_(True),
        lambda: setattr(base.lm_head, "weight", nn.Parameter(torch.zeros(128, 64))),
        lambda: model.to("meta"),
        # As FSDP2 puts its shards in the place of parameters
        lambda: base.lm_head._parameters.update(weight=nn.Parameter(torch.zeros(128, 64))),
    ]
    for change in changes:
        change()
        assert_as_class(model)
    assert [*model.named_parameters(recurse=False)] == []
    assert next(model.named_parameters(prefix="a"))[0].startswith("a.")
    undo()
    assert not {"train", "named_parameters"} & set(vars(model))
    assert "num_parameters" not in vars(base)


def test_train_reaches_modules_of_its_own_tree(model):
    """Also one that was switched by itself, and those of a copy alone."""
    quicken_walks(model)
    assert model.train() is model
    model.get_base_model().model.layers[1].eval()
    model.train()
    assert all(module.training for module in model.modules())
    twin = copy.deepcopy(model)
    assert_as_class(twin)
    twin.get_base_model().lm_head = nn.Linear(64, 128)
    assert_as_class(twin)
    assert twin.eval() is twin
    assert not any(module.training for module in twin.modules()) and model.training


def test_a_forward_leaves_the_lists(model, monkeypatch):
    """It makes modules of its own: a slice of the layers is a new ModuleList."""
    quicken_walks(model.train())
    expected = list(model.named_parameters())
    model(**tiny_inputs(model))
    monkeypatch.setattr(type(model), "named_parameters", lambda *_: 1 / 0)
    assert list(model.named_parameters()) == expected


def test_what_looks_for_nan_reads_the_copy_and_all_else_the_loss():
    states, hooked, weights = [], [], torch.ones(3, requires_grad=True)
    doubled = 2 * weights
    # A backward runs in the state of the forward: else compiled layers would be compiled anew.
    doubled.register_hook(lambda _: states.append(torch._C._is_torch_function_enabled()))
    of_tokens = EarlyLoss.of(doubled)
    loss = of_tokens.sum() / torch.tensor(0.5) * 2  # As TRL computes it
    assert not torch.isnan(loss), "before its backward"
    scaled = loss / 4  # as accelerate does
    loss.register_hook(hooked.append)  # as FSDP does
    loss.retain_grad()
    scaled.backward(retain_graph=True)
    loss._copies[0][0].fill_(math.nan)
    for change in (lambda x: x, lambda x: x / 4, lambda x: 2 * x, Tensor.detach):
        assert torch.isnan(change(loss)) and not torch.isinf(change(loss))
    for other in (loss + 1, loss * torch.tensor(2.0), loss.mean(), copy.deepcopy(loss.detach())):
        assert not torch.isnan(other)
    assert type(torch.zeros(()).add_(loss.detach())) is type(loss.clone().detach().exp()) is Tensor
    assert loss.detach().__reduce_ex__(2)[0] is not torch._tensor._rebuild_from_type_v2
    assert f"{loss:.2f}" == "24.00" and float(loss.detach()) == 24
    torch.autograd.grad([loss], [weights])
    assert torch.equal(weights.grad, torch.full((3,), 2.0))
    assert len(hooked) == 2 and loss.grad == 1.25 and states == [True, True]
    loss = loss.detach()
    loss *= 3  # as Trainer does
    assert torch.isnan(loss / 2) and loss.item() == 72
    loss.add_(math.inf)
    assert torch.isinf(loss), "it has changed since"


def test_trainer_looks_at_the_copy(model, tmp_path, monkeypatch):
    looks, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda x: looks.append(x) or isnan(x))
    handle = copy_losses_early(model)
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 4
    args = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=2, gradient_accumulation_steps=2, report_to=[],
        per_device_train_batch_size=1, save_strategy="no",
    )  # fmt: skip
    Trainer(model, args, train_dataset=rows).train()
    assert [len(x._copies) for x in looks if isinstance(x, EarlyLoss)] == [1] * 4
    batch = {name: row[None] for name, row in rows[0].items()}
    with torch.no_grad():
        assert type(model(**batch).loss) is Tensor
    handle.remove()
    assert type(model(**batch).loss) is Tensor
