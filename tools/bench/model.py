"""Trains a whole model with random weights, ours and its peers one after the other; model.csv.

    python tools/bench/model.py                        qwen3-30b-a3b, one GPU with 80 GB or more
    python tools/bench/model.py --prepare 28GiB --optimizer adamw_fused --peers ours
    python tools/bench/model.py --liger-loss --compile --no-checkpointing --peers frozen
    python tools/bench/model.py --tiny --device cpu    whether it runs at all

    ours        experts packed, nf4 with double quantization; LoRA as `--lora` says
    frozen      bf16 experts, transformers' grouped_mm; LoRA on attention alone
    peft        bf16 experts, transformers' grouped_mm; PEFT's LoRA as `--lora` says
    mxfp4       ours, on random experts in MXFP4 as a checkpoint's are kept: `--peers ours,mxfp4`

Only experts are packed; Linear layers stay in bf16 for every peer. AdamW trains the adapters.
`--liger-loss` and `--compile` (each decoder layer) are the same for every peer. `--fit` is
`fit_memory` for ours, `--prepare` `prepare_training`, `--offload` `offload_experts`; peers then
keep all activations. A model is made on the device one module at a time, and an expert stack packed
as soon as it is made, so that models fit that do not in 16 bits.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from common import (
    Rows,
    allocated,
    environment,
    parser_of,
    recompute,
    release,
    release_workspace,
    synchronize,
    words_of,
)
from shapes import meta_model, quantization, random_mxfp4, whole_config
from torch import Tensor, nn

import moe_qlora

PEERS = ("ours", "frozen", "peft")
KNOWN = (*PEERS, "mxfp4")
OURS = ("ours", "mxfp4")
DEVICE = "device"  # the memory of --fit without a figure: all that the device has free
KINDS = {"keep": "layers kept", "part": "layers kept in part", "recompute": "layers recomputed"}
"""The metric that counts the layers of each choice of `fit_memory`."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
}


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    where = environment(device, options.commit)
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    if options.attention:
        config._attn_implementation = options.attention
    name = f"{config.model_type}-tiny" if options.tiny else options.model
    for peer in options.peers:
        setting = _setting(peer, options, config.get_text_config().num_hidden_layers)
        print(f"\n{name} {setting}", flush=True)
        rows = Rows(options.out, where, name, setting)
        torch.manual_seed(0)
        release(device)
        try:
            run(peer, options, config, device, rows)
        except Exception as error:
            if peer in OURS:
                raise
            rows.fail(error)
        release_workspace()
        release(device)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "model.csv")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="as `moe-qlora plan` takes it")
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 64 with --tiny")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora", default="experts,attention", help="experts, attention or both")
    parser.add_argument("--liger-loss", action="store_true", help="Liger's loss alone")
    parser.add_argument("--chunk-mem-const", type=int, help="of Liger's loss: larger chunks")
    parser.add_argument("--compile", action="store_true", help="each decoder layer")
    parser.add_argument("--offload", action="store_true", help="offload_experts; ours only")
    given: dict[str, Any] = {"nargs": "?", "const": DEVICE, "metavar": "MEMORY"}
    parser.add_argument(
        "--fit", **given, help="fit_memory, to bytes or 24GiB; default: what is free"
    )
    parser.add_argument(
        "--prepare",
        **given,
        help="prepare_training; for peers: --liger-loss --chunk-mem-const 8 --compile",
    )
    parser.add_argument("--attention", help="as attn_implementation; default: transformers' choice")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--losses", type=int, default=0, help="record those of the first N steps")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    options = parser.parse_args()
    options.seq = options.seq or (64 if options.tiny else 4096)
    options.lora = sorted(set(options.lora.split(",")), reverse=True)
    options.peers = words_of(parser, "--peers", options.peers, KNOWN)
    if not set(options.lora) <= {"attention", "experts"}:
        parser.error(f"--lora {','.join(options.lora)}: expected experts, attention or both")
    if options.prepare is not None:
        options.liger_loss = options.compile = True
        options.fit, options.chunk_mem_const = options.prepare, 8
    if options.fit is not None:
        options.checkpointing = False
    return options


def _lora(peer: str, options: argparse.Namespace) -> list[str]:
    return [*options.lora] if peer != "frozen" else ["attention"]


