"""Without a GPU, Triton kernels run in its interpreter, to be chosen before Triton's import.

Tensors here are small: one thread does the work of each process, since several would do little but
wait for each other, in a loop that takes a busy machine's CPUs. OpenMP reads it at torch's import.
Garbage is collected less often, and never among what the libraries hold: a fifth of the time.
"""

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate", action="store_true", help="write golden files anew (tests/unit/cli/golden)"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE in float32, on disk in several shards."""
    from moe_qlora.testing import tiny_model

    path = tmp_path_factory.mktemp("plain") / "qwen3_moe"
    tiny_model("qwen3_moe").save_pretrained(path, max_shard_size="80KB")
    return path


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
