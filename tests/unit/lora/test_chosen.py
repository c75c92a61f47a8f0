"""LoRA on some experts alone, against LoRA on all of them whose other factors stay zero."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import small_models
import torch
from small_models import IDS, build, fill
from torch import Tensor
from training import NF4
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora import testing
from moe_qlora.errors import AdapterError, ConfigError
from moe_qlora.lora.config import choose_experts
from moe_qlora.lora.layer import ChosenFactor, ParamWrapper
from moe_qlora.packing import parametrize
from moe_qlora.testing import requires_gpu

EXPERTS = "model.layers.{}.mlp.experts"
CHOSEN = {EXPERTS.format(0): [3, 1], EXPERTS.format(1): [0, 2, 3]}


def lora_config(**changes: Any) -> peft.LoraConfig:
    return small_models.lora_config(target_parameters=None, **changes)


def chosen_model(model_type: str = "qwen3_moe", implementation: str = "moe_qlora") -> Any:
    base = build(model_type, implementation)
    return fill(moe_qlora.get_peft_model(base, lora_config(), experts=CHOSEN))


def with_all(model_type: str, implementation: str, like: Any) -> Any:
    """LoRA on all experts with the chosen ones' factors, and zero for every other expert."""
    base = build(model_type, implementation)
    model = moe_qlora.get_peft_model(base, lora_config(), experts=True)
    model.load_state_dict(like.state_dict(), strict=True)
    return model


def wrappers(model: Any) -> dict[str, ParamWrapper]:
    return {n: m for n, m in model.named_modules() if isinstance(m, ParamWrapper)}


def of_chosen(whole: Tensor, wrapper: Any, part: str, name: str) -> Tensor:
    """The chosen experts' part of a factor of all experts, one expert after the other."""
    layer = 1 if ".layers.1." in name else 0
    experts, count = sorted(CHOSEN[EXPERTS.format(layer)]), wrapper.num_experts
    rank = wrapper.r["default"]
    if part == "lora_A":
        return torch.cat([whole[e * rank : (e + 1) * rank] for e in experts])
    columns = [r * count + e for r in range(rank) for e in experts]
    return whole[:, columns]


@pytest.mark.parametrize("implementation", ["moe_qlora", "eager"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_output_and_gradients_are_those_of_zero_factors(
    model_type: str, implementation: str
) -> None:
    model = chosen_model(model_type, implementation)
    other = with_all(model_type, implementation, model)
    logits, expected = model(input_ids=IDS).logits, other(input_ids=IDS).logits
    assert torch.equal(logits, expected)
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=IDS).logits, logits, atol=1e-3)
    logits.square().sum().backward()
    expected.square().sum().backward()
    twins = wrappers(other)
    assert len(twins) == 4
    for name, wrapper in wrappers(model).items():
        for part in ("lora_A", "lora_B"):
            factor, twin = (getattr(w, part)["default"].weight for w in (wrapper, twins[name]))
            grad = of_chosen(twin.grad, wrapper, part, name)
            assert factor.numel() < twin.numel()
            assert torch.allclose(factor.grad, grad, rtol=1e-5, atol=1e-6), (name, part)
            assert bool(grad.any())


def test_factors_start_as_those_of_all_experts_do() -> None:
    torch.manual_seed(4)
    model = moe_qlora.get_peft_model(build(), lora_config(), experts=CHOSEN)
    torch.manual_seed(4)
    other = wrappers(moe_qlora.get_peft_model(build(), lora_config(), experts=True))
    for name, wrapper in wrappers(model).items():
        whole = other[name].lora_A["default"].weight
        part = wrapper.lora_A["default"].weight
        assert torch.equal(part, of_chosen(whole, wrapper, "lora_A", name))
        assert not bool(wrapper.lora_B["default"].weight.any())


def test_only_chosen_experts_cost_parameters_and_a_layer_may_have_none() -> None:
    config = lora_config(target_modules=[])
    count = {}
    for key, experts in {
        "all": True,
        "two": {EXPERTS.format(i): [0, 4] for i in (0, 1)},
        "one layer": {EXPERTS.format(1): [0, 4], EXPERTS.format(0): []},
        "one weight": {f"{EXPERTS.format(1)}.down_proj": [2]},
    }.items():
        model = moe_qlora.get_peft_model(build(), config, experts=experts)
        count[key] = model.get_nb_trainable_parameters()[0]
    per_expert = 3 * (24 + 24 + 12 + 24)  # both weights' a and b of rank 3
    assert count["all"] == 2 * 5 * per_expert
    assert count["two"] == 2 * 2 * per_expert
    assert count["one layer"] == 2 * per_expert
    assert count["one weight"] == 3 * (12 + 24)


