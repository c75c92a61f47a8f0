"""What reports read: folders, logs and texts, whole, odd and damaged."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments

from moe_qlora.errors import CheckpointError, ConfigError, MoeQloraError
from moe_qlora.report import routing as texts
from moe_qlora.report.measure import read_log
from moe_qlora.report.pieces import Missing
from moe_qlora.report.subject import RunSettings, read_settings, subject_of


def write(file: Path, value: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
    return file


def log(*entries: object, **more: object) -> dict[str, object]:
    return {"log_history": list(entries), "global_step": 3, "max_steps": 4, "epoch": 0.5} | more


def test_a_log(tmp_path):
    file = write(
        tmp_path / "trainer_state.json",
        log(
            {"step": 1, "loss": 2.5, "learning_rate": 1e-4},
            {"step": 2, "loss": float("nan")},
            {"step": 2, "eval_loss": 2.25},
            {"step": 3, "loss": 2.0},
            {"step": 1, "loss": 2.4},  # resumed
            train_batch_size=4,
        ),
    )
    piece = read_log(file)
    assert (piece.steps, piece.max_steps, piece.epochs, piece.batch) == (3, 4, 0.5, 4)
    assert piece.curve("loss").points == ((1.0, 2.4), (3.0, 2.0))
    assert piece.curve("loss").lost == (2.0,)
    assert piece.curve("eval_loss").points == ((2.0, 2.25),)
    assert piece.curve("grad_norm") is None


def test_curves_of_any_trainer(tmp_path):
    more = {f"rewards/{n:02}": n for n in range(30)}
    values = {"loss": 1.0, "kl": 0.5, "eval_kl": 0.25, "num_tokens": 9, "train_loss": 3, "x": "y"}
    entry = {"step": 1, "epoch": 1.0, "eval_runtime": 3.0, **more, **values}
    names = [curve.name for curve in read_log(write(tmp_path / "s.json", log(entry))).curves]
    assert names[:3] == ["loss", "eval_kl", "kl"]
    assert names[3:] == [f"rewards/{n:02}" for n in range(13)]


def test_what_is_no_number_of_a_curve(tmp_path):
    """Too large to draw, and true, which Python takes for 1."""
    entry = {"step": 1, "loss": 1e16, "grad_norm": -1e15, "done": True}
    piece = read_log(write(tmp_path / "s.json", log(entry, train_batch_size=True)))
    assert [curve.name for curve in piece.curves] == ["loss", "grad_norm"]
    assert (piece.curve("loss").points, piece.curve("loss").lost) == ((), (1.0,))
    assert piece.curve("grad_norm").points == ((1.0, -1e15),)
    assert piece.batch is None


def test_a_log_of_many_names_is_read_at_once(tmp_path):
    """As a step for each name is; name by name it took minutes."""
    names = [f"x{n:05}" for n in range(20_000)]
    file = write(tmp_path / "s.json", log(*({"step": 1, name: 1.0} for name in names)))
    start = time.process_time()
    assert [curve.name for curve in read_log(file).curves] == names[:16]
    name = "num_" + "tokens" * 20_000 + "\n"
    assert isinstance(read_log(write(file, log({"step": 1, name: 1.0}))), Missing)
    assert time.process_time() - start < 5


def test_a_run_without_losses_says_so(tmp_path):
    assert "logging_steps" in read_log(write(tmp_path / "s.json", log({"step": 1}))).why
    assert isinstance(read_log(None), Missing)


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"log_history": 3}', "\udcff"])
def test_a_damaged_log_is_named(tmp_path, content):
    file = tmp_path / "trainer_state.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        read_log(file)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
entries = st.lists(
    st.dictionaries(st.sampled_from(["step", "loss", "eval_loss", "x"]), json_values) | json_values,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(entries, json_values)
def test_any_log_is_read_or_refused_in_a_sentence(tmp_path_factory, history, other):
    file = tmp_path_factory.getbasetemp() / "any_state.json"
    write(file, {"log_history": history, "global_step": other, "epoch": other, "max_steps": other})
    try:
        piece = read_log(file)
    except MoeQloraError as error:
        said = str(error)
        assert str(file) in said
    else:
        curves = () if isinstance(piece, Missing) else piece.curves
        assert all(
            a[0] < b[0] for c in curves for a, b in zip(c.points, c.points[1:], strict=False)
        )


def test_folders_are_told_apart(tmp_path):
    write(tmp_path / "model/config.json", {})
    subject = subject_of(tmp_path / "model")
    assert (subject.model, subject.weights) == (str(tmp_path / "model"), tmp_path / "model")
    assert (subject.adapter, subject.log, subject.title) == (None, None, tmp_path.name)

    adapter = tmp_path / "adapter"
    write(adapter / "adapter_config.json", {"base_model_name_or_path": str(tmp_path / "model")})
    subject = subject_of(str(adapter))
    assert (subject.adapter, subject.weights) == (adapter, tmp_path / "model")
    assert subject_of(adapter, base="owner/name").model == "owner/name"

    write(adapter / "adapter_config.json", {"base_model_name_or_path": "/gone/model"})
    subject = subject_of(adapter)
    assert subject.model is None and "/gone/model" in subject.no_model
    write(adapter / "adapter_config.json", {"base_model_name_or_path": None})
    assert "name it with base" in subject_of(adapter).no_model


def test_a_run_has_its_latest_checkpoint(tmp_path):
    write(tmp_path / "model/config.json", {})
    run = tmp_path / "run"
    for step in (9, 100, 20):
        write(run / f"checkpoint-{step}/trainer_state.json", {})
        config = {"base_model_name_or_path": str(tmp_path / "model")}
        write(run / f"checkpoint-{step}/adapter_config.json", config)
    subject = subject_of(run)
    assert subject.adapter == run / "checkpoint-100"
    assert subject.log == run / "checkpoint-100/trainer_state.json"
    (run / "checkpoint-300").mkdir()  # interrupted while it was written
    assert subject_of(run) == subject
    write(run / "trainer_state.json", {})
    write(run / "adapter_config.json", {"base_model_name_or_path": str(tmp_path / "model")})
    subject = subject_of(run)
    assert (subject.adapter, subject.log) == (run, run / "trainer_state.json")
    alone = write(tmp_path / "log/trainer_state.json", {}).parent
    assert subject_of(alone).model is None
    assert subject_of(alone, base=tmp_path / "model").weights == tmp_path / "model"


def test_a_folder_of_nothing_and_a_source_of_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint, adapter or Trainer's run"):
        subject_of(tmp_path)
    with pytest.raises(ConfigError, match="source is a int"):
        subject_of(7)


def lines(folder: Path, *rows: object) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_rows_of_every_kind(tmp_path):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = lines(
        tmp_path,
        {"text": "one"},
        '"two"',
        "",
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "input": "", "output": "o"},
        {"messages": said},
        {"conversations": [{"from": "human", "value": "v"}, {"from": "gpt", "value": "w"}]},
        {"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": None}]},
        {"prompt": said[:1], "completion": said[1:]},
    )
    assert list(texts.texts_of(file)) == [
        "one",
        "two",
        "p\nc",
        "i\no",
        said,
        [{"role": "user", "content": "v"}, {"role": "assistant", "content": "w"}],
        [{"role": "tool", "content": "a"}, {"role": "user", "content": ""}],
        said,
    ]
    plain = tmp_path / "a.txt"
    plain.write_text("first\nline\n\n\n  second \n\n")
    assert list(texts.texts_of(plain)) == ["first\nline", "second"]
    assert list(texts.texts_of(["x", "y"])) == ["x", "y"]


def test_json_files_are_rows_too_and_no_text(tmp_path):
    """One list, or a line for each row: both are called .json."""
    file = tmp_path / "alpaca.json"
    rows = [{"instruction": "i", "output": "o"}, {"text": "one"}]
    for text in (json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        file.write_text(text)
        assert list(texts.texts_of(file)) == ["i\no", "one"]
    file.write_text('[{"text": "one"}, 3]')
    with pytest.raises(CheckpointError, match=r"alpaca\.json, row 2 has no text"):
        list(texts.texts_of(file))
    file.write_text('["one"')
    with pytest.raises(CheckpointError, match=r"alpaca\.json is no valid JSON"):
        list(texts.texts_of(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path, name):
    (tmp_path / name).write_text('"one"' if "json" in name else "one", encoding="utf-8-sig")
    assert list(texts.texts_of(tmp_path / name)) == ["one"]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "3",
        "{}",
        '{"text": 3}',
        '{"messages": [3]}',
        '{"messages": [{"role": "user"}]}',
        "[" * 999,
    ],
)
def test_a_row_without_text_is_named_by_its_line(tmp_path, row):
    file = lines(tmp_path, {"text": "fine"}, row)
    with pytest.raises(CheckpointError, match=r"rows\.jsonl, line 2"):
        list(texts.texts_of(file))


def test_a_list_of_something_else_than_strings():
    with pytest.raises(ConfigError, match=r"text\[1\] is a int; give strings"):
        list(texts.texts_of(["a b", 3]))


def test_a_text_that_is_no_file_and_one_that_is_binary(tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        list(texts.texts_of(tmp_path / "gone.jsonl"))
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"b\.txt"):
        list(texts.texts_of(binary))


class Letters:
    """A tokenizer of one id for each character."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return {"input_ids": [1] * add_special_tokens + [ord(char) for char in text]}

    def apply_chat_template(self, messages: list, tokenize: bool) -> str:
        return "".join(f"<{message['content']}>" for message in messages)


