"""Folders as the makers of models quantize them, and the plain tensors that these stand for.

    folder, plain = write_case(tmp_path / "base", "deepseek_v3 fp8")
    folder, plain = write_folder(tmp_path / "base", "qwen3_moe", "fp8", block=(8, 8))

A tiny model is quantized here, in plain fp32 arithmetic that shares nothing with the reader: the
plain value is taken from codes and scales before these are packed, and rounded once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_qlora.checkpoint.folder import INDEX
from moe_qlora.testing import tiny_model

Stored = dict[str, Tensor]
Encoded = tuple[Stored, Tensor]
"""Tensors on disk by the end of their key, "" the key itself; the fp32 values they stand for."""

# Quantized by nobody: embeddings, heads, routers, norms, what is no matrix.
_KEPT = r"embed|lm_head|^head\.|(?<!proj)\.gate\.weight$|router|norm|bias|sinks|hc_|compressor"


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Which model, which method (of `METHODS`), and options of the model and of the method."""
WIDE, EVEN, ODD = ({"moe_intermediate_size": size} for size in (96, 48, 42))
CASES: dict[str, Case] = {
    "deepseek_v3 fp8": ("deepseek_v3", "fp8", {}, {"mtp": True}),
    "deepseek_v3 fp8 e8m0": ("deepseek_v3", "fp8", {}, {"scale_dtype": "e8m0"}),
    "qwen3_moe fp8": ("qwen3_moe", "fp8", {}, {"scale_dtype": torch.bfloat16}),
    "qwen3_moe mxfp8": ("qwen3_moe", "mxfp8", WIDE, {}),
    "glm4_moe fp8 channel": ("glm4_moe", "compressed-fp8", {}, {"strategy": "channel"}),
    "glm4_moe fp8 tensor": ("glm4_moe", "compressed-fp8", {}, {"strategy": "tensor"}),
    "glm4_moe fp8 block": ("glm4_moe", "compressed-fp8", {}, {"strategy": "block"}),
    "gpt_oss mxfp4": ("gpt_oss", "mxfp4", {}, {}),
    "deepseek_v3 int4": ("deepseek_v3", "int4", WIDE, {}),
    "deepseek_v3 int4 channel": ("deepseek_v3", "int4", ODD, {"group": None}),
    "qwen3_moe nvfp4": ("qwen3_moe", "nvfp4", EVEN, {}),
    "qwen3_moe modelopt nvfp4": ("qwen3_moe", "modelopt-nvfp4", EVEN, {}),
    "qwen3_moe modelopt fp8": ("qwen3_moe", "modelopt-fp8", {}, {}),
    "deepseek_v4 fp4": ("deepseek_v4", "deepseek-v4", WIDE, {}),
}


def write_case(path: Path, name: str, **changes: Any) -> tuple[Path, Stored]:
    """Write the folder of a name in `CASES`; changes are options of `write_folder`."""
    model_type, method, overrides, options = CASES[name]
    return write_folder(path, model_type, method, **{"overrides": overrides, **options, **changes})


def write_both(path: Path, name: str, **changes: Any) -> Path:
    """Write such a folder as `maker`, and the 16-bit folder it stands for as `plain`."""
    folder, plain = write_case(path / "maker", name, **changes)
    (path / "plain").mkdir()
    (path / "plain/config.json").write_text(json.dumps(plain_config(folder), indent=2))
    tensors = {key: tensor.contiguous() for key, tensor in plain.items()}
    save_file(tensors, path / "plain/model.safetensors", {"format": "pt"})
    return path


