"""Makers' folders that are mutated end as their oracle says, and what is planted is seen."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from tools import fuzz_makers, fuzz_makers_mutations, fuzz_shared
from tools.fuzz_makers_oracle import DamagedError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=["mixtral bf16 fused", "gpt_oss mxfp4"])
def victim(request: Any, tmp_path_factory: pytest.TempPathFactory) -> fuzz_makers.Victim:
    return fuzz_makers.Victim(tmp_path_factory.mktemp("makers") / "victim", request.param)


def test_mutations_are_refused_or_what_the_folder_describes(victim):
    failures: list[str] = []
    ends = fuzz_makers.fuzz(victim, 0, 15, failures.append, Counter())
    assert not failures
    assert ends.total() == 45
    seen = {end for _, _, end in ends}
    assert "refused" in seen and seen & {"same", "other"}


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """As many values in the same shape, of which rows were taken for columns."""
    return weight.transpose(-1, -2).reshape(weight.shape)


PLANTED: dict[str, Any] = {
    "rows for columns": transposed,
    "a scale twice as large": lambda w: torch.cat([w[:1] * 2, w[1:]]),
    "experts in another order": lambda w: w.roll(1, 0),
    "nan": lambda w: torch.where(w == w.max(), torch.nan, w),
    "another shape": lambda w: w[:-1],
}


@pytest.mark.parametrize("step", fuzz_makers.STEPS)
@pytest.mark.parametrize("planted", PLANTED)
def test_weights_that_the_folder_does_not_hold_are_seen(victim, step, planted):
    folder = victim.place / "again"
    expected, got = victim.expect(folder), victim.run(step, folder)
    assert victim.judge(step, got, expected) == ("same", "")
    name = next(name for name in got if name.endswith("experts.down_proj"))
    for key in (name, "model.layers.1.input_layernorm.weight"):
        weight, packed = got[key]
        if weight.dim() == 1:
            weight = weight.clone()
            weight[3] *= 1.01
            wrong = weight
        else:
            wrong = PLANTED[planted](weight)
        end, message = victim.judge(step, {**got, key: (wrong, packed)}, expected)
        assert end == "changed" and key in message
    lost = {key: value for key, value in got.items() if key != name}
    assert victim.judge(step, lost, expected) == ("changed", f"{name} is not there")
    assert victim.judge(step, got, DamagedError("x")) == ("changed", "taken, although x")


def test_a_folder_that_describes_nothing_must_be_refused(victim, tmp_path):
    folder = fuzz_makers_mutations.read(victim.place / "sound")
    file, key = next(place for place in folder.places if "experts.down_proj" in place[1])
    folder.drop(file, key)
    fuzz_makers_mutations.write(tmp_path / "model", folder)
    expected = victim.expect(tmp_path / "model")
    for step in ("quantize", "load"):
        assert fuzz_makers.attempt(victim, step, tmp_path / "model", expected)[0] == "refused"


def test_a_step_that_hangs_is_ended():
    def batch(numbers: list[int], say: fuzz_shared.Say) -> None:
        for number in numbers:
            say(number, "load", "x")
            time.sleep(600 if number == 1 else 0)
            say(number, "load", "x", "same", "")

    ends = list(fuzz_shared.run_children(batch, [0, 1, 2], limit=0.5))
    assert [end[3] for end in ends] == ["same", "hung", "same"]
    assert ends[1][4] == "longer than 0 s"
