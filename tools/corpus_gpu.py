"""The corpus's entries for a GPU: three steps of tiny models in each of the ways that are quick.

`corpus.py --gpu` runs them: LoRA on all layers, AdamW, bfloat16 on CUDA and float32 on a CPU.
Recorded are the losses, and every gradient of the last step, which a CUDA graph has replayed by
then. The two entries of two ranks are skipped where CUDA has one device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import LoraConfig
from torch import distributed, nn
from transformers import AutoModelForCausalLM

import moe_qlora
from tools import corpus_entries as on_cpu

ENTRIES = (
    *("qwen3_moe/nf4/eager", "qwen3_moe/nf4/recorded", "qwen3_moe/double/recorded"),
    *("gpt_oss/nf4/recorded", "gpt_oss/mxfp4/recorded", "mixtral/fp4/recorded"),
    *("olmoe/int8/recorded", "deepseek_v3/nf4/recorded", "llama4_text/nf4/recorded"),
    *("qwen3_moe/nf4/compiled", "qwen3_moe/nf4/offloaded", "gpt_oss/mxfp4/offloaded recorded"),
    *("qwen3_moe/nf4/part", "glm4_moe/double/part", "qwen3_moe/nf4/ddp", "qwen3_moe/double/fsdp"),
)
BATCH, SEQ, STEPS = 4, 32, 3
KEPT_SEQ = 1024  # Of layers kept in part: activations that are more than CUDA's own memory varies


def measure(entry: str, device: str) -> dict[str, Any] | None:
    """Return what is recorded of an entry, or None where there are too few devices."""
    on_cpu.quietly()
    kind, codec, way = entry.split("/")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        on_cpu.write_base(kind, root / "base", **(on_cpu.WIDE if codec == "mxfp4" else {}))
        if codec == "mxfp4":
            on_cpu.publish_mxfp4(root / "base")
        if way not in ("ddp", "fsdp"):
            return _steps(root / "base", codec, way, device)
        if device == "cuda" and torch.cuda.device_count() < 2:
            return None
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, str(root), codec, way, device]
        subprocess.run(command, check=True, timeout=300)
        found: dict[str, Any] = json.loads((root / "found.json").read_text())
        return found


def _steps(folder: Path, codec: str, way: str, device: str, rank: int = 0) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    config = on_cpu.quantization(codec, dtype)
    found: dict[str, Any] = {}
    if way == "fsdp":
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=names)
        options: Any = {"lora_config": lora, "adapter_options": {"experts": True}}
        model = moe_qlora.load_sharded(folder, config, dtype=dtype, **options)
    else:
        place: dict[str, Any] = {"device_map": {"": device}, "quantization_config": config}
        with moe_qlora.enabled(keep_codes=codec == "mxfp4"):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place)
        found["packed"] = on_cpu.state_hashes(model.state_dict())
        model = moe_qlora.get_peft_model(model, on_cpu.lora(model))
    _fill(model)
    model.train()
    with ExitStack() as stack:
        seq = KEPT_SEQ if way == "part" else SEQ
        runs = _set_up(model, way, stack, found, device, seq)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        ids = torch.randint(5, 100, (BATCH, seq), generator=torch.Generator().manual_seed(0))
        ids = ids.to(device)
        if way in ("ddp", "fsdp"):
            ids = ids.chunk(2)[rank]
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = runs(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            said = loss.detach().float()
            if way in ("ddp", "fsdp"):
                distributed.all_reduce(said)
                said /= 2
            found[f"loss {number}"] = float(f"{float(said):.6g}")
            named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
            whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in named.items()}
            found["gradients"] = on_cpu.fingerprints(whole)
            optimizer.step()
    return found


def _set_up(
    model: Any, way: str, stack: ExitStack, found: dict[str, Any], device: str, seq: int
) -> nn.Module:
    """Put the model into this way to run, until the stack ends; return what is called."""
    sizes: dict[str, Any] = {"batch_size": BATCH, "seq_len": seq}
    if "offloaded" in way:
        off = stack.enter_context(moe_qlora.offload_experts(model))
        found["host_nbytes"] = off.host_nbytes
    if "recorded" in way:
        memory: dict[str, Any] = {} if device.startswith("cuda") else {"memory": "8GiB"}
        prepared = stack.enter_context(moe_qlora.prepare_training(model, **sizes, **memory))
        found["prepared"] = sorted({line.split(":")[0] for line in str(prepared).splitlines()})
    if way == "compiled":
        for module in model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                module.compile()
    if way == "part":
        stack.enter_context(_kept_in_part(model, sizes))
    if way == "ddp":
        ids = [torch.device(device)] if device.startswith("cuda") else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    return model


def _kept_in_part(model: Any, sizes: dict[str, Any]) -> Any:
    """Return the fit of the most memory, of a few, that does not hold all activations."""
    for _ in range(2):  # The first also finds what CUDA's libraries take at their first call
        whole = moe_qlora.fit_memory(model, **sizes, memory="8GiB")
        whole.remove()
    for part in range(990, 600, -5):
        fit = moe_qlora.fit_memory(model, **sizes, memory=whole.peak * part // 1000)
        if any(layer.activations != "keep" for layer in fit.layers):
            return fit
        fit.remove()
    raise AssertionError("no memory is too small to keep everything")


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            continue
        values = on_cpu.grid(name, weight.shape, bits=13 if "lora_A" in name else 15)
        values = values.to(weight.device, weight.dtype)
        if isinstance(weight, DTensor):
            values = distribute_tensor(values, weight.device_mesh, weight.placements)
        weight.copy_(values)


def _rank_main(root: str, codec: str, way: str, device: str) -> None:
    """Run one rank's steps; the first one writes what it found."""
    on_cpu.quietly()
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    found = _steps(Path(root) / "base", codec, way, device, rank)
    if rank == 0:
        (Path(root) / "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
