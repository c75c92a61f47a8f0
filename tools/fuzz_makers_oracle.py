"""What a maker's folder means, decoded by plain arithmetic that shares nothing with moe_qlora.

`read_folder` reads safetensors files by the safetensors library, `decode` multiplies codes by
scales, whole tensors at a time, and `parameters` has stock transformers load the 16-bit folder.
`decoded_packed` decodes packed weights with bitsandbytes. What they cannot tell is `DamagedError`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

INDEX = "model.safetensors.index.json"
Tensors = dict[str, Tensor]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = 64  # of the codec that the fuzzer packs with
_HALF_STEP = 0.16  # half of NF4's widest gap, 0.304 of a block's maximum, and a little
_IDLE = re.compile(r"input_scale$|input_global_scale$|_zero_point$|[kv]_scale$|activation_scale$")


class DamagedError(Exception):
    """The folder describes no model."""


def read_folder(folder: Path) -> Tensors:
    """Return the tensors of the files that transformers reads; the index only names the files."""
    try:
        names = ["model.safetensors"]
        if not (folder / names[0]).exists():
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        held = [load_file(folder / name) for name in names]
    except Exception as error:
        raise DamagedError(f"the files cannot be read: {error!r:.150}") from error
    if any(Path(name).name != name for name in names):
        raise DamagedError("the index names a file that is not in the folder")
    tensors: Tensors = {}
    for file in held:
        twice = file.keys() & tensors.keys()
        if twice:
            raise DamagedError(f"{min(twice)} is stored twice")
        tensors |= file
    return tensors


# Codes and scales


def maker_settings(config: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a config.json or of its text model, None without one."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        if part.get("quantization_config"):
            return part["quantization_config"]
    return None


def decode(stored: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Return the 16-bit tensors that stored ones stand for, by the names of the 16-bit folder."""
    own = maker_settings(config)
    if own is None:
        coded = [key for key, tensor in stored.items() if tensor.dtype in _FP8]
        if coded:
            raise DamagedError(f"{coded[0]} holds codes, and nothing says of which kind")
        return dict(stored)
    try:
        return _decode(stored, own, _dtype(config))
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"the tensors do not fit each other: {error!r:.150}") from error


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    for part in (config, config.get("text_config") or {}):
        for name in ("dtype", "torch_dtype"):
            dtype = getattr(torch, str(part.get(name)).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
    return torch.bfloat16


def _decode(stored: Tensors, own: Any, dtype: torch.dtype) -> Tensors:
    method = str(own.get("quant_method", "")).lower()
    if own.get("load_in_4bit") or own.get("load_in_8bit"):
        raise DamagedError("bitsandbytes' settings for other codes")
    if method not in ("fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt"):
        raise DamagedError(f"no method that is read: {method}")
    plain: Tensors = {}
    used: set[str] = set()
    for key, tensor in stored.items():
        parts = _parts(key, tensor, stored, method)
        if parts is None:
            continue
        name, values = parts
        if name in plain or (name != key and name in stored):
            raise DamagedError(f"{name} is stored twice")
        scheme = _scheme(own, method, name.rpartition(".")[0], tensor)
        plain[name] = _values(name, tensor, stored, scheme, method, used, values).to(dtype)
        used.add(key)
    for key, tensor in stored.items():
        if key in used or _IDLE.search(key):
            continue
        is_bytes = tensor.dtype in (torch.uint8, torch.int8) and tensor.dim() > 1
        is_bytes = is_bytes and not _persists(own, key.rpartition(".")[0])
        if tensor.dtype in _FP8 or (is_bytes and not key.endswith(("scales", "_scale"))):
            raise DamagedError(f"{key} holds codes without scales")
        plain[key] = tensor
    return plain


def _persists(own: Any, module: str) -> bool:
    """Whether compressed-tensors' settings say that a module is not quantized."""
    return any(
        re.match(name[3:], module) if name.startswith("re:") else name == module
        for name in own.get("ignore") or ()
    )


def _parts(
    key: str, tensor: Tensor, stored: Tensors, method: str
) -> tuple[str, tuple[str, ...]] | None:
    """Return the plain name of codes and the keys of their scales, None of what is no code."""
    module = key.rpartition(".")[0]
    if method == "mxfp4":
        name = key.removesuffix("_blocks")
        return None if name == key else (name, (f"{name}_scales",))
    if method == "compressed-tensors" and key.endswith("_packed"):
        name = key.removesuffix("_packed")
        return name, (f"{name}_scale",)
    if tensor.dtype not in (*_FP8, torch.int8, torch.uint8):
        return None
    names = (f"{key}_scale_inv", f"{key}_scale", f"{module}.scale")
    found = next((name for name in names if name in stored), None)
    return None if found is None else (key, (found,))


def _scheme(own: Any, method: str, module: str, codes: Tensor) -> dict[str, Any]:
    """Return kind, bits and block (None: the whole dimension) of a module's codes."""
    fp4 = {"kind": "float", "bits": 4, "blocks": [(1, 32)]}
    if method == "mxfp4":
        return fp4
    if method in ("fp8", "mxfp8"):
        if codes.dtype == torch.int8 and method == "fp8":
            return fp4
        blocks: list[Any] = [(1, 32)] if method == "mxfp8" else [(128, 128), (None, None)]
        if "weight_block_size" in own:
            size = own["weight_block_size"]
            blocks = [(None, None), (1, None)] if size is None else [_pair(size)]
        return {"kind": "float", "bits": 8, "blocks": blocks}
    if method == "modelopt":
        algorithm = str(own.get("quant_algo")).upper()
        known: dict[str, list[Any]] = {
            "FP8": [(None, None), (1, None)],
            "FP8_PB_WO": [(128, 128)],
            "MXFP8": [(1, 32)],
        }
        if algorithm == "NVFP4":
            size = own.get("group_size") or 16
            return {"kind": "float", "bits": 4, "blocks": [(1, size)], "nested": True}
        return {"kind": "float", "bits": 8, "blocks": known[algorithm]}
    return _compressed_scheme(own, module)


def _compressed_scheme(own: Any, module: str) -> dict[str, Any]:
    found: list[tuple[int, Any]] = []
    for group in (own.get("config_groups") or {}).values():
        for target in group.get("targets") or ["Linear"]:
            matches = target.startswith("re:") and re.match(target[3:], module)
            rank = 0 if target == module else 1 if matches else 2 if target[:1].isupper() else 9
            found += [(rank, group["weights"])] if rank < 9 and group.get("weights") else []
    if not found:
        raise DamagedError(f"no group is for {module}")
    weights = min(found, key=lambda pair: pair[0])[1]
    in_order = weights.get("actorder") in (None, False, "weight", "static")
    if weights.get("symmetric") is False or not in_order:
        raise DamagedError("zero points or reordered columns, which the folder does not hold")
    if (own.get("sparsity_config") or {}).get("format", "dense") not in (None, "dense"):
        raise DamagedError("sparse weights, which the folder does not hold")
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy in ("group", "tensor_group"):
        block: Any = (1, _pair((group, group))[0])
    elif strategy == "block":
        block = _pair(weights["block_structure"])
    else:
        block = {"channel": (1, None), "tensor": (None, None)}[strategy]
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    return {"kind": kind, "bits": bits, "blocks": [block], "nested": strategy == "tensor_group"}


def _pair(size: Any) -> tuple[int, int]:
    high, wide = map(int, size.split("x")) if isinstance(size, str) else size
    if not all(type(n) is int and n > 0 for n in (high, wide)):
        raise DamagedError(f"{size} is no size of a block")
    return high, wide


def _values(
    name: str,
    codes: Tensor,
    stored: Tensors,
    scheme: dict[str, Any],
    method: str,
    used: set[str],
    parts: tuple[str, ...],
) -> Tensor:
    """Return the fp32 values of codes; note the keys of what goes with them as used."""
    scale = stored[parts[0]]
    used |= {*parts, f"{name}_shape", f"{name}_global_scale", f"{name}_scale_2"} & stored.keys()
    if method == "mxfp4":
        if codes.dtype != torch.uint8 or codes.dim() != 4 or codes.shape[-1] != 16:
            raise DamagedError(f"{name}_blocks are no blocks")
        if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu) or codes.shape[:3] != scale.shape:
            raise DamagedError(f"{name}_scales are no scales of them")
        wide = _e2m1(codes) * _exponents(scale)[..., None]
        return wide.flatten(2).transpose(1, 2).contiguous()
    kind = (scheme["kind"], scheme["bits"])
    if codes.dtype in _FP8 and kind == ("float", 8):
        values = codes.float()
    elif codes.dtype in (torch.uint8, torch.int8) and kind == ("float", 4):
        values = _e2m1(codes.view(torch.uint8))
    elif codes.dtype == torch.int8 and kind == ("int", 8) and method == "compressed-tensors":
        values = codes.float()
    elif codes.dtype == torch.int32 and kind in (("int", 4), ("int", 8)):
        values = _integers(codes, kind[1], tuple(stored[f"{name}_shape"].tolist()))
    else:
        raise DamagedError(f"{name} holds {codes.dtype}, of which {kind} is said")
    if scheme.get("nested"):
        if scale.dtype != torch.float8_e4m3fn:
            raise DamagedError(f"scales of {name} are {scale.dtype}")
        divides = f"{name}_global_scale" in stored
        one = stored[f"{name}_global_scale" if divides else f"{name}_scale_2"]
        if one.numel() != 1 or one.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise DamagedError(f"the scale of scales of {name} is {one.dtype} {one.shape}")
        grid = scale.float() / one.float() if divides else scale.float() * one.float()
    else:
        grid = _scales(name, scale, codes.dtype == torch.int32, kind == ("float", 4))
    for block in scheme["blocks"]:
        spread = _spread(grid, block, values.shape)
        if spread is not None:
            return values * spread
    raise DamagedError(f"{name}: scales {tuple(scale.shape)} do not fit {tuple(values.shape)}")


