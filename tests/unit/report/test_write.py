"""The page: what it says of folders, runs and live models, and what it says it lacks."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.errors import CheckpointError, ConfigError
from moe_qlora.report.write import expert_counts
from moe_qlora.testing import tiny_model

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
LAYERS, EXPERTS, TOP_K = 3, 8, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/, packed/, run/ with an adapter and a log, and sample.jsonl."""
    root = tmp_path_factory.mktemp("report")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tiny_model(
        "qwen3_moe", dtype=torch.bfloat16, vocab_size=300, num_hidden_layers=LAYERS,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K,
    ).save_pretrained(root / "plain")  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "plain")
    moe_qlora.quantize_checkpoint(root / "plain", root / "packed", NF4)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "packed")
    adapted = moe_qlora.get_peft_model(
        load(root / "packed"), LoraConfig(r=4, target_modules=["q_proj"]), experts=True
    )
    adapted.save_pretrained(root / "run/checkpoint-4", save_embedding_layers=False)
    history = [
        {"step": step, "loss": 3.0 - step / 10, "tokens_per_second": 100.0 + step}
        for step in range(1, 5)
    ]
    log = {"log_history": [*history, {"step": 4, "train_loss": 2.75, "eval_loss": float("nan")}]}
    (root / "run/checkpoint-4/trainer_state.json").write_text(json.dumps(log))
    rows = [{"text": f"Row {number} of a sample"} for number in range(4)]
    (root / "sample.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def load(folder: Path) -> Any:
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(folder)


def page_of(source: Any, out: Path, **options: Any) -> tuple[str, tuple[str, ...]]:
    missing = moe_qlora.write_report(source, out / "page.html", **options)
    return (out / "page.html").read_text(encoding="utf-8"), missing


def pictures(page: str) -> list[str]:
    return re.findall(r'src="data:image/png;base64,iVBOR[^"]+" alt="([^"]+)"', page)


def test_a_packed_folder_with_its_source_and_a_text(folders: Path, tmp_path: Path) -> None:
    page, missing = page_of(
        folders / "packed", tmp_path, against=folders / "plain", text=folders / "sample.jsonl"
    )
    assert missing == ("Training",)
    assert "Packed as nf4." in page and "<td>experts</td>" in page
    assert "model.layers.*.mlp.experts.gate_up_proj" in page and "9." in page  # % of error
    assert f"{4 * len('Row 0 of a sample')} tokens of 4 texts" in page
    assert pictures(page) == ["packing error by layer", "use of experts by layer"]
    assert "<script" not in page and "http" not in page


def test_a_run(folders: Path, tmp_path: Path) -> None:
    page, missing = page_of(folders / "run", tmp_path)
    assert missing == ("Packing error", "Routing")
    assert "<td>loss</td><td>2.9</td><td>2.6</td>" in page
    assert "<td>tokens_per_second</td><td>101</td><td>104</td>" in page
    assert pictures(page) == ["loss by step", "speed by step"]


def test_counts_are_those_of_the_routers(folders: Path, tmp_path: Path) -> None:
    """A live model keeps its mode; its counts are those of its routers' own answers."""
    model = load(folders / "packed").train()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "plain")
    tokenizer.chat_template = "{{ messages[0].content }}"
    texts = ["one text", [{"role": "user", "content": "and another"}]]
    page, missing = page_of(model, tmp_path, text=texts, tokenizer=tokenizer)
    assert missing == ("Packing error", "Training") and model.training
    assert f"{len('one textand another')} tokens of 2 texts" in page
    seen: list[Counter[int]] = [Counter() for _ in model.model.layers]
    for layer, count in zip(model.model.layers, seen, strict=True):
        layer.mlp.gate.register_forward_hook(
            lambda gate, args, out, count=count: count.update(out[-1].flatten().tolist())
        )
    with torch.no_grad(), expert_counts(model.eval()) as counts:
        model(input_ids=torch.tensor([tokenizer("one text")["input_ids"]]))
    for layer, count in enumerate(seen):
        found = counts[f"model.layers.{layer}.mlp.experts"].tolist()
        assert found == [*(count[expert] for expert in range(EXPERTS)), 0]


def test_what_cannot_be_had_is_a_sentence(folders: Path, tmp_path: Path) -> None:
    for source, options, error, words in (
        (tmp_path, {}, CheckpointError, "holds no checkpoint, adapter or Trainer's run"),
        (3, {}, ConfigError, "source is a int"),
        (folders / "plain", {"text": "gone.jsonl"}, ConfigError, "text is gone.jsonl"),
        (folders / "plain", {"max_tokens": 0}, ConfigError, "max_tokens is 0"),
    ):
        with pytest.raises(error, match=words):
            page_of(source, tmp_path, **options)
    with pytest.raises(ConfigError, match=r"no \.html file"):
        moe_qlora.write_report(folders / "plain", folders / "sample.jsonl")
    bad = tmp_path / "rows.jsonl"
    bad.write_text('{"other": 1}\n')
    page, missing = page_of(folders / "packed", tmp_path, text=bad)
    assert "rows.jsonl is no sample of texts" in page and "Routing" in missing


def test_the_command(cli: Any, folders: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, said, err = cli("report", folders / "plain", "-o", "~/a.html", "--quant", "int8")
    assert (code, err) == (0, "") and "Packed as int8" in (tmp_path / "a.html").read_text()
    left = "KiB; left out: packing error, routing, training (the page says why)."
    assert said.startswith(f"{tmp_path}/a.html: ") and said.endswith(f"{left}\n")
    for arguments, message in (
        (["gone", "-o", tmp_path / "b.html"], "gone"),
        ([folders / "plain", "-o", folders], "no .html file that can be written"),
    ):
        code, said, err = cli("report", *arguments)
        assert (code, said) == (2, "") and message in err and err.count("\n") == 1
    assert not (tmp_path / "b.html").exists()


def test_names_are_escaped_and_old_arguments_warn(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", device="meta").config.save_pretrained(tmp_path / "<script>x")
    with pytest.warns(DeprecationWarning, match="batch, seq and progress are ignored"):
        page, _ = page_of(tmp_path / "<script>x", tmp_path, quantization_config=NF4, seq=64)
    assert "<script" not in page and "&lt;script&gt;x" in page
