"""Trains a whole model with random weights on several GPUs of one machine; two_gpu.csv.

    python tools/bench/many_gpus.py                          qwen3-30b-a3b, every engine
    python tools/bench/many_gpus.py --engines fsdp2 --model glm-4.5-air

    single    one GPU by itself
    ddp       torch's DistributedDataParallel: the whole model on each GPU
    fsdp2     fully_shard on each decoder layer and the root; each rank loads its own share of a
              checkpoint of random weights, which is written to the folder for temporary files

Experts are packed to nf4 with double quantization, other weights stay in bf16. Each engine runs in
processes of its own. Every rank trains its own micro-batch: tokens/s are those of all together.
"""

import argparse
import datetime as dt
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import model as whole_model
import torch
from common import append_row, environment, peak, percentiles, recompute, release, words
from shapes import encode_bf16, meta_model, quantization, whole_config, write_checkpoint
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import ProcessException, spawn

import moe_qlora

ENGINES = ("single", "ddp", "fsdp2")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "transformers", "engine", "gpus", "model", "layers"),
    *("seq", "micro_batch", "step_s", "step_p20", "step_p80", "tokens_per_s"),
    *("model_gb", "build_peak_gb", "train_peak_gb", "build_s", "first_loss", "last_loss", "note"),
)
GB = 1e9
PORT = 29650


def main() -> None:
    """Run the engines that the command line asks for."""
    parser = whole_model.training_parser(__doc__, "two_gpu.csv")
    parser.set_defaults(micro_batch=4, steps=6)
    add = parser.add_argument
    add("--gpus", type=int, default=2)
    add("--engines", type=words(*ENGINES), default=",".join(ENGINES))
    add("--reshard", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    options.seq = 64 if options.tiny else options.seq
    for number, engine in enumerate(options.engines):
        ranks = 1 if engine == "single" else options.gpus
        print(f"\n{options.model} {engine} on {ranks}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            options.folder = Path(folder)
            try:
                spawn(_rank, args=(ranks, engine, PORT + number, options), nprocs=ranks)
            except ProcessException as error:
                _write(options, engine, ranks, note=f"fails: {str(error).strip().splitlines()[-1]}")


def _rank(rank: int, ranks: int, engine: str, port: int, options: argparse.Namespace) -> None:
    cuda = options.device.type == "cuda"
    device = options.device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if not cuda:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    backend, limit = "cpu:gloo,cuda:nccl" if cuda else "gloo", dt.timedelta(seconds=300)
    distributed.init_process_group(backend, timeout=limit, device_id=device if cuda else None)
    try:
        figures = _run(engine, options)
        if rank == 0:
            _write(options, engine, ranks, **figures)
    finally:
        distributed.destroy_process_group()


def _run(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Build, adapt and train under one engine; return the row's figures."""
    rank, ranks, device = distributed.get_rank(), distributed.get_world_size(), options.device
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    torch.manual_seed(0)
    if engine == "fsdp2" and rank == 0:
        write_checkpoint(options.folder, config, device, encode_bf16)
    distributed.barrier()
    release(device)
    start = time.perf_counter()
    model = (_fsdp2 if engine == "fsdp2" else _whole)(engine, config, options)
    common.synchronize(device)
    figures: dict[str, Any] = {"build_s": time.perf_counter() - start}
    figures["build_peak_gb"] = peak(device) / GB
    release(device)
    local = [getattr(weight, "to_local", lambda w=weight: w)() for weight in model.parameters()]
    figures["model_gb"] = sum(weight.nbytes for weight in local) / GB
    del local
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocabulary, shape = config.get_text_config().vocab_size, (options.micro_batch, options.seq)

    def draw(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(vocabulary, shape, generator=generator).to(device)
        distributed.barrier()
        return ids

    seconds, losses = common.train(model, optimizer, draw, options.warmup + options.steps)
    distributed.all_reduce(means := torch.tensor(losses, device=device) / ranks)
    losses = means.tolist()
    if rank == 0:
        for step, both in enumerate(zip(seconds, losses, strict=True)):
            print("step {}: {:.3f} s, {:.4f}".format(step, *both))
    low, middle, high = percentiles(seconds[options.warmup :])
    figures |= {"step_s": middle, "step_p20": low, "step_p80": high}
    figures |= {"tokens_per_s": ranks * shape[0] * shape[1] / middle}
    figures |= {"first_loss": losses[0], "last_loss": losses[-1]}
    figures |= {"train_peak_gb": peak(device) / GB}
    return figures


def _whole(engine: str, config: Any, options: argparse.Namespace) -> Any:
    """Build the whole model on the device, each expert weight packed as soon as it is made."""
    model, device = whole_model.build(config, options.device, packed=True)[0], options.device
    torch.manual_seed(1)
    model = whole_model.adapt("ours", model, options)
    if options.prepare:
        whole_model.prepared(model, options)
    if engine == "ddp":
        more: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, **more)
    return model


def _fsdp2(_: str, config: Any, options: argparse.Namespace) -> Any:
    """Load each rank's own share of the folder."""
    model: Any = meta_model(config)
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    experts = [param.name for param in moe_qlora.detect(model)]
    model = moe_qlora.load_sharded(
        options.folder,
        quantization(llm_int8_skip_modules=linears),
        lora_config=whole_model.lora_config(model, experts, options.lora, options.rank),
        fsdp_options={"reshard_after_forward": options.reshard},
        adapter_options={"autocast_adapter_dtype": False},
    )
    model.config.get_text_config().use_cache = False
    if options.checkpointing:
        recompute(model)
    if options.prepare:
        whole_model.prepared(model, options)
    return model


def _write(options: argparse.Namespace, engine: str, ranks: int, **figures: Any) -> None:
    """Append one row to the CSV file, and print it."""
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    row: dict[str, Any] = environment(options.device, options.commit)
    row |= {"engine": engine, "gpus": ranks, "model": "tiny" if options.tiny else options.model}
    row |= {"layers": config.get_text_config().num_hidden_layers, "seq": options.seq}
    row |= {"micro_batch": options.micro_batch}
    prepared = f", prepare_training {options.prepare}" if options.prepare else ""
    once = "" if options.reshard else ", gathered once"
    row |= {"note": f"LoRA r={options.rank} {','.join(options.lora)}{once}{prepared}"}
    row |= {key: f"{v:.5g}" if isinstance(v, float) else v for key, v in figures.items()}
    row = {key: row[key] for key in COLUMNS if key in row}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    append_row(options.out, COLUMNS, row)


if __name__ == "__main__":
    main()
