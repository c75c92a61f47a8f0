"""Loading a checkpoint into 4 bits: memory and time, against the ways without this package.

    python tools/bench/loading.py --layers 24 --device cuda
    python tools/bench/loading.py --layers 24 --fp8 --device cuda

A random bf16 checkpoint is loaded each way in a process of its own, its files' pages dropped from
the page cache before:

    plain          bf16, as transformers loads it
    load-then-pack bf16 experts first, then `quantize_experts`
    streaming      `from_pretrained` under `moe_qlora.enabled()`
    reload         the folder that the streamed model's `save_pretrained` wrote
    fp8            with `--fp8`: from block FP8, as makers ship it, under `moe_qlora.enabled()`

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
from shapes import encode_bf16, quantization, whole_config, write_checkpoint
from transformers import AutoModelForCausalLM

import moe_qlora
from moe_qlora.registry import checkpoint_named
from moe_qlora.testing import tiny_model

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
WAYS = ("plain", "load-then-pack", "streaming", "reload")
FP8_BLOCK = 128


def encode_fp8(key: str, shape: tuple[int, ...], device: Any) -> dict[str, torch.Tensor]:
    """Make e4m3 codes and a scale for each block of 128 x 128, where a matrix is projected."""
    if not key.endswith("_proj.weight"):
        return encode_bf16(key, shape, device)
    codes = torch.randn(shape, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    grid = tuple(math.ceil(size / FP8_BLOCK) for size in shape)
    scales = torch.rand(grid, device=device).add_(0.5).mul_(2e-4)
    return {key: codes.cpu(), f"{key}_scale_inv": scales.cpu()}


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
    if way in ("streaming", "load-then-pack", "fp8"):
        arguments = packing
    forget(folder)
    release(device)
    start = time.perf_counter()
    switched = way in ("streaming", "reload", "fp8")
    with moe_qlora.enabled() if switched else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    if way == "load-then-pack":
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
    folders = {"bf16": work / "bf16", "reload": work / "packed", "fp8": work / "fp8"}
    write_checkpoint(folders["bf16"], settings, options.device, encode_bf16)
    if options.fp8:
        published: Any = checkpoint_named("deepseek-v3")
        settings.quantization_config = dict(published.config["quantization_config"])
        kept = ["lm_head", "model.embed_tokens"]
        settings.quantization_config["modules_to_not_convert"] = kept
        write_checkpoint(folders["fp8"], settings, options.device, encode_fp8)
    spawn = multiprocessing.get_context("spawn")
    each = None if options.tiny else 1
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=each) as pool:
        for way in (*WAYS, "fp8")[: None if options.fp8 else -1]:
            source = folders.get(way, folders["bf16"])
            size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            yield way, pool.submit(measure, way, source, options, folders["reload"]).result(), size


def main() -> None:
    """Measure and record."""
    parser = parser_of(__doc__, "loading.csv", "cpu")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="also as makers quantize it")
    options = parser.parse_args()
    model, experts = ("", 128) if options.model == MODELS[0] else (f"{options.model} ", 32)
    setting = f"{model}layers={options.layers} experts={experts} nf4+double"
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