def _setting(peer: str, options: argparse.Namespace, layers: int) -> str:
    ours = peer in OURS
    fitted = options.fit is not None and ours
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    asked = {
        "liger-loss": options.liger_loss,
        "merge-lora": options.prepare is not None and ours, "offload": options.offload and ours,
        "compile": options.compile, "graphs": options.prepare is not None and ours,
        "expandable-segments": expandable, options.optimizer: options.optimizer != "adamw",
    }  # fmt: skip
    added = ",".join(name for name, wanted in asked.items() if wanted)
    kept = "fit" if fitted else "non-reentrant" if options.checkpointing else "none"
    packed = {"frozen": "bf16", "peft": "bf16", "mxfp4": "mxfp4"}
    return (
        f"layers={layers} lora={','.join(_lora(peer, options))} r={options.rank} "
        f"seq={options.seq} batch={options.micro_batch} "
        f"checkpointing={kept} {packed.get(peer, 'nf4+double')}"
        f" peer={peer} adapters=bf16"
        f"{f' with={added}' if added else ''}"
        f"{f' memory={options.fit}' if fitted and options.fit != DEVICE else ''}"
        f"{f' chunk_mem_const={options.chunk_mem_const}' if options.chunk_mem_const else ''}"
        f"{f' attention={options.attention}' if options.attention else ''}"
    )


def run(
    peer: str, options: argparse.Namespace, config: Any, device: torch.device, rows: Rows
) -> None:
    """Build, pack, adapt and train one peer's model."""
    rows.add("allocated before", "bytes", allocated(device))
    start = time.perf_counter()
    packer = Packer(peer, config)
    model = build(config, device, packer.visit)
    synchronize(device)
    rows.add("building time", "s", time.perf_counter() - start)
    if packer.before:
        rows.add("experts before", "bytes", packer.before)
        rows.add("experts packed", "bytes", packer.after)
        rows.add("packed weight", "bytes/weight", 2 * packer.after / packer.before)
        rows.add("packing time", "s", packer.seconds)
    if device.type == "cuda":
        rows.add("peak while building", "bytes", torch.cuda.max_memory_allocated(device))
    if peer in OURS:
        moe_qlora.quantize_experts(model, quantization())  # takes on what is packed already
    else:
        model.set_experts_implementation("grouped_mm")
    release(device)
    if device.type == "cuda":
        rows.add("model", "bytes", allocated(device))
    peft_model = adapt(peer, model, options)
    with prepared(peft_model, options, peer in OURS, rows):
        train(peft_model, options, device, rows)


def build(
    config: Any, device: torch.device, each: Callable[[str, nn.Module], None] | None = None
) -> Any:
    """The model in bf16 on the device, as `moe_qlora.testing.fill_randomly` makes it."""
    from moe_qlora.testing import fill_randomly

    return fill_randomly(meta_model(config), device, each)


class Packer:
    """Packs a model's expert stacks as they are made.

    Attributes:
        before: Bytes of the packed stacks in bf16.
        after: Bytes packed, statistics included.
        seconds: Time taken.
    """

    def __init__(self, peer: str, config: Any) -> None:
        self.peer = peer
        self.stacks: dict[str, list[str]] = {}
        self.before = self.after = 0
        self.seconds = 0.0
        if peer in ("frozen", "peft"):
            return
        for param in moe_qlora.detect(meta_model(config)):
            self.stacks.setdefault(param.module_name, []).append(param.parameter_name)

    def visit(self, name: str, module: nn.Module) -> None:
        """Pack this module's expert stacks."""
        for parameter in self.stacks.get(name, ()):
            weight = module.get_parameter(parameter).data
            device = weight.device
            self.before += weight.nbytes
            synchronize(device)
            start = time.perf_counter()
            self._pack(module, parameter, weight)
            del weight
            synchronize(device)
            self.seconds += time.perf_counter() - start

    def _pack(self, module: Any, parameter: str, weight: Tensor) -> None:
        from moe_qlora.packing import codec, parametrize
        from moe_qlora.packing.settings import CodecSettings

        if self.peer == "mxfp4":
            packed = random_mxfp4(weight.shape, bool(module.is_transposed), weight.device)
        else:
            packed = codec.pack(weight, CodecSettings.from_config(quantization()))
        self.after += packed.nbytes
        parametrize.attach(module, parameter, packed)


def adapt(peer: str, model: Any, options: argparse.Namespace) -> Any:
    """LoRA as the peer has it, under gradient checkpointing unless told otherwise."""
    import peft

    if options.checkpointing:
        recompute(model)
    model.config.get_text_config().use_cache = False
    experts = [param.name for param in moe_qlora.detect(model)]
    get: Any = peft.get_peft_model
    if peer in OURS:
        experts, get = moe_qlora.target_parameters(model), moe_qlora.get_peft_model
    config = lora_config(model, experts, _lora(peer, options), options.rank)
    return get(model, config, autocast_adapter_dtype=False)


