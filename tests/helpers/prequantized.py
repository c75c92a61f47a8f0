"""Folders as the makers of models quantize them, and the plain tensors that these stand for.

    folder, plain = write_case(tmp_path / "base", "deepseek_v3 fp8")

A tiny model is quantized here, in plain fp32 arithmetic that shares nothing with the reader: the
plain value is taken from codes and scales before these are packed, and rounded once.
"""

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

from moe_qlora.checkpoint.folder import INDEX, SINGLE
from moe_qlora.testing import tiny_model

Stored = dict[str, Tensor]
Encoded = tuple[Stored, Tensor]
"""Tensors on disk by the end of their key, "" the key itself; the fp32 values they stand for."""

# Quantized by nobody: embeddings, heads, routers, norms, what is no matrix.
_KEPT = r"embed|lm_head|^head\.|(?<!proj)\.gate\.weight$|router|norm|bias|sinks|hc_|compressor"


def write_case(path: Path, name: str, shards: int = 3, **sizes: Any) -> tuple[Path, Stored]:
    """Write the tiny model of a name in `CASES` as its maker does; return the plain tensors too.

    A tensor's codes and scales go to different `shards`; `sizes` are of the configuration.
    """
    maker = CASES[name]
    model: Any = tiny_model(name.partition(" ")[0], **{**maker.sizes, **sizes}).bfloat16()
    model.save_pretrained(path, save_original_format=True)
    plain, config = load_file(path / SINGLE), json.loads((path / "config.json").read_text())
    (path / SINGLE).unlink()
    if "num_nextn_predict_layers" in maker.fields:  # a layer that models ignore
        last, more = (f".layers.{config['num_hidden_layers'] + place}." for place in (-1, 0))
        plain |= {key.replace(last, more): t.flip(0) for key, t in plain.items() if last in key}
    stored: Stored = {}
    for key in sorted(plain):
        parts, module = {"": plain[key]}, key.removesuffix(".weight")
        if plain[key].dim() > 1 and not re.search(f"{_KEPT}|{maker.plain}", key):
            parts, values = maker.encode(key)(plain[key].float())
            plain[key] = values.bfloat16()
        for end, part in parts.items():
            at = maker.scale.format(key=key, module=module) if end == "_scale_inv" else key + end
            stored[at] = part.contiguous()
    config |= {"quantization_config": maker.config, **maker.fields}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_shards(path, stored, shards)
    return path, plain


def write_both(path: Path, name: str, **options: Any) -> Path:
    """Write such a folder as `maker`, and the 16-bit folder it stands for as `plain`."""
    folder, plain = write_case(path / "maker", name, **options)
    config = json.loads((folder / "config.json").read_text())
    if config.pop("expert_dtype", None):  # DeepSeek-V4's
        config["dtype"] = "bfloat16"
    del config["quantization_config"]
    write_tensors(path / "plain", None, plain, **config)
    return path


