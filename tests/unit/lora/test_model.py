"""Adapters as users handle them: files, several at once, and calls of stock PEFT itself."""

import copy
import json
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import upstream
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from safetensors.torch import save_file
from small_models import IDS, close, decoded, fill, logits, lora_config
from torch import Tensor, nn
from training import assert_same, loaded, packed, results

import moe_qlora
from moe_qlora.errors import AdapterError
from moe_qlora.lora.model import LoraModel, connect_adapters, load_adapter
from moe_qlora.testing import tiny_inputs, tiny_model


def unpacked(model_type: str = "qwen3_moe") -> Any:
    """The same model with plain weights: what stock PEFT adapts."""
    return decoded(packed(model_type))


def lora_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if ".lora_" in name]


def test_loading_a_second_adapter_and_training_it(tmp_path):
    first = fill(moe_qlora.get_peft_model(packed(), lora_config()))
    expected = logits(first)
    first.save_pretrained(tmp_path)
    model = load_adapter(packed(), str(tmp_path), low_cpu_mem_usage=True)
    assert close(logits(model), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    load_adapter(model, str(tmp_path), "two", is_trainable=True)
    model.load_adapter(tmp_path, "three", low_cpu_mem_usage=True)
    for name in ("two", "three"):
        model.set_adapter(name)
        assert close(logits(model), expected)
    model.set_adapter("two")
    model(input_ids=IDS).logits.sum().backward()
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.grad is not None} == {"two"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_whose_keys_peft_renames_is_loaded_by_the_models_own(tmp_path):
    """PEFT takes this type's keys for those of the published checkpoint, its own included."""
    base = packed("deepseek_ocr2")
    config = lora_config(target_parameters=moe_qlora.target_parameters(base))
    trained = fill(moe_qlora.get_peft_model(copy.deepcopy(base), config).eval())
    trained.save_pretrained(tmp_path, save_embedding_layers=False)
    again = load_adapter(base, str(tmp_path))
    held = dict(trained.named_parameters())
    for name, value in again.named_parameters():
        assert "lora_" not in name or torch.equal(value, held[name]), name


def test_adapters_of_transformers_v4_load(tmp_path):
    """One LoRA for each expert's w1, w2, w3, as PEFT wrote them when experts were Linear layers."""
    generator, tensors = torch.Generator().manual_seed(4), {}
    sizes = (("w1", 96, 64), ("w2", 64, 96), ("w3", 96, 64))
    for layer, expert, (name, out, width) in product(range(2), range(4), sizes):
        key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(2, width, generator=generator) * 0.3
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 2, generator=generator) * 0.3
    LoraConfig(target_modules=["w1", "w2", "w3"], r=2, lora_alpha=4).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "rank_pattern keys did not match"
        stock = PeftModel.from_pretrained(unpacked("mixtral"), tmp_path)
    ours = load_adapter(packed("mixtral"), str(tmp_path))
    assert close(logits(ours), logits(stock))
    assert not close(logits(ours), logits(packed("mixtral")))
    # Beside other layers the config of stock PEFT is vague: its own call names ours.
    attention = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    tensors |= {f"{attention}_{half}.weight": torch.zeros(shape) for half, shape in
                (("A", (2, 64)), ("B", (64, 2)))}  # fmt: skip
    modules = ["q_proj", "w1", "w2", "w3"]
    LoraConfig(target_modules=modules, r=2).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AdapterError, match=r"moe_qlora\.load_adapter"):
            logits(PeftModel.from_pretrained(packed("mixtral"), tmp_path))


def test_lora_on_shared_experts_reloads_here(tmp_path):
    """Stock PEFT loses it: it takes the leaf names for experts of this model type."""
    config = lora_config(target_modules=["o_proj", "down_proj"])
    with pytest.warns(UserWarning, match=r"load it with moe_qlora\.load_adapter"):
        model = moe_qlora.get_peft_model(packed("deepseek_v3"), config)
    assert any("shared_experts.down_proj.lora_A" in name for name in lora_names(model))
    fill(model).save_pretrained(tmp_path)
    again = load_adapter(packed("deepseek_v3"), str(tmp_path))
    assert lora_names(again) == lora_names(model)
    assert close(logits(again), logits(model))
    plain = load_adapter(unpacked("deepseek_v3"), str(tmp_path), unpacked_ok=True)
    assert close(logits(plain), logits(model))