def plain_config(folder: Path) -> dict[str, Any]:
    """The config.json of the 16-bit folder that another stands for."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    if config.pop("expert_dtype", None):  # DeepSeek-V4's
        config["dtype"] = "bfloat16"
    return config


def write_folder(
    path: Path, model_type: str, method: str, *, overrides: dict[str, Any] | None = None,
    shards: int = 3, seed: int = 0, mtp: bool = False, **options: Any,
) -> tuple[Path, Stored]:  # fmt: skip
    """Write a tiny model as the maker of such models does; return the plain tensors as well.

    `overrides` are of the model's configuration, `options` of the method. A tensor's codes and
    scales go to different `shards`. `mtp` adds a layer for the prediction of more tokens, which
    models ignore, as DeepSeek ships.
    """
    model: Any = tiny_model(model_type, seed=seed, **(overrides or {})).bfloat16()
    model.save_pretrained(path, save_original_format=True)
    plain = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    if mtp:
        plain |= _extra_layer(plain, config["num_hidden_layers"], seed)
        config["num_nextn_predict_layers"] = 1
    maker = METHODS[method](**options)
    stored: Stored = {}
    for key in sorted(plain):
        encode = maker.encoder(key, plain[key])
        if encode is None:
            stored[key] = plain[key]
            continue
        parts, values = encode(plain[key].float())
        plain[key] = values.bfloat16()
        stored |= {maker.key(key, part): tensor.contiguous() for part, tensor in parts.items()}
    config |= {"quantization_config": maker.config, **maker.says}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_shards(path, stored, shards)
    return path, plain


def write_shards(path: Path, tensors: Stored, shards: int = 1) -> None:
    """Write tensors to so many files, one after the other, and their index."""
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map = {key: files[number % shards] for number, key in enumerate(tensors)}
    for file in files:
        part = {key: tensors[key] for key, name in weight_map.items() if name == file}
        save_file(part, path / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2))


def write_tensors(path: Path, settings: Any, tensors: Stored, **config: Any) -> Path:
    """Write tensors, and a config.json with these settings as its quantization_config, or none."""
    path.mkdir(exist_ok=True, parents=True)
    config |= {} if settings is None else {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    write_shards(path, {key: tensor.contiguous() for key, tensor in tensors.items()})
    return path


def _extra_layer(plain: Stored, layers: int, seed: int) -> Stored:
    """A layer after the last one, and what predicts with it, under the names of DeepSeek-V3."""
    generator = torch.Generator().manual_seed(seed + 1)
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    extra = {key.replace(last, new): t.flip(0) for key, t in plain.items() if key.startswith(last)}
    norm = plain["model.norm.weight"]
    wide = torch.randn(len(norm), 2 * len(norm), generator=generator).to(norm)
    extra |= {f"{new}{name}.weight": torch.ones_like(norm) for name in ("enorm", "hnorm")}
    extra[new + "shared_head.norm.weight"] = torch.ones_like(norm)
    extra[new + "eh_proj.weight"] = wide
    extra[new + "embed_tokens.weight"] = plain["model.embed_tokens.weight"].clone()
    extra[new + "shared_head.head.weight"] = plain["lm_head.weight"].clone()
    return extra


# Codes and scales, fp32


def expand(scale: Tensor, block: Sequence[int], rows: int, columns: int) -> Tensor:
    """A grid of scales, each of them repeated over its block, cut off at the edges."""
    grid = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return grid[:rows, :columns]


def block_amax(weight: Tensor, block: Sequence[int]) -> Tensor:
    """The largest absolute value of each block; blocks at the edges are smaller."""
    (rows, columns), (high, wide) = weight.shape, block
    whole = torch.zeros(-(-rows // high) * high, -(-columns // wide) * wide)
    whole[:rows, :columns] = weight.abs()
    tiles = whole.view(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    return tiles.amax((1, 3)).clamp_min(1e-12)


def power_of_two(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents with 127 added, as bytes, of the powers of two from `scale` up; and these."""
    exponent = scale.log2().ceil().clamp(-127, 127)
    return (exponent + 127).to(torch.uint8), torch.pow(2.0, exponent.double()).float()


def encode_fp8(
    weight: Tensor, block: Sequence[int], end: str, scale_dtype: Any = torch.float32
) -> Encoded:
    """FP8 (e4m3) codes of a matrix, with a scale that multiplies for each block."""
    scale = block_amax(weight, block) / 448
    if scale_dtype in ("e8m0", torch.uint8):
        stored, scale = power_of_two(scale)
        stored = stored.view(torch.float8_e8m0fnu) if scale_dtype == "e8m0" else stored
    else:
        stored = scale.to(scale_dtype)
        scale = stored.float()
    grid = expand(scale, block, *weight.shape)
    codes = (weight / grid).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": codes, end: stored}, codes.float() * grid