def write_shards(path: Path, tensors: Stored, shards: int = 1) -> None:
    """Write tensors to one file, or to so many, one after the other, and their index."""
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, path / SINGLE, {"format": "pt"})
        return
    weight_map = {key: f"model-{number % shards}.safetensors" for number, key in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {key: tensors[key] for key, name in weight_map.items() if name == file}
        save_file(part, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tensors(path: Path, settings: Any, tensors: Stored, **config: Any) -> Path:
    """Write tensors, and a config.json with these settings as its quantization_config, or none."""
    path.mkdir(exist_ok=True, parents=True)
    config |= {} if settings is None else {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    write_shards(path, tensors)
    return path


# Codes and scales, fp32


def expand(scale: Tensor, block: Sequence[int], rows: int, columns: int) -> Tensor:
    """A grid of scales, each of them repeated over its block, cut off at the edges."""
    grid = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return grid[:rows, :columns]


def block_amax(weight: Tensor, block: Sequence[int]) -> Tensor:
    """The largest absolute value of each block; blocks at the edges are smaller."""
    (rows, columns), (high, wide) = weight.shape, block
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % wide, 0, -rows % high))
    tiles = whole.view(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    return tiles.amax((1, 3)).clamp_min(1e-12)


def power_of_two(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents with 127 added, as bytes, of the powers of two from `scale` up; and these."""
    exponent = scale.log2().ceil().clamp(-127, 127)
    return (exponent + 127).to(torch.uint8), torch.pow(2.0, exponent.double()).float()


def encode_fp8(
    weight: Tensor, block: Sequence[int], end: str = "_scale_inv", e8m0: bool = False
) -> Encoded:
    """FP8 (e4m3) codes of a matrix, with a scale that multiplies for each block."""
    stored = scale = block_amax(weight, block) / 448
    if e8m0:
        raw, scale = power_of_two(scale)
        stored = raw.view(torch.float8_e8m0fnu)
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


def encode_int(weight: Tensor, bits: int = 4, group: int | None = 32) -> Encoded:
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
    shape = torch.tensor([rows, columns])
    return {"_packed": words, "_scale": scale, "_shape": shape}, codes * grid


def encode_nvfp4(weight: Tensor, factor_name: str, codes_name: str) -> Encoded:
    """E2M1 codes, FP8 scales of 16, and a scale of these that divides (compressed) or multiplies.

    Modelopt's codes have the key of the weight itself.
    """
    amax = block_amax(weight, (1, 16))
    factor = amax.max() / (448 * 6)
    one = (1 / factor).reshape(1) if codes_name else factor
    scale = amax / 6 * one if codes_name else amax / 6 / factor
    scale = scale.clamp(1e-3, 448).to(torch.float8_e4m3fn)
    grid = scale.float() / one if codes_name else scale.float() * factor
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
    """How a maker quantizes: its `quantization_config`, and what it does with which keys."""

    config: dict[str, Any]
    encode: Callable[[str], Callable[[Tensor], Encoded]]  # what quantizes a tensor, by its key
    plain: str = r"$^"
    scale: str = "{key}_scale_inv"
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json
    sizes: dict[str, Any] = field(default_factory=dict)


def fp8(block: tuple[int, int], *kept: str, **fields: Any) -> Maker:
    """DeepSeek's block FP8."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": [*block], "modules_to_not_convert": [*kept]}
    plain = "|".join(re.escape(name) + r"\." for name in kept) or r"$^"
    return Maker(config, lambda key: partial(encode_fp8, block=block), plain, fields=fields)


def compressed(form: str, weights: dict[str, Any], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    own = {"dynamic": False, "symmetric": True, "actorder": None, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own, "format": form}},
        "ignore": [*ignore],
        "kv_cache_scheme": None,
    }


_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_WIDE = {"moe_intermediate_size": 96}
_MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": _NVFP4, "targets": ["Linear"]}},
}  # fmt: skip
CASES = {
    "deepseek_v3 fp8": fp8((16, 24), num_nextn_predict_layers=1),
    "qwen3_moe fp8": fp8((8, 8)),  # whole blocks alone, as stock transformers wants them
    "glm4v_moe fp8": fp8((16, 24), "visual", "model.visual"),
    "gpt_oss mxfp4": Maker(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        lambda key: encode_mxfp4,
        r"^(?!.*experts)",
    ),
    "deepseek_v3 int4": Maker(  # Kimi-K2-Thinking's: routed experts only
        compressed("pack-quantized", _INT4, ["re:.*self_attn.*", "re:.*shared_experts.*"]),
        lambda key: encode_int,
        r"self_attn|shared_experts|mlp\.(gate|up|down)_proj",
        sizes=_WIDE,
    ),
    "qwen3_moe nvfp4": Maker(
        compressed("nvfp4-pack-quantized", {**_NVFP4, "strategy": "tensor_group"}, ["lm_head"]),
        lambda key: partial(encode_nvfp4, factor_name="_global_scale", codes_name="_packed"),
        sizes=_WIDE,
    ),
    "qwen3_moe modelopt nvfp4": Maker(
        _MODELOPT,
        lambda key: partial(encode_nvfp4, factor_name="_scale_2", codes_name=""),
        sizes=_WIDE,
    ),
    "deepseek_v4 fp4": Maker(  # the rest is FP8, with exponents under names of its own
        {**fp8((16, 24)).config, "scale_fmt": "ue8m0"},
        lambda key: (
            encode_fp4 if ".experts." in key else partial(encode_fp8, block=(16, 24), e8m0=True)
        ),
        r"\.ape$|tid2eid",
        scale="{module}.scale",
        fields={"dtype": "float8_e4m3fn", "expert_dtype": "fp4"},
        sizes=_WIDE,
    ),
}
