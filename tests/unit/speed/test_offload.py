"""Experts in host memory: losses, gradients and files are those of the resident model.

All runs are on a device whose copies come as late as they may (tests/helpers/delayed.py).
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import ConfigError
from moe_qlora.packing import parametrize
from moe_qlora.speed import offload as host_memory
from moe_qlora.speed.offload import held_tensors
from moe_qlora.testing import registry_families, tiny_inputs, tiny_model
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import adapted, equal, fill, token_ids, train, with_lora
from tests.helpers.mxfp4 import write_gpt_oss
from tests.helpers.representatives import REPRESENTATIVES

CODECS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
CHECKPOINTS: dict[str, bool | None] = {"kept": None, "recomputed": False, "reentrant": True}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    with delayed(monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt_oss")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 3}
    write_gpt_oss(root, **sizes, num_hidden_layers=3)
    return root / "maker"


def kept_codes(folder: Path) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    with moe_qlora.enabled(keep_codes=True):
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).train()


def packed(codec: str = "nf4 twice", layers: int = 4, **overrides: Any) -> Any:
    model = tiny_model("qwen3_moe", num_hidden_layers=layers, **{"num_experts": 2, **overrides})
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**CODECS[codec]))
    return model


def checkpointed(model: Any, way: str) -> Any:
    reentrant = CHECKPOINTS[way]
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def bits(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether all bytes are the same; codes may look like numbers that are none."""
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype
        and a.shape == second[name].shape
        and torch.equal(raw(a), raw(second[name]))
        for name, a in first.items()
    )


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("codec", "way"),
    [*((codec, "kept") for codec in CODECS), ("fp4", "recomputed"), ("nf4 twice", "reentrant")],
)
def test_steps_are_those_of_the_resident_model(
    codec: str, way: str, devices: list[Delayed]
) -> None:
    model = checkpointed(with_lora(packed(codec)), way)
    ids, weights = token_ids(model), bits(model)
    resident = train(model, ids, 2)
    model.load_state_dict(weights)
    with moe_qlora.offload_experts(model) as off, Reads(devices) as reads:
        assert equal(train(model, ids, 2), resident)
        # 2 at first; in each pass forward and backward all but the two that are there
        assert off.copies == 2 + 2 * 2 * (4 - off.slots)
        assert reads.count > 2 * 4 * 2 * 2
        assert len(devices[0].made) == off.slots
        assert devices[0].missed == 1  # The very first
    again = bits(model)
    model.load_state_dict(weights)
    assert equal(train(model, ids, 2), resident)
    assert same(bits(model), again)


@pytest.mark.parametrize("way", ["kept", "reentrant"])
def test_kept_codes_of_a_checkpoint(kept_folder: Path, way: str, devices: list[Delayed]) -> None:
    model = checkpointed(with_lora(kept_codes(kept_folder)), way)
    ids, weights = token_ids(model, seq=12), bits(model)
    resident = train(model, ids)
    model.load_state_dict(weights)
    with moe_qlora.offload_experts(model) as off, Reads(devices):
        assert equal(train(model, ids), resident)
        assert off.copies == 2 + 3 * 2


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama4_text", "nemotron_h"])
def test_model_types_train_alike(model_type: str, devices: list[Delayed]) -> None:
    """Some read decoded weights, have dense layers first, or several kinds of layers."""
    model = adapted(model_type)
    ids, weights = token_ids(model, seq=20), bits(model)
    resident = train(model, ids)
    model.load_state_dict(weights)
    with moe_qlora.offload_experts(model), Reads(devices):
        assert equal(train(model, ids), resident)


@pytest.mark.parametrize(
    "model_type", sorted(REPRESENTATIVES.keys() & {*registry_families()} - {"qwen3_omni_moe"})
)
def test_each_kind_of_layer_computes_alike(model_type: str) -> None:
    model: Any = tiny_model(model_type)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    inputs, weights = tiny_inputs(model), bits(model)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = model(**inputs)[0]
    with moe_qlora.offload_experts(model), torch.random.fork_rng():
        torch.manual_seed(1)
        assert torch.equal(model(**inputs)[0], expected)
        assert same(bits(model), weights)
    assert same(bits(model), weights)