def test_tokens_stop_at_the_limits():
    rows = texts.token_ids(["abc", "", "defgh", "ij"], Letters(), longest=4, most=9)
    assert rows == [[1, 97, 98, 99], [1], [1, 100, 101, 102]]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert texts.token_ids([said], Letters(), longest=9, most=9) == [[1, 97, 10, 98]]
    templated = Letters()
    templated.chat_template = "x"
    assert texts.token_ids([said], templated, longest=9, most=9) == [[ord(c) for c in "<a><b>"]]


def named(folder, name_or_path=""):
    write(folder / "config.json", {"model_type": "qwen3_moe", "_name_or_path": name_or_path})
    return subject_of(folder).title


def test_the_title_is_the_name_of_the_model(tmp_path):
    assert named(tmp_path / "Qwen3-30B-A3B") == "Qwen3-30B-A3B"
    assert named(tmp_path / "Qwen3-30B-A3B-nf4/model") == "Qwen3-30B-A3B-nf4"
    assert named(tmp_path / "a/checkpoint-12", "Qwen/Qwen3-30B-A3B") == "Qwen3-30B-A3B"
    assert named(tmp_path / "out/model") == "qwen3_moe"
    adapter = tmp_path / "my-run"
    base = str(tmp_path / "Qwen3-30B-A3B")
    write(adapter / "adapter_config.json", {"base_model_name_or_path": base})
    assert subject_of(adapter).title == "Qwen3-30B-A3B"


