"""Plans against what really is: footprints, adapters, optimizers, kept tensors, H200 peaks."""

import copy
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.kernels import limits
from moe_qlora.kernels.cards import of_capability
from moe_qlora.models import named
from moe_qlora.planning import budget, devices
from moe_qlora.planning.budget import Settings
from moe_qlora.planning.model import source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import model_class, tiny_config, tiny_inputs, tiny_model
from tests.helpers.plans import DOUBLE, MEASURED, plan, qwen3_30b, small
from tests.helpers.representatives import cases
from tests.helpers.training import loaded

# transformers leaves the file of a checkpoint open, and says what it will drop in v6.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:llm_int8_skip_modules names 'q_proj'",
)

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "dbrx", "nemotron_h")
PACKINGS = {
    "nf4 double": DOUBLE,
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "skips": {"load_in_4bit": True, "llm_int8_skip_modules": ["q_proj", "lm_head"]},
}
SKIPPED = {**DOUBLE, "llm_int8_skip_modules": ["experts"]}
GIB = 1 << 30


def planner(model, settings: Settings, quantization=None) -> Planner:
    return Planner(source_of(model, quantization), settings)


# Each family in one packing, by turns.
PAIRS = [(family, list(PACKINGS)[turn % len(PACKINGS)]) for turn, family in enumerate(FAMILIES)]


@pytest.mark.filterwarnings("ignore:stock PEFT rewrites the target_modules")
@pytest.mark.parametrize(("family", "packing"), cases(PAIRS))
def test_weights_and_adapters_are_those_of_the_loaded_model(tmp_path, family, packing):
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config, folder = BitsAndBytesConfig(**PACKINGS[packing]), str(tmp_path)
    model = loaded(folder, config, model_class(family), dtype=torch.bfloat16)
    for made in (planner(folder, Settings(), config), planner(model, Settings())):
        assert sum(block.weights for block in made.meta.blocks) == model.get_memory_footprint()
    for targets in ("all-linear", "experts"):
        experts = targets == "experts"
        lora = LoraConfig(r=4, target_modules=[] if experts else targets)
        real = moe_qlora.get_peft_model(copy.deepcopy(model), lora, experts=experts)
        wanted = sorted(p.numel() for p in real.parameters() if p.requires_grad)
        meta = planner(folder, Settings(rank=4, targets=targets), config).meta
        assert sorted(n for block in meta.blocks for n in block.trained) == wanted


STATISTICS = 128 * 2048 * 1536 // 64 * 4
DEQUANTIZED = 128 * 2048 * (1536 + 768) * 2


@pytest.mark.parametrize(
    ("layers", "seq", "targets", "adapters", "peak", "workspace"),
    [
        # results/plan.csv
        (16, 4096, "attention", "bfloat16", 1.47346e10, STATISTICS),
        (16, 4096, "attention,experts", "float32", 1.728e10, STATISTICS),
        (8, 8192, "attention", "bfloat16", 5.6483e9, DEQUANTIZED),
        (8, 8192, "attention,experts", "float32", 7.47728e9,
         128 * 2 * (1552 * 2064 + 2064 * 784)),
    ],
)  # fmt: skip
def test_peaks_of_fused_layers_measured_on_an_h200(layers, seq, targets, adapters, peak, workspace):
    vocabulary = {"vocab_size": 4096} if layers == 8 else {}
    config = qwen3_30b(num_hidden_layers=layers, **vocabulary)
    asked = {"seq": seq, "targets": targets, "adapter_dtype": adapters, "search": False}
    made = plan(config, BitsAndBytesConfig(**MEASURED), **asked)
    assert made.peak.nbytes == pytest.approx(peak, rel=0.01)
    assert made.peak.parts["decode scratch"] == workspace


HOPPER = of_capability((9, 0))


@pytest.fixture
def no_levels(monkeypatch):
    """Plans say nothing of what layers could keep, which takes a step on each level."""
    monkeypatch.setattr(Planner, "fit", lambda planner, capacities: None)


