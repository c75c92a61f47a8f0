"""The test helpers themselves."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
import torch

from moe_qlora.testing import requires_gpu, run_distributed, tiny_inputs, tiny_model

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


def test_dtype_device_and_overrides():
    model = tiny_model("mixtral", dtype=torch.bfloat16, num_local_experts=6)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 6
    meta = tiny_model("mixtral", device="meta")
    assert {weight.device.type for weight in meta.parameters()} == {"meta"}


def test_inputs():
    model = tiny_model("mixtral")
    inputs = tiny_inputs(model, batch=3, seed=1)
    assert inputs["input_ids"].shape == (3, 12)
    assert torch.equal(inputs["input_ids"], tiny_inputs(model, batch=3, seed=1)["input_ids"])
    assert not torch.equal(inputs["input_ids"], tiny_inputs(model, batch=3, seed=2)["input_ids"])
    assert model(**inputs, labels=inputs["input_ids"]).loss.requires_grad


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


def crash_outside_of_python(rank, world_size, folder):
    crashed = len(list(Path(folder).iterdir()))
    if rank == 1 and not crashed:
        Path(folder, "crashed").touch()
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.strlen, None)
    value = torch.tensor([rank + 10.0])
    torch.distributed.all_reduce(value)
    return rank, world_size, crashed, value.item()


def test_a_crash_outside_of_python_is_tried_once_more(tmp_path, caplog):
    returned = run_distributed(crash_outside_of_python, 2, str(tmp_path))
    assert returned == [(0, 2, 1, 21.0), (1, 2, 1, 21.0)]
    assert "rank 1 failed:\nFatal Python error: Segmentation" in caplog.text


def test_gpu_marks():
    for count, name in ((2, "multi_gpu"), (1, "gpu")):

        def marked():
            pass

        assert {mark.name for mark in requires_gpu(count)(marked).pytestmark} == {name, "skipif"}
