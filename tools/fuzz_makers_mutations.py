"""Mutations of makers' folders in memory, by kind; each changes one place, and says which."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.fuzz_makers_oracle import INDEX
from tools.fuzz_shared import ODD, edit

# A model's sizes decide how much a load allocates.
SMALL = tuple(odd for odd in ODD if not (type(odd) in (int, float) and not -64 < odd < 2**9))
_SCALES = ("_scale_inv", "_scale", ".scale", "_scales", "_global_scale", "_scale_2", "_shape")
_DTYPES = (
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int8),
    *(torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
)


@dataclass
class Folder:
    """A folder in memory.

    Attributes:
        shards: Tensors by file and key.
        index: The content of the index, None for none.
        config: The content of config.json.
        after: What is done to the folder once it is written.
    """

    shards: dict[str, dict[str, Tensor]]
    index: Any
    config: dict[str, Any]
    after: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The file and key of each tensor."""
        return [(file, key) for file in sorted(self.shards) for key in sorted(self.shards[file])]

    def add(self, file: str, key: str, tensor: Tensor) -> None:
        """Store a tensor, in the index too."""
        self.shards[file][key] = tensor
        if isinstance(self.index, dict) and isinstance(self.index.get("weight_map"), dict):
            self.index["weight_map"][key] = file

    def drop(self, file: str, key: str) -> Tensor:
        """Take a tensor out, of the index too."""
        if isinstance(self.index, dict) and isinstance(self.index.get("weight_map"), dict):
            self.index["weight_map"].pop(key, None)
        return self.shards[file].pop(key)


def read(path: Path) -> Folder:
    """Return a sound folder."""
    index = json.loads((path / INDEX).read_text())
    shards = {name: load_file(path / name) for name in sorted(set(index["weight_map"].values()))}
    return Folder(shards, index, json.loads((path / "config.json").read_text()))


def write(path: Path, folder: Folder) -> None:
    """Write a folder."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(folder.config, indent=2))
    for name, tensors in folder.shards.items():
        whole = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        save_file(whole, path / name, metadata={"format": "pt"})
    if folder.index is not None:
        (path / INDEX).write_text(json.dumps(folder.index))
    for change in folder.after:
        change(path)


def mutate(folder: Folder, rng: random.Random) -> tuple[str, str]:
    """Change one place of a folder, or two; return the kind of mutation, and what was done."""
    first, *more = rng.choices(list(KINDS), weights=[w for _, w in KINDS.values()], k=2)
    told = [f"{first}: {KINDS[first][0](folder, rng)}"]
    if rng.random() < 0.15:
        told += [f"{kind}: {KINDS[kind][0](folder, rng)}" for kind in more]
    return first, "; ".join(told)


def _pick(folder: Folder, rng: random.Random, scales: float = 0.5) -> tuple[str, str]:
    """Choose a tensor: a part of codes, an expert's, or any."""
    places = folder.places
    parts = [place for place in places if place[1].endswith(_SCALES)]
    experts = [place for place in places if "expert" in place[1] or "moe" in place[1]]
    chance = rng.random()
    wanted = parts if chance < scales else experts if chance < 0.85 else places
    return rng.choice(wanted or experts or places)


