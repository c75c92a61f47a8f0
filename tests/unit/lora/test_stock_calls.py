"""`PeftModel.from_pretrained` and `peft.get_peft_model`, called by themselves on packed models."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import training
import upstream
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from small_models import fill
from torch import Tensor
from training import results

import moe_qlora
from moe_qlora.lora.model import LoraModel
from moe_qlora.testing import tiny_inputs, tiny_model

# dbrx and llama4_text do not dispatch through transformers' experts interface
TYPES = ["mixtral", "llama4_text", "dbrx"]


def packed(model_type: str = "qwen3_moe") -> Any:
    return training.packed(model_type, seed=1).eval()


def lora(model_type: str = "qwen3_moe", modules: Any = None, **fields: Any) -> LoraConfig:
    names = modules or (["Wqkv"] if model_type == "dbrx" else ["q_proj", "v_proj"])
    return LoraConfig(r=3, lora_alpha=7, target_modules=names, task_type="CAUSAL_LM", **fields)


def saved(folder: Path, model_type: str, **options: Any) -> Path:
    """The folder of an adapter that counts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "stock PEFT rewrites")
        made = fill(moe_qlora.get_peft_model(packed(model_type), lora(model_type), **options))
    made.save_pretrained(folder, save_embedding_layers=False)
    return folder


def config_in(folder: Path) -> dict[str, Any]:
    fields = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(v) if isinstance(v, list) else v for key, v in fields.items()}


def assert_same(left: Any, right: Any) -> None:
    """Two models have the same names, logits and gradients, bit for bit."""
    assert list(dict(left.named_parameters())) == list(dict(right.named_parameters()))
    training.assert_same(results(left), results(right))


@pytest.mark.parametrize(
    ("model_type", "options", "is_trainable"),
    # PEFT has no LoRA for llama4's router, which gives two values
    [
        *((name, {"experts": True, "router": name != "llama4_text"}, True) for name in TYPES),
        *(("qwen3_moe", {"experts": True}, False), ("gpt_oss", {}, True)),
    ],
)
def test_from_pretrained_is_load_adapter(model_type, options, is_trainable, tmp_path):
    folder = saved(tmp_path, model_type, **options)
    expected = moe_qlora.load_adapter(packed(model_type), folder, is_trainable=is_trainable)
    model = PeftModel.from_pretrained(packed(model_type), folder, is_trainable=is_trainable)
    assert type(model) is type(expected) and model.training == expected.training
    assert_same(model, expected)
    assert any(p.requires_grad for p in model.parameters()) == is_trainable
    expected.save_pretrained(tmp_path / "expected", save_embedding_layers=False)
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    assert config_in(tmp_path / "expected") == config_in(tmp_path / "again")


@pytest.mark.parametrize(
    "config",
    [
        lora(modules="all-linear"),
        lora(target_parameters=["down_proj"], lora_dropout=0.5, init_lora_weights="gaussian"),
    ],
    ids=["all-linear", "dropout"],
)
def test_get_peft_model_of_stock_peft(config, tmp_path):
    makers, models, written = (moe_qlora.get_peft_model, peft.get_peft_model), [], []
    for make in makers:
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "stock PEFT rewrites")
            models.append(fill(make(packed("qwen2_moe"), copy.deepcopy(config))))
        models[-1].save_pretrained(tmp_path / make.__module__, save_embedding_layers=False)
        written.append(config_in(tmp_path / make.__module__))
    ours, stock = models
    assert type(stock.base_model) is LoraModel
    assert_same(ours, stock)  # with dropout, and without
    assert_same(ours.eval(), stock.eval())
    for field in ("target_parameters", "lora_dropout", "target_modules"):
        assert written[0][field] == written[1][field]


def test_other_models_and_tuners_are_left_to_peft():
    plain = tiny_model("qwen3_moe")
    assert type(peft.get_peft_model(plain, lora()).base_model) is StockLoraModel
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10)
    assert not isinstance(peft.get_peft_model(packed(), config).base_model, LoraModel)


# transformers' own methods.


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, Path, Tensor]:
    """A packed model, the folder of an adapter for it, and the logits that this gives."""
    folder = saved(tmp_path / "adapter", "mixtral", experts=True)
    expected = results(moe_qlora.load_adapter(packed("mixtral"), folder))["out"]
    return packed("mixtral"), folder, expected


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**tiny_inputs(model)).logits


@upstream.ADAPTER_METHODS
@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
def test_adapters_are_switched(trained):
    model, folder, expected = trained
    twin, plain = copy.deepcopy(model), logits(model)
    model.load_adapter(str(folder))
    model.disable_adapters()
    assert torch.equal(logits(model), plain)
    model.load_adapter(str(folder), "second")
    model.set_adapter("second")
    model.enable_adapters()
    assert torch.equal(logits(model), expected)
    twin.load_adapter(str(folder.parent), adapter_kwargs={"subfolder": folder.name})
    assert torch.equal(logits(twin), expected)


@upstream.ADAPTER_METHODS
@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`")
def test_add_adapter_trains_and_is_saved(trained, tmp_path):
    model, again = trained[0], copy.deepcopy(trained[0])
    asked = lora(model.config.model_type, target_parameters=moe_qlora.target_parameters(model))
    before = copy.deepcopy(vars(asked))
    model.add_adapter(asked)
    assert vars(asked) == before
    fill(model).train()
    model(**tiny_inputs(model)).logits.float().square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if "experts" in n and "lora" in n}
    assert len(grads) == 8
    assert all(grad is not None and grad.any() for grad in grads.values())
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/model.safetensors").exists()
    assert torch.equal(logits(moe_qlora.load_adapter(again, tmp_path / "saved")), logits(model))


def test_the_automatic_class_on_the_folder_of_an_adapter(tmp_path):
    tiny_model("mixtral", seed=1).save_pretrained(tmp_path / "base")
    base = training.loaded(tmp_path / "base")
    model = fill(moe_qlora.get_peft_model(base, lora("mixtral"), experts=True))
    model.save_pretrained(tmp_path / "adapter")
    again = training.loaded(tmp_path / "adapter")
    assert torch.equal(logits(again), results(model.eval())["out"])