def lora_config(model: nn.Module, experts: list[str], wanted: list[str], rank: int) -> Any:
    """PEFT's config of LoRA on attention, on the named expert weights, or on both."""
    import peft

    attention = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "attn" in name.rpartition(".")[0].lower()
    ]
    if "attention" in wanted and not attention:
        raise ValueError(f"{type(model).__name__}: no Linear layer within a module named *attn*")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=attention if "attention" in wanted else [],
        target_parameters=experts if "experts" in wanted else None,
        task_type="CAUSAL_LM",
    )


@contextmanager
def prepared(
    peft_model: Any, options: argparse.Namespace, ours: bool, rows: Rows
) -> Iterator[None]:
    """Liger, torch.compile, and for ours what this package adds, as far as it is asked for."""
    library: Any = moe_qlora
    whole = ours and options.prepare is not None  # prepare_training does it all
    model = peft_model.get_base_model()
    if options.liger_loss and not whole:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger

        liger(model=model, swiglu=False, rope=False, rms_norm=False)
    if options.compile and not whole:
        for layer in model.base_model.layers:
            layer.compile()
    memory: Any = None if options.fit == DEVICE else options.fit
    memory = int(memory) if memory and memory.isdigit() else memory
    sizes = {"batch_size": options.micro_batch, "seq_len": options.seq, "memory": memory}
    with ExitStack() as stack:
        fit = off = None
        if ours and options.offload:
            off = stack.enter_context(library.offload_experts(peft_model))
        if whole:
            done = stack.enter_context(library.prepare_training(peft_model, **sizes))
            print(done, flush=True)
            fit = done.fit
        if ours and options.fit is not None and fit is None:
            fit = stack.enter_context(library.fit_memory(peft_model, **sizes))
        if fit is not None:
            print(fit, flush=True)
            rows.add("planned peak", "bytes", fit.peak)
            rows.add("memory to fit", "bytes", fit.memory)
            count = Counter(layer.activations for layer in fit.layers)
            for kind, metric in KINDS.items():
                rows.add(metric, "layers", count[kind])
        yield
        if off is not None:
            rows.add("experts in host memory", "bytes", off.host_nbytes)
            rows.add("copies to the device", "copies", off.copies)
        device = next(peft_model.parameters()).device
        if fit is not None and device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(device)
            rows.add("planned peak, error", "%", 100 * (fit.peak / measured - 1))


def train(model: Any, options: argparse.Namespace, device: torch.device, rows: Rows) -> None:
    """Train on random tokens; records time, tokens/s and memory, and the losses asked for.

    Raises:
        RuntimeError: A loss is not finite, or an adapter gets no gradient.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows.add("trained weights", "weights", sum(parameter.numel() for parameter in parameters))
    optimizer = OPTIMIZERS[options.optimizer](parameters, lr=1e-4)
    chunks = {"chunk_mem_const": options.chunk_mem_const} if options.chunk_mem_const else {}
    release(device)
    if device.type == "cuda":
        rows.add("model and adapters", "bytes", allocated(device))
    seconds: list[float] = []
    losses: list[float] = []
    vocabulary = model.config.get_text_config().vocab_size
    for _ in range(options.warmup + options.steps):
        ids = torch.randint(vocabulary, (options.micro_batch, options.seq), device=device)
        synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, **chunks).loss
        loss.backward()
        if not losses:
            _check_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    seconds = seconds[options.warmup :]
    rows.add("step", "s", *seconds)
    rows.add("throughput", "tokens/s", *(ids.numel() / step for step in seconds))
    rows.add("first loss", "nats", losses[0])
    rows.add("last loss", "nats", losses[-1])
    for index, value in enumerate(losses[: options.losses]):
        rows.add(f"loss of step {index}", "nats", value)
    if device.type == "cuda":
        rows.add("peak in training", "bytes", torch.cuda.max_memory_allocated(device))
        rows.add("reserved in training", "bytes", torch.cuda.max_memory_reserved(device))
        rows.add("resident between steps", "bytes", allocated(device))


def _check_gradients(model: Any) -> None:
    """Every LoRA B must get a gradient (A gets none while B is zero)."""
    dead = [
        name
        for name, parameter in model.named_parameters()
        if "lora_B" in name and (parameter.grad is None or not parameter.grad.any())
    ]
    if dead:
        raise RuntimeError(f"{len(dead)} LoRA weights get no gradient, the first is {dead[0]}")


if __name__ == "__main__":
    main()