def encode_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest E2M1 codes, two a byte, the first one in the low half; and their values.

    These are (-1)^s 2^(e - 1) (1 + m / 2), or m / 2.
    """
    codes = torch.arange(16)
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, (codes & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    table = torch.where(sign == 1, -size, size)
    index = (values.abs()[..., None] - table[:8]).abs().argmin(-1)
    index += 8 * (values.signbit())
    return (index[..., 0::2] + 16 * index[..., 1::2]).to(torch.uint8), table[index]


def encode_int(weight: Tensor, bits: int, group: int | None) -> Encoded:
    """Symmetric integers in words of 32 bits, as compressed-tensors packs them."""
    rows, columns = weight.shape
    block = (1, group or columns)
    top = 2 ** (bits - 1)
    scale = (block_amax(weight, block) / (top - 0.5)).to(torch.bfloat16)
    grid = expand(scale.float(), block, rows, columns)
    codes = (weight / grid).round().clamp(-top, top - 1) + 0.0  # there is no -0
    per = 32 // bits
    room = torch.zeros(rows, -(-columns // per) * per, dtype=torch.int64)
    room[:, :columns] = codes.long() + top
    words = sum(room[:, place::per] << (bits * place) for place in range(per))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        "_packed": words,
        "_scale": scale,
        "_shape": torch.tensor([rows, columns]),
    }, codes * grid


def encode_nvfp4(weight: Tensor, factor_name: str, codes_name: str, divide: bool) -> Encoded:
    """E2M1 codes, FP8 scales of 16, and a scale of these that divides or multiplies."""
    amax = block_amax(weight, (1, 16))
    factor = amax.max() / (448 * 6)
    one = (1 / factor).reshape(1) if divide else factor
    scale = amax / 6 * one if divide else amax / 6 / factor
    scale = scale.clamp(1e-3, 448).to(torch.float8_e4m3fn)
    grid = scale.float() / one if divide else scale.float() * factor
    grid = expand(grid, (1, 16), *weight.shape)
    codes, values = encode_e2m1(weight / grid)
    return {codes_name: codes, "_scale": scale, factor_name: one}, values * grid


def encode_fp4(weight: Tensor) -> Encoded:
    """E2M1 codes in int8 and exponents of 32, as DeepSeek-V4's experts."""
    raw, scale = power_of_two(block_amax(weight, (1, 32)) / 6)
    grid = expand(scale, (1, 32), *weight.shape)
    codes, values = encode_e2m1(weight / grid)
    codes = codes.view(torch.int8)
    return {"": codes, "_scale_inv": raw.view(torch.float8_e8m0fnu)}, values * grid


def encode_mxfp4(weight: Tensor) -> Encoded:
    """gpt-oss's experts (E, in, out): codes of the transposed matrices, in blocks of 32."""
    experts, columns, rows = weight.shape
    groups = weight.transpose(1, 2).reshape(experts, rows, columns // 32, 32)
    raw, scale = power_of_two(groups.abs().amax(-1).clamp_min(1e-12) / 6)
    codes, values = encode_e2m1(groups / scale[..., None])
    plain = (values * scale[..., None]).reshape(experts, rows, columns).transpose(1, 2)
    return {"_blocks": codes, "_scales": raw}, plain.contiguous()


# Makers


@dataclass
class Maker:
    """How a maker quantizes: its configuration, and what it does with which keys."""

    config: dict[str, Any]
    encode: Callable[[str], Callable[[Tensor], Encoded] | None]  # what quantizes a tensor, by key
    plain_modules: str = r"$^"
    scales: str = "{key}_scale_inv"
    says: dict[str, Any] = field(default_factory=dict)  # fields of config.json

    def encoder(self, key: str, tensor: Tensor) -> Callable[[Tensor], Encoded] | None:
        plain = re.search(f"{_KEPT}|{self.plain_modules}", key) or tensor.dim() < 2
        return None if plain else self.encode(key)

    def key(self, key: str, part: str) -> str:
        """The key on disk of a part."""
        scale = self.scales.format(key=key, module=key.removesuffix(".weight"))
        return scale if part == "_scale_inv" else key + part


def _fp8(
    block: tuple[int, int] | None = (16, 24),
    scale_dtype: Any = torch.float32,
    modules_to_not_convert: list[str] | None = None,
) -> Maker:
    """DeepSeek's block FP8; `block=None` is a scale a tensor."""
    kept = modules_to_not_convert
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"scale_fmt": "ue8m0"} if scale_dtype == "e8m0" else {}
    config |= {"weight_block_size": block and list(block), "modules_to_not_convert": kept}
    plain = "|".join(re.escape(name) + r"\." for name in kept or ()) or r"$^"

    def encode(weight: Tensor) -> Encoded:
        return encode_fp8(weight, block or weight.shape, "_scale_inv", scale_dtype)

    return Maker(config, lambda key: encode, plain)


