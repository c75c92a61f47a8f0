"""Packing a built model: what it does, refuses and leaves, and what the model says then."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from moe_qlora import quantize_experts
from moe_qlora.checkpoint.rows import packed_linears
from moe_qlora.errors import (
    ConfigError,
    DetectionError,
    NonFiniteWeightError,
    QuantizationError,
    UnsupportedWeightError,
)
from moe_qlora.hf import fill
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack, unpack
from moe_qlora.packing.settings import CodecSettings, packed_nbytes
from moe_qlora.testing import tiny_model

NAMES = [
    f"model.layers.{layer}.mlp.experts.{stack}"
    for layer in (0, 1)
    for stack in ("gate_up_proj", "down_proj")
]
IDS = torch.arange(24).view(2, 12)


def tiny(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    return tiny_model("qwen3_moe", dtype=dtype, **sizes)


def nf4(**kwargs: Any) -> BitsAndBytesConfig:
    kwargs = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | kwargs
    return BitsAndBytesConfig(load_in_4bit=True, **kwargs)


def stacks(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(*parametrize.owner_of(model, name)).detach() for name in NAMES}


def packed_by_hand(model: nn.Module, settings: CodecSettings) -> dict[str, torch.Tensor]:
    return {name: unpack(pack(weight, settings)) for name, weight in stacks(model).items()}


def assert_stacks(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, weight in stacks(model).items():
        assert torch.equal(weight, expected[name]), name


def packed(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return list(parametrize.iter_packed(model))


STORED = {"bnb_4bit_quant_storage": "bfloat16"}
CONFIGS = {
    "nf4": (nf4(), CodecSettings("nf4", True)),
    "fp4-bfloat16": (
        BitsAndBytesConfig(load_in_4bit=True, **STORED),
        CodecSettings("fp4", False, torch.bfloat16),
    ),
    "int8": (BitsAndBytesConfig(load_in_8bit=True), CodecSettings("int8")),
}


EVERY = pytest.mark.parametrize(("config", "settings"), CONFIGS.values(), ids=CONFIGS)


@EVERY
def test_packs_every_stack_and_the_model_says_what_a_bitsandbytes_model_says(config, settings):
    model, buffers = tiny(), sum(buffer.nbytes for buffer in tiny().buffers())
    expected, asked = packed_by_hand(model, settings), config.to_dict()
    sizes = [weight.nbytes for weight in stacks(model).values()]
    count, footprint = model.num_parameters(), model.get_memory_footprint()
    report = quantize_experts(model, config)
    assert config.to_dict() == asked == model.config.quantization_config.to_dict()
    assert_stacks(model, expected)
    assert [(row.name, row.status) for row in report.rows] == [(n, "quantized") for n in NAMES]
    assert [row.bytes_before for row in report.rows] == sizes
    held = [parametrize.read_packed(module, name).nbytes for _, module, name in packed(model)]
    assert [row.bytes_after for row in report.rows] == held and report.bytes_after == sum(held)
    assert held == [packed_nbytes(weight.shape, settings) for weight in expected.values()]
    assert "4 expert parameters quantized" in str(report)
    assert model.config.quantization_config is not config
    assert model.is_loaded_in_8bit == (settings.kind == "int8") != model.is_loaded_in_4bit
    assert model.is_quantized and model.hf_quantizer.is_trainable
    assert model.quantization_method == "bitsandbytes"
    assert model.num_parameters() == count
    left = footprint - report.bytes_before + report.bytes_after
    assert model.get_memory_footprint() == left
    assert model.get_memory_footprint(return_buffers=False) == left - buffers
    for cast in (model.half, model.float, lambda: model.to(torch.float16)):
        with pytest.raises(ValueError, match=r"not supported|cannot cast"):
            cast()


def test_none_means_the_models_own_config_and_a_second_call_changes_nothing() -> None:
    model = tiny()
    model.config.quantization_config = nf4().to_dict()
    expected = packed_by_hand(model, CodecSettings("nf4", True))
    quantize_experts(model)
    assert_stacks(model, expected)
    before = [parametrize.original_of(module, name) for _, module, name in packed(model)]
    attributes = {key: id(value) for key, value in model.__dict__.items()}
    report = quantize_experts(model)
    assert {row.status for row in report.rows} == {"already_quantized"}
    assert report.bytes_before == report.bytes_after
    after = [parametrize.original_of(module, name) for _, module, name in packed(model)]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert {key: id(value) for key, value in model.__dict__.items()} == attributes


def test_each_stack_is_released_as_soon_as_it_is_packed() -> None:
    """References alone decide what lives, as for a large model between two collections."""
    gc.collect()
    gc.disable()
    model = tiny()
    alive = {name: weakref.ref(model.get_parameter(name)) for name in NAMES}
    seen = []

    def progress(done: int, total: int, name: str) -> None:
        seen.append((done, total, name))
        assert [ref() is not None for ref in alive.values()] == [i >= done for i in range(total)]

    try:
        quantize_experts(model, nf4(), progress=progress)
    finally:
        gc.enable()
    assert seen == [*((i, 4, name) for i, name in enumerate(NAMES)), (4, 4, "")]


@EVERY
def test_dequantize_gives_back_a_plain_model_also_of_a_copy(config: Any, settings: Any) -> None:
    model = tiny()
    names, expected = list(model.state_dict()), packed_by_hand(model, settings)
    quantize_experts(model, config)
    logits, twin, again = model(IDS).logits, copy.deepcopy(model), copy.deepcopy(model)
    assert twin.get_memory_footprint() == model.get_memory_footprint()
    assert twin.dequantize() is twin and len(packed(model)) == 4
    for plain in (twin, model.dequantize()):
        assert list(plain.state_dict()) == names
        assert_stacks(plain, expected)
        torch.testing.assert_close(plain(IDS).logits, logits)
        assert not (plain.is_quantized or plain.is_loaded_in_4bit or plain.is_loaded_in_8bit)
        assert not hasattr(plain.config, "quantization_config")
        bound = {"dequantize", "add_adapter", "load_adapter", "named_modules"}
        assert bound <= set(again.__dict__) and not bound & set(plain.__dict__)
    assert quantize_experts(model, config).quantized
    assert stacks(model.dequantize(torch.float32))[NAMES[0]].dtype == torch.float32


# Names that start as others do, expressions, and what is none.
PATTERNS = ["model.layers.0", "experts", "lay", r"layers\.\d", "^mlp", "down_proj$", "["]


@pytest.mark.filterwarnings("ignore:llm_int8_skip_modules names")  # what matches nothing
@pytest.mark.parametrize("pattern", PATTERNS)
def test_skip_modules_follow_transformers(pattern: str) -> None:
    model, config = tiny(), nf4(llm_int8_skip_modules=[pattern])
    try:
        left = [
            name
            for name in NAMES
            for module in [name.rpartition(".")[0]]
            if not all(should_convert_module(one, [pattern]) for one in (module, name))
        ]
    except re.error:
        with pytest.raises(ConfigError, match=re.escape(repr(pattern))):
            quantize_experts(model, config)
        return
    report = quantize_experts(model, config)
    assert [row.name for row in report.skipped] == left
    assert all(pattern in row.reason for row in report.skipped)
    assert len(packed(model)) == 4 - len(left)
    assert hasattr(model, "is_loaded_in_4bit") == (len(left) < 4)


def linear_experts() -> nn.Module:
    block: Any = nn.Module()
    block.gate = nn.Linear(16, 4, bias=False)
    block.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4)
    )
    return block


def packed_model(**config: Any) -> Any:
    model = tiny()
    quantize_experts(model, nf4(**config))
    return model


def of_other_code(model: Any) -> None:
    experts = model.get_submodule("model.layers.0.mlp.experts")
    replace_parameter_4bit(experts, "down_proj", quant_type="fp4")


def converted(model: Any) -> None:
    """As bitsandbytes leaves it after an evaluation on a CPU with AVX512-BF16."""
    layer = model.model.layers[0].self_attn.q_proj = Linear4bit(64, 64, quant_type="nf4").to("cpu")
    layer.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)


class Sharded(torch.Tensor):
    """As DTensor, a class of its own."""


def holding(value: float) -> Callable[[nn.Parameter], None]:
    return lambda weight: weight.data.__setitem__((2, 1, 5), value)


def spoiled(change: Callable[[Any], Any], of: str = "down_proj") -> Callable[[], Any]:
    """A model after a change of its last stack, which may be another one then, or of it ("")."""

    def make() -> Any:
        model = tiny()
        stacks = model.get_submodule("model.layers.1.mlp.experts")._parameters
        changed = change(stacks[of] if of else model)
        stacks |= {} if changed is None else {of: changed}
        return model

    return make


INT8 = BitsAndBytesConfig(load_in_8bit=True)
AT, ODD = r" at index \[2, 1, 5\]", UnsupportedWeightError
REFUSED: list[tuple[Any, Any, Any, str]] = [
    (tiny, None, ConfigError, "no quantization config"),
    (tiny, SimpleNamespace(quant_method="gptq"), ConfigError, "'gptq'"),
    (linear_experts, nf4(), DetectionError, r"lists of Linear layers \(experts\)"),
    (lambda: tiny(mlp_only_layers=[0, 1]), nf4(), DetectionError, "missing_ok"),
    (lambda: packed_model(llm_int8_skip_modules=["down_proj"]), INT8, ConfigError, "4bit"),
    (
        packed_model, nf4(bnb_4bit_quant_type="fp4"), ConfigError,
        f"{NAMES[0]} is packed as nf4 with double quantization, and .* fp4 with double",
    ),
    (packed_model, nf4(bnb_4bit_use_double_quant=False), ConfigError, "asks for nf4:"),
    (packed_model, nf4(**STORED), ConfigError, "stored as bfloat16"),
    (
        spoiled(lambda model: setattr(model, "quantization_method", "gptq"), ""), nf4(),
        ConfigError, "'gptq'",
    ),
    (spoiled(of_other_code, ""), nf4(), ConfigError, f"{NAMES[1]} is packed as fp4 by other code"),
    (spoiled(converted, ""), nf4(), QuantizationError, r"converted model\.layers\.0\.self_attn"),
    *((spoiled(change), nf4(), error, rf"{NAMES[3]}.*{words}") for change, error, words in [
        (lambda w: nn.Parameter(w.to("meta")), ODD, "meta device"),
        (lambda w: setattr(w, "ds_id", 3), ODD, "ZeRO-3"),
        (lambda w: nn.Parameter(w.detach().as_subclass(Sharded), False), ODD, "is a Sharded"),
        (lambda w: nn.Parameter(w.double()), ODD, "float64"),
        (holding(torch.nan), NonFiniteWeightError, rf"nan{AT}"),
        (holding(1e38), NonFiniteWeightError, rf"e\+37{AT}"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "config", "error", "words"), REFUSED)
def test_refusals_leave_the_model_as_it_is(make: Any, config: Any, error: Any, words: str) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(error, match=words):
        quantize_experts(model, config)
    assert all(before[name] is p for name, p in model.named_parameters())


def test_missing_ok_and_what_is_no_conflict() -> None:
    report = quantize_experts(linear_experts(), nf4(), missing_ok=True)
    assert [found.name for found in report.linear_experts] == ["experts"]
    assert "bitsandbytes packs itself" in str(report)
    model = tiny(mlp_only_layers=[0, 1])
    assert not quantize_experts(model, nf4(), missing_ok=True).rows
    assert not hasattr(model, "is_loaded_in_4bit")
    with pytest.raises(ConfigError):  # a broken config is an error all the same
        quantize_experts(model, {}, missing_ok=True)
    again = quantize_experts(packed_model(), nf4(bnb_4bit_compute_dtype=torch.float32))
    assert len(again.already_quantized) == 4
    with pytest.warns(UserWarning, match="'layers.7.mlp'"):
        quantize_experts(tiny(), nf4(llm_int8_skip_modules=["layers.7.mlp", "lm_head"]))


def test_tied_experts_are_packed_once_and_stay_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, leaves, attach = tiny(), ("gate_up_proj", "down_proj"), parametrize.attach
    first, second = (layer.mlp.experts for layer in model.model.layers)
    for name in leaves:
        setattr(second, name, getattr(first, name))

    def failing(module: nn.Module, *rest: Any) -> None:
        if module is second:
            raise MemoryError
        attach(module, *rest)

    with monkeypatch.context() as patch:  # under all of its names, or none
        patch.setattr(parametrize, "attach", failing)
        with pytest.raises(QuantizationError, match="this one included, are whole"):
            quantize_experts(model, nf4())
    assert not packed(model)
    report = quantize_experts(model, nf4())
    assert sorted(row.name for row in report.rows) == sorted(NAMES[:2])
    for name in leaves:
        assert parametrize.original_of(first, name) is parametrize.original_of(second, name)
    assert quantize_experts(model).bytes_after == report.bytes_after
    model.dequantize()
    assert first.down_proj is second.down_proj


def test_a_failure_half_way_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    whole, expected = stacks(model), packed_by_hand(model, CodecSettings("nf4", True))
    calls, real = [], fill.pack

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory left")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fill, "pack", failing)
        with pytest.raises(QuantizationError, match=r"after 2 of 4 weights.*no memory left") as one:
            quantize_experts(model, nf4())
    assert all(name in str(one.value) for name in NAMES[:3])
    assert [f"{path}.{name}" for path, _, name in packed(model)] == NAMES[:2]
    assert_stacks(model, {n: expected[n] if n in NAMES[:2] else whole[n] for n in NAMES})
    report = quantize_experts(model, nf4())
    assert (len(report.quantized), len(report.already_quantized)) == (2, 2)
    assert_stacks(model, expected)


def test_packed_layers_that_are_stored_the_other_way_round_are_refused() -> None:
    layer = Linear4bit(64, 64)
    layer.source_cls = Conv1D
    with pytest.raises(ConfigError, match="c_fc is a Conv1D: name it in llm_int8_skip_modules"):
        packed_linears(nn.ModuleDict({"c_fc": layer}))


def test_reports_classes_that_decode_a_layer_at_a_time_and_linear_routers() -> None:
    model = tiny_model("llama4_text", num_hidden_layers=1)
    report = quantize_experts(model, nf4())
    (slow,) = report.slow_modules
    assert slow.decoded_bytes == report.bytes_before and slow.class_name in str(report)
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    model = tiny_model("jetmoe")
    report = quantize_experts(model, nf4())
    assert report.linear_routers and "llm_int8_skip_modules" in str(report)
    for router in report.linear_routers:
        assert isinstance(model.get_submodule(router.name), nn.Linear)
    report = quantize_experts(tiny(), nf4())
    assert not report.linear_routers and not report.slow_modules
