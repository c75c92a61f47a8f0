"""Experts that stay in the files of a packed folder: read as they are, and never written."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import CheckpointError, ConfigError
from moe_qlora.checkpoint.reader import read_header
from moe_qlora.packing import parametrize
from moe_qlora.speed import disk, host_memory
from moe_qlora.speed.slots import HostCopier
from moe_qlora.testing import tiny_model
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import equal, fitted, least_memory, token_ids, train, with_lora
from tests.helpers.mxfp4 import write_gpt_oss

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
CODECS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bf16 storage": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    """Buffers of a size that cuts most tensors, and is no multiple of any."""
    monkeypatch.setattr(disk, "BUFFER", 1000)
    with delayed(monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder of each codec, of three layers."""
    root = tmp_path_factory.mktemp("folders")
    tiny_model("qwen3_moe", num_hidden_layers=3).save_pretrained(root / "plain")
    for codec, settings in CODECS.items():
        load(root / "plain", settings).save_pretrained(root / codec, max_shard_size="30KB")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 3}
    write_gpt_oss(root / "gpt_oss", **sizes, num_hidden_layers=3)
    load(root / "gpt_oss" / "maker", NF4, keep_codes=True).save_pretrained(root / "kept")
    return root


def load(folder: Path, config: dict[str, Any] | None = None, **block: Any) -> Any:
    given = {} if config is None else {"quantization_config": BitsAndBytesConfig(**config)}
    with moe_qlora.enabled(**block):
        return AutoModelForCausalLM.from_pretrained(folder, **given, device_map={"": "cpu"})


def on_disk(folder: Path) -> tuple[Any, Any]:
    model = load(folder, offload="disk")
    return model, moe_qlora.offload_experts(model)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "experts" in thread.name]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def bits(model: Any) -> dict[str, Tensor]:
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).clone()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("codec", [*CODECS, "kept"])
def test_a_packed_folder_trains_from_its_files(
    codec: str, folders: Path, devices: list[Delayed]
) -> None:
    before = digests(folders / codec)
    resident = load(folders / codec)
    model, off = on_disk(folders / codec)
    packed = [parametrize.read_packed(m, n) for _, m, n in parametrize.iter_packed(model)]
    codes = sum(weight.codes.nbytes + weight.absmax.nbytes for weight in packed)
    assert off.disk_nbytes >= codes and off.host_nbytes < 0.02 * off.disk_nbytes + 8192
    assert "of files" in str(off) and "on host" in repr(model)
    first, second = (with_lora(each, experts=True).train() for each in (resident, model))
    ids, copies = token_ids(first, seq=12), off.copies
    with Reads(devices):
        assert equal(train(first, ids), train(second, ids))
    # All but the two that are there, forwards and backwards; at first the slots may have others
    assert 3 * 2 <= off.copies - copies <= 2 + 3 * 2 and len(devices[0].made) == 2
    known = bits(first)
    assert all(torch.equal(tensor, known[name]) for name, tensor in bits(second).items())
    off.remove()
    assert off.disk_nbytes == 0 and "on host" not in repr(model)
    assert equal(train(first, ids), train(second, ids))
    assert digests(folders / codec) == before and not readers()


def test_the_folder_is_checked_at_each_use(folders: Path, tmp_path: Path) -> None:
    for harm in ("removed", "truncated", "rewritten", "replaced"):
        folder = tmp_path / harm
        load(folders / "nf4").save_pretrained(folder, max_shard_size="4KB")
        model, off = on_disk(folder)
        ids = token_ids(model, seq=12)
        model(input_ids=ids)
        for file in folder.glob("*.safetensors"):
            if not all(".experts." in key for key in read_header(file)):
                continue  # On a CPU others are read through the mapping by anyone
            content = file.read_bytes()
            if harm in ("removed", "replaced"):
                file.unlink()
            elif harm == "truncated":
                os.truncate(file, 100)
            if harm in ("rewritten", "replaced"):
                file.write_bytes(content)
                os.utime(file, ns=(1, 1))
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"safetensors was changed or removed.*again"):
                model(input_ids=ids)
        assert all(slot.leases == 0 for slot in off._slots._slots)
        for reads in (model.state_dict, off.remove, partial(copy.deepcopy, model)):
            with pytest.raises(CheckpointError, match="was changed or removed"):
                reads()
        assert not readers(), harm


