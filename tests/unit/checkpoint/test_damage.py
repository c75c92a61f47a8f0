"""Damaged packed folders are refused with an error of ours, or load bit-equal; nothing else."""

from __future__ import annotations

import copy
import json
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
from moe_qlora.checkpoint.manifest import MANIFEST_NAME, manifest_name
from moe_qlora.errors import CheckpointError, MoeQloraError
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "\0", "nf4", "fp4", "int8", "uint8", "F32", "save"),
    *("../model.safetensors", "/etc/passwd", "C:\\x", "model.safetensors", ".", "..", "a/b"),
    *([], {}, [[]], [0], [-1, 4], [2**40, 2**40], {"a": 1}, ["x"], [None], [1.5, 2], "\ud800"),
)


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

    def write_manifest(self, text: bytes, **mark: Any) -> None:
        """Put another manifest in the place of the folder's, and have config.json name it."""
        (self.folder / self.manifest).unlink()
        (self.folder / manifest_name(text)).write_bytes(text)
        config = json.loads(self.files["config.json"])
        config["moe_qlora"] |= {"manifest": manifest_name(text), **mark}
        (self.folder / "config.json").write_text(json.dumps(config))

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


# --- damage -------------------------------------------------------------------------------------


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


def places(value: Any, depth: int = 0) -> Iterator[tuple[int, Any, Any]]:
    """Depth, holder and key of every value in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield depth, value, key
        if isinstance(inner, dict | list):
            yield from places(inner, depth + 1)


def damage_manifest(victim: Victim, rng: random.Random) -> str:
    """Edit the manifest, mostly with its name put right."""
    value = json.loads(victim.files[victim.manifest])
    # by depth, so that the few fields at the top are met as often as the many below
    every = list(places({key: one for key, one in value.items() if key != "config"}))
    depth = rng.choice(sorted({depth for depth, *_ in every}))
    _, holder, key = rng.choice([place for place in every if place[0] == depth])
    holder = holder if depth else value
    kind = rng.choice(["odd", "odd", "odd", "remove", "rename", "number"])
    if kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[rng.choice(["../x", "x", "/x", "a/b", "", "\0"])] = holder.pop(key)
    elif kind == "number" and isinstance(holder[key], int):
        holder[key] += rng.choice([-1, 1, 2**40])
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    way = rng.choice(["as it is", *["named"] * 4])
    text = json.dumps(value).encode()
    if way == "as it is":
        (victim.folder / victim.manifest).write_bytes(text)
    else:
        victim.write_manifest(text)
    return f"{kind} at {key}, {way}"


DAMAGE = {damage_file: 30, damage_manifest: 60}  # and how many of each are done to each victim


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__.removeprefix("damage_"))
def test_damage_is_refused_or_without_effect(victim, damage):
    ends: Counter[str] = Counter()
    for seed in range(DAMAGE[damage]):
        rng = random.Random(f"{damage.__name__} {seed}")
        victim.restore()
        what = damage(victim, rng)
        cls = rng.choice([AutoModelForCausalLM, victim.cls])
        try:
            ends[victim.load(cls)] += 1
        except BaseException as error:
            error.add_note(f"{damage.__name__} {seed}: {what}, by {cls.__name__}")
            raise
    assert ends["refused"] > DAMAGE[damage] // 3
    assert ends.total() == DAMAGE[damage]


@pytest.mark.parametrize("call", ["load", "quantize", "merge", "merge-adapter", "load-adapter"])
def test_a_file_that_is_cut_off_is_an_incomplete_download(call: str, tmp_path: Path) -> None:
    model: Any = tiny_model("mixtral", num_hidden_layers=1)
    base, adapter, config = tmp_path / "base", tmp_path / "adapter", {"load_in_4bit": True}
    model.save_pretrained(base)
    quantize_experts(model, config)
    lora(model, "q_proj").save_pretrained(adapter)
    file = next((adapter if call.endswith("adapter") else base).glob("*.safetensors"))
    whole, out = file.read_bytes(), tmp_path / "out"
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: loaded(base, config),
        "quantize": lambda: moe_qlora.quantize_checkpoint(base, out, config),
        "merge": lambda: moe_qlora.merge_adapter(base, adapter, out),
        "merge-adapter": lambda: moe_qlora.merge_adapter(base, adapter, out),
        "load-adapter": lambda: moe_qlora.load_adapter(loaded(base, config), adapter),
    }
    for left in (0, 20, len(whole) // 2):
        file.write_bytes(whole[:left])
        with pytest.raises(CheckpointError, match=rf"{file.name}: download incomplete, \d+.*bytes"):
            calls[call]()
    assert not (tmp_path / "out").exists()
