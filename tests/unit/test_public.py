"""The public names: there, sorted, documented, and cheap to import."""

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import bits

import moe_qlora
from moe_qlora import errors
from moe_qlora.testing import run_distributed, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("", ["torch", "transformers", "peft", "bitsandbytes", "accelerate", "triton", "numpy"]),
        ("moe_qlora.registry.load('qwen3_moe')", ["torch", "transformers"]),
        ("import torch; moe_qlora.detect(torch.nn.Linear(2, 2))", ["transformers"]),
    ],
)
def test_imports_are_lean(code, absent):
    """And detection starts no accelerator."""
    code = f"""import sys, moe_qlora, moe_qlora.registry
{code}
assert not [name for name in {absent} if name in sys.modules]
assert 'torch' not in sys.modules or not sys.modules['torch'].cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_all_is_sorted_and_complete():
    assert list(moe_qlora.__all__) == sorted(moe_qlora.__all__, key=str)
    # One line for each name: the face reads the stub by lines, type checkers read it by its rules.
    lines = Path(moe_qlora.__file__).with_suffix(".pyi").read_text().splitlines()
    imports = [line.split() for line in lines if line.startswith("from")]
    assert sorted(words[3] for words in imports) == moe_qlora.__all__
    assert all(words[2:] == ["import", words[3], "as", words[3]] for words in imports)
    assert set(moe_qlora.__all__) <= set(dir(moe_qlora))


@pytest.mark.parametrize("name", moe_qlora._REMOVED)
def test_a_removed_name_says_what_to_use(name):
    with pytest.raises(AttributeError, match=rf"^moe_qlora.{name} is gone since version 0.3: .+$"):
        getattr(moe_qlora, name)
    assert name not in dir(moe_qlora)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moe_qlora.nothing  # noqa: B018


def test_one_error_tree():
    tree = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert all(issubclass(error, moe_qlora.MoeQloraError) for error in tree)
    assert {error.__name__ for error in tree} <= set(moe_qlora.__all__)
    for error in tree - {moe_qlora.MoeQloraError}:
        assert issubclass(error, ValueError | RuntimeError)


pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_seed_is_a_model_and_nothing_leaks():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (tiny_model("llama4_text", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert bits(first) == bits(second) != bits(other)


def test_overrides_do_not_leak_into_other_configurations():
    config = tiny_config("qwen4_exp", text_config={"num_experts": 6})
    assert (config.text_config.num_experts, config.text_config.hidden_size) == (6, 64)
    assert tiny_config("qwen4_exp").text_config.num_experts == 4


def fail_on_one(rank, world_size, crash):
    if rank == 1 and crash:
        os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 1:
        raise KeyboardInterrupt("rank one is unwell")
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("crash", "words"), [(False, "KeyboardInterrupt: rank one is"), (True, "in fail_on_one")]
)
def test_a_failing_rank_is_an_error(crash, words):
    """Also by what is no Exception, like torch's CheckpointException and an interrupt."""
    with pytest.raises(RuntimeError, match=rf"^rank 1 failed:(.|\n)*{words}"):
        run_distributed(fail_on_one, 2, crash)
