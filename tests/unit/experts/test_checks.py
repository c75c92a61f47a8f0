"""Casts that trainers do, over packed experts: codes and statistics stay, or the model says so."""

import copy

import pytest
import torch
from folders import bits
from peft import prepare_model_for_kbit_training
from training import NF4, SETTINGS, loaded, lora

import moe_qlora
from moe_qlora import testing
from moe_qlora.experts import checks

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")


def load(folder, stored, *, adapter=True):
    settings = SETTINGS["int8"] if stored == "int8" else {**NF4, "bnb_4bit_quant_storage": stored}
    model = loaded(folder, settings)
    return lora(model, "q_proj", task_type="CAUSAL_LM") if adapter else model


def contents(model):
    """Every tensor that the packed experts hold."""
    return {k: v for k, v in bits(model).items() if ".experts." in k and ".lora_" not in k}


def to_bf16(model, chosen):
    for parameter in filter(chosen, model.parameters()):
        parameter.data = parameter.data.to(torch.bfloat16)


CASTS = {
    # As TRL's trainers do with a model in 4 or 8 bit, and its experimental ones with any.
    "adapters": lambda model: to_bf16(model, lambda p: p.requires_grad),
    "sweep": lambda model: to_bf16(model, lambda p: p.dtype == torch.float32),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float": lambda model: model.float(),
    "k-bit preparation": prepare_model_for_kbit_training,
}
# What hits codes in these dtypes.
DESTROYS = {
    "sweep": {torch.float32},
    "half": {torch.bfloat16, torch.float32},
    "bfloat16": {torch.float16, torch.float32},
    "float": {torch.bfloat16, torch.float16},
}


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *((name, torch.uint8) for name in CASTS),
        *((name, torch.bfloat16) for name in ("adapters", "half", "float", "k-bit preparation")),
        ("sweep", torch.float32),
        ("sweep", "int8"),
    ],
    ids=str,
)
def test_cast(name, stored, folder):
    model = load(folder, stored)
    before = contents(model)
    inputs = testing.tiny_inputs(model)
    CASTS[name](model)
    if stored in DESTROYS.get(name, ()):
        message = rf"codes of model\.layers\.0\.\S+ were cast from {stored} to torch\.\w+, which"
        with pytest.raises(moe_qlora.QuantizationError, match=message):
            model(**inputs)
        return
    assert contents(model) == before
    output = model(**inputs, labels=inputs["input_ids"])
    assert output.logits.isfinite().all()
    if name != "k-bit preparation":  # which freezes adapters too, stock ones as well
        output.loss.backward()
        grads = [p.grad for n, p in model.named_parameters() if "experts.base_layer.lora_B" in n]
        assert grads and all(grad is not None and grad.any() for grad in grads)


def test_a_linear_layer_that_was_cast_is_named_in_a_copy_alone(folder):
    model = load(folder, torch.bfloat16, adapter=False)
    model(**testing.tiny_inputs(model))
    twin = copy.deepcopy(model)
    weight = twin.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.to(torch.float16)
    checks.check_codes(model)
    with pytest.raises(moe_qlora.QuantizationError, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        twin(**testing.tiny_inputs(model))
    # bitsandbytes converts codes to another layout on some CPUs, which is no cast
    weight.quant_state.packing_format_for_cpu = True
    checks.check_codes(twin)


def test_a_state_dict_is_loaded_whole_and_crafted_statistics_of_a_layer_are_refused(folder):
    source, model = (load(folder, torch.bfloat16, adapter=False) for _ in range(2))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    assert bits(model) != bits(source)
    state = source.state_dict()
    assert str(model.load_state_dict(state)).startswith("<All")
    assert bits(model) == bits(source)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.quant_state is layer.weight.quant_state
    key = "model.layers.0.self_attn.q_proj.weight.nested_absmax"
    state[key] = state[key][:0]
    with pytest.raises(RuntimeError, match=r"q_proj\.weight has float32 of shape \(0,\) as its"):
        model.load_state_dict(state)
    assert bits(model) == bits(source)