def test_a_card_that_is_named_computes_as_it_does(no_levels):
    """At 512 rows an expert Hopper dequantizes nothing; a size alone may be of any card."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 4096}
    asked = partial(plan, qwen3_30b(**sizes), seq=8192, search=False)
    scratch = {gpus: asked(gpus=gpus).peak.parts["decode scratch"] for gpus in ("H100", "79GiB")}
    assert scratch == {"H100": STATISTICS, "79GiB": DEQUANTIZED}
    assert asked(gpus="H100,A100-40GB").peak == asked(gpus="79GiB,39GiB").peak
    # An eighth of the device's memory bounds a buffer, and weights then go in slices.
    small = asked(gpus="4GiB").peak.parts["decode scratch"]
    assert 0 < small <= 2 * (4 * GIB // limits.WORKSPACE_PART) and small < DEQUANTIZED


LIGER = (  # layers=48 or 32, lora=experts,attention, with=liger,graphs,adamw_fused: model.csv
    ("qwen3-30b-a3b", {"seq": 32768}, 34.7135e9, 0.01),
    ("mixtral-8x7b", {"seq": 4096}, 32.5749e9, 0.03),
)


@pytest.mark.parametrize(("name", "sizes", "peak", "tolerance"), LIGER)
def test_peaks_under_liger_that_were_measured_on_an_h200(name, sizes, peak, tolerance):
    """What Liger's other kernels save is not counted, so that short sequences are over by some."""
    config = named.resolve(name).config
    quantization = BitsAndBytesConfig(**MEASURED)
    settings = {"targets": "attention,experts", "adapter_dtype": "bfloat16", **sizes}
    made = plan(config, quantization, prepared=True, **settings)
    assert made.peak.nbytes == pytest.approx(peak, rel=tolerance)
    assert plan(config, quantization, **settings).peak.nbytes > 1.02 * peak


def test_optimizers_states():
    """On the CPU nothing is paged, so the two paged optimizers hold there what they page."""
    from bitsandbytes import optim

    parameters = [nn.Parameter(torch.ones(size)) for size in (100, 4095, 4096, 5000, 120_001)]
    sum(p.sum() for p in parameters).backward()
    for name, maker in {
        "adamw": torch.optim.AdamW, "adamw_8bit": optim.AdamW8bit, "paged_adamw": optim.AdamW32bit,
    }.items():  # fmt: skip
        optimizer = maker(parameters)
        optimizer.step()
        real = sum(
            tensor.nbytes
            for state in optimizer.state.values()
            for key, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and not key.startswith(("qmap", "step"))
        )
        said = budget.optimizer_nbytes(name, [p.numel() for p in parameters], 4)
        assert sum(said[:2]) == real, name
    paged = budget.optimizer_nbytes("paged_adamw", [99_999, 100_000], 4)
    assert paged[:2] == (8 * 99_999, 8 * 100_000)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x24GiB", [24 * GIB] * 2),
        ("24GB, 2 x 1.5TiB,80g", [24 * 10**9, 1536 * GIB, 1536 * GIB, 80 * GIB]),
        ("4090, 2*rtx-4090, NVIDIA GeForce RTX 4090", [23 * GIB] * 4),
        ("A100 80GB,A100-40GB,rtx 6000 ada,a10", [79 * GIB, 39 * GIB, 47 * GIB, 21 * GIB]),
    ],
)
def test_devices(text, sizes):
    assert [*devices.devices_of(text)[0]] == sizes