def test_saved_folder_for_stock_peft_and_for_this_package(tmp_path: Path) -> None:
    model = chosen_model()
    expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)

    again = moe_qlora.load_adapter(build(), tmp_path, is_trainable=True)
    assert torch.equal(again.eval()(input_ids=IDS).logits, expected)
    assert again.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
    for name, wrapper in wrappers(again).items():
        assert isinstance(wrapper.lora_A["default"], ChosenFactor), name

    plain = copy.deepcopy(build())
    for _, module, name in list(parametrize.iter_packed(plain)):
        parametrize.detach(module, name)
    plain.set_experts_implementation("eager")
    stock = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(stock(input_ids=IDS).logits, expected)

    # a second adapter, the same folder: without a word about experts it has them all
    again.load_adapter(tmp_path, "two")
    again.set_adapter("two")
    assert torch.equal(again(input_ids=IDS).logits, expected)


def test_an_adapter_folder_loads_into_an_adapter_of_its_experts_alone(tmp_path: Path) -> None:
    model = chosen_model()
    model.save_pretrained(tmp_path / "some")
    everywhere = moe_qlora.get_peft_model(build(), lora_config(), experts=True)
    fill(everywhere)
    everywhere.save_pretrained(tmp_path / "all")

    fresh = moe_qlora.get_peft_model(build(), lora_config(), experts=CHOSEN)
    fresh.load_adapter(tmp_path / "some", "default")
    assert torch.equal(fresh.eval()(input_ids=IDS).logits, model(input_ids=IDS).logits)
    with pytest.raises(RuntimeError, match=r"has LoRA on expert 0, which is not one of the 2 of 5"):
        fresh.load_adapter(tmp_path / "all", "default")

    note = tmp_path / "some" / "moe_qlora_adapter.json"
    (tmp_path / "all" / note.name).write_text(note.read_text())
    with pytest.raises(AdapterError, match="has LoRA on expert 0"):
        moe_qlora.load_adapter(build(), tmp_path / "all")
    fields = json.loads(note.read_text())
    fields["chosen_experts"][f"{EXPERTS.format(0)}.down_proj"] = [1, 99]
    note.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="expert 99"):
        moe_qlora.load_adapter(build(), tmp_path / "some")


def test_merges_as_zero_factors_do(tmp_path: Path) -> None:
    model = chosen_model()
    other = with_all("qwen3_moe", "moe_qlora", model)
    expected = model(input_ids=IDS).logits
    model.merge_adapter()
    other.merge_adapter()
    assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)
    model.unmerge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)  # o_proj is W + BA - BA
    merged = model.merge_and_unload(dtype=torch.float32)
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected)


def test_trains_checkpointed_compiled_and_copied() -> None:
    model = chosen_model()
    model.train()
    runs = [model, torch.compile(model, backend="aot_eager", fullgraph=True), copy.deepcopy(model)]
    runs[2].enable_input_require_grads()
    runs[2].gradient_checkpointing_enable({"use_reentrant": False})
    grads = []
    for run in runs:
        run(input_ids=IDS, use_cache=False).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in run.parameters() if p.requires_grad])
        run.zero_grad()
    for other in grads[1:]:
        for left, right in zip(grads[0], other, strict=True):
            torch.testing.assert_close(left, right)


def test_later_adapters_and_a_hosts_own_call_take_the_adapted_config() -> None:
    base = build()
    config = moe_qlora.adapt_lora_config(base, lora_config(), experts=CHOSEN)
    model = moe_qlora.connect_adapters(peft.get_peft_model(base, config))
    more = moe_qlora.adapt_lora_config(
        base, lora_config(r=2), experts={name: [4] for name in CHOSEN}
    )
    model.add_adapter("two", more)
    for wrapper in wrappers(model).values():
        assert len(wrapper.lora_A["default"].experts) in (2, 3)
        assert wrapper.lora_A["two"].experts == (4,)
    with pytest.raises(AdapterError, match="add_weighted_adapter needs LoRA on all experts"):
        model.add_weighted_adapter(["default", "two"], [1.0, 1.0], "sum", "cat")


