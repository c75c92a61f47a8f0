"""Attention that is eager and need not be is named, and each kind is counted as it is computed."""

from typing import Any

import pytest
import torch
from torch import nn

from moe_qlora.errors import ConfigError
from moe_qlora.planning.step import MemoryTracker
from moe_qlora.testing import tiny_config
from tests.helpers.plans import plan

KERNEL = "kernels-community/vllm-flash-attn3"
SEQ = 512
SIZES = {"search": False, "seq": SEQ}


def config(model_type: str, name: str | None = None) -> Any:
    made = tiny_config(model_type)
    made._attn_implementation = name
    return made


def eager_notes(made: Any) -> list[str]:
    return [note for note in made.notes if "computed eagerly" in note]


def test_plan_names_flex_attention_where_the_class_supports_it_and_nothing_was_asked_for():
    eager = plan(config("gpt_oss"), **SIZES)
    (note,) = eager_notes(eager)
    assert note.startswith("GptOssForCausalLM supports no sdpa") and "model.csv" in note
    assert 'Pass attn_implementation="flex_attention" to from_pretrained' in note
    asked = plan(config("gpt_oss"), attention="eager", **SIZES)
    assert not eager_notes(asked) and asked.peak.nbytes == eager.peak.nbytes
    for model_type in ("qwen3_moe", "deepseek_v4"):  # supports sdpa, supports nothing
        assert not eager_notes(plan(config(model_type), **SIZES))
    # Bytes of one layer's scores in bf16, of which backward holds several.
    scores = tiny_config("gpt_oss").num_attention_heads * SEQ * SEQ * 2
    for name in ("flex_attention", KERNEL):
        made = plan(config("gpt_oss", name), **SIZES)
        asked = plan(config("gpt_oss"), attention=name, **SIZES)
        assert made.peak.nbytes == asked.peak.nbytes < eager.peak.nbytes - scores
        for each in (made, asked):
            said = f"Attention by {name} does not run on the meta device"
            assert any(said in n for n in each.notes) and not eager_notes(each)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gpt_oss", "sdpa"), ("deepseek_v4", "flash_attention_2"), ("qwen3_vl_moe", "nonsense")],
)
def test_what_a_class_does_not_support_is_refused(model_type, name):
    with pytest.raises(ConfigError, match=f"attention is '{name}', which .* give one of eager"):
        plan(config(model_type), attention=name, **SIZES)
    with pytest.raises(ConfigError, match="attention is 3"):
        plan(config(model_type), attention=3, **SIZES)


def test_a_softmaxs_backward_holds_what_cuda_holds():
    """The gradient that arrives, its product with the output, and the gradient that is made."""
    x = torch.zeros(64, 1024, device="meta", requires_grad=True)
    grad = torch.zeros(64, 1024, device="meta")
    tracker = MemoryTracker([x, grad])
    with tracker:
        out = nn.functional.softmax(x, dim=-1)
        tracker.mark()
        out.backward(grad)
    assert tracker.peak == 3 * x.nbytes  # the output, the product, the gradient for x


def test_a_kernel_of_the_language_model_alone():
    """As `attn_implementation={"text_config": ...}` gives it; the vision tower keeps its own."""
    nested, name = config("qwen3_vl_moe"), "flash_attention_2"
    nested._attn_implementation = {"text_config": name}
    made = plan(nested, **SIZES)
    assert any(f"Attention by {name} does not run" in note for note in made.notes)
    assert nested.text_config._attn_implementation == name
    assert nested._attn_implementation is nested.vision_config._attn_implementation is None
