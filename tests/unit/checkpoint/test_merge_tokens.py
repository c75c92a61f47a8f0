"""Merged folders that load: added tokens, heads trained in full, text models of images ones."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from folders import set_json, tensors
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from training import loaded
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)
from upstream import skip_llama4

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import AdapterError, UnsupportedWeightError
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")  # PEFT's advice
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
ROWS, ADDED = 128, 7

TRAINED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"trainable_token_indices": [3, 7]},
    "rows of both": {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [3, 9]}},
    "rows of the head": {"trainable_token_indices": {"lm_head": [3, 9]}},
}


def base(folder: Path, model_type: str, **settings: Any) -> Path:
    tiny_model(model_type, dtype=torch.float32, **settings).save_pretrained(folder)
    return folder


def load(folder: Path, kind: Any = AutoModelForCausalLM, added: int = 0, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loaded(folder, NF4, kind, **settings)
    torch.manual_seed(5)
    if added:
        model.resize_token_embeddings(ROWS + added, mean_resizing=False)
    model.config.pad_token_id = 0
    return model


def inputs(added: int = 0) -> Tensor:
    tokens = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(1))
    tokens[:, 2:6] = torch.tensor([3, 7, 9, ROWS + added - 1])
    return tokens


def values(result: Any) -> Tensor:
    return result.logits if "logits" in result else result.last_hidden_state


def out(model: Any, added: int = 0) -> Tensor:
    with torch.no_grad():
        return values(model.eval()(input_ids=inputs(added)))


def train(model: Any, added: int = 0, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, **{"target_modules": ["q_proj"], **settings})
        adapted = moe_qlora.get_peft_model(model, config, experts=True)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        values(adapted(input_ids=inputs(added))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted


def save(adapted: Any, folder: Path, **settings: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder, **settings)
    return folder


def merged(source: Path, adapter: Path, folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    moe_qlora.merge_adapter(source, adapter, folder, like_training=True)
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    model.config.pad_token_id = 0
    return model


# Each with or without tied weights, half of them with added tokens; where both ways differ, both.
@pytest.mark.parametrize(
    ("tied", "trained", "added"),
    [(number % 4 > 1, trained, ADDED * (number % 2)) for number, trained in enumerate(TRAINED)]
    + [(False, "both", ADDED), (True, "rows of both", ADDED)],
)
def test_added_tokens(tied: bool, trained: str, added: int, tmp_path: Path) -> None:
    source = base(tmp_path / "base", "qwen3_moe", tie_word_embeddings=tied)
    adapted = train(load(source, added=added), added, **TRAINED[trained])
    expected = out(adapted, added)
    adapter = save(adapted, tmp_path / "adapter", save_embedding_layers=True)
    for read in (PeftModel.from_pretrained, moe_qlora.load_adapter):
        assert torch.equal(out(read(load(source, added=added), adapter), added), expected)
    again = read(load(source, added=added), adapter, is_trainable=True)
    again.load_adapter(adapter, "default", is_trainable=True)  # as Trainer goes on
    assert torch.equal(out(again, added), expected)
    model = merged(source, adapter, tmp_path / "merged")
    torch.testing.assert_close(out(model, added), expected, atol=1e-5, rtol=0)
    assert model.config.vocab_size == ROWS + added
    assert model.config.tie_word_embeddings == (tied and trained not in UNTIED)


UNTIED = {"embeddings", "head", "both", "rows of both", "rows of the head"}


def test_a_vocabulary_that_is_not_all_in_the_adapter(tmp_path: Path) -> None:
    source = base(tmp_path / "base", "qwen3_moe")
    adapted = train(load(source, added=ADDED), target_modules=["q_proj", "embed_tokens"])
    adapter = save(adapted, tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"embed_tokens.weight: 135 rows, lm_head.weight: 128"):
        moe_qlora.merge_adapter(source, adapter, tmp_path / "out")


@pytest.mark.parametrize(("labels", "tied"), [(1, True), (3, False)])
def test_a_reward_models_head(labels: int, tied: bool, tmp_path: Path) -> None:
    source = base(tmp_path / "base", "mixtral", tie_word_embeddings=tied)
    kind = AutoModelForSequenceClassification
    adapted = train(load(source, kind, num_labels=labels), task_type="SEQ_CLS")
    adapter, expected = save(adapted, tmp_path / "adapter"), out(adapted)
    model = merged(source, adapter, tmp_path / "merged", kind)
    assert model.config.num_labels == labels
    assert "lm_head.weight" not in tensors(tmp_path / "merged")
    torch.testing.assert_close(out(model), expected, atol=1e-5, rtol=0)


def test_experts_that_bitsandbytes_packed_one_by_one(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "qwen3_moe")
    stored: dict[str, Tensor] = {}
    for key, weight in tensors(folder).items():
        stored[key] = weight
        if key.endswith("proj.weight"):
            stored[key], state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
            stored |= {f"{key}.{end}": part for end, part in state.as_dict(packed=True).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_json(folder / "config.json", quantization_config=NF4.to_dict())
    sentence = r"has experts that bitsandbytes packed one by one \(model\.layers\.\d\.mlp\.experts"
    with moe_qlora.enabled(), pytest.raises(UnsupportedWeightError, match=sentence):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UnsupportedWeightError, match=sentence):
        moe_qlora.plan(folder)
    (problem,) = verify(folder).problems
    assert re.search(sentence, problem)


def test_the_adapters_tokenizer_wins(tmp_path: Path) -> None:
    source = base(tmp_path / "base", "qwen3_moe")
    adapter = save(train(load(source)), tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "notes.txt"):
        (source / name).write_text(json.dumps({"of": "base"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (adapter / name).write_text(json.dumps({"of": "adapter"}))
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    report = moe_qlora.merge_adapter(source, adapter, tmp_path / "out")
    copied = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {*report.from_adapter} == copied | {"generation_config.json"}
    assert all(name in str(report) for name in copied)
    for name in report.from_adapter:
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    assert (tmp_path / "out" / "notes.txt").is_file()
    assert not (tmp_path / "out" / "added_tokens.json").exists()


@pytest.fixture(scope="module", params=["qwen3_5_moe", "llama4"])
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "base"
    tiny_model(request.param, seed=1).save_pretrained(folder)
    return folder


def with_adapter(model: Any, *, packed: bool = True) -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if packed:
        model = moe_qlora.get_peft_model(model, config, experts=True)
    else:
        config.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(model, config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_an_adapter_of_the_text_model_is_merged_into_all_of_it(images: Path, tmp_path: Path):
    text = AutoModelForCausalLM.from_pretrained(images, dtype=torch.float32)
    assert type(text).__name__.endswith("ForCausalLM")
    before, model = out(text), with_adapter(text, packed=False)
    model.save_pretrained(tmp_path / "adapter")
    wanted = out(model)
    assert (wanted - before).abs().max() > 1e-2
    places = images, tmp_path / "adapter", tmp_path / "merged"
    moe_qlora.merge_adapter(*places, dtype=torch.float32)
    with pytest.raises(moe_qlora.AdapterError, match="does not fit the base"):
        moe_qlora.export_adapter(
            tmp_path / "adapter", tmp_path / "served", base=images, target="peft"
        )
    keys = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    configs = [json.loads((f / "config.json").read_text()) for f in (images, tmp_path / "merged")]
    assert configs[0].keys() - keys == configs[1].keys() - keys
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        if auto is AutoModelForImageTextToText:
            skip_llama4(images.parent.name.removesuffix("0"))  # the number of mktemp
        torch.testing.assert_close(out(merged), wanted, rtol=1e-4, atol=1e-5)


def test_a_packed_folder_says_how_it_is_loaded(images: Path, tmp_path: Path):
    moe_qlora.quantize_checkpoint(images, tmp_path / "packed", NF4)
    with pytest.raises(ValueError, match=r"holds a packed .*ForConditionalGeneration: load it"):
        loaded(tmp_path / "packed", None)
    model = loaded(tmp_path / "packed", None, AutoModelForImageTextToText)
    assert "transformers_weights" not in vars(model.config.text_config)
    assert verify(tmp_path / "packed").good
    model = with_adapter(model)
    model.save_pretrained(tmp_path / "adapter")
    moe_qlora.merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    assert "transformers_weights" not in (tmp_path / "merged" / "config.json").read_text()
    model.unload().save_pretrained(tmp_path / "again")
    assert verify(tmp_path / "again").good