@pytest.mark.parametrize("seed", range(8))
def test_partition_is_the_evenest(seed):
    """No other way to cut a row of blocks leaves the fullest device less full."""
    generator = torch.Generator().manual_seed(seed)
    loads = torch.randint(0, 50, (6,), generator=generator).tolist()
    sizes = torch.randint(20, 90, (1 + seed % 4,), generator=generator).tolist()

    def fullest(spans):
        return max(sum(loads[a:b]) / size for (a, b), size in zip(spans, sizes, strict=True))

    spans = budget.partition(6, sizes, lambda first, last: sum(loads[first:last]))
    assert [place for span in spans for place in range(*span)] == list(range(6))
    cuts = combinations_with_replacement(range(7), len(sizes) - 1)
    assert fullest(spans) == pytest.approx(
        min(fullest([*pairwise((0, *cut, 6))]) for cut in cuts), rel=1e-6
    )


def test_device_map_is_whole_even_and_usable(no_levels):
    from accelerate.utils.modeling import check_device_map

    config = small(num_hidden_layers=8)
    made = plan(config, gpus=[GIB, GIB], seq=512, search=False)
    model = tiny_model("qwen3_moe", device="meta", num_hidden_layers=8)
    check_device_map(model, made.device_map)
    assert set(made.device_map.values()) == {0, 1}
    places = [made.device_map[f"model.layers.{i}"] for i in range(8)]
    assert places == sorted(places)
    assert (made.device_map["model.embed_tokens"], made.device_map["lm_head"]) == (0, 1)
    assert made.device_map["model.rotary_emb"] == 0
    assert not any(name.startswith("model.layers.0.") for name in made.device_map)
    tied = plan(small(tie_word_embeddings=True), gpus="2x1GiB", seq=64, search=False).device_map
    assert tied["lm_head"] == tied["model.embed_tokens"] and {*tied.values()} == {0, 1}
    peaks = [use.peak.nbytes for use in made.devices]
    assert max(peaks) < 0.75 * made.peak.nbytes + budget.LIBRARY_BYTES
    assert sum(use.weights for use in made.devices) == made.resident


def test_nothing_of_the_callers_is_changed():
    config = small()
    said = config.to_json_string()
    model = tiny_model("olmoe", dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**PACKINGS["nf4 double"]))
    inputs, keys = tiny_inputs(model), list(model.state_dict())
    before = model(**inputs).logits
    quantization = BitsAndBytesConfig(**PACKINGS["fp4"])
    asked = quantization.to_json_string()
    plan(config, quantization, gpus="1GiB", seq=32, search=False)
    plan(model, seq=32, targets="attention,experts")
    assert config.to_json_string() == said
    assert quantization.to_json_string() == asked
    assert list(model.state_dict()) == keys
    assert model.config._experts_implementation == "moe_qlora"
    assert torch.equal(model(**inputs).logits, before)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_largest_sequence_and_batch_are_the_largest(no_levels):
    """Where a step grows with its tokens, and with the square of a sequence."""
    attention = "eager"
    config = qwen3_30b(num_hidden_layers=2)
    made = plan(config, gpus="6GiB", seq=1024, attention=attention)
    asked = planner(config, Settings(attention=attention))

    def fits(batch, seq):
        sized = asked.with_settings(replace(asked.settings, batch=batch, seq=seq))
        return all(use.fits for use in sized.report([6 * GIB]).devices)

    assert made.fits and fits(1, made.largest_seq) and fits(made.largest_batch, 1024)
    assert not fits(1, int(made.largest_seq * 1.02) + 64)
    assert not fits(made.largest_batch + 1, 1024)


def test_moments():
    """Where a vocabulary is large the loss is the peak; with large adapters it is the step."""
    loss, more = (plan(small(vocab_size=200_000), seq=512, accumulation=n) for n in (1, 2))
    assert more.peak.nbytes == loss.peak.nbytes + 4 * loss.trained_weights
    assert loss.peak.moment == "backward of lm_head"
    logits = 512 * 200_000
    assert loss.peak.parts["logits and loss"] == pytest.approx(12 * logits, rel=1e-3)
    step = plan(small(), seq=8, targets="experts", rank=256)
    assert step.peak.moment == "the optimizer's step"
    assert step.peak.parts["gradients"] == 4 * step.trained_weights
    assert step.peak.parts["optimizer states"] == 8 * step.trained_weights


