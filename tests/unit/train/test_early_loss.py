"""The loss that is copied early: what looks for NaN reads the copy, all else reads the loss."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import Trainer, TrainingArguments

import moe_qlora
from moe_qlora.testing import tiny_model
from moe_qlora.train.early_loss import EarlyLoss, copy_losses_early


def early() -> tuple[EarlyLoss, Tensor]:
    """Return a loss of 6, as if NaN had been copied, and its weights."""
    weights = torch.ones(3, requires_grad=True)
    loss = EarlyLoss.of((2 * weights).sum().add_(0))
    loss._copy[0].fill_(math.nan)  # type: ignore[index]
    return loss, weights


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x / 4, lambda x: 2 * x, Tensor.detach])
def test_what_looks_for_nan_and_infinity_reads_the_copy(change: Any) -> None:
    loss, _ = early()
    assert torch.isnan(change(loss)) and not torch.isinf(change(loss))
    loss *= 3  # as Trainer does
    assert torch.isnan(loss / 2) and loss.item() == 18


def test_all_else_is_computed_of_the_loss() -> None:
    loss, weights = early()
    for plain in (loss + 1, loss * torch.tensor(2.0), loss.mean(), copy.deepcopy(loss.detach())):
        assert type(plain) is Tensor and not torch.isnan(plain)
    assert loss.detach().__reduce_ex__(2)[0] is not torch._tensor._rebuild_from_type_v2
    assert f"{loss:.2f}" == "6.00" and float(loss.detach()) == 6
    loss.add_(math.inf)
    assert torch.isinf(loss), "it has changed since"
    hooked = []
    loss.register_hook(hooked.append)  # as FSDP does
    loss.retain_grad()
    loss.backward()
    assert torch.equal(weights.grad, torch.full((3,), 2.0))
    assert len(hooked) == 1 and loss.grad == 1


def test_a_backward_runs_in_the_state_of_the_forward() -> None:
    """Compiled layers that it computes again would be compiled anew, and save other tensors."""
    states, weights = [], torch.ones(3, requires_grad=True)
    doubled = 2 * weights
    doubled.register_hook(lambda _: states.append(torch._C._is_torch_function_enabled()))
    EarlyLoss.of(doubled.sum()).backward(retain_graph=True)
    torch.autograd.grad([EarlyLoss.of(doubled.sum())], [weights])
    assert states == [True, True]


def test_trainer_looks_at_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda x: looks.append(x) or isnan(x))
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = moe_qlora.get_peft_model(tiny_model("qwen3_moe"), lora, unpacked_ok=True)
    handle = copy_losses_early(model)
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 4
    args = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=2, gradient_accumulation_steps=2, report_to=[],
        per_device_train_batch_size=1, save_strategy="no",
    )  # fmt: skip
    Trainer(model, args, train_dataset=rows).train()
    assert [x._copy[2] == x._version for x in looks if isinstance(x, EarlyLoss)] == [True] * 4
    batch = {name: row[None] for name, row in rows[0].items()}
    with torch.no_grad():
        assert type(model(**batch).loss) is Tensor
    handle.remove()
    assert type(model(**batch).loss) is Tensor
