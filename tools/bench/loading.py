"""Loading a checkpoint into 4 bits: memory and time, against the ways without this package.

    python tools/bench/loading.py --layers 24 --device cuda
    python tools/bench/loading.py --layers 24 --maker fp8 --device cuda
    python tools/bench/loading.py --model gpt-oss-20b --layers 24 --maker mxfp4 --device cuda

A checkpoint of the shape of Qwen3-30B-A3B (per-expert keys) or gpt-oss-20b (fused), bf16, random,
is loaded each way in a process of its own, its files' pages dropped from the page cache before:

    plain          bf16, as transformers loads it
    load-then-pack bf16 experts first, then `quantize_experts`
    streaming      `from_pretrained` under `moe_qlora.enabled()`
    reload         the folder that the streamed model's `save_pretrained` wrote

With `--maker` the same model is also written as its makers ship it, other random numbers, and:

    maker          that folder with a BitsAndBytesConfig under `moe_qlora.enabled()`
    maker-stock    transformers' own dequantize=True, then `quantize_experts`

"over" is what a load takes at its peak beyond the model that it leaves, by
`torch.cuda.max_memory_allocated`; on a CPU memory is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from common import Rows, environment, parser_of, release, synchronize
from shapes import Encode, encode_bf16, meta_model, quantization, whole_config, write_checkpoint
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.registry import checkpoint_named

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
WAYS = ("plain", "load-then-pack", "streaming", "reload")
MAKER_WAYS = ("maker", "maker-stock")
FP8_BLOCK = 128


MAKERS: dict[str, dict[str, Any]] = {
    maker: dict(known.config["quantization_config"])
    for maker, name in (("fp8", "deepseek-v3"), ("mxfp4", "gpt-oss-20b"))
    if (known := checkpoint_named(name)) is not None
}
MAKERS["fp8"]["modules_to_not_convert"] = ["lm_head", "model.embed_tokens"]


def config(model: str, layers: int, tiny: bool) -> Any:
    """Return a model's configuration with fewer layers."""
    settings = whole_config(model, layers=layers, tiny=tiny)
    settings.dtype = torch.bfloat16
    settings.architectures = [type(meta_model(settings)).__name__]
    return settings


