"""The test helpers themselves."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from moe_qlora.testing import run_distributed, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_seed_is_a_model_and_nothing_leaks():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (tiny_model("llama4_text", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    a, b, c = (dict(model.named_parameters()) for model in (first, second, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    stacks = [name for name in a if a[name].dim() == 3]
    assert stacks
    assert not any(torch.equal(a[name], c[name]) for name in stacks)


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
