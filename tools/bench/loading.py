"""Loading a checkpoint into 4 bits: memory and time, against the ways without this package.

    python tools/bench/loading.py --experts-gib 1                # CPU, memory of the process
    python tools/bench/loading.py --layers 32 --device cuda      # one GPU, memory of the device

A checkpoint of the shape of Qwen3-30B-A3B (per-expert keys, bf16, random weights) is written, then
loaded, each way in a process of its own, with the files' pages dropped from the page cache before:

    plain          bf16, as transformers loads it
    load-then-pack bf16 experts first, then `quantize_experts`
    streaming      `from_pretrained` under `moe_qlora.enabled()`
    reload         the folder that the streamed model's `save_pretrained` wrote

"over" is what a load takes at its peak beyond the model that it leaves: on the CPU anonymous memory
(RssAnon, sampled), on a GPU `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Rows, environment
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig

import moe_qlora

WAYS = ("plain", "load-then-pack", "streaming", "reload")
GIB = 2**30
SAMPLE_SECONDS = 0.002


def config(layers: int, experts: int) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's configuration with fewer layers or experts."""
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=40960,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )


def write(folder: Path, settings: Qwen3MoeConfig, device: str) -> int:
    """Write the checkpoint layer by layer, per-expert keys; returns its bytes."""
    folder.mkdir(parents=True)
    settings.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weight_map: dict[str, str] = {}
    total = 0
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name in shapes:
        group = name.split(".")[2] if ".layers." in name else "rest"
        groups.setdefault(group, {})
    for index, group in enumerate(groups):
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            if (name.split(".")[2] if ".layers." in name else "rest") != group:
                continue
            if ".experts." not in name:
                tensors[name] = random(shape, device)
                continue
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            stem = name.rpartition(".")[0]
            single = (shape[1] // len(parts), shape[2])
            for expert in range(shape[0]):
                for part in parts:
                    tensors[f"{stem}.{expert}.{part}.weight"] = random(single, device)
        file = f"model-{index:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return total


def random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """bf16 weights of a standard deviation of 0.02, on the CPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()


def forget(folder: Path) -> None:
    """Write the files out and drop their pages from the page cache."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


class Anonymous:
    """Peak anonymous memory of this process, sampled in a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @staticmethod
    def now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the kernel does not say RssAnon")

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> Anonymous:
        self.peak = self.now()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(way: str, folder: Path, device: str, save_to: Path | None) -> dict[str, float]:
    """Load once in this process."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": device}}
    if way in ("streaming", "load-then-pack"):
        arguments["quantization_config"] = quantization
    warm_up(device)
    forget(folder)
    gc.collect()
    before = Anonymous.now()
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    switch = moe_qlora.enabled() if way in ("streaming", "reload") else contextlib.nullcontext()
    with Anonymous() as anonymous:
        start = time.perf_counter()
        with switch:
            model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
        if way == "load-then-pack":
            moe_qlora.quantize_experts(model)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    result = {"seconds": seconds, "model": float(model.get_memory_footprint())}
    if on_gpu:
        result["left"] = float(torch.cuda.memory_allocated())
        result["peak"] = float(torch.cuda.max_memory_allocated())
        result["over"] = result["peak"] - result["left"]
    else:
        result["peak"] = float(anonymous.peak - before)
        # transformers leaves what it need not change in the mapped file: no anonymous memory
        gc.collect()
        result["left"] = float(Anonymous.now() - before)
        result["over"] = result["peak"] - min(result["left"], result["model"])
    if save_to is not None:
        start = time.perf_counter()
        model.save_pretrained(save_to)
        result["save_seconds"] = time.perf_counter() - start
    return result


def warm_up(device: str) -> None:
    """Import and start everything that a first load would, on a model of one expert."""
    settings = Qwen3MoeConfig(
        num_hidden_layers=1,
        num_experts=2,
        hidden_size=64,
        moe_intermediate_size=64,
        intermediate_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=64,
    )
    with tempfile.TemporaryDirectory() as folder, moe_qlora.enabled():
        AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            device_map={"": device},
        )


def ways(arguments: argparse.Namespace, work: Path) -> Iterator[tuple[str, dict[str, float], int]]:
    """Write the checkpoint and load it each way: `(way, figures, bytes on disk)`."""
    settings = config(arguments.layers, arguments.num_experts)
    folder, packed = work / "bf16", work / "packed"
    total = write(folder, settings, arguments.device)
    for way in arguments.ways.split(","):
        source = packed if way == "reload" else folder
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = [sys.executable, __file__, "--measure", way, "--folder", str(source)]
        command += ["--device", arguments.device]
        if way == "streaming" and "reload" in arguments.ways:
            command += ["--save-to", str(packed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
        yield way, json.loads(done.stdout.splitlines()[-1]), size if way == "reload" else total


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--num-experts", type=int, default=128)
    parser.add_argument("--experts-gib", type=float, help="instead of both: about so much of bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--work", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "loading.csv")
    parser.add_argument("--commit")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save-to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        figures = measure(arguments.measure, arguments.folder, arguments.device, arguments.save_to)
        print(json.dumps(figures))
        return
    if arguments.experts_gib is not None:
        expert = 3 * 2048 * 768 * 2
        arguments.layers = 2
        arguments.num_experts = round(arguments.experts_gib * GIB / expert / arguments.layers)
    where = environment(torch.device(arguments.device), arguments.commit)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        for way, figures, size in ways(arguments, Path(work)):
            setting = f"layers={arguments.layers} experts={arguments.num_experts} nf4+double"
            rows = Rows(arguments.out, where, f"load {way}", setting)
            rows.add("bytes on disk", "bytes", size)
            rows.add("time", "s", figures["seconds"])
            rows.add("throughput", "bytes/s", size / figures["seconds"])
            rows.add("model", "bytes", figures["model"])
            rows.add("peak", "bytes", figures["peak"])
            rows.add("peak over the model", "bytes", figures["over"])
            if "save_seconds" in figures:
                rows.add("time to save packed", "s", figures["save_seconds"])


if __name__ == "__main__":
    main()