def test_a_model_that_cannot_run_is_refused(monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    def needs_data(*args, **kwargs):
        raise NotImplementedError("data")

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeAttention, "forward", needs_data)
    with pytest.raises(moe_qlora.ConfigError, match=r"cannot run on the meta device \(NotImpl"):
        plan(small(), seq=64)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next_text", "jamba", "llama4_text"])
def test_layers_that_do_more_than_call_their_linears_run(family):
    """A grouped projection, masks as indices, a weight that is read if unquantized, or always."""
    targets = "attention,experts" if family == "llama4_text" else "all-linear"
    config, settings = tiny_config(family), Settings(seq=64, targets=targets)
    made = planner(config, settings, BitsAndBytesConfig(load_in_4bit=True))
    made.step()
    assert not hasattr(config, "_is_quantized")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"seq": 0}, "seq is 0; give a whole number of 1 or more."),
        ({"adapter_dtype": "int8"}, "adapter_dtype is 'int8'; give one of float32, "),
        ({"targets": ""}, "targets='' names nothing in this model"),
        ({"targets": "attention,banana"}, "names 'banana', which is no target and no module of "),
        ({"targets": "attention,q_prj"}, "(did you mean q_proj"),
        ({"targets": "self_attn.q_proj,layers.99.self_attn.q_proj"}, "names 'layers.99.self_attn."),
        ({"targets": "input_layernorm"}, "PEFT cannot put LoRA on 'input_layernorm': "),
        ({"gpus": 0}, "gpus: 0 is no size of a device"),
        ({"gpus": "3060"}, "gpus: 3060 is a number of bytes; write the memory, as in 24GiB."),
        ({"gpus": "A100"}, "write A100-80GB or A100-40GB"),
        *(({"gpus": text}, "gpus: ") for text in ("", "2x", "24GX", "-1GiB", "0x24GiB", "2*3*4G")),
        ({"engine": "zero"}, "engine is 'zero' for 0 gpus; give ddp or fsdp for 2 gpus or more"),
        ({"engine": "ddp", "gpus": "1x80GiB"}, "engine is 'ddp' for 1 gpus; give"),
        ({"ddp": 4, "gpus": "8x80GiB"}, "so give 8, or 4 GPUs."),
        ({"fsdp": 3, "gpus": "8x80GiB"}, "give a number of ranks that divides 8, or 3 GPUs."),
        ({"offload": True, "gpus": "2x1TiB"}, "offload is True, and experts in host memory are"),
        ({"offload": True, "gpus": "2x1TiB", "fsdp": 2}, "give one GPU, or ddp, or leave offload"),
        ({"offload": True, "quantization_config": SKIPPED}, "has no packed experts that could lie"),
    ],
)
def test_settings_that_make_no_sense(asked, message):
    """More errors: cli/golden/errors.txt."""
    with pytest.raises(moe_qlora.ConfigError) as caught:
        plan(small(), **asked)
    assert message in str(caught.value)


def test_models_that_are_none():
    config = LoraConfig(target_modules=["q_proj"])
    wrapped = moe_qlora.get_peft_model(tiny_model("mixtral"), config, unpacked_ok=True)
    for model, error, words in (
        (3, moe_qlora.ConfigError, "model is a int; give a model"),
        ("./nothing", moe_qlora.CheckpointError, "does not exist"),
        (wrapped, moe_qlora.ConfigError, "has adapters already"),
    ):
        with pytest.raises(error, match=words):
            plan(model)


def test_layers_that_cannot_be_computed_again_are_a_note():
    made = plan(tiny_config("diffusion_gemma_text"), seq=64, gpus="24GiB", search=False)
    assert made.fit is None and "What layers can keep of their activations" in made.notes[-1]