def _scales(name: str, scale: Tensor, of_integers: bool, of_fp4: bool) -> Tensor:
    """Return a grid of scales in fp32; bytes and e8m0 are exponents."""
    bare = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    floats = scale.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (bare and not of_integers) and not (floats and not of_fp4):
        raise DamagedError(f"scales of {name} are {scale.dtype}")
    return _exponents(scale) if bare else scale.float()


def _spread(grid: Tensor, block: Any, shape: torch.Size) -> Tensor | None:
    """Return each scale for all of its block, None where there are not as many as blocks."""
    rows, columns = shape[-2:]
    high, wide = block[0] or rows, block[1] or columns
    wanted = (*shape[:-2], -(-rows // high), -(-columns // wide))
    if block == (None, None) and grid.numel() == 1:
        wanted = (1,) * len(shape)
        high, wide = rows, columns
    if [n for n in grid.shape if n != 1] != [n for n in wanted if n != 1]:
        return None
    grid = grid.reshape(wanted).repeat_interleave(high, -2).repeat_interleave(wide, -1)
    return grid[..., :rows, :columns]


def _e2m1(codes: Tensor) -> Tensor:
    """Return the values of two codes a byte, the low half first."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.where(pairs > 7, -sizes[pairs & 7], sizes[pairs & 7])


def _exponents(scale: Tensor) -> Tensor:
    """Return 2^(byte - 127), of 255 NaN."""
    raw = scale.view(torch.uint8).double()
    return torch.where(raw == 255, torch.nan, torch.pow(2.0, raw - 127)).float()


def _integers(words: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Return codes of words of 32 bits, lowest first, cut off at the stored shape."""
    wide = words.long() & 0xFFFFFFFF
    places = torch.arange(0, 32, bits)
    codes = (wide[..., None] >> places & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)
    if codes.shape[:-1] != shape[:-1] or not codes.shape[-1] - 32 // bits < shape[-1]:
        raise DamagedError(f"words {tuple(words.shape)} are not of the shape {shape}")
    if shape[-1] > codes.shape[-1]:
        raise DamagedError(f"words {tuple(words.shape)} are too few for {shape}")
    return codes[..., : shape[-1]].float()


# Parameters, and what is packed of them


def parameters(plain: Tensors, config: Mapping[str, Any], place: Path) -> tuple[Tensors, set[str]]:
    """Return the parameters that stock transformers makes of a 16-bit folder, and what lacks."""
    config = copy.deepcopy(dict(config))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(
        {key: t.clone().contiguous() for key, t in plain.items()}, place / "model.safetensors"
    )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    except BaseException as error:
        raise DamagedError(f"stock transformers: {type(error).__name__} {error!s:.150}") from error
    return dict(model.state_dict()), set(info["missing_keys"])


def decoded_packed(folder: Path) -> dict[str, tuple[Tensor, bool]]:
    """Return the weights of a packed folder, and whether each was packed; bitsandbytes decodes."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    found: dict[str, tuple[Tensor, bool]] = {}
    records = [key for key in tensors if ".quant_state.bitsandbytes__" in key]
    packed = [key.partition(".quant_state.bitsandbytes__")[0] for key in records]
    for name in packed:
        own = {key: t for key, t in tensors.items() if key.startswith(f"{name}.")}
        state = {key.removeprefix(f"{name}."): tensor for key, tensor in own.items()}
        found[name] = (
            decode_4bit(tensors[name], QuantState.from_dict(state, torch.device("cpu"))),
            True,
        )
        for key in (name, *own):
            del tensors[key]
    return found | {key: (tensor, False) for key, tensor in tensors.items()}


def decode_4bit(codes: Tensor, state: Any) -> Tensor:
    """Decode by bitsandbytes, whose CPU kernel errs for rows that are no multiple of a block."""
    flat, shape = copy.copy(state), state.shape
    flat.shape = torch.Size([prod(shape)])
    return dequantize_4bit(codes.view(-1, 1), flat).view(shape)


def difference(expected: Tensor, got: Tensor, packed: bool) -> str:
    """Say how a weight differs from what it should be by more than its format may; "" if not."""
    if expected.shape != got.shape:
        return f"is of the shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    right, value = expected.double().flatten(), got.double().flatten()
    if not packed:
        close = torch.isclose(value, right, 2.0**-8, 1e-30, equal_nan=True)
        if expected.dtype == got.dtype:
            close = (value == right) | (value.isnan() & right.isnan())
        return "" if bool(close.all()) else f"differs in {int((~close).sum())} values"
    if not bool(value.isfinite().all()) or not bool(right.isfinite().all()):
        return "is packed, and holds NaN or inf"
    room = torch.zeros(-(-len(right) // _BLOCK) * _BLOCK, dtype=torch.double)
    room[: len(right)] = right.abs()
    largest = room.view(-1, _BLOCK).amax(1)
    # Blocks may start elsewhere: of a block and its neighbours the largest value bounds.
    padded = torch.nn.functional.pad(largest, (1, 1))
    largest = torch.stack([padded[:-2], padded[1:-1], padded[2:]]).amax(0)
    bound = _HALF_STEP * largest.repeat_interleave(_BLOCK)[: len(right)]
    bound = bound + 0.01 * largest.max() + 1e-12  # statistics are quantized once more
    wrong = (value - right).abs() > bound
    return f"is packed, and off in {int(wrong.sum())} values" if bool(wrong.any()) else ""