def test_a_file_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    file = disk._File(tmp_path / "a")
    to = torch.zeros(30, dtype=torch.uint8)
    file.read(to, 60)
    assert to.tolist() == list(range(60, 90))
    with pytest.raises(CheckpointError, match="a ends at byte 100"):
        file.read(to, 80)


def test_reads_are_in_parts_and_of_interrupted_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of it a call reads, and wherever buffers cut, the slot has all bytes."""
    content = torch.randint(256, (5000,), dtype=torch.uint8)
    (tmp_path / "a").write_bytes(content.numpy().tobytes())
    read, wait = os.preadv, threading.Event().wait

    def some(handle: int, views: Any, offset: int) -> int:
        wait(0.001)
        return read(handle, [views[0][:333]], offset)

    monkeypatch.setattr(disk.os, "preadv", some)
    for size in (128, 1000, 4096, 10_000):
        monkeypatch.setattr(disk, "BUFFER", size)
        one = disk.Disk({})
        one._files[tmp_path / "a"] = disk._File(tmp_path / "a")
        extra = torch.arange(50, dtype=torch.uint8)
        here = [
            disk._Part(0, 900, tmp_path / "a", 100),
            disk._Part(1024, 50, extra),
            disk._Part(1280, 3000, tmp_path / "a", 1777),
        ]
        slots = [torch.zeros(4352, dtype=torch.uint8) for _ in range(3)]
        filled = [one.fill(slot, here, HostCopier(), []) for slot in slots]
        assert [each.result(10) for each in filled] == [None] * 3
        for slot in slots:
            assert torch.equal(slot[:900], content[100:1000])
            assert torch.equal(slot[1024:1074], extra)
            assert torch.equal(slot[1280:4280], content[1777:4777])
        assert len(one._buffers) == 2
        one.fill(slots[0], here, HostCopier(), [])
        one.free()
        assert not readers() and not one._buffers


def test_a_change_in_the_middle_is_seen(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folders / "nf4").save_pretrained(tmp_path / "packed")
    model, _ = on_disk(tmp_path / "packed")
    [file] = (tmp_path / "packed").glob("*.safetensors")
    read = disk._File.read

    def changed(self: Any, to: Tensor, offset: int) -> None:
        read(self, to, offset)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(disk._File, "read", changed)
    with pytest.raises(CheckpointError, match="was changed or removed"):
        model(input_ids=token_ids(model, seq=12))


def test_a_read_that_failed_is_tried_again(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident, (model, _) = load(folders / "nf4"), on_disk(folders / "nf4")
    ids, read, failures = token_ids(model, seq=12), os.preadv, [1, 7, 60]

    def failing(*args: Any) -> int:
        failures[:] = [left - 1 for left in failures]
        if 0 in failures:
            raise OSError(5, "Input/output error")
        return read(*args)

    expected = resident(input_ids=ids).logits
    monkeypatch.setattr(disk.os, "preadv", failing)
    errors = 0
    for _ in range(12):
        try:
            assert torch.equal(model(input_ids=ids).logits, expected)
        except CheckpointError as error:
            errors += "cannot be read: [Errno 5] Input/output error" in str(error)
    assert errors == 3
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_slot_is_waited_for(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is, or how quick."""
    resident, (model, _) = load(folders / "nf4"), on_disk(folders / "nf4")
    ids = token_ids(model, seq=12)
    read = disk._File.read

    def slowly(self: Any, to: Tensor, offset: int) -> None:
        threading.Event().wait(0.003)
        read(self, to, offset)

    monkeypatch.setattr(disk._File, "read", slowly)
    for _ in range(2):
        assert torch.equal(model(input_ids=ids).logits, resident(input_ids=ids).logits)


