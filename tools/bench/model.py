"""Trains a whole model with random weights, ours and its peers one after the other; model.csv.

    python tools/bench/model.py                        qwen3-30b-a3b, one GPU with 80 GB or more
    python tools/bench/model.py --prepare 28GiB --optimizer adamw_fused --peers ours
    python tools/bench/model.py --liger-loss --compile --no-checkpointing --peers frozen

    ours        experts packed, nf4 with double quantization; LoRA as `--lora` says
    frozen      bf16 experts, transformers' grouped_mm; LoRA on attention alone
    peft        bf16 experts, transformers' grouped_mm; PEFT's LoRA as `--lora` says

Linear layers stay in bf16. `--liger-loss` and `--compile` (each decoder layer) are for every peer,
`--prepare` (`prepare_training`) and `--offload` (`offload_experts`) for ours. A model is made on
the device one module at a time, and an expert stack packed as soon as it is made.
"""

import argparse
import os
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import common
import peft
import torch
from common import Rows, allocated, peak, recompute, release, words
from shapes import meta_model, quantization, whole_config
from torch import nn
from transformers import PreTrainedModel

import moe_qlora
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings

PEERS, LORA = ("ours", "frozen", "peft"), ("experts", "attention")
DEVICE = "device"  # the memory of --prepare without a figure: all that the device has free
KINDS = {"keep": "layers kept", "part": "layers kept in part", "recompute": "layers recomputed"}


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = training_parser(__doc__, "model.csv")
    add = parser.add_argument
    add("--liger-loss", action="store_true", help="Liger's loss alone")
    add("--compile", action="store_true", help="each decoder layer")
    add("--offload", action="store_true", help="offload_experts; ours only")
    add("--attention", help="as attn_implementation; default: transformers' choice")
    add("--optimizer", choices=["adamw", "adamw_fused"], default="adamw")
    add("--peers", type=words(*PEERS), default=",".join(PEERS))
    options = parser.parse_args()
    options.seq = 64 if options.tiny else options.seq
    if options.prepare is not None:
        options.liger_loss, options.compile, options.checkpointing = True, True, False
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    if options.attention:
        config._attn_implementation = options.attention
    name = f"{config.model_type}-tiny" if options.tiny else options.model
    for peer in options.peers:
        layers = config.get_text_config().num_hidden_layers
        rows = Rows(options, name, _setting(peer, options, layers))
        torch.manual_seed(0)
        release(options.device, workspace=True)
        with rows.attempt(peer == "ours"):
            run(peer, options, config, rows)


def training_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with the options of a training, here and on many GPUs."""
    parser = common.parser_of(doc, out)
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="as `moe-qlora plan` takes it")
    add("--layers", type=int, help="default: all")
    add("--seq", type=int, default=4096)
    add("--micro-batch", type=int, default=1)
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    add("--rank", type=int, default=16, help="of LoRA")
    add("--lora", type=words(*LORA), default=",".join(LORA))
    prepare = "prepare_training, to bytes, 24GiB or what is free; peers: --liger-loss --compile"
    add("--prepare", nargs="?", const=DEVICE, metavar="MEMORY", help=prepare)
    add("--steps", type=int, default=12)
    add("--warmup", type=int, default=3, help="steps before those that count")
    return parser


def _setting(peer: str, options: argparse.Namespace, layers: int) -> str:
    prepared = options.prepare is not None and peer == "ours"
    asked = {
        "liger-loss": options.liger_loss,
        "offload": options.offload and peer == "ours", "compile": options.compile,
        "graphs": prepared, options.optimizer: options.optimizer != "adamw",
        "expandable-segments": "expandable_segments" in os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }  # fmt: skip
    kept = "fit" if prepared else "non-reentrant" if options.checkpointing else "none"
    lora = "attention" if peer == "frozen" else ",".join(options.lora)
    setting = (
        f"layers={layers} lora={lora} r={options.rank} "
        f"seq={options.seq} batch={options.micro_batch} checkpointing={kept} "
        f"{'nf4+double' if peer == 'ours' else 'bf16'} peer={peer} adapters=bf16"
    )
    memory = options.prepare if prepared and options.prepare != DEVICE else None
    more = {"with": ",".join(name for name, wanted in asked.items() if wanted), "memory": memory}
    more |= {"attention": options.attention}
    return setting + "".join(f" {name}={value}" for name, value in more.items() if value)


def run(peer: str, options: argparse.Namespace, config: Any, rows: Rows) -> None:
    """Build, pack, adapt and train one peer's model."""
    start, ours, device = time.perf_counter(), peer == "ours", options.device
    model, before, after = build(config, device, packed=ours)
    common.synchronize(device)
    rows.add("building time", "s", time.perf_counter() - start)
    if ours:
        rows.add("experts before", "bytes", before)
        rows.add("experts packed", "bytes", after)
        rows.add("packed weight", "bytes/weight", 2 * after / before)
    else:
        model.set_experts_implementation("grouped_mm")
    rows.add_bytes("peak while building", peak(device))
    release(device)
    rows.add_bytes("model", allocated(device))
    model = adapt(peer, model, options)
    if not (whole := ours and options.prepare is not None):  # prepare_training does it all
        if options.liger_loss:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger

            liger(model=model.get_base_model(), swiglu=False, rope=False, rms_norm=False)
        for layer in model.get_base_model().base_model.layers if options.compile else ():
            layer.compile()
    with ExitStack() as stack:
        fit = off = None
        if ours and options.offload:
            off = stack.enter_context(moe_qlora.offload_experts(model))
        if whole:
            fit = stack.enter_context(prepared(model, options)).fit
        if fit is not None:
            rows.add("planned peak", "bytes", fit.peak)
            rows.add("memory to fit", "bytes", fit.memory)
            count = Counter(layer.activations for layer in fit.layers)
            for kind, metric in KINDS.items():
                rows.add(metric, "layers", count[kind])
        train(model, options, rows)
        if off is not None:
            rows.add("experts in host memory", "bytes", off.host_nbytes)
            rows.add("copies to the device", "copies", off.copies)
        if fit is not None and peak(device):
            rows.add("planned peak, error", "%", 100 * (fit.peak / peak(device) - 1))


