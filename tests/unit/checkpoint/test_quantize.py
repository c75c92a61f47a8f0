"""Packing a checkpoint from disk to disk: interruptions, refusals, memory, the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import check_folder, contents, set_json
from safetensors.torch import load_file, save_file
from training import NF4, loaded
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

import moe_qlora
from moe_qlora.checkpoint.conversion import make_group
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import MoeQloraError
from moe_qlora.testing import tiny_model

SHARD = "24KB"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "qwen3_moe"
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    model.save_pretrained(path, max_shard_size="40KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.bin").write_text("a pickle, so to speak")
    return path


def pack(source: Path, out: Path) -> Any:
    return moe_qlora.quantize_checkpoint(source, out, NF4, max_shard_size=SHARD)


def dense(path: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_the_folder_is_complete(source, tmp_path):
    manifest = pack(source, tmp_path / "packed")
    whole = contents(tmp_path / "packed")
    assert verify(tmp_path / "packed").good
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(whole)
    assert "model.bin" not in whole and len(manifest.shards) > 1
    assert set(manifest.shards) == {name for name in whole if name.endswith(".safetensors")}


def test_other_dtypes(source: Path, tmp_path: Path) -> None:
    moe_qlora.quantize_checkpoint(source, tmp_path / "half", NF4, dtype=torch.float16)
    packed = loaded(tmp_path / "half", None, dtype="auto")
    reference = loaded(source, dtype=torch.float16)
    ids = torch.arange(5)[None]
    assert packed.dtype == torch.float16
    assert torch.equal(packed(ids).logits, reference(ids).logits)


def asked(config: Any = NF4, **options: Any) -> Callable[[Path, Path], Any]:
    return lambda source, out: moe_qlora.quantize_checkpoint(source, out, config, **options)


SKIPS = NF4 | {"llm_int8_skip_modules": ["experts"]}
UNPACKED = "qwen3_moe: .* or llm_int8_skip_modules leaves all of them unpacked"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, o: pack(s, s), "exists and is no empty folder"),
        (lambda s, o: pack(s / "no", o), "is no folder: name one"),
        (
            lambda s, o: pack(dense(o.parent / "dense"), o),
            "dense: a LlamaForCausalLM has no expert",
        ),
        (asked(config={}), "neither 4 nor 8 bit"),
        (asked(config=4), "config is of the method 'int'"),
        (asked(config=SKIPS), UNPACKED),
        (asked(device="x"), "device is 'x'"),
        (asked(max_shard_size="much"), "max_shard_size"),
    ],
)
def test_refusals(source: Path, tmp_path: Path, call: Any, message: str) -> None:
    with pytest.raises(MoeQloraError, match=message):
        call(source, tmp_path / "o")
    assert not (tmp_path / "o").exists()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("tied", "stored"), [(True, (EMBEDDING,)), (True, (EMBEDDING, HEAD)), (False, ())]
)
def test_a_tied_weight_is_written_once(tmp_path: Path, tied: bool, stored: tuple[str, ...]) -> None:
    """Unless the checkpoint holds two that differ: transformers does not tie these."""
    model: Any = tiny_model("granitemoe", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "plain")
    file, config = (tmp_path / "plain" / name for name in ("model.safetensors", "config.json"))
    tensors = load_file(file)
    for name in stored:
        tensors[name] = tensors[EMBEDDING].clone()
    save_file(tensors, file, {"format": "pt"})
    set_json(config, tie_word_embeddings=True)
    moe_qlora.quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", NF4)
    written = {EMBEDDING, HEAD} & check_folder(tmp_path / "packed").tensors.keys()
    assert written == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    packed = loaded(tmp_path / "packed", None, dtype="auto")
    assert torch.equal(packed.model.embed_tokens.weight, tensors[EMBEDDING])
    assert torch.equal(packed.lm_head.weight, tensors[EMBEDDING if tied else HEAD])
    assert verify(tmp_path / "packed", tmp_path / "plain").good


def test_what_is_not_known_to_keep_experts_apart_is_converted_as_a_whole() -> None:
    experts, inner = 5, 6
    shapes = {"w": (experts, 2, inner)}
    halves = {"w.a": (experts, 1, inner), "w.b": (experts, 1, inner)}
    sources = {"a": ("w.a",), "b": ("w.b",)}
    within = WeightConverter(["a", "b"], ["w"], [Concatenate(dim=1)])
    across = WeightConverter(["a", "b"], ["w"], [Concatenate(dim=0)])
    assert make_group("w", within, sources, shapes, halves).unit == "row"
    assert make_group("w", across, sources, shapes, halves).unit == ""
    turned = WeightConverter(["a"], ["w"], [Transpose(0, 1)])
    square: dict[str, Any] = {"w": (experts, experts, inner)}
    stored = {"w.a": (experts, experts, inner)}
    assert make_group("w", turned, {"a": ("w.a",)}, square, stored).unit == ""
