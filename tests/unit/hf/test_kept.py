"""gpt-oss folders whose experts keep their MXFP4 codes: load, save, reload, merge, train."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.checkpoint.manifest import read_manifest
from moe_qlora.checkpoint.verify import verify
from moe_qlora.packing import codec, parametrize
from moe_qlora.testing import tiny_inputs
from tests.helpers import training
from tests.helpers.plans import plan
from tests.helpers.prequantized import write_both
from tests.helpers.training import adapted, loaded, train

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 3}
NF4 = {**training.NF4, "bnb_4bit_compute_dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`maker`, as gpt-oss is shipped, and `plain`, the bf16 folder that it stands for."""
    root = tmp_path_factory.mktemp("gpt_oss")
    return write_both(root, "gpt_oss mxfp4", shards=1, **SIZES)


def load(folder: Any, keep_codes: bool = True) -> Any:
    with moe_qlora.enabled(keep_codes=keep_codes):
        return loaded(folder, NF4, dtype="auto")


@pytest.fixture(scope="module")
def kept(folders):
    return load(folders / "maker")


@pytest.fixture(scope="module")
def saved(kept, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "packed"
    kept.save_pretrained(folder, max_shard_size="100KB")
    return folder


def experts_of(tensors) -> set[str]:
    return {key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))}


def packed_of(model) -> dict[str, Any]:
    return {
        f"{module_name}.{name}": parametrize.read_packed(module, name)
        for module_name, module, name in parametrize.iter_packed(model)
    }


def test_codes_are_those_of_the_folder(folders, monkeypatch):
    monkeypatch.setattr("moe_qlora.hf.fill.SLICE_BYTES", 1)
    kept = load(folders / "maker")
    expected = load_file(folders / "plain" / "model.safetensors")
    weights = packed_of(kept)
    assert weights.keys() == experts_of(expected)
    for name, packed in weights.items():
        assert packed.kind == "mxfp4" and packed.stored_transposed
        assert torch.equal(codec.unpack(packed), expected[name])
        assert torch.equal(kept.get_parameter(f"{name}_bias"), expected[f"{name}_bias"])
    assert kept.quantization_method == "bitsandbytes" and kept.is_loaded_in_4bit
    assert kept.config.quantization_config.bnb_4bit_quant_type == "nf4"


def test_what_has_no_codes_to_keep_is_packed_anew(folders):
    with pytest.warns(UserWarning, match="keep_codes=True: the checkpoint holds no experts in MX"):
        model = load(folders / "plain")
    assert {packed.kind for packed in packed_of(model).values()} == {"nf4"}


def test_counts_bytes_and_plans(folders, kept, saved):
    nf4 = load(folders / "maker", keep_codes=False)
    weights = packed_of(kept).values()
    constants = 4 * (16 + 256 + 2) * len(weights)
    experts = sum(packed.nbytes for packed in weights)
    assert experts == sum(packed.numel for packed in weights) * 17 // 32 + constants
    others = nf4.get_memory_footprint() - sum(p.nbytes for p in packed_of(nf4).values())
    assert kept.get_memory_footprint() == others + experts
    bytes_of = partial(plan, seq=64, search=False)
    assert bytes_of(kept).resident == bytes_of(saved).resident == others + experts
    assert bytes_of(folders / "maker", BitsAndBytesConfig(**NF4)).resident < others + experts


def test_saves_and_reloads_bit_for_bit(folders, kept, saved):
    manifest = read_manifest(saved)
    assert manifest.version == 3 and manifest.codec["kind"] == "nf4"
    again = loaded(saved, None, dtype="auto")
    torch.testing.assert_close(kept.state_dict(), again.state_dict(), rtol=0, atol=0)
    for name, packed in packed_of(again).items():
        assert packed.kind == "mxfp4" and packed.dtype == torch.bfloat16
        assert packed.stored_transposed, name
    report = verify(saved, against=folders / "plain")
    assert report.good and report.kind == "mxfp4"
    experts = [weight for weight in report.errors if weight.expert]
    assert len(experts) == 4 and all(weight.relative == 0 for weight in experts)
    inputs = tiny_inputs(kept)
    with torch.no_grad():
        assert torch.equal(kept(**inputs).logits, again(**inputs).logits)


def test_merges(folders, kept, saved, tmp_path):
    """Experts are not rounded again; with like_training Linear layers are, as in training."""
    peft_model = adapted(copy.deepcopy(kept), ["q_proj", "o_proj"])
    ids = tiny_inputs(kept)["input_ids"]
    losses = train(peft_model, [ids, ids])
    assert losses[1] < losses[0]
    peft_model.save_pretrained(tmp_path / "lora")

    def merged(base: Path, like_training: bool = False) -> dict[str, torch.Tensor]:
        out = tmp_path / f"{base.name}, {like_training}"
        moe_qlora.merge_adapter(base, tmp_path / "lora", out, like_training=like_training)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
        return load_file(out / "model.safetensors")

    plain, exact = load_file(folders / "plain/model.safetensors"), merged(folders / "plain")
    linears = {key for key in plain if key.endswith(("q_proj.weight", "o_proj.weight"))}
    changed = {key for key in plain if not torch.equal(plain[key], exact[key])}
    assert changed == linears | experts_of(plain)
    rounded = {k for k in plain.keys() - experts_of(plain) if k.endswith("proj.weight")}
    for base, like, differ in (
        (folders / "maker", False, set()),
        (folders / "plain", True, rounded),
        (saved, False, rounded),
    ):
        found = merged(base, like)
        assert {key for key in exact if not torch.equal(found[key], exact[key])} == differ