def test_evaluation_generation_and_switched_adapters() -> None:
    model = with_lora(packed())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    fill(model)
    ids = token_ids(model)

    def results() -> list[Tensor]:
        found: list[Any] = []
        for name in ("default", "second"):
            model.set_adapter(name)
            model.train()
            loss = model(input_ids=ids, labels=ids).loss
            with torch.no_grad():  # Between a forward and its backward
                found.append(model(input_ids=ids).logits)
                with model.disable_adapter():
                    found.append(model(input_ids=ids).logits)
            loss.backward()
            found += [
                loss.detach(),
                *(
                    p.grad.clone()
                    for p in model.parameters()
                    if p.requires_grad and p.grad is not None
                ),
            ]
            model.zero_grad()
            model.eval()
            with torch.inference_mode():
                found.append(model(input_ids=ids).logits.clone())
            found.append(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
        return found

    resident = results()
    with moe_qlora.offload_experts(model):
        for _ in range(2):
            assert all(map(torch.equal, results(), resident))
    assert all(map(torch.equal, results(), resident))


def test_first_use_in_inference_mode_spoils_nothing() -> None:
    model = with_lora(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 2)
    with moe_qlora.offload_experts(model):
        with torch.inference_mode():
            model(input_ids=ids)
        assert equal(train(model, ids, 2), resident)


def test_some_layers_only() -> None:
    model = with_lora(packed())
    ids, weights = token_ids(model), bits(model)
    resident = train(model, ids)
    for count in (1, 2, 3):
        model.load_state_dict(weights)
        with moe_qlora.offload_experts(model, layers=count) as off:
            assert equal(train(model, ids), resident)
            assert len(off.layers) == count and off.layers[-1].endswith("layers.3")
            assert off.slots == min(2, count)
            assert off.copies == (count if count < 3 else 2 + 3 * 2)


def test_a_failure_in_the_middle_leaves_nothing(devices: list[Delayed]) -> None:
    model = with_lora(packed())
    ids = token_ids(model)
    resident = train(copy.deepcopy(model), ids, 1)
    threads = threading.active_count()
    off = moe_qlora.offload_experts(model)
    layer = model.get_base_model().model.layers[2]
    for stage in ("forward", "backward"):
        hook = (
            layer.mlp.register_forward_hook(failing)
            if stage == "forward"
            else layer.mlp.register_full_backward_hook(failing)
        )
        held = None
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        except ArithmeticError as error:
            held = error  # With all frames
        hook.remove()
        model.zero_grad()
        assert held is not None
        assert equal(train(copy.deepcopy(model), ids, 1), resident)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert [loss.item()] == resident[0]
        model.zero_grad()
    del held
    gc.collect()
    (device,) = devices
    assert all(slot.leases == 0 for slot in off._slots._slots)  # type: ignore[union-attr]
    assert len(device.made) <= 6
    assert threading.active_count() == threads
    off.remove()
    assert equal(train(model, ids, 1), resident)


def failing(*_: Any) -> None:
    raise ArithmeticError("in the middle")


@pytest.mark.parametrize("codec", ["nf4 twice", "int8"])
def test_remove_gives_back_the_same_model(codec: str) -> None:
    model = packed(codec)
    before, text = bits(model), repr(model)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    nbytes = model.get_memory_footprint()
    weights = [parametrize.read_packed(m, n) for _, m, n in parametrize.iter_packed(model)]
    off = moe_qlora.offload_experts(model)
    assert repr(model) != text and "on host" in repr(model)
    assert model.get_memory_footprint() == nbytes
    assert off.host_nbytes >= sum(weight.nbytes for weight in weights)
    assert str(off.slots) in str(off) and off.copies == 0
    off.remove()
    off.remove()
    assert same(bits(model), before) and repr(model) == text
    assert parameters == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert off.host_nbytes == off.slots == 0
    hosts = [parametrize.parametrization_list(m, n) for _, m, n in parametrize.iter_packed(model)]
    assert all("host" not in each.__dict__ for each in hosts)


def test_host_memory_is_freed_with_the_model_or_by_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    class Watched(host_memory._Map):
        def __del__(self) -> None:
            alive.remove(id(self))

    def made(nbytes: int) -> Any:
        found = original(nbytes)
        alive.append(id(found))
        return found

    monkeypatch.setattr(host_memory, "_Map", Watched)
    original = Watched.anonymous
    monkeypatch.setattr(Watched, "anonymous", made)
    model = packed()
    with moe_qlora.offload_experts(model):
        model(**tiny_inputs(model))
        assert len(alive) == 4
    assert not alive
    off = moe_qlora.offload_experts(model)
    model(**tiny_inputs(model))
    del model, off
    gc.collect()
    assert not alive


def test_a_copy_has_its_experts_on_the_device() -> None:
    model = with_lora(packed())
    ids = token_ids(model)
    with moe_qlora.offload_experts(model) as off:
        twin = copy.deepcopy(model)
        copies = off.copies
        found = train(twin, ids)
        assert off.copies == copies and "on host" not in repr(twin)
        for _, module, name in parametrize.iter_packed(twin):
            for tensor in held_tensors(parametrize.parametrization_list(module, name)):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        with moe_qlora.offload_experts(twin):
            pass
        assert equal(train(model, ids), found)


def test_state_dicts_and_folders_are_those_of_the_resident_model(tmp_path: Path) -> None:
    model = packed()
    before = bits(model)
    model.save_pretrained(tmp_path / "resident")
    with moe_qlora.offload_experts(model):
        model(**tiny_inputs(model))
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        model.save_pretrained(tmp_path / "offloaded")
    sizes = sum(tensor.nbytes for tensor in before.values())
    assert (tmp_path / "weights.pt").stat().st_size < 1.5 * sizes
    assert same(torch.load(tmp_path / "weights.pt"), before)
    files = sorted(path.name for path in (tmp_path / "resident").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "offloaded").iterdir())
    for name in files:
        first, second = (tmp_path / folder / name for folder in ("resident", "offloaded"))
        assert first.read_bytes() == second.read_bytes(), name


