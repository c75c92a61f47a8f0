"""Trains a whole model with random weights on several GPUs of one machine; two_gpu.csv.

    python tools/bench/many_gpus.py                          qwen3-30b-a3b, every engine
    python tools/bench/many_gpus.py --engines fsdp2 --model glm-4.5-air --memory 48
    python tools/bench/many_gpus.py --tiny --device cpu      whether it runs at all

    single    one GPU by itself
    ddp       torch's DistributedDataParallel: the whole model on each GPU
    fsdp2     fully_shard on each decoder layer and the root; each rank fills its own share
    whole     the same, of a model that was built whole on each GPU first

Experts are packed to nf4 with double quantization, other weights stay in bf16. LoRA is on attention
and experts. Each engine runs in processes of its own, one after the other, on the same machine.
Every rank trains its own micro-batch: tokens/s are those of all ranks together.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import model as whole_model
import torch
from common import append_row, environment, parser_of, recompute, release, synchronize, words_of
from shapes import meta_model, quantization, whole_config
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.spawn import ProcessException, spawn

import moe_qlora
from moe_qlora.checkpoint.conversion import DiskLayout
from moe_qlora.checkpoint.folder import Checkpoint, TensorInfo

ENGINES = ("single", "ddp", "fsdp2", "whole")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "transformers", "engine", "gpus", "model", "layers"),
    *("seq", "micro_batch", "step_s", "step_p20", "step_p80", "tokens_per_s"),
    *("model_gb", "build_peak_gb", "train_peak_gb", "build_s", "first_loss", "last_loss", "note"),
)
GB = 1e9
PORT = 29650


def main() -> None:
    """Run the engines that the command line asks for."""
    options = _options()
    for number, engine in enumerate(options.engines):
        ranks = 1 if engine == "single" else options.gpus
        print(f"\n{options.model} {engine} on {ranks}", flush=True)
        try:
            spawn(_rank, args=(ranks, engine, PORT + number, options), nprocs=ranks)
        except ProcessException as error:
            _write(options, engine, ranks, note=f"fails: {str(error).strip().splitlines()[-1]}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "two_gpu.csv")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 32 with --tiny")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--lora", default="experts,attention")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--memory", type=float, default=None, help="GiB that each GPU may use")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prefetch", type=int, default=0, help="layers that FSDP2 gathers ahead")
    parser.add_argument("--prepare", default=None, help="memory of prepare_training, as 70GiB")
    parser.add_argument("--profile", default=None, help="a file for rank 0's kernels of a step")
    options = parser.parse_args()
    options.seq = options.seq or (32 if options.tiny else 4096)
    options.engines = words_of(parser, "--engines", options.engines, ENGINES)
    options.lora = sorted(set(options.lora.split(",")), reverse=True)
    return options


def _rank(rank: int, ranks: int, engine: str, port: int, options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if cuda:
        torch.cuda.set_device(device)
        if options.memory:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(options.memory * 2**30 / total, device)
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=rank,
            world_size=ranks,
            timeout=dt.timedelta(seconds=300),
            device_id=device if cuda else None,
        )
    try:
        figures = _run(rank, ranks, engine, options, device)
        if rank == 0:
            _write(options, engine, ranks, **figures)
    finally:
        if ranks > 1:
            distributed.destroy_process_group()


def _run(
    rank: int, ranks: int, engine: str, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Build, adapt and train under one engine; return the row's figures."""
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    torch.manual_seed(0)
    start = time.perf_counter()
    build = _fsdp2 if engine == "fsdp2" else partial(_whole, engine)
    model, trained = build(config, options, device)
    synchronize(device)
    figures: dict[str, Any] = {"build_s": time.perf_counter() - start}
    cuda = device.type == "cuda"
    if cuda:
        figures["build_peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
    release(device)
    figures["model_gb"] = sum(_local(parameter).nbytes for parameter in model.parameters()) / GB
    trained.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    vocabulary = config.get_text_config().vocab_size
    seconds: list[float] = []
    losses: list[float] = []

    def run(step: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = (options.micro_batch, options.seq)
        ids = torch.randint(vocabulary, shape, generator=generator).to(device)
        if ranks > 1:
            distributed.barrier()
        synchronize(device)
        begin = time.perf_counter()
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        host = time.perf_counter() - begin
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        mean = loss.detach().float()
        if ranks > 1:
            distributed.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0:
            print(f"step {step}: {seconds[-1]:.3f} s, host {host:.3f} s, {losses[-1]:.4f}")

    for step in range(options.warmup + options.steps):
        run(step)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    kept = sorted(seconds[options.warmup :])
    step_s = statistics.median(kept)
    figures |= {"step_s": step_s, "step_p20": kept[len(kept) // 5]}
    figures |= {"step_p80": kept[-1 - len(kept) // 5]}
    figures["tokens_per_s"] = ranks * options.micro_batch * options.seq / step_s
    figures |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if cuda:
        figures["train_peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
    if options.profile:
        _profile(run, options.profile if rank == 0 else None)
    return figures


def _profile(step: Callable[[int], Any], path: str | None) -> None:
    """Write the kernels of a step by their time, and a trace beside it, where there is a path."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(0)
        torch.cuda.synchronize()
    if path is not None:
        found.export_chrome_trace(f"{path}.json.gz")
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40)
        Path(path).write_text(table)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _whole(
    engine: str, config: Any, options: argparse.Namespace, device: torch.device
) -> tuple[Any, Any]:
    """Build the whole model on the device, each expert weight packed as soon as it is made."""
    packer = whole_model.Packer("ours", config)
    model = whole_model.build(config, device, packer.visit)
    moe_qlora.quantize_experts(model, quantization())
    torch.manual_seed(1)
    model = whole_model.adapt("ours", model, options)
    _prepare(model, options)
    if engine == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        wrap = nn.parallel.DistributedDataParallel
        more: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        return model, wrap(model, device_ids=ids, **more)
    if engine == "whole":
        from moe_qlora.distributed.sharding import shard_model

        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        shard_model(model, mesh, reshard_after_forward=options.reshard)
    return model, model


def _fsdp2(config: Any, options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    from moe_qlora.checkpoint.rows import packing_spec
    from moe_qlora.checkpoint.training_codec import from_config
    from moe_qlora.distributed.load_sharded import compute_buffers, shard_and_fill
    from moe_qlora.hf.fill import Fill

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    model: Any = meta_model(config)
    bnb_config = quantization()
    bnb_config.llm_int8_skip_modules = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    if options.checkpointing:
        recompute(model)
    compute_buffers(model, torch.device("cpu"))
    spec = packing_spec(model, bnb_config, model.dtype, None)
    from_config(model, bnb_config)
    model.tie_weights()
    experts, rows = [param.name for param in spec.layout.experts], _RandomRows([])
    rows.disk = {n: (tuple(t.shape), torch.bfloat16) for n, t in model.state_dict().items()}
    lora = whole_model.lora_config(model, experts, options.lora, options.rank)
    dtypes = dict.fromkeys(rows.disk, model.dtype)
    fill = Fill(model, spec, rows, dtypes, bnb_config, shards=True)
    fill.pack(DiskLayout(model, rows.disk, []))
    more = {"reshard_after_forward": options.reshard}, {"autocast_adapter_dtype": False}
    model = shard_and_fill(fill, mesh, lora, None, *more)
    _prefetch(model, options.prefetch)
    _prepare(model, options)
    return model, model


def _prepare(model: Any, options: argparse.Namespace) -> None:
    if options.prepare:
        sizes = {"batch_size": options.micro_batch, "seq_len": options.seq}
        print(moe_qlora.prepare_training(model, **sizes, memory=options.prepare), flush=True)


def _prefetch(model: Any, ahead: int) -> None:
    """Gather the next layers while one computes, forward and back."""
    layers = [m for m in model.modules() if ahead and isinstance(m, FSDPModule)][1:]
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])


class _RandomRows(Checkpoint):
    """Random numbers in place of a checkpoint's tensors."""

    disk: dict[str, Any]

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(Path(), torch.bfloat16, self.disk[key][0], 0, 0)

    def fetch(self, key: str, start: int = 0, stop: int | None = None, device: Any = None) -> Any:
        rows = torch.empty(self.disk[key][0], dtype=torch.bfloat16, device="meta")[start:stop]
        std = 0.02 if rows.dim() > 1 else 0.0  # norms are 1
        return lambda: torch.empty_like(rows, device=device).normal_(0.0 if std else 1.0, std)


def _write(options: argparse.Namespace, engine: str, ranks: int, **figures: Any) -> None:
    """Append one row to the CSV file, and print it."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    where = environment(device, options.commit)
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    row: dict[str, Any] = {key: where[key] for key in COLUMNS if key in where}
    row |= {"engine": engine, "gpus": ranks, "seq": options.seq}
    row |= {"model": "tiny" if options.tiny else options.model}
    row |= {"layers": config.get_text_config().num_hidden_layers}
    row |= {"micro_batch": options.micro_batch}
    row |= {"note": f"LoRA r={options.rank} {','.join(options.lora)}"}
    for name, is_set in (
        ("gathered once", not options.reshard),
        (f"prefetch={options.prefetch}", options.prefetch),
        (f"prepare_training {options.prepare}", options.prepare),
        (f"each GPU held to {options.memory or 0:g} GiB", options.memory),
    ):
        row["note"] += f", {name}" if is_set else ""
    row |= {key: f"{v:.5g}" if isinstance(v, float) else v for key, v in figures.items()}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    append_row(options.out, COLUMNS, row)


if __name__ == "__main__":
    main()