@pytest.mark.parametrize("name", ["q_proj", "weight"])
def test_adapters_with_the_name_of_a_layer_are_alone(name, tmp_path):
    """PEFT takes the tensors of such a layer for the adapter's, which it leaves out of others'."""
    model = fill(moe_qlora.get_peft_model(packed(), lora_config()))
    kept = copy.deepcopy(model.peft_config), logits(model)
    model.save_pretrained(tmp_path)
    said = f"adapter '{name}' has the name of .*: give it another name"
    for add in (
        lambda: model.add_adapter(name, lora_config()),
        lambda: model.load_adapter(tmp_path, name),
        lambda: moe_qlora.load_adapter(model, tmp_path, name),
    ):
        with pytest.raises(AdapterError, match=said):
            add()
        assert (model.peft_config, name) == (kept[0], name)
        assert torch.equal(logits(model), kept[1])


@pytest.mark.parametrize("spelling", ["short", "full"])
def test_layers_of_stock_peft_over_packed_weights_are_refused(spelling):
    """As of a model that `from_pretrained` did not make, so that PEFT's calls find nothing here."""
    base = packed()
    del base.__dict__["named_modules"]
    full = moe_qlora.target_parameters(base)
    config = lora_config(
        exclude_modules=moe_qlora.exclude_modules(base),
        **({"target_parameters": full} if spelling == "full" else {}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no parameter was matched"
        host = peft.get_peft_model(base, config)
    with pytest.raises(AdapterError, match=r"moe_qlora\.get_peft_model"):
        host(input_ids=IDS)
    with pytest.raises(AdapterError, match=r"was not created|would have no effect"):
        connect_adapters(host)


def test_an_adapter_on_routers_keeps_its_spelling_on_the_unpacked_model(tmp_path):
    """What makes PEFT leave the names alone is not written to the file."""
    modules = ["q_proj", "gate"]
    targets = {"target_modules": modules, "target_parameters": ["experts.down_proj"]}
    trained = fill(moe_qlora.get_peft_model(packed(), lora_config(**targets)))
    trained.save_pretrained(tmp_path / "first")
    loaded = load_adapter(unpacked(), str(tmp_path / "first"), is_trainable=True, unpacked_ok=True)
    assert any("mlp.gate" in name for name in lora_names(loaded))
    loaded.save_pretrained(tmp_path / "second")
    for name in ("first", "second"):
        written = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert set(written["target_modules"]) == set(modules)
        assert written["exclude_modules"] is None
        assert written["target_parameters"] == ["experts.down_proj"]


# `PeftModel.from_pretrained` and `peft.get_peft_model`, called by themselves on packed models.

# dbrx and llama4_text do not dispatch through transformers' experts interface
TYPES = ["mixtral", "llama4_text", "dbrx"]


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


def assert_alike(left: Any, right: Any) -> None:
    """Two models have the same names, logits and gradients, bit for bit."""
    assert list(dict(left.named_parameters())) == list(dict(right.named_parameters()))
    assert_same(results(left), results(right))


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
    expected = load_adapter(packed(model_type), folder, is_trainable=is_trainable)
    model = PeftModel.from_pretrained(packed(model_type), folder, is_trainable=is_trainable)
    assert type(model) is type(expected) and model.training == expected.training
    assert_alike(model, expected)
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
    assert_alike(ours, stock)  # with dropout, and without
    assert_alike(ours.eval(), stock.eval())
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
    expected = logits(load_adapter(packed("mixtral"), folder))
    return packed("mixtral"), folder, expected


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
    assert torch.equal(logits(load_adapter(again, tmp_path / "saved")), logits(model.eval()))


def test_the_automatic_class_on_the_folder_of_an_adapter(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    base = loaded(tmp_path / "base")
    model = fill(moe_qlora.get_peft_model(base, lora("mixtral"), experts=True))
    model.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model.eval()))