def test_a_later_word_about_experts_goes_before_the_chosen() -> None:
    """It adds to an adapted config, as it does to any: weights that it does not name stay."""
    base = build()
    config = moe_qlora.adapt_lora_config(base, lora_config(), experts=CHOSEN)
    first = {EXPERTS.format(1): [4]}
    for experts, layer, gate_up, down in (
        (True, 1, 5, 5),
        (["down"], 1, 3, 5),
        (first, 1, 1, 1),
        (first, 0, 2, 2),
        (False, 1, 3, 3),
    ):
        model = moe_qlora.get_peft_model(copy.deepcopy(base), config, experts=experts)
        held = {
            wrapper.full_name: len(getattr(wrapper.lora_A["default"], "experts", range(5)))
            for wrapper in wrappers(model).values()
        }
        module = EXPERTS.format(layer)
        assert held[f"{module}.gate_up_proj"] == gate_up, experts
        assert held[f"{module}.down_proj"] == down, experts


def test_a_module_and_one_of_its_weights_are_joined() -> None:
    module = EXPERTS.format(0)
    for down in (f"{module}.down_proj", module):
        other = module if down != module else f"{module}.down_proj"
        asked = {down: [2], other: [1]}
        chosen = choose_experts(
            {f"{module}.gate_up_proj": (5, 24, 24), f"{module}.down_proj": (5, 24, 12)}, asked
        )
        assert chosen[f"{module}.down_proj"] == (1, 2)
        assert chosen[f"{module}.gate_up_proj"] == tuple(asked[module])


def test_low_cpu_mem_usage_loads_the_chosen_experts(tmp_path: Path) -> None:
    model = chosen_model()
    model.save_pretrained(tmp_path)
    again = moe_qlora.load_adapter(build(), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_plan_counts_the_chosen_experts() -> None:
    base = build()
    config = moe_qlora.adapt_lora_config(base, lora_config(), experts=CHOSEN)
    plan = moe_qlora.plan(base, lora_config=config, seq=16)
    model = moe_qlora.get_peft_model(base, config)
    assert plan.trained_weights == model.get_nb_trainable_parameters()[0]


@requires_gpu()
def test_the_fused_layer_on_a_gpu() -> None:
    """Training on a GPU is that of LoRA on all experts with zeros, gradients included."""
    runs = []
    chosen = {EXPERTS.format(i): [0, 3, 5, 10] for i in (0, 1)}
    for experts in (chosen, True):
        base = testing.tiny_model(
            "qwen3_moe", hidden_size=128, moe_intermediate_size=64, num_experts=11
        ).to(torch.bfloat16)
        config = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.bfloat16)
        moe_qlora.quantize_experts(base, config)
        model: Any = moe_qlora.get_peft_model(base, lora_config(r=8), experts=experts).cuda()
        if runs:
            model.load_state_dict(runs[0].state_dict())
        else:
            fill(model.cpu())
            model.cuda()
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        runs.append(model)
    twins = wrappers(runs[1])
    assert len(twins) == 4
    for name, wrapper in wrappers(runs[0]).items():
        for part in ("lora_A", "lora_B"):
            factor: Any = getattr(wrapper, part)["default"]
            grad = factor.select(getattr(twins[name], part)["default"].weight.grad)
            assert (factor.weight.grad - grad).norm() <= 1e-2 * grad.norm(), (name, part)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({EXPERTS.format(7): [0]}, r"names 'model.layers.7.mlp.experts', .*; did you mean"),
        ({EXPERTS.format(0): [5]}, r"expert 5 of model.layers.0.*\(5, 24, 24\).*from 0 to 4"),
        ({EXPERTS.format(0): [-1]}, r"expert -1 of"),
        ({EXPERTS.format(0): []}, r"chooses no expert of any layer"),
        (
            {EXPERTS.format(0): "12"},
            r"experts\['model.layers.0.mlp.experts'\] is '12'; give a list",
        ),
        ({EXPERTS.format(0): 3}, r"experts\['model.layers.0.mlp.experts'\] is 3; give a list"),
    ],
)
def test_errors_name_the_layer(experts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_qlora.get_peft_model(build(), lora_config(), experts=experts)
