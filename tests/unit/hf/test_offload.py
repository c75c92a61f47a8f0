"""`enabled(offload=True)`: experts are loaded into host memory, and are those of any other load."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import moe_qlora
from moe_qlora.hf.fill import Fill
from moe_qlora.kernels.weights import PackedWeight
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model
from moe_qlora.train import offload as host_memory
from tests.helpers.delayed import delayed
from tests.helpers.fitting import token_ids, train, with_lora
from tests.helpers.folders import bits
from tests.helpers.prequantized import write_both
from tests.helpers.training import NF4, assert_same_training, loaded

INT8 = {"load_in_8bit": True}


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with delayed(monkeypatch):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` and `packed`, and `maker` with MXFP4 experts."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 96, "intermediate_size": 160}
    write_both(root / "gpt_oss", "gpt_oss mxfp4", shards=1, **sizes)
    (root / "gpt_oss" / "maker").rename(root / "maker")
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=3)
    model.save_pretrained(root / "plain")
    load(root / "plain", NF4).save_pretrained(root / "packed")
    return root


def load(folder: Path, config: dict[str, Any] | None, **block: bool) -> Any:
    with moe_qlora.enabled(**block):
        return loaded(folder, config, device_map={"": "cpu"}, dtype="auto")


@pytest.mark.parametrize(
    ("folder", "config", "keeps"),
    [("plain", INT8, False), ("packed", None, False), ("maker", NF4, True)],
)
def test_a_load_into_host_memory(folder, config, keeps, folders, monkeypatch):
    expected = load(folders / folder, config, keep_codes=keeps)
    on_device: list[int] = []
    finish = Fill.finish

    def finished(fill: Fill) -> None:
        on_device.extend(parameter.numel() for parameter, _ in fill._pending.values())
        finish(fill)

    monkeypatch.setattr(Fill, "finish", finished)
    model = load(folders / folder, config, keep_codes=keeps, offload=True)
    off = moe_qlora.offload_experts(model)
    packed = list(parametrize.iter_packed(model))
    assert on_device == [0] * len(packed) and off.copies == 0
    assert len(off.layers) == len(packed) // 2 and "on host" in repr(model)
    whole = sum(parametrize.read_packed(module, name).nbytes for _, module, name in packed)
    assert off.host_nbytes >= whole
    assert bits(model) == bits(expected)
    first, second = with_lora(expected), with_lora(model)
    ids = token_ids(first, seq=12)
    assert_same_training(train(first, ids), train(second, ids))
    assert off.copies > 0
    off.remove()
    assert "on host" not in repr(model)
    assert_same_training(train(first, ids), train(second, ids))


class Watch:
    """Bytes of packed weights outside of the host memory they are moved to, whenever it grows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.moved = self.count = 0
        loose: dict[Any, int] = {}
        make, hold = host_memory.HostMemory.__init__, PackedWeight.__init__

        def made(memory: Any, nbytes: int) -> None:
            make(memory, nbytes)
            self.count, self.moved = self.count + 1, self.moved + nbytes
            alive = sum(n for ref, n in loose.items() if not ref.expired())
            self.most = max(self.most, self.moved + alive)

        def held(packed: Any, codes: Tensor, *rest: Any, **named: Any) -> None:
            hold(packed, codes, *rest, **named)
            storage = codes.untyped_storage()
            if not self.count and codes.device.type == "cpu" and len(packed.shape) > 2:
                loose[StorageWeakRef(storage)] = storage.nbytes()

        monkeypatch.setattr(host_memory.HostMemory, "__init__", made)
        monkeypatch.setattr(PackedWeight, "__init__", held)


def test_no_more_than_a_layer_is_held_twice(folders, monkeypatch):
    watch = Watch(monkeypatch)
    off = moe_qlora.offload_experts(load(folders / "plain", NF4, offload=True))
    assert watch.count == len(off.layers) == 3 and watch.moved == off.host_nbytes
    assert off.host_nbytes < watch.most <= off.host_nbytes * 4 / 3