@pytest.mark.parametrize(
    ("codec", "assign"), [("nf4", False), ("nf4 twice", True), ("int8", False), ("int8", True)]
)
def test_weights_that_are_loaded_meanwhile_count(codec: str, assign: bool) -> None:
    model = packed(codec)
    other: Any = tiny_model("qwen3_moe", seed=5, num_hidden_layers=4, num_experts=2)
    moe_qlora.quantize_experts(other, BitsAndBytesConfig(**CODECS[codec]))
    inputs = tiny_inputs(model)
    expected = other(**inputs).logits
    before = model(**inputs).logits
    assert not torch.equal(before, expected)
    first = copy.deepcopy(model.state_dict())
    for layers in (None, 2):  # In which the slots have all layers
        model.load_state_dict(first)
        with moe_qlora.offload_experts(model, layers=layers):
            for _ in range(2):
                assert torch.equal(model(**inputs).logits, before)
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            for _ in range(2):
                assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(model(**inputs).logits, expected)
    assert same(bits(model), bits(other))


def test_to_leaves_experts_in_host_memory() -> None:
    model = packed()
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    with moe_qlora.offload_experts(model) as off:
        moved = model.to("cpu").cpu()
        assert torch.equal(moved(**inputs).logits, expected) and "on host" in repr(moved)
        model.model.layers.to(torch.float64).to(torch.float32)
        assert torch.equal(moved(**inputs).logits, expected)
        with pytest.raises(ConfigError, match=r"moved to meta.*call remove"):
            model.to("meta")
        assert off.device == torch.device("cpu")


def test_merging_is_refused_and_possible_afterwards() -> None:
    model = with_lora(packed())
    twin = copy.deepcopy(model)
    with moe_qlora.offload_experts(model):
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(ConfigError, match=r"experts.*lies in host memory.*remove\(\)"):
                merge()
        with pytest.raises(ConfigError, match=r"lies in host memory"):
            model.get_base_model().dequantize()
        assert equal(train(model, token_ids(model), 1), train(twin, token_ids(model), 1))
    first, second = model.merge_and_unload(), twin.merge_and_unload()
    assert same(bits(first), bits(second))


def test_adapters_are_made_on_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed()
    with moe_qlora.offload_experts(model) as off:
        names = [(module, name) for _, module, name in parametrize.iter_packed(model)]
        off.device = torch.device("meta")  # Another one than where the codes are
        devices = {parametrize.device_of(module, name) for module, name in names}
        off.device = torch.device("cpu")
        assert devices == {torch.device("meta")}
        adapted_later = with_lora(model)
        found = train(adapted_later, token_ids(model))
    assert equal(train(with_lora(packed()), token_ids(model)), found)


@pytest.mark.parametrize("layers", [0, -1, 5, True, 2.0, "2"])
def test_wrong_numbers_of_layers(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"layers is .*from 1 to 4"):
        moe_qlora.offload_experts(packed(), layers=layers)


def test_what_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no packed experts"):
        moe_qlora.offload_experts(tiny_model("qwen3_moe"))
    model = packed()
    with (
        moe_qlora.offload_experts(model, layers=2),
        pytest.raises(ConfigError, match=r"layers\.2 are in host memory already"),
    ):
        moe_qlora.offload_experts(model)


