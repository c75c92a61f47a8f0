"""Adapters in the layouts of servers: what is written, that it loads back, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from small_models import fill, logits
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.errors import AdapterError, ConfigError
from moe_qlora.serving.export import servers
from moe_qlora.testing import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`"),
    pytest.mark.filterwarnings("ignore:stock PEFT rewrites the target_modules"),
    pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor"),
    pytest.mark.filterwarnings("ignore:.*experts of this model are not packed"),
]
SINGLE = ("gate_proj", "up_proj", "down_proj")
# One whose server wants fused experts, and three with other names and orders of single ones
FAMILIES = {
    "qwen3_moe": ("model.layers.0.mlp.experts", SINGLE),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "granitemoe": ("model.layers.0.block_sparse_moe.experts", SINGLE),
    "gpt_oss": ("model.layers.0.mlp.experts", ()),
}


def experts_of(model: Any) -> list[str]:
    return [param.name for param in moe_qlora.detect(model)]


def trained(model: Any, folder: Path, **settings: Any) -> Any:
    """An adapter with random factors on all experts and two layers, saved; and its model."""
    settings.setdefault("target_parameters", experts_of(model))
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], **settings}
    peft_model = moe_qlora.get_peft_model(model, LoraConfig(**settings), unpacked_ok=True)
    fill(peft_model).save_pretrained(folder, save_embedding_layers=False)
    return peft_model.eval()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        tiny_model(family, initializer_range=0.2).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def adapters(bases: dict[str, Path]) -> dict[str, tuple[Path, torch.Tensor]]:
    """Adapter folders, and the logits of their models."""
    folders = {family: base.with_name(f"{family} adapter") for family, base in bases.items()}
    return {k: (to, logits(trained(load(bases[k]), to))) for k, to in folders.items()}


def export(folder: Path, base: Path, target: str) -> tuple[Path, str]:
    """Export an adapter; return the folder beside it, and what the report says."""
    out = folder.parent / "out"
    return out, str(moe_qlora.export_adapter(folder, out, base=base, target=target))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


UNSEEN = {("gguf", "granitemoe"), ("gguf", "gpt_oss")}
ALONE = {
    *(("sglang", "granitemoe"), ("sglang", "gpt_oss"), ("sglang", "mixtral")),
    ("vllm", "granitemoe"),
}


@pytest.mark.parametrize("server", servers())
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_of_fused_experts_and_those_that_peft_fuses_load_back(
    family: str, server: str, bases: dict[str, Path], adapters: Any, tmp_path: Path
) -> None:
    folder, expected = adapters[family]
    out, call = tmp_path / "out", {"base": bases[family], "target": server}
    if (server, family) in UNSEEN:
        with pytest.raises(ConfigError, match=r"was not seen to serve .* moe-qlora merge"):
            moe_qlora.export_adapter(folder, out, **call)
        assert not out.exists()
        return
    moe_qlora.export_adapter(folder, out, **call)
    if (server, family) in ALONE:
        single = r"out was trained on .* single experts \(\S+\.experts\.0\.\w+\.lora_A\.weight\)"
        with pytest.raises(AdapterError, match=rf"{single}, and this model .*: merge it with"):
            moe_qlora.load_adapter(load(bases[family]), str(out))
        with pytest.raises(AdapterError, match=single):
            moe_qlora.merge_adapter(bases[family], out, tmp_path / "merged")
        return
    again = moe_qlora.load_adapter(load(bases[family]), str(out))
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_single_experts_hold_the_products_of_the_fused_weight(family, bases, adapters, tmp_path):
    """By the definition: expert e's B A, cut from the fused weight's, row by row."""
    folder, _ = adapters[family]
    server = "vllm" if family != "gpt_oss" else "sglang"
    moe_qlora.export_adapter(folder, tmp_path / "out", base=bases[family], target=server)
    written, source = tensors(tmp_path / "out"), tensors(folder)
    path, leaves = FAMILIES[family]
    gate, up, down = leaves or SINGLE
    own = f"base_model.model.{experts_of(load(bases[family]))[0].rpartition('.')[0]}"
    outer_a, outer_b = (source[f"{own}.lora_{h}.weight"] for h in "AB")
    inner_a, inner_b = (source[f"{own}.base_layer.lora_{h}.weight"] for h in "AB")
    experts = len(outer_a) // 4
    for expert in range(experts):
        rows = slice(expert * 4, expert * 4 + 4)
        fused = inner_b[:, expert::experts] @ inner_a[rows]
        halves = (fused[::2], fused[1::2]) if family == "gpt_oss" else fused.chunk(2)
        wanted = (*halves, outer_b[:, expert::experts] @ outer_a[rows])
        for leaf, product in zip((gate, up, down), wanted, strict=True):
            key = f"base_model.model.{path}.{expert}.{leaf}"
            a, b = (written[f"{key}.lora_{half}.weight"] for half in "AB")
            torch.testing.assert_close(b @ a, product)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 2 and not config["target_parameters"]
    assert {gate, up, down, "q_proj", "o_proj"} <= set(config["target_modules"])


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
def test_ranks_and_scalings_are_made_alike(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["qwen3_moe"]
    model = trained(
        load(base), tmp_path / "adapter", rank_pattern={"q_proj": 3, r".*\.down_proj": 7},
        alpha_pattern={"o_proj": 4}, use_rslora=True,
    )  # fmt: skip
    out, said = export(tmp_path / "adapter", base, "vllm")
    assert "rank 7" in said and "padded to 7" in said and "folded into B" in said
    for key, value in tensors(out).items():
        assert value.shape[0 if "lora_A" in key else 1] == 7, key
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert not config["rank_pattern"] and not config["alpha_pattern"] and not config["use_rslora"]
    again = moe_qlora.load_adapter(load(base), str(tmp_path / "out"))
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LEFT_OUT: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_moe", "vllm", {"target_parameters": ["down_proj"]}),
    ("gpt_oss", "vllm", {"target_parameters": ["down_proj"]}),
    ("qwen3_moe", "vllm", {"exclude_modules": r".*layers\.1\.self_attn\.(q|k|o)_proj"}),
    ("qwen3_moe", "sglang", {"layers_to_transform": [1]}),
]


@pytest.mark.parametrize(("family", "server", "scope"), LEFT_OUT)
def test_what_an_adapter_leaves_out_is_zeros_where_a_server_wants_all_and_loads_back(
    family: str, server: str, scope: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(load(bases[family]), tmp_path / "adapter", target_modules=LINEARS, **scope)
    out, said = export(tmp_path / "adapter", bases[family], server)
    assert ("its engine was not run" in said) is (server == "sglang")
    blank = [key for key, value in tensors(out).items() if not value.any()]
    if "target_parameters" in scope:  # vLLM asserts that all projections of all experts are there
        assert blank and all("gate" in key or "up" in key or "base_layer" in key for key in blank)
    again = moe_qlora.load_adapter(load(bases[family]), str(out))
    torch.testing.assert_close(logits(again), logits(model))


OFFER = r"merge the adapter with moe-qlora merge and serve the merged folder\.$"
REFUSED = [  # model, server, what is trained, error, words
    ("qwen3_moe", "vllm", {"modules_to_save": ["lm_head"]}, AdapterError,
     rf"lm_head\.weight, which is trained in full.*{OFFER}"),
    ("qwen3_moe", "tgi", {}, ConfigError, r"target is 'tgi'; give one of vllm, sglang"),
    ("qwen2_moe", "vllm", {"target_modules": ["shared_expert_gate"]}, AdapterError,
     rf"shared_expert_gate.*is not served.*{OFFER}"),
    ("deepseek_v2", "gguf", {"target_modules": ["lm_head"]}, AdapterError,
     rf"lm_head.*is not served.*{OFFER}"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "server", "settings", "error", "words"), REFUSED)
def test_what_servers_do_not_take_is_refused(family, server, settings, error, words, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "base")
    trained(load(tmp_path / "base"), tmp_path / "adapter", **settings)
    with pytest.raises(error, match=words):
        export(tmp_path / "adapter", tmp_path / "base", server)
    assert not (tmp_path / "out").exists()
