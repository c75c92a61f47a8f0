"""The page: what it says of folders, runs and live models, and what it says it lacks."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training import NF4, loaded, lora
from transformers import PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.errors import CheckpointError, ConfigError
from moe_qlora.layout import human_bytes
from moe_qlora.testing import tiny_model
from tools.bench.shapes import write_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/, packed/, run/ with an adapter and a log, and sample.jsonl."""
    root = tmp_path_factory.mktemp("report")
    sizes = {"vocab_size": 300, "num_hidden_layers": 3, "num_experts": 8}
    tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes).save_pretrained(root / "plain")
    moe_qlora.quantize_checkpoint(root / "plain", root / "packed", NF4)
    for name in ("plain", "packed"):
        write_tokenizer(root / name)
    checkpoint = root / "run/checkpoint-4"
    lora(load(root / "packed"), "q_proj").save_pretrained(checkpoint, save_embedding_layers=False)
    history: list[dict[str, float]] = [
        {"step": step, "loss": 3.0 - step / 10, "memory/max_active (GiB)": 1.0} for step in range(4)
    ]
    history.append({"step": 4, "train_loss": 2.75, "eval_loss": float("nan")})
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    rows = [{"text": f"Row {number} of a sample"} for number in range(4)]
    (root / "sample.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def load(folder: Path) -> Any:
    return loaded(folder, None, dtype="auto")


def page_of(source: Any, out: Path, **options: Any) -> tuple[str, tuple[str, ...]]:
    missing = moe_qlora.write_report(source, out / "page.html", **options)
    return (out / "page.html").read_text(encoding="utf-8"), missing


def pictures(page: str) -> list[str]:
    return re.findall(r'src="data:image/png;base64,iVBOR[^"]+" alt="([^"]+)"', page)


def test_a_packed_folder_with_its_source_and_a_text(folders: Path, tmp_path: Path) -> None:
    page, missing = page_of(
        folders / "packed", tmp_path, against=folders / "plain", text=folders / "sample.jsonl"
    )
    assert missing == ("Training",) and "<script" not in page and "http" not in page
    made = moe_qlora.plan(folders / "packed")
    sizes = f"{human_bytes(made.unpacked)} before, {human_bytes(made.resident)} after."
    assert f"<p>Packed as nf4: {sizes}</p>" in page
    experts = r"<td>model\.layers\.\*\.mlp\.experts\.gate_up_proj</td>"
    assert re.search(rf"{experts}<td>gate_up</td><td>\(8, .*\)</td><td>nf4</td><td>3</td>", page)
    assert re.search(rf"{experts}<td>\d\.\d\d%</td><td>1?\d\.\d\d%</td>", page)
    assert f"{4 * len('Row 0 of a sample')} tokens of 4 texts" in page
    assert pictures(page) == ["use of experts by layer"]


def test_a_run(folders: Path, tmp_path: Path) -> None:
    page, missing = page_of(folders / "run", tmp_path)
    assert missing == ("Packing error", "Routing") and "Packed as nf4" in page
    assert "&#39;q_proj&#39;" in page and "mlp.experts.down_proj" in page
    assert pictures(page) == ["loss, memory/max_active (GiB), train_loss, eval_loss by step"]


def test_a_live_model_keeps_its_mode(folders: Path, tmp_path: Path) -> None:
    model = load(folders / "packed").train()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "plain")
    tokenizer.chat_template = "{{ messages[0].content }}"
    texts = ["one text", [{"role": "user", "content": "and another"}]]
    page, missing = page_of(model, tmp_path, text=texts, tokenizer=tokenizer)
    assert missing == ("Packing error", "Training") and model.training
    assert f"{len('one textand another')} tokens of 2 texts" in page


def test_refusals(folders: Path, tmp_path: Path) -> None:
    plain, rows = folders / "plain", tmp_path / "rows.jsonl"
    rows.write_text('{"other": 1}\n')
    for source, options, error, words in (
        (tmp_path, {}, CheckpointError, "holds no checkpoint, adapter or Trainer's run"),
        (3, {}, ConfigError, "model is a int"),
        (plain, {"text": "gone.jsonl"}, ConfigError, "text is gone.jsonl"),
        (plain, {"text": [""]}, ConfigError, "text has no tokens"),
        (plain, {"text": rows}, CheckpointError, "rows.jsonl cannot be read: 'messages'"),
        (plain, {"max_tokens": 0}, ConfigError, "max_tokens is 0"),
        (plain, {"against": plain}, CheckpointError, "was not packed by moe_qlora"),
    ):
        with pytest.raises(error, match=words):
            page_of(source, tmp_path, **options)
    assert not (tmp_path / "page.html").exists()


def test_the_command(cli: Any, folders: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folders / "plain", tmp_path / "<script>x")
    code, said, err = cli("report", tmp_path / "<script>x", "-o", "~/a.html", "--quant", "int8")
    page = (tmp_path / "a.html").read_text()
    assert (code, err) == (0, "") and "Packed as int8" in page
    assert "<script" not in page and "&lt;script&gt;x" in page
    left = "KiB, without packing error (--against), routing (--text), training (a Trainer's run)."
    assert said.startswith(f"{tmp_path}/a.html: ") and said.endswith(f"{left}\n")
    assert "no .html file that can be written" in cli("report", "qwen3_moe", "-o", folders)[2]
    code, said, err = cli("report", folders / "plain", "-o", "/proc/a.html")
    assert (code, said, err.count("\n")) == (2, "", 1) and "which cannot be written" in err