def _shape(folder: Folder, rng: random.Random) -> str:
    file, key = _pick(folder, rng)
    tensor = folder.shards[file][key]
    flat, shape = tensor.reshape(-1), list(tensor.shape)
    ways: dict[str, Callable[[], Tensor]] = {
        "flat": lambda: flat,
        "cut": lambda: tensor[: len(tensor) // 2] if shape else flat[:0],
        "one more": lambda: torch.cat([tensor, tensor[:1]]) if shape else flat.repeat(2),
        "in front": lambda: tensor[None],
        "behind": lambda: tensor[..., None],
    }
    if len(shape) > 1:
        ways["transposed"] = ways["transposed again"] = lambda: tensor.transpose(-1, -2)
        ways["viewed transposed"] = lambda: flat.view(*shape[:-2], shape[-1], shape[-2])
        ways["first transposed"] = lambda: tensor.transpose(0, 1)
        if shape[-1] % 2 == 0:
            ways["halved"] = lambda: flat.view(*shape[:-2], shape[-2] * 2, shape[-1] // 2)
            ways["columns cut"] = lambda: tensor[..., : shape[-1] // 2]
        if shape[-2] % 2 == 0:
            ways["doubled"] = lambda: flat.view(*shape[:-2], shape[-2] // 2, shape[-1] * 2)
    if rng.random() < 0.15 and shape and shape[0] > 1:
        folder.drop(file, key)
        ends = rng.choice([(".0", ".1"), ("_a", "_b"), (".weight", ".bias")])
        for end, half in zip(ends, tensor.tensor_split(2), strict=True):
            folder.add(file, key + end, half)
        return f"split {key}"
    way = rng.choice(sorted(ways))
    folder.shards[file][key] = ways[way]()
    return f"{way} {key} {tuple(shape)}"


def _dtype(folder: Folder, rng: random.Random) -> str:
    file, key = _pick(folder, rng)
    tensor = folder.shards[file][key]
    if rng.random() < 0.6:
        wanted = rng.choice([d for d in _DTYPES if d != tensor.dtype])
        folder.shards[file][key] = tensor.float().to(wanted)
        return f"{key} {tensor.dtype} as {wanted}"
    same = [d for d in (*_DTYPES, torch.int16, torch.float8_e8m0fnu) if d != tensor.dtype]
    wanted = rng.choice([d for d in same if d.itemsize == tensor.dtype.itemsize])
    folder.shards[file][key] = tensor.reshape(-1).view(wanted).view(tensor.shape)
    return f"{key} {tensor.dtype} seen as {wanted}"


def _name(folder: Folder, rng: random.Random) -> str:
    file, key = _pick(folder, rng)
    tensor = folder.shards[file][key]
    way = rng.choice(["lost", "renamed", "swapped", "twice", "twice, unlike", "extra", "copied"])
    others = [name for name in sorted(folder.shards) if name != file]
    if way == "lost":
        folder.drop(file, key)
    elif way == "renamed":
        digits = [str(n) for n in range(4) if f".{n}." in key]
        new = [f"{key}_", f"x.{key}", key.upper(), key.removeprefix("model."), f"model.{key}"]
        new += [key.replace(f".{n}.", f".{rng.choice([9, 3, 1, 0])}.") for n in digits]
        new = [name for name in new if name != key]
        folder.add(file, rng.choice(new), folder.drop(file, key))
    elif way == "swapped":
        alike = [
            (f, k)
            for f, k in folder.places
            if k != key and folder.shards[f][k].shape == tensor.shape
        ]
        if not alike:
            return _shape(folder, rng)
        other, name = rng.choice(alike)
        folder.shards[file][key], folder.shards[other][name] = folder.shards[other][name], tensor
        return f"swapped {key} and {name}"
    elif way.startswith("twice") and others:
        twin = tensor.clone() if way == "twice" or not tensor.numel() else tensor.flip(0)
        folder.shards[rng.choice(others)][key] = twin
    elif way == "extra":
        names = ["x.weight", f"{key}_scale", f"{key}.weight_scale", "model.layers.9.x.weight"]
        folder.add(file, rng.choice(names), torch.zeros(2, 3, dtype=rng.choice(_DTYPES)))
    else:
        ends = ["_scale", "_scales", "_blocks", "_packed", "_copy", ".weight", "_zero_point"]
        folder.add(file, key + rng.choice(ends), tensor.clone())
    return f"{way} {key}"


def _value(folder: Folder, rng: random.Random) -> str:
    file, key = _pick(folder, rng, 0.7)
    tensor = folder.shards[file][key]
    if not tensor.numel():
        return _name(folder, rng)
    place = rng.randrange(tensor.numel())
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        spoiled = tensor.clone().reshape(-1)
        if tensor.dtype.itemsize == 1:  # of FP8 codes 0x7f is NaN, of exponents 0xff
            byte = rng.choice([0x7F, 0xFF, 0x7E, 0x00, 0xFE, 0x80])
            spoiled.view(torch.uint8)[place] = byte
            folder.shards[file][key] = spoiled.view(tensor.shape)
            return f"{key}[{place}] is byte {byte}"
        spoiled[place] = rng.choice([0, -1, 1, 64, 2**31 - 1])
        folder.shards[file][key] = spoiled.view(tensor.shape)
        return f"{key}[{place}] is {spoiled[place]}"
    value = rng.choice([float("nan"), float("inf"), 0.0, -1.0, 1e38, 1e-40, 65504.0, 2.0])
    spoiled = tensor.clone().reshape(-1)
    everywhere = rng.random() < 0.2
    spoiled[slice(None) if everywhere else place] = value
    folder.shards[file][key] = spoiled.view(tensor.shape)
    return f"{key}[{'all' if everywhere else place}] is {value}"


def _index(folder: Folder, rng: random.Random) -> str:
    if not isinstance(folder.index, dict) or not isinstance(folder.index.get("weight_map"), dict):
        return _file(folder, rng)
    names: dict[str, Any] = folder.index["weight_map"]
    key = rng.choice(sorted(names))
    way = rng.choice(["other", "odd", "lacks", "replaced", "none", "stale", "second", "text"])
    if way == "other":
        names[key] = rng.choice(sorted(folder.shards))
    elif way == "odd":
        odd = ["../model.safetensors", "/etc/passwd", "", ".", "none.safetensors", "config.json"]
        names[key] = rng.choice([*odd, 3, None, ["x"], f"./{names[key]}"])
    elif way == "lacks":
        del names[key]
    elif way == "replaced":
        folder.index["weight_map"] = rng.choice([{}, [], None, "x", {"x": names[key]}])
    elif way == "none":
        folder.index = None
        if rng.random() < 0.5:  # all in one file, as small models are
            whole = {k: t for shard in folder.shards.values() for k, t in shard.items()}
            folder.shards = {"model.safetensors": whole}
            return "one file"
    elif way == "stale":  # a single file beside the index, of which a tensor is another's
        whole = {k: t.clone() for shard in folder.shards.values() for k, t in shard.items()}
        if whole[key].numel():
            whole[key] = whole[key].flip(0) if whole[key].dim() else whole[key]
        folder.shards["model.safetensors"] = whole
    elif way == "second":
        content = json.dumps(folder.index)
        folder.after.append(lambda path: _put(path / f"other{INDEX[5:]}", content))
    else:
        text = rng.choice(["", "{", "[]", "null", '{"weight_map": {"a": "b", "a": "c"}}', "\xff"])
        folder.after.append(lambda path: _put(path / INDEX, text))
    return f"{way} {key}"


def _put(path: Path, text: str) -> None:
    path.write_text(text)


def _file(folder: Folder, rng: random.Random) -> str:
    name = rng.choice(sorted(folder.shards))
    place, bit = rng.random(), rng.randrange(8)
    way = rng.choice(
        ["cut", "flip", "flip", "flip", "length", "empty", "no tensors", "link", "out"]
    )

    def change(path: Path) -> None:
        file = path / name
        if not file.is_file():
            return
        raw = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(raw[:8], "little")
        if way == "cut":
            del raw[int(place * len(raw)) :]
        elif way == "flip":
            raw[8 + int(place * min(header - 8, len(raw) - 9))] ^= 1 << bit
        elif way == "length":
            raw[bit] ^= 1 << int(place * 8)
        elif way == "empty":
            raw.clear()
        elif way == "no tensors":
            raw = bytearray(len(b"{}      ").to_bytes(8, "little") + b"{}      ")
        else:
            target = (path if way == "link" else path.parent) / f"moved-{bit}"
            file.rename(target)
            file.symlink_to(target)
            return
        file.write_bytes(raw)

    folder.after.append(change)
    return f"{way} {name} at {place:.3f}, bit {bit}"


_SIZES = (
    *("num_experts", "num_local_experts", "n_routed_experts", "hidden_size", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
)


def _config(folder: Folder, rng: random.Random) -> str:
    config = folder.config
    sizes = [name for name in _SIZES if isinstance(config.get(name), int)]
    chance = rng.random()
    if chance < 0.45:
        name = rng.choice(sizes)
        before = config[name]
        config[name] = rng.choice([before + 1, before - 1, before * 2, before // 2, 1, 0, None])
        return f"{name} {before} -> {config[name]}"
    if chance < 0.55:
        config["tie_word_embeddings"] = not config.get("tie_word_embeddings", False)
        return "tie_word_embeddings"
    if chance < 0.65:
        name = rng.choice(["dtype", "torch_dtype"])
        values: list[Any] = [
            "float16",
            "float32",
            "bfloat16",
            "float8_e4m3fn",
            "x",
            None,
            "torch.float16",
            7,
        ]
        config.pop("dtype", None)
        config[name] = rng.choice(values)
        return f"{name} {config[name]}"
    if chance < 0.75:
        name = rng.choice(["model_type", "architectures", "expert_dtype", "text_config"])
        values = ["mixtral", "qwen2_moe", "", None, [], ["MixtralForCausalLM"], {}, 3]
        config[name] = rng.choice(values)
        return f"{name} {config[name]}"
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    told = edit(plain, rng, SMALL)
    for key in [key for key in config if key != "quantization_config"]:
        config.pop(key)
    config |= plain
    return told


def _settings(folder: Folder, rng: random.Random) -> str:
    config = folder.config
    own = config.get("quantization_config")
    if not isinstance(own, dict) or not own:
        return _config(folder, rng)
    chance = rng.random()
    if chance < 0.1:
        del config["quantization_config"]
        return "quantization_config removed"
    if chance < 0.2:
        config["text_config"] = {"quantization_config": config.pop("quantization_config")}
        return "quantization_config moved to text_config"
    if chance < 0.3:
        methods = ["fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes", "awq"]
        own["quant_method"] = rng.choice([*methods, "gptq", "fbgemm_fp8", None, 3, "FP8"])
        return f"quant_method {own['quant_method']}"
    lists = [k for k in ("ignore", "modules_to_not_convert", "exclude_modules") if k in own]
    if chance < 0.4 and lists:
        names: list[Any] = [
            ["re:.*"],
            [".*"],
            ["model"],
            ["re:("],
            ["experts", "lm_head"],
            [],
            "x",
            None,
        ]
        own[lists[0]] = rng.choice([*names, [3], ["re:(a+)+$"], ["re:.*experts.*"], {"a": 1}])
        return f"{lists[0]} {own[lists[0]]}"
    if "weight_block_size" in own and chance < 0.7:
        sizes: list[Any] = [None, [16, 16], [17, 24], [16, 25], [24, 16], [128, 128], [1, 32], 16]
        sizes += [[16, 24, 1], [0, 24], [16.0, 24.0], "16x24", [32, 24], [16, 48], [True, 24]]
        own["weight_block_size"] = rng.choice(sizes)
        return f"weight_block_size {own['weight_block_size']}"
    groups = own.get("config_groups")
    if isinstance(groups, dict) and isinstance(groups.get("group_0"), dict) and chance < 0.85:
        return _group(groups, rng)
    return edit(own, rng)


def _group(groups: dict[str, Any], rng: random.Random) -> str:
    group = groups["group_0"]
    weights = group.get("weights")
    if not isinstance(weights, dict) or rng.random() < 0.25:
        targets: list[Any] = [
            ["re:.*"],
            ["re:.*experts.*"],
            ["re:nothing"],
            ["Embedding"],
            [],
            None,
            "Linear",
        ]
        targets += [["re:("], ["re:.*up_proj$", "re:.*down_proj$"], [3], ["model"], ["re:"]]
        group["targets"] = rng.choice(targets)
        return f"targets {group['targets']}"
    if rng.random() < 0.1:  # two groups that match the same modules
        groups["group_1"] = copy.deepcopy(group)
        groups["group_1"]["weights"]["group_size"] = rng.choice([8, 16, 64])
        group["targets"] = rng.choice([["re:.*experts.*"], ["re:.*down.*"], ["lm_head"]])
        return "two groups"
    choices: dict[str, list[Any]] = {
        "group_size": [8, 16, 32, 64, 128, -1, 0, None, "32", 31],
        "num_bits": [4, 8, 2, 3, 16, None, "4", True],
        "strategy": ["group", "channel", "tensor", "block", "tensor_group", "token", None, 3],
        "type": ["int", "float", "INT", None, "x"],
        "symmetric": [False, None, "no"],
        "actorder": ["group", "weight", "static", "dynamic", True, "x", []],
        "block_structure": ["16x24", [16, 24], [24, 16], None, "16", [17, 24], [16, 25]],
    }
    name = rng.choice(sorted(choices))
    weights[name] = rng.choice(choices[name])
    return f"weights {name} {weights[name]!r}"


KINDS: dict[str, tuple[Callable[[Folder, random.Random], str], int]] = {
    "shape": (_shape, 5),
    "dtype": (_dtype, 3),
    "name": (_name, 4),
    "value": (_value, 4),
    "index": (_index, 2),
    "file": (_file, 3),
    "config": (_config, 3),
    "quantization": (_settings, 5),
}
"""What each kind changes, and how often it is chosen."""