def saved_arguments(folder, **options):
    folder.mkdir(exist_ok=True)
    arguments = TrainingArguments(output_dir=str(folder), report_to=[], **options)
    torch.save(arguments, folder / "training_args.bin")
    return arguments


def test_settings_of_a_run_are_read(tmp_path):
    arguments = saved_arguments(tmp_path / "a", gradient_accumulation_steps=3)
    assert read_settings(tmp_path / "a") == RunSettings(None, 3)
    for name, length in (("max_length", 70_000), ("max_seq_length", 512), ("max_length", 64)):
        setattr(arguments, name, length)
        torch.save(arguments, tmp_path / "a/training_args.bin")
        assert read_settings(tmp_path / "a").length == length
        delattr(arguments, name)
    arguments.max_length = None  # TRL's: rows are not cut
    torch.save(arguments, tmp_path / "a/training_args.bin")
    assert read_settings(tmp_path / "a") == RunSettings(None, 3)


class Trap:
    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["TRAP"])),)


def test_settings_are_read_without_running_a_pickle(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"trap": Trap(), "max_length": 77}, tmp_path / "training_args.bin")
    assert read_settings(tmp_path).length == 77
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_settings_that_are_damaged_are_none(tmp_path, content):
    (tmp_path / "training_args.bin").write_bytes(content)
    assert read_settings(tmp_path) == RunSettings()
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("a/data.pkl", content)
    assert read_settings(tmp_path) == RunSettings()


def test_tokens_that_a_run_saw(tmp_path):
    counted = log({"step": 1, "loss": 1.0, "num_tokens": 90}, {"step": 2, "num_tokens": 200.0})
    assert read_log(write(tmp_path / "a.json", counted)).tokens == 200
    assert read_log(write(tmp_path / "b.json", log({"step": 1, "loss": 1.0}))).tokens is None
    seen = log({"step": 1, "loss": 1.0}, num_input_tokens_seen=300)
    assert read_log(write(tmp_path / "c.json", seen)).tokens == 300