def _mxfp8() -> Maker:
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    encode = partial(encode_fp8, block=(1, 32), end="_scale_inv", scale_dtype=torch.uint8)
    return Maker(config, lambda key: encode, r"self_attn")


def compressed(form: str, weights: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    own = {"dynamic": False, "symmetric": True, "actorder": None, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own, "format": form}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


_IGNORE = ["lm_head", "re:.*mlp.gate$"]


def _compressed_fp8(strategy: str = "channel", block: tuple[int, int] = (16, 24)) -> Maker:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}

    def encode(weight: Tensor) -> Encoded:
        sizes = {"channel": (1, weight.shape[1]), "tensor": weight.shape, "block": block}
        parts, values = encode_fp8(weight, sizes[strategy], "_scale", torch.bfloat16)
        if strategy == "tensor":
            parts["_scale"] = parts["_scale"].reshape(1)
        return parts, values

    return Maker(compressed("float-quantized", weights, _IGNORE), lambda key: encode)


def _int4(group: int | None = 32) -> Maker:
    """Kimi-K2-Thinking's: routed experts only."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    ignore += ["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    encode = partial(encode_int, bits=4, group=group)
    plain = r"self_attn|shared_experts|mlp\.(gate|up|down)_proj|eh_proj"
    return Maker(compressed("pack-quantized", weights, ignore), lambda key: encode, plain)


def _nvfp4() -> Maker:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    names = {"factor_name": "_global_scale", "codes_name": "_packed"}
    encode = partial(encode_nvfp4, **names, divide=True)
    return Maker(compressed("nvfp4-pack-quantized", weights, _IGNORE), lambda key: encode)


def _modelopt(algorithm: str) -> Maker:
    weights: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algorithm == "NVFP4":
        weights |= {"num_bits": 4, "group_size": 16}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    }

    def encode(weight: Tensor) -> Encoded:
        if algorithm == "NVFP4":
            return encode_nvfp4(weight, "_scale_2", "", divide=False)
        parts, values = encode_fp8(weight, weight.shape, "_scale")
        return parts | {"_scale": parts["_scale"].reshape(())}, values

    return Maker(config, lambda key: encode)


def _mxfp4() -> Maker:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    return Maker(config, lambda key: encode_mxfp4 if "experts" in key else None)


def _deepseek_v4(block: tuple[int, int] = (16, 24)) -> Maker:
    """FP4 experts and block FP8 for the rest, with exponents under DeepSeek's own names."""
    rest = _fp8(block, "e8m0")
    del rest.config["modules_to_not_convert"]
    return Maker(
        rest.config,
        lambda key: encode_fp4 if ".experts." in key else rest.encode(key),
        r"\.ape$|tid2eid",
        scales="{module}.scale",
        says={"dtype": "float8_e4m3fn", "expert_dtype": "fp4"},
    )


METHODS: dict[str, Callable[..., Maker]] = {
    "fp8": _fp8, "mxfp8": _mxfp8, "compressed-fp8": _compressed_fp8, "int4": _int4,
    "nvfp4": _nvfp4, "mxfp4": _mxfp4, "deepseek-v4": _deepseek_v4,
    "modelopt-nvfp4": partial(_modelopt, "NVFP4"), "modelopt-fp8": partial(_modelopt, "FP8"),
}  # fmt: skip
