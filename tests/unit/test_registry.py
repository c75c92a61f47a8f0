"""The registry's reader: data, layouts, errors, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_qlora import registry
from moe_qlora.errors import CheckpointError

FOLDER = Path(__file__).parents[2] / "model_registry"


def test_types_are_the_files():
    assert registry.model_types() == tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@pytest.mark.parametrize("model_type", registry.model_types())
def test_each_file_loads(model_type):
    entry = registry.load(model_type)
    assert entry.model_type == model_type
    assert entry.params
    assert all(param.checkpoint_keys for param in entry.params)
    for sizes in ("tiny", "published"):
        layout = registry.layout(model_type, sizes)
        names = [param.name for param in layout]
        assert len(names) == len(set(names))
        assert [param for module in layout.modules for param in module.parameters] == [*layout]


def test_reading_imports_no_torch():
    code = (
        "import sys; from moe_qlora import registry; registry.layout('qwen3_moe');"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_qwen3_moe_by_hand():
    layout = registry.layout("qwen3_moe")
    gate_up, down = layout.experts[:2]
    assert gate_up.name == "model.layers.0.mlp.experts.gate_up_proj"
    assert (gate_up.shape, gate_up.num_experts) == ((128, 1536, 2048), 128)
    assert (gate_up.in_features, gate_up.out_features) == (2048, 1536)
    assert (down.in_features, down.out_features, down.transposed) == (768, 2048, False)
    assert len(layout) == 48
    assert layout.nbytes == 24 * 3 * 128 * 768 * 2048 * 2
    assert registry.layout("qwen3_moe", dtype="float32").nbytes == 2 * layout.nbytes
    assert layout.modules[0].router.name == "model.layers.0.mlp.gate.weight"
    assert registry.load("qwen3_moe").params[0].checkpoint_keys == (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    )


def test_gpt_oss_by_hand():
    layout = registry.layout("gpt_oss", "tiny")
    gate_up, down = layout.experts[:2]
    assert gate_up.transposed is True
    assert (gate_up.in_features, gate_up.out_features) == (64, 192)
    assert (down.in_features, down.out_features) == (96, 64)
    param = registry.load("gpt_oss").params[0]
    assert (param.interleaved, param.gated) == (True, True)
    assert layout.modules[0].bias_names == ("gate_up_proj_bias", "down_proj_bias")


def test_experts_along_rows():
    param = registry.layout("dbrx", "tiny").experts[0]
    assert (param.shape, param.num_experts) == ((384, 64), 4)
    assert (param.in_features, param.out_features) == (64, 96)


def test_tied_experts_have_one_entry():
    layout = registry.layout("diffusion_gemma", "tiny")
    assert len(layout) == 4
    assert layout.find("model.decoder.layers.1.experts.down_proj") is layout.experts[3]
    assert registry.load("diffusion_gemma").tied


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("3", [(3,)]),
        ("0-2,5", [(0,), (1,), (2,), (5,)]),
        ("0.1,2.10", [(0, 1), (2, 10)]),
    ],
)
def test_indices(text, numbers):
    assert list(registry._indices(text)) == numbers


def test_unknown_type():
    with pytest.raises(CheckpointError, match="'llama' is not in the registry"):
        registry.load("llama")
    with pytest.raises(CheckpointError, match="not in the registry"):
        registry.load("../pyproject")
    with pytest.raises(CheckpointError, match="dtype 'int3'"):
        registry.layout("mixtral", dtype="int3")


def spoiled(**changes):
    return json.dumps({**json.loads((FOLDER / "mixtral.json").read_text("utf-8")), **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "format_version 'list'"),
        (spoiled(format_version=99), "format_version 99"),
        (spoiled(experts=[{}]), "damaged"),
        (spoiled(experts=None), "damaged"),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_damaged_file(content, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        registry.parse(content, "some.json")
    assert "some.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_count_is_damage():
    data = json.loads((FOLDER / "mixtral.json").read_text("utf-8"))
    data["experts"][0]["tiny"]["count"] += 1
    with pytest.raises(CheckpointError, match="are counted"):
        registry.parse(json.dumps(data), "mixtral.json")


def test_entries_do_not_leak_into_each_other():
    from moe_qlora.testing import tiny_config

    config = tiny_config("qwen4_exp", text_config={"num_experts": 6})
    assert config.text_config.num_experts == 6
    assert config.text_config.hidden_size == 64
    assert tiny_config("qwen4_exp").text_config.num_experts == 4
