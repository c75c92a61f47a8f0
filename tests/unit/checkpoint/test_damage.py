"""Damaged packed folders are refused with an error of ours, or load bit-equal; nothing else."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import bits, contents
from torch import nn
from training import SETTINGS, loaded, lora
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import quantize_experts
from moe_qlora.checkpoint.manifest import MANIFEST_NAME
from moe_qlora.errors import CheckpointError, MoeQloraError
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model


class Victim:
    """A packed folder of several shards, what it loads as, and how to put it right again."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
        quantize_experts(model, BitsAndBytesConfig(**SETTINGS[kind]))
        model.save_pretrained(folder, max_shard_size="20KB")
        self.cls = type(model)
        self.want = seen(model)
        self.files = contents(folder)
        self.shards = [name for name in self.files if name.endswith(".safetensors")]
        self.manifest = next(filter(MANIFEST_NAME.fullmatch, self.files))
        assert len(self.shards) > 3

    def restore(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)

    def load(self, cls: Any) -> str:
        """How loading ends: "refused", or "equal"; anything else raises."""
        try:
            with moe_qlora.enabled():
                model = cls.from_pretrained(self.folder)
        except MoeQloraError:
            return "refused"
        assert seen(model) == self.want
        return "equal"


def seen(model: nn.Module) -> tuple[Any, ...]:
    """All that makes two loaded models the same."""
    stacks = {}
    for name, module, leaf in parametrize.iter_packed(model):
        stack = parametrize.read_packed(module, leaf)
        stacks[f"{name}.{leaf}"] = (stack.kind, stack.shape, stack.dtype, stack.compute_dtype)
    return bits(model), stacks, {name: type(one).__name__ for name, one in model.named_modules()}


@pytest.fixture(scope="module", params=["nf4", "int8"])
def victim(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Victim(tmp_path_factory.mktemp("fuzz") / "model", request.param)


def damage_file(victim: Victim, rng: random.Random) -> str:
    """Damage the bytes of a shard or of the manifest."""
    name = rng.choice([victim.manifest, *victim.shards, *victim.shards])
    raw = bytearray(victim.files[name])
    header = int.from_bytes(raw[:8], "little") + 8 if name != victim.manifest else len(raw)
    # half of the damage to what comes first, which is parsed
    at = rng.choice([rng.randrange(8), rng.randrange(header), rng.randrange(len(raw))])
    count = min(rng.choice([1, 8, 100, 1000]), len(raw) - at)
    gone, come = rng.choice([  # bytes that go from there, and that come
        (1, bytes([raw[at] ^ 1 << rng.randrange(8)])), (len(raw), b""), (count, bytes(count)),
        (count, rng.randbytes(count)), (count, b""), (0, rng.choice([b"\xff\xfe", b"\0", b"{"])),
    ])  # fmt: skip
    raw[at : at + gone] = come
    (victim.folder / name).write_bytes(raw)
    return f"{gone} for {len(come)} at {at} of {name}"


def test_damage_is_refused_or_without_effect(victim):
    ends: Counter[str] = Counter()
    for seed in range(30):
        rng = random.Random(f"damage_file {seed}")
        victim.restore()
        what = damage_file(victim, rng)
        cls = rng.choice([AutoModelForCausalLM, victim.cls])
        try:
            ends[victim.load(cls)] += 1
        except BaseException as error:
            error.add_note(f"{seed}: {what}, by {cls.__name__}")
            raise
    assert ends["refused"] > 10 and ends.total() == 30


@pytest.mark.parametrize("of", ["base", "adapter"])
def test_a_file_that_is_cut_off_is_an_incomplete_download(of: str, tmp_path: Path) -> None:
    model: Any = tiny_model("mixtral", num_hidden_layers=1)
    base, adapter, config = tmp_path / "base", tmp_path / "adapter", {"load_in_4bit": True}
    model.save_pretrained(base)
    quantize_experts(model, config)
    lora(model, "q_proj").save_pretrained(adapter)
    file, out = next((tmp_path / of).glob("*.safetensors")), tmp_path / "out"
    file.write_bytes(file.read_bytes()[:-20])
    calls: list[Callable[[], Any]] = [lambda: moe_qlora.merge_adapter(base, adapter, out)]
    if of == "base":
        calls.append(lambda: loaded(base, config))
        calls.append(lambda: moe_qlora.quantize_checkpoint(base, out, config))
    for call in calls:
        with pytest.raises(CheckpointError, match=rf"{file.name}: download incomplete, \d+.*bytes"):
            call()
    assert not out.exists()