def encode_fp8(key: str, shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """Make e4m3 codes and a scale for each block of 128 x 128, where a matrix is projected."""
    if not key.endswith("_proj.weight"):
        return encode_bf16(key, shape, device)
    codes = torch.randn(shape, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    grid = tuple(math.ceil(size / FP8_BLOCK) for size in shape)
    scales = torch.rand(grid, device=device).add_(0.5).mul_(2e-4)
    return {key: codes.cpu(), f"{key}_scale_inv": scales.cpu()}


def encode_mxfp4(key: str, shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """Make FP4 codes along the input, and an exponent for each 32 of them, of expert weights."""
    if len(shape) != 3:
        return encode_bf16(key, shape, device)
    experts, inputs, rows = shape
    size = (experts, rows, inputs // 32)
    codes = torch.randint(256, (*size, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 122, size, dtype=torch.uint8, device=device)
    return {f"{key}_blocks": codes.cpu(), f"{key}_scales": scales.cpu()}


ENCODE: dict[str, Encode] = {"bf16": encode_bf16, "fp8": encode_fp8, "mxfp4": encode_mxfp4}


def forget(folder: Path) -> None:
    """Write the files out and drop their pages from the page cache."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def measure(way: str, folder: Path, device: str, save_to: Path | None) -> dict[str, float]:
    """Load once in this process."""
    bnb_config = quantization()
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": device}}
    if way in ("streaming", "load-then-pack", "maker"):
        arguments["quantization_config"] = bnb_config
    if way == "maker-stock":
        arguments["quantization_config"] = dequantizing_config(folder)
    warm_up(device)
    forget(folder)
    place = torch.device(device)
    release(place)
    switch = moe_qlora.enabled() if way in ("streaming", "reload", "maker") else nullcontext()
    start = time.perf_counter()
    with switch:
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    if way in ("load-then-pack", "maker-stock"):
        moe_qlora.quantize_experts(model, bnb_config)
    synchronize(place)
    result = {"seconds": time.perf_counter() - start}
    result["model"] = float(model.get_memory_footprint())
    if place.type == "cuda":
        result["peak"] = float(torch.cuda.max_memory_allocated())
        result["over"] = result["peak"] - torch.cuda.memory_allocated()
    if save_to is not None:
        start = time.perf_counter()
        model.save_pretrained(save_to)
        result["save_seconds"] = time.perf_counter() - start
    return result


def dequantizing_config(folder: Path) -> Any:
    """Return the configuration by which transformers itself dequantizes a maker's folder."""
    from transformers import FineGrainedFP8Config, Mxfp4Config

    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = FineGrainedFP8Config if stored["quant_method"] == "fp8" else Mxfp4Config
    return kind(dequantize=True)


def warm_up(device: str) -> None:
    """Import and start everything that a first load would, on a tiny model."""
    from moe_qlora.testing import tiny_model

    with tempfile.TemporaryDirectory() as folder, moe_qlora.enabled():
        tiny: Any = tiny_model("qwen3_moe")
        tiny.save_pretrained(folder)
        options = {"quantization_config": quantization(), "device_map": {"": device}}
        AutoModelForCausalLM.from_pretrained(folder, **options)


def ways(arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, dict[str, float], int]]:
    """Write the checkpoint and load it each way: `(way, figures, bytes on disk)`."""
    settings = config(arguments.model, arguments.layers, arguments.tiny)
    folders = {"bf16": work / "bf16", "reload": work / "packed", "maker": work / "maker"}
    write_checkpoint(folders["bf16"], settings, arguments.device, encode_bf16)
    if arguments.maker:
        settings.quantization_config = MAKERS[arguments.maker]
        write_checkpoint(folders["maker"], settings, arguments.device, ENCODE[arguments.maker])
    for way in WAYS + (MAKER_WAYS if arguments.maker else ()):
        source = folders.get(way.partition("-")[0], folders["bf16"])
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        if arguments.tiny and way != "streaming":  # One in a process of its own runs that code.
            yield way, measure(way, source, arguments.device, None), size
            continue
        command = [sys.executable, __file__, "--measure", way, "--folder", str(source)]
        command += ["--device", arguments.device]
        command += ["--save-to", str(folders["reload"])] if way == "streaming" else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
        yield way, json.loads(done.stdout.splitlines()[-1]), size


def main() -> None:
    """Measure and record."""
    parser = parser_of(__doc__, "loading.csv", "cpu")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--maker", choices=tuple(MAKERS), help="also as its makers quantize it")
    parser.add_argument("--measure", choices=WAYS + MAKER_WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save-to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        figures = measure(arguments.measure, arguments.folder, arguments.device, arguments.save_to)
        print(json.dumps(figures))
        return
    where = environment(torch.device(arguments.device), arguments.commit)
    experts = 32 if arguments.model == "gpt-oss-20b" else 128
    model = "" if arguments.model == MODELS[0] else f"{arguments.model} "
    maker = f" {arguments.maker}" if arguments.maker else ""
    setting = f"{model}layers={arguments.layers} experts={experts} nf4+double{maker}"
    with tempfile.TemporaryDirectory() as work:
        for way, figures, size in ways(arguments, Path(work)):
            rows = Rows(arguments.out, where, f"load {way}", setting)
            rows.add("bytes on disk", "bytes", size)
            rows.add("time", "s", figures["seconds"])
            rows.add("throughput", "bytes/s", size / figures["seconds"])
            rows.add("model", "bytes", figures["model"])
            if "peak" in figures:
                rows.add("peak", "bytes", figures["peak"])
                rows.add("peak over the model", "bytes", figures["over"])
            if "save_seconds" in figures:
                rows.add("time to save packed", "s", figures["save_seconds"])


if __name__ == "__main__":
    main()
