"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/demo.py"), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_demo(tmp_path):
    done = demo("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4 expert parameters quantized" in done.stdout
    assert "times less memory, and the loss fell" in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()

    again = demo("--quick", "--model", tmp_path / "model", "--steps", 15, "--out", tmp_path / "two")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "from scratch" not in again.stdout
    assert (tmp_path / "two/loss.png").is_file()


def test_model_that_is_not_there(tmp_path):
    done = demo("--model", tmp_path / "gone", "--out", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "holds no config.json" in done.stderr