def build(config: Any, device: torch.device, *, packed: bool) -> tuple[Any, int, int]:
    """The model in bf16 on the device, with its own random initialization, experts packed or not.

    Memory is taken for one module at a time. Also returned: bytes of the experts before and after.
    """
    model, stacks, before, after = meta_model(config), Counter[tuple[str, str]](), 0, 0
    if packed:
        stacks.update((one.module_name, one.parameter_name) for one in moe_qlora.detect(model))
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in reversed(modules.items()):  # what a module holds comes before it
        owner = name
        while not isinstance(modules[owner], PreTrainedModel):
            owner = owner.rpartition(".")[0]
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():  # zeros: a class may leave out some in initializing
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.zero_()
        modules[owner]._init_weights(module)
        for parameter in [one for where, one in stacks if where == name]:
            weight = module.get_parameter(parameter).data
            codes = codec.pack(weight, CodecSettings.from_config(quantization()))
            before, after = before + weight.nbytes, after + codes.nbytes
            parametrize.attach(module, parameter, codes)
    model.tie_weights()
    if packed:
        moe_qlora.quantize_experts(model, quantization())  # takes on what is packed already
    return model, before, after


def adapt(peer: str, model: Any, options: argparse.Namespace) -> Any:
    """LoRA as the peer has it, under gradient checkpointing unless told otherwise."""
    if options.checkpointing:
        recompute(model)
    model.config.get_text_config().use_cache = False
    experts, get = [param.name for param in moe_qlora.detect(model)], peft.get_peft_model
    if peer == "ours":
        experts, get = moe_qlora.target_parameters(model), moe_qlora.get_peft_model
    wanted = ["attention"] if peer == "frozen" else options.lora
    config = lora_config(model, experts, wanted, options.rank)
    return get(model, config, autocast_adapter_dtype=False)


def lora_config(model: nn.Module, experts: list[str], wanted: list[str], rank: int) -> Any:
    """PEFT's config of LoRA on attention, on the named expert weights, or on both."""
    named = [(name.rpartition(".")[0].lower(), name, m) for name, m in model.named_modules()]
    linears = [name for owner, name, m in named if "attn" in owner and isinstance(m, nn.Linear)]
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=linears if "attention" in wanted else [],
        target_parameters=experts if "experts" in wanted else None,
        task_type="CAUSAL_LM",
    )


def prepared(model: Any, options: argparse.Namespace) -> Any:
    """What `prepare_training` returns, which is printed too."""
    memory = None if options.prepare == DEVICE else options.prepare
    memory = int(memory) if memory and memory.isdigit() else memory
    sizes: Any = {"batch_size": options.micro_batch, "seq_len": options.seq}
    done = moe_qlora.prepare_training(model, **sizes, memory=memory)
    print(done, flush=True)
    return done


def train(model: Any, options: argparse.Namespace, rows: Rows) -> None:
    """Train on random tokens; records time, tokens/s and memory."""
    model.train()
    device, fused = options.device, options.optimizer == "adamw_fused"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows.add("trained weights", "weights", sum(parameter.numel() for parameter in parameters))
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused or None)
    # Liger's loss in chunks as large as prepare_training's
    chunks = {"chunk_mem_const": 8} if options.prepare is not None else {}
    release(device)
    rows.add_bytes("model and adapters", allocated(device))
    vocabulary = model.config.get_text_config().vocab_size
    shape = (options.micro_batch, options.seq)
    seconds, losses = common.train(
        model, optimizer, lambda _: torch.randint(vocabulary, shape, device=device),
        options.warmup + options.steps, **chunks,
    )  # fmt: skip
    dead = [n for n, weight in model.named_parameters() if "lora_B" in n and not weight.any()]
    if dead:
        raise RuntimeError(f"{len(dead)} LoRA weights got no gradient, first {dead[0]}")
    seconds = seconds[options.warmup :]
    rows.add("step", "s", *seconds)
    rows.add("throughput", "tokens/s", *(shape[0] * shape[1] / step for step in seconds))
    rows.add("first loss", "nats", losses[0])
    rows.add("last loss", "nats", losses[-1])
    if device.type == "cuda":
        rows.add("peak in training", "bytes", peak(device))
        rows.add("reserved in training", "bytes", torch.cuda.max_memory_reserved(device))
        rows.add("resident between steps", "bytes", allocated(device))


if __name__ == "__main__":
    main()
