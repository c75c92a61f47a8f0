"""What goes to stderr: each problem once, on one line; libraries' noise not at all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from moe_qlora.cli import app, render
from moe_qlora.testing import tiny_model

PROGRAM = [sys.executable, "-m", "moe_qlora.cli"]


def test_our_warnings_are_a_line_and_others_none(capsys, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    with render.streams():
        for module in ("moe_qlora.lora.somewhere", "torch.somewhere"):
            warnings.warn_explicit(f"of {module}\nin two lines", UserWarning, "file", 1, module)
        logging.getLogger("bitsandbytes.backends").warning("Failed to load CPU gemm_4bit_forward")
        logging.getLogger("peft.x").error("broken")
        logging.getLogger("moe_qlora.hf").warning("slow")
        logging.getLogger("moe_qlora.hf").info("quick")
    assert capsys.readouterr().err.splitlines() == [
        "warning: of moe_qlora.lora.somewhere in two lines",
        "error (peft.x): broken",
        "warning: slow",
    ]
    assert not [h for h in logging.getLogger().handlers if type(h).__module__ == render.__name__]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is full")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    message = "error: what is printed cannot be read or written: No space left on device.\n"
    assert done.stderr == message


@pytest.mark.parametrize(
    "arguments", ["doctor", "doctor --json", "dump qwen3_moe", "dump qwen3_moe --json"]
)
def test_what_nobody_reads_is_no_problem_that_was_found(monkeypatch, arguments):
    """However it is printed; `doctor` and `verify` end with 1 where they found something."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["moe-qlora", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            app.run()
        stdout.flush()  # into nothing by now, as at Python's end
    assert stop.value.code == 141


def test_an_interrupted_command_leaves_nothing(cli, tmp_path, monkeypatch):
    from moe_qlora.checkpoint.folder import ShardWriter

    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    before, stock, calls = sorted(tmp_path.rglob("*")), ShardWriter.write, []

    def write(self, *arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return stock(self, *arguments)

    monkeypatch.setattr(ShardWriter, "write", write)
    source, out = tmp_path / "model", tmp_path / "out"
    code, said, err = cli("quantize", source, out)
    assert (code, said) == (130, "")
    assert err == "interrupted: nothing new stays on disk, and what was there is unchanged.\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_completion_of_model_types(cli, monkeypatch):
    """What bash asks for, and what it gets, without torch."""
    asked = {"COMP_WORDS": "moe-qlora dump qwen3_m", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "moe_qlora.cli"],
        env=os.environ | asked | {"_MOE_QLORA_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "qwen3_moe" in done.stdout.split()
    assert " torch\n" not in done.stderr
    # typer looks for a shell among the parents, and a job in the background has none
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete -o default -F _moe_qlora_completion" in cli("--show-completion", "bash")[1]