@pytest.mark.parametrize("codec", ["nf4 twice", "int8"])
def test_a_model_laid_out_for_sharding(codec: str) -> None:
    """As several ranks have it."""
    model, sharded = (moe_qlora.prepare_sharding(packed(codec)) for _ in range(2))
    with moe_qlora.offload_experts(sharded):
        assert same(bits(sharded), bits(model))
        with pytest.raises(ConfigError, match=r"lies in host memory.*remove\(\)"):
            moe_qlora.prepare_sharding(sharded)
        first, second = with_lora(model), with_lora(sharded)
        assert equal(train(first, token_ids(model)), train(second, token_ids(model)))
    assert same(bits(first), bits(second))


class Cuda:
    """What CUDA has page-locked, by address."""

    def __init__(self, most: int = 1 << 60) -> None:
        self.locked: dict[int, int] = {}
        self.most = most

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.locked) == self.most:
            return 2
        assert address % 4096 == 0 and address not in self.locked and flags == 1
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Cuda:
        cuda = host_memory.torch.cuda
        monkeypatch.setattr(cuda, "cudart", self.cudart)
        monkeypatch.setattr(cuda, "device", lambda _: torch.no_grad())
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(host_memory.torch, "zeros", lambda *_, **__: None)
        return self


def test_page_locked_memory_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = Cuda().install(monkeypatch), torch.device("cuda", 0)
    memory = host_memory.HostMemory(10_000, device)
    part = memory.tensor(512, 16)
    assert list(cuda.locked.values()) == [10_000]
    memory.lock(device)
    del memory
    assert len(cuda.locked) == 1 and int(part.sum()) == 0
    del part
    assert not cuda.locked
    memory = host_memory.HostMemory(10, torch.device("cpu"))
    assert not cuda.locked
    memory.lock(device)
    assert len(cuda.locked) == 1
    del memory
    assert not cuda.locked


def test_a_limit_of_locked_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed()
    before = bits(model)
    with monkeypatch.context() as patched:
        cuda = Cuda(most=2).install(patched)
        lock = host_memory.HostMemory.lock
        patched.setattr(
            host_memory.HostMemory, "lock", lambda self, _: lock(self, torch.device("cuda", 0))
        )
        with pytest.raises(ConfigError, match=r"could not be page-locked \(CUDA error 2\)"):
            moe_qlora.offload_experts(model)
        assert not cuda.locked
    assert same(bits(model), before) and "on host" not in repr(model)
    with moe_qlora.offload_experts(model):
        model(**tiny_inputs(model))


def test_with_saved_tensors_on_the_host(devices: list[Delayed]) -> None:
    """torch moves activations there, and nothing of a slot: autograd has saved none of it."""
    model = with_lora(packed())
    ids, weights = token_ids(model), bits(model)
    resident = train(model, ids)
    model.load_state_dict(weights)
    saved: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        made = [memory for device in devices for memory in device.made]
        slots = {memory.untyped_storage().data_ptr() for memory in made}
        saved.append(tensor.untyped_storage().data_ptr() in slots)
        return tensor.clone()  # What `save_on_cpu` does for a device

    with moe_qlora.offload_experts(model):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone), Reads(devices):
            assert equal(train(model, ids), resident)
        assert len(saved) > 40 and not any(saved)
        model.load_state_dict(weights)
        with torch.autograd.graph.save_on_cpu():
            assert equal(train(model, ids), resident)


@pytest.mark.parametrize("second", [False, True])
def test_factors_are_where_experts_are_computed(
    second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT moves what it made to the first parameter's device; "cpu:0" stands for another one."""
    model, moves, there = packed(), [], torch.device("cpu", 0)
    moe_qlora.offload_experts(model)
    monkeypatch.setattr("moe_qlora.lora.layer.device_of", lambda *_: there)
    move = torch.nn.Module.to

    def noted(self: Any, *args: Any, **rest: Any) -> Any:
        moves.append((self, args[0]))
        return move(self, *args, **rest)

    monkeypatch.setattr(torch.nn.Module, "to", noted)
    adapted_model = with_lora(model)
    if second:
        config = adapted_model.peft_config["default"]
        adapted_model.add_adapter("other", copy.deepcopy(config))
        adapted_model.set_adapter("other")
    factors = [
        (name, module)
        for name, module in adapted_model.named_modules()
        if "experts" in name and "lora_" in name and isinstance(module, torch.nn.Linear)
    ]
    assert len(factors) == (2 if second else 1) * 4 * 2 * 2
    for name, factor in factors:
        own = [to for module, to in moves if any(part is factor for part in module.modules())]
        assert own[-1] == there and str(own[-1]) == "cpu:0", name
