"""Packed folders that no checksum can fault, and that no decode should trust, end in a sentence."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import fuzz_folders


@pytest.fixture(scope="module", params=["nf4", "int8"])
def victim(request: Any, tmp_path_factory: pytest.TempPathFactory) -> fuzz_folders.Victim:
    return fuzz_folders.Victim(tmp_path_factory.mktemp("fuzz") / request.param, request.param)


@pytest.mark.filterwarnings("ignore")
def test_mutations_are_refused_or_without_effect(victim):
    failures: list[str] = []
    ends = fuzz_folders.fuzz(victim, 0, 30, failures.append)
    assert not failures
    assert ends.total() == 90
    assert all(ends[f"{step} refused"] > 10 for step in fuzz_folders.STEPS)


def test_what_ends_a_process_is_seen(victim, monkeypatch):
    def run(step: str, folder: Path) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(victim, "run", run)
    failures: list[str] = []
    ends = fuzz_folders.fuzz(victim, 0, 2, failures.append)
    assert ends["verify raised"] == ends["load raised"] + ends["load foreign"] == 2
    monkeypatch.setattr(victim, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ends = fuzz_folders.fuzz(victim, 0, 3, failures.append)
    assert ends == {"verify crashed": 3}
    assert "verify crashed" in failures[-1] and "signal 9" in failures[-1]


def changed(record: torch.Tensor, **fields: Any) -> torch.Tensor:
    said = json.loads(bytes(record.tolist())) | fields
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


# What reads out of bounds in a decoder that believes it: each was a segmentation fault, or weights
# that were off by as much as themselves.
CRAFTED: dict[str, Any] = {
    "nested block of 1": (".quant_state.bitsandbytes__nf4", {"nested_blocksize": 1}),
    "nested block of 128": (".quant_state.bitsandbytes__nf4", {"nested_blocksize": 128}),
    "block of 1": (".quant_state.bitsandbytes__nf4", {"blocksize": 1}),
    "short nested absmax": (".nested_absmax", lambda t: t[:0]),
    "short table": (".quant_map", lambda t: t[:4]),
    "short nested table": (".nested_quant_map", lambda t: t[:16]),
}


@pytest.mark.parametrize("owner", ["mlp.experts.down_proj", "self_attn.q_proj.weight"])
@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_statistics_end_in_a_sentence_everywhere(victim, tmp_path, case, owner):
    if victim.kind == "int8":
        pytest.skip("of 4-bit weights")
    end, change = CRAFTED[case]
    folder = {**victim.sound, "tensors": dict(victim.sound["tensors"])}
    key = f"model.layers.0.{owner}{end}"
    before = folder["tensors"][key]
    folder["tensors"][key] = (
        changed(before, **change) if isinstance(change, dict) else change(before)
    )
    fuzz_folders.write(tmp_path / "model", folder)
    for step in fuzz_folders.STEPS:
        ended, message = fuzz_folders.attempt(victim, step, tmp_path / "model")
        assert (step, ended) == (step, "refused"), message
        assert owner in message


def test_a_configuration_that_builds_no_model_is_damage(victim, tmp_path):
    config = victim.sound["config"] | {"router_aux_loss_coef": "x"}
    fuzz_folders.write(tmp_path / "model", {**victim.sound, "config": config})
    ended, message = fuzz_folders.attempt(victim, "verify", tmp_path / "model")
    assert ended == "refused" and "Shapes were not compared with the model's" in message
    tensors = dict(victim.sound["tensors"])
    name = "model.layers.0.self_attn.q_norm.weight"
    tensors[f"{name}_"] = tensors.pop(name)
    fuzz_folders.write(tmp_path / "other", {**victim.sound, "tensors": tensors})
    for step in fuzz_folders.STEPS:
        ended, message = fuzz_folders.attempt(victim, step, tmp_path / "other")
        assert ended == "refused" and name in message