def test_buffers_are_two_and_freed_with_the_rest(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    alive: list[int] = []

    class Watched(host_memory._Map):
        def __del__(self) -> None:
            alive.remove(id(self))

    def watched(nbytes: int) -> Any:
        found = original(nbytes)
        alive.append(id(found))
        made.append(nbytes)
        return found

    monkeypatch.setattr(host_memory, "_Map", Watched)
    original = Watched.anonymous
    monkeypatch.setattr(Watched, "anonymous", watched)
    model, off = on_disk(folders / "nf4")
    ids = token_ids(model, seq=12)
    for _ in range(3):
        model(input_ids=ids)
    off._slots.finish()
    assert made == [disk.BUFFER] * 2
    off.remove()
    gc.collect()
    assert not alive
    model, off = on_disk(folders / "nf4")
    model(input_ids=ids)
    del model, off
    gc.collect()
    handles = [str(one.resolve()) for one in Path("/proc/self/fd").iterdir()]
    assert not alive and not any(str(folders) in each for each in handles)


def test_weights_that_are_loaded_meanwhile_lie_in_host_memory(folders: Path) -> None:
    before = digests(folders / "nf4")
    model, off = on_disk(folders / "nf4")
    ids, there, nbytes = token_ids(model, seq=12), off.host_nbytes, off.disk_nbytes
    other: Any = tiny_model("qwen3_moe", seed=5, num_hidden_layers=3)
    moe_qlora.quantize_experts(other, BitsAndBytesConfig(**NF4))
    assert not torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    state = {name: t for name, t in other.state_dict().items() if ".experts." in name}
    expected, _ = on_disk(folders / "nf4")
    off_again = moe_qlora.offload_experts(expected)
    off_again.remove()
    for assign in (False, True):
        for one in (model, expected):
            one.load_state_dict(copy.deepcopy(state), strict=False, assign=assign)
        assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
        assert off.disk_nbytes == 0 and off.host_nbytes == there + nbytes
    assert digests(folders / "nf4") == before


def test_copies_and_saves_have_the_bytes_themselves(folders: Path, tmp_path: Path) -> None:
    model, _ = on_disk(folders / "nf4")
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert digests(tmp_path / "again") == digests(folders / "nf4")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    sizes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert (tmp_path / "weights.pt").stat().st_size < 1.5 * sizes
    assert "on host" not in repr(twin)
    ids = token_ids(model, seq=12)
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)


def test_what_is_no_packed_folder_is_refused(folders: Path) -> None:
    with pytest.raises(ConfigError, match=r"plain is none: write one first.*moe-qlora quantize"):
        load(folders / "plain", NF4, offload="disk")
    model = tiny_model("qwen3_moe")
    with (
        moe_qlora.enabled(offload="disk"),
        pytest.raises(ConfigError, match="quantize_experts has no files"),
    ):
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(**NF4))
    with pytest.raises(ConfigError, match="offload is 'ram'"), moe_qlora.enabled(offload="ram"):  # type: ignore[arg-type]
        pass


def test_the_last_block_that_asks_counts(folders: Path) -> None:
    for outer, inner, files in (("disk", True, False), (True, "disk", True), ("disk", False, True)):
        with moe_qlora.enabled(offload=outer):  # type: ignore[arg-type]
            model = load(folders / "nf4", offload=inner)
        assert (moe_qlora.offload_experts(model).disk_nbytes > 0) is files


@pytest.mark.parametrize("loads", [False, True])
def test_fit_memory_brings_experts_from_files_and_back(
    loads: bool, folders: Path, devices: list[Delayed]
) -> None:
    before = digests(folders / "nf4")
    model, off = on_disk(folders / "nf4")
    model = with_lora(model, experts=True).train()
    ids, weights = token_ids(model), bits(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = train(model, ids)
    model.load_state_dict({name: t for name, t in state.items() if "lora" in name}, strict=False)
    where = off.layers, off.disk_nbytes, off.host_nbytes
    with fitted(model, least_memory(model)) as fit:
        assert [layer.experts for layer in fit.layers] == ["host"] * 3
        assert "experts of 3 lie in" in str(fit) and "of files" in str(fit)
    with fitted(model) as fit:
        assert {layer.experts for layer in fit.layers} == {"device"} and not off.layers
        assert equal(train(model, ids), expected)
        model.load_state_dict(state if loads else {}, strict=False)
    assert off.layers == where[0]
    if loads:  # into memory on the device, of which no file is known
        assert off.disk_nbytes == 0
    else:
        assert (off.disk_nbytes, off.host_nbytes) == where[1:]
    model.load_state_dict({name: t for name, t in state.items() if "lora" in name}, strict=False)
    assert equal(train(model, ids), expected)
    found = bits(model)
    packed = [name for name in weights if "lora" not in name]
    assert all(torch.equal(found[name], weights[name]) for name in packed)
    off.remove()
    assert digests(folders / "nf4") == before and not readers()
