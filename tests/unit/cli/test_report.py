"""`moe-qlora report`: the file it writes, what it says, how it ends."""

from __future__ import annotations

import re

import pytest

from moe_qlora.testing import tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3_moe", device="meta").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_report_of_a_folder(cli, folder, tmp_path):
    out = tmp_path / "report.html"
    code, said, err = cli("report", folder, "-o", out, "--quant", "int8")
    assert (code, err) == (0, "")
    size = re.fullmatch(
        rf"{re.escape(str(out))}: (\d+) KiB; left out: packing error, routing, training "
        r"\(the page says why\)\.\n",
        said,
    )[1]
    assert int(size) == round(out.stat().st_size / 1024)
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Packed as int8" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "-o", "{out}"], "gone"),
        (["{folder}", "-o", "{folder}"], "no .html file that can be written"),
    ],
)
def test_mistakes_end_with_one_line(cli, folder, tmp_path, arguments, message):
    places = {"out": tmp_path / "report.html", "folder": folder}
    code, said, err = cli("report", *(argument.format(**places) for argument in arguments))
    assert (code, said) == (2, "")
    assert message in err and err.count("\n") == 1
    assert not places["out"].exists()


def test_a_report_in_the_home_folder(cli, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, said, err = cli("report", folder, "-o", "~/report.html", "--seq", 64)
    assert code == 0 and "batch, seq and progress are ignored" in err
    assert said.startswith(f"{tmp_path}/report.html: ")
