"""Random sequences of calls agree with the oracle, and what is planted in a model is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_qlora.speed import offload
from tools import fuzz_calls
from tools.fuzz_machine import ALLOWED, CALLS, FAMILIES, Machine
from tools.fuzz_oracle import Contradiction

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs set these for their process."""
    for name in ("SLOTS", "copier_of"):
        monkeypatch.setattr(offload, name, getattr(offload, name))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture
def machine(sources: Path, tmp_path: Path) -> Machine:
    """A model with two adapters, of which the first is active."""
    machine = Machine(3, tmp_path, sources, "qwen3_moe")
    machine.start()
    first = "model = moe_qlora.get_peft_model(model, {}, experts=True)"
    later = "model.add_adapter('other', moe_qlora.adapt_lora_config(model, {}, experts=True))"
    for name, code in (("default", first), ("other", later)):
        machine.run(code.format("LoraConfig(r=2, lora_alpha=4, target_modules=['q_proj'])"))
        names = [n for n in machine.oracle.base if n in machine.experts or ".q_proj." in n]
        adapter = fuzz_calls.Adapter({}, 2.0)
        fuzz_calls.take_factors(machine, name, adapter, names)
    machine.oracle.active, machine.stage = ["default"], "peft"
    machine.check("two adapters")
    return machine


def test_sequences_agree_with_the_oracle(sources):
    shown: list[str] = []
    tally = fuzz_calls.Tally()
    for seed in range(4):  # .ci/run has a minute of others
        tally.run(seed, sources, shown.append)
    assert not tally.failed, "\n".join(shown)
    assert tally.families.total() == 4
    assert tally.calls.total() >= 32


def test_a_seed_is_one_program(sources):
    programs = [fuzz_calls.Tally().run(4, sources, pytest.fail) for _ in range(2)]
    assert programs[0] == programs[1]
    compile(programs[0], "program", "exec")


def wrappers(machine: Machine) -> list[Any]:
    return [m for m in machine.model.modules() if hasattr(m, "parameter_name")]


def test_a_wrong_scaling_of_one_layer_is_seen(machine):
    wrappers(machine)[0].scaling["default"] *= 1.1
    with pytest.raises(Contradiction, match="off by"):
        machine.check("planted")


def test_one_experts_missing_lora_is_seen(machine):
    factor = wrappers(machine)[0].lora_B["default"].weight
    with torch.no_grad():
        factor.view(len(factor), -1, 4)[:, :, 1] = 0
    with pytest.raises(Contradiction, match="off by"):
        machine.check("planted")


def test_an_adapter_that_stays_active_is_seen(machine):
    machine.oracle.active = ["other"]
    with pytest.raises(Contradiction, match="off by"):
        machine.check("planted")


def test_a_wrong_gradient_is_seen(machine):
    wrappers(machine)[1].lora_A["default"].weight.register_hook(lambda grad: grad * 0.9)
    with pytest.raises(Contradiction, match="is not the gradient's"):
        fuzz_calls.train(machine)


def rounding(machine: Machine) -> dict[str, float]:
    """The stock model's rounding of each weight's factors, as a part of their gradients."""
    exact = machine.oracle.gradients(["default"])
    moved = machine.oracle.rounding(["default"], exact)
    return {key[1]: float(moved[key][0].norm() / exact[key][0].norm()) for key in exact}


def test_rounding_of_the_stock_model_hides_no_error(machine):
    assert all(0 < share < 1e-3 for share in rounding(machine).values())


def test_a_gradient_may_be_off_by_the_stock_models_own_rounding(machine):
    for i in range(2):  # attention becomes one-hot: differences of equal numbers are left
        name = f"model.layers.{i}.self_attn.q_norm.weight"
        machine.model.get_parameter(f"base_model.model.{name}").data.mul_(1000)
        machine.oracle.base[name] = machine.oracle.base[name] * 1000
    assert rounding(machine)["model.layers.0.self_attn.q_proj.weight"] > 0.1
    fuzz_calls.train(machine)


def test_a_weighted_sum_that_drops_a_layer_or_scales_is_seen(machine, monkeypatch):
    add = type(machine.model.base_model).add_weighted_adapter

    def wrong(self: Any, adapters: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        add(self, adapters, [1.5 * weight for weight in weights], *args, **kwargs)

    monkeypatch.setattr(type(machine.model.base_model), "add_weighted_adapter", wrong)
    monkeypatch.setattr(machine.rng, "random", lambda: 0.5)  # no adapter that is not there
    with pytest.raises(Contradiction, match="off by"):
        fuzz_calls.add_weighted_adapter(machine)


def test_a_saved_factor_that_is_another_is_seen(machine):
    machine.oracle.adapters["default"].factors = machine.oracle.adapters["other"].factors
    machine.oracle.adapters.pop("other")
    with pytest.raises(Contradiction, match="are others"):
        fuzz_calls.save_adapter(machine)


def test_refusals_are_held_to_their_row(machine):
    row = "get_peft_model: a second time"
    again = "moe_qlora.get_peft_model(model, LoraConfig(), experts=True)"
    assert not machine.run(again, row)
    assert machine.refused[row] == 1
    assert "# moe_qlora.get_peft_model" in machine.program()
    with pytest.raises(Contradiction, match="was not refused"):
        machine.run("model.eval()", row)
    with pytest.raises(Contradiction, match="DoRA"):
        machine.run(again, "get_peft_model: DoRA on packed experts")
    with pytest.raises(Exception, match="is a PeftModel"):
        machine.run(again)


def test_every_row_of_the_table_can_be_reached():
    text = Path(fuzz_calls.__file__).read_text()
    assert len(FAMILIES) == len(set(FAMILIES)) == 20
    for row in ALLOWED:
        call, why = row.split(": ")
        assert call in CALLS
        assert why in text


def test_a_failing_sequence_is_printed_as_a_program(sources, monkeypatch):
    def broken(machine: Machine) -> None:
        machine.run("raise KeyError('planted')")

    monkeypatch.setattr(Machine, "sequence", broken)
    shown: list[str] = []
    tally = fuzz_calls.Tally()
    tally.run(7, sources, shown.append)
    assert tally.failed == [7]
    assert "seed 7" in shown[0] and "KeyError: 'planted'" in shown[0]
    assert shown[0].rstrip().endswith("raise KeyError('planted')")
