"""Loading a checkpoint into 4 bits: memory and time, against the ways without this package.

    python tools/bench/loading.py --layers 24 --device cuda
    python tools/bench/loading.py --model gpt-oss-20b --layers 24 --maker mxfp4 --device cuda

A random bf16 checkpoint is loaded each way in a process of its own, its files' pages dropped from
the page cache before:

    plain          bf16, as transformers loads it
    load-then-pack bf16 experts first, then `quantize_experts`
    streaming      `from_pretrained` under `moe_qlora.enabled()`
    reload         the folder that the streamed model's `save_pretrained` wrote
    maker          with `--maker`: as its makers ship it, under `moe_qlora.enabled()`
    maker-stock    the same by transformers' dequantize=True, then `quantize_experts`

"over" is what a load takes at its peak beyond the model that it leaves; on a CPU memory is not
measured.
"""

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from common import Rows, allocated, parser_of, peak, release, synchronize
from shapes import Encode, encode_bf16, quantization, whole_config, write_checkpoint
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import moe_qlora
from moe_qlora.registry import checkpoint_named
from moe_qlora.testing import tiny_model

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
WAYS = ("plain", "load-then-pack", "streaming", "reload")
MAKER_WAYS = ("maker", "maker-stock")
FP8_BLOCK = 128


def encode_fp8(key: str, shape: tuple[int, ...], device: Any) -> dict[str, torch.Tensor]:
    """Make e4m3 codes and a scale for each block of 128 x 128, where a matrix is projected."""
    if not key.endswith("_proj.weight"):
        return encode_bf16(key, shape, device)
    codes = torch.randn(shape, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    grid = tuple(math.ceil(size / FP8_BLOCK) for size in shape)
    scales = torch.rand(grid, device=device).add_(0.5).mul_(2e-4)
    return {key: codes.cpu(), f"{key}_scale_inv": scales.cpu()}


def encode_mxfp4(key: str, shape: tuple[int, ...], device: Any) -> dict[str, torch.Tensor]:
    """Make FP4 codes along the input, and an exponent for each 32 of them, of expert weights."""
    if len(shape) != 3:
        return encode_bf16(key, shape, device)
    experts, inputs, rows = shape
    size = (experts, rows, inputs // 32)
    codes = torch.randint(256, (*size, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 122, size, dtype=torch.uint8, device=device)
    return {f"{key}_blocks": codes.cpu(), f"{key}_scales": scales.cpu()}


MAKERS: dict[str, tuple[str, Encode, Any]] = {  # as whom it is, and transformers' own to dequantize
    "fp8": ("deepseek-v3", encode_fp8, FineGrainedFP8Config),
    "mxfp4": ("gpt-oss-20b", encode_mxfp4, Mxfp4Config),
}


def forget(folder: Path) -> None:
    """Write the files out and drop their pages from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: str, folder: Path, options: argparse.Namespace, save_to: Path) -> dict[str, float]:
    """Load once in this process, and save what streaming loads."""
    device: torch.device = options.device
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": str(device)}}
    packing = arguments | {"quantization_config": quantization()}
    with tempfile.TemporaryDirectory() as small, moe_qlora.enabled():  # what a first load starts
        tiny: Any = tiny_model("qwen3_moe")
        tiny.save_pretrained(small)
        AutoModelForCausalLM.from_pretrained(small, **packing)
        del tiny
    if way in ("streaming", "load-then-pack", "maker"):
        arguments = packing
    if way == "maker-stock":
        arguments["quantization_config"] = MAKERS[options.maker][2](dequantize=True)
    forget(folder)
    release(device)
    start = time.perf_counter()
    switched = way in ("streaming", "reload", "maker")
    with moe_qlora.enabled() if switched else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    if way in ("load-then-pack", "maker-stock"):
        moe_qlora.quantize_experts(model, quantization())
    synchronize(device)
    found = {"seconds": time.perf_counter() - start, "model": model.get_memory_footprint()}
    found |= {"peak": peak(device), "over": peak(device) - allocated(device)}
    if way == "streaming":
        start = time.perf_counter()
        model.save_pretrained(save_to)
        found["save_seconds"] = time.perf_counter() - start
    return found


def ways(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, dict[str, float], int]]:
    """Write the checkpoint and load it each way: `(way, figures, bytes on disk)`."""
    settings = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    folders = {"bf16": work / "bf16", "reload": work / "packed", "maker": work / "maker"}
    write_checkpoint(folders["bf16"], settings, options.device, encode_bf16)
    if options.maker:
        name, encode, _ = MAKERS[options.maker]
        published: Any = checkpoint_named(name)
        settings.quantization_config = dict(published.config["quantization_config"])
        if encode is encode_fp8:
            kept = ["lm_head", "model.embed_tokens"]
            settings.quantization_config["modules_to_not_convert"] = kept
        write_checkpoint(folders["maker"], settings, options.device, encode)
    spawn = multiprocessing.get_context("spawn")
    each = None if options.tiny else 1
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=each) as pool:
        for way in WAYS + (MAKER_WAYS if options.maker else ()):
            source = folders.get(way.partition("-")[0], folders["bf16"])
            size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            yield way, pool.submit(measure, way, source, options, folders["reload"]).result(), size


def main() -> None:
    """Measure and record."""
    parser = parser_of(__doc__, "loading.csv", "cpu")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--maker", choices=tuple(MAKERS), help="also as its makers quantize it")
    options = parser.parse_args()
    model, experts = ("", 128) if options.model == MODELS[0] else (f"{options.model} ", 32)
    maker = f" {options.maker}" if options.maker else ""
    setting = f"{model}layers={options.layers} experts={experts} nf4+double{maker}"
    with tempfile.TemporaryDirectory() as work:
        for way, figures, size in ways(options, Path(work)):
            rows = Rows(options, f"load {way}", setting)
            rows.add("bytes on disk", "bytes", size)
            rows.add("time", "s", figures["seconds"])
            rows.add("throughput", "bytes/s", size / figures["seconds"])
            rows.add("model", "bytes", figures["model"])
            if figures["peak"]:
                rows.add("peak", "bytes", figures["peak"])
                rows.add("peak over the model", "bytes", figures["over"])
            if way == "streaming":
                rows.add("time to save packed", "s", figures["save_seconds"])


if __name__ == "__main__":
    main()
