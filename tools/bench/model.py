"""Trains a whole model with random weights, ours and its peers one after the other; model.csv.

    python tools/bench/model.py                        qwen3-30b-a3b, one GPU with 80 GB or more
    python tools/bench/model.py --liger --graphs --optimizer adamw_fused --peers ours,frozen
    python tools/bench/model.py --prepare 28GiB --optimizer adamw_fused --peers ours
    python tools/bench/model.py --liger --compile --no-checkpointing --peers frozen
    python tools/bench/model.py --liger --generate 1,16 --peers ours
    python tools/bench/model.py --model glm4_moe --layers 12 --no-checkpointing
    python tools/bench/model.py --model path/to/config.json
    python tools/bench/model.py --tiny --device cpu    whether it runs at all

    ours        experts packed, nf4 with double quantization; LoRA as `--lora` says
    frozen      bf16 experts, transformers' grouped_mm; LoRA on attention alone
    peft        bf16 experts, transformers' grouped_mm; PEFT's LoRA as `--lora` says
    bnb         experts packed by bitsandbytes' parametrization; LoRA on attention alone
    axolotl     packed likewise, as `quantize_moe_experts: true` has it, on its scattermoe kernels;
                PEFT's LoRA as `--lora` says
    e4b         experts4bit-qlora's experts and LoRA, its fast path with dgrad and what that brings;
                PEFT's LoRA on attention
    mxfp4       ours, on random experts in MXFP4 as a checkpoint's are kept: `--peers ours,mxfp4`

Only experts are packed; Linear layers stay in bf16 for every peer. AdamW trains the adapters.
`--liger` (its norms, rotary embedding and loss, not its experts), `--liger-loss`, `--compile` (each
decoder layer), `--graphs` and `--graphs-keep` (`moe_qlora.graph_layers`) are the same for every
peer, as are `--attention` (transformers' own switch) and `--chunk-mem-const` (of Liger's loss).
`--fit` is `moe_qlora.fit_memory` for ours, `--prepare` `moe_qlora.prepare_training`; peers then
keep all activations. `--offload` is
`moe_qlora.offload_experts` for ours, and for e4b its own offload to pinned host memory. `--losses`
records the losses of the first steps: the same seed and tokens under every setting. `--generate`
measures decoding with a static cache in place of training; without `--graphs`, transformers
compiles it. A model is made on the device one module at a time, and an expert stack packed as soon
as it is made, so that models fit that do not in 16 bits; `--pack after` packs a model that was made
in 16 bits, as after a stock load. A peer's memory is given back before the next: `allocated before`
says what is left then.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import additions
import peers
import torch
from building import OURS, Packer, build, pack
from chats import KINDS, LOSSES, Batch
from common import RESULTS, Rows, allocated, environment, release, release_workspace, synchronize
from loop import OPTIMIZERS, train
from peers import UnavailableError
from shapes import name_of, whole_config
from torch import Tensor, nn

import moe_qlora

PEERS = ("ours", "frozen", "peft", "bnb", "axolotl", "e4b")
NEW_TOKENS = 128
"""Tokens that `--generate` makes of a prompt of 64."""


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
    name = f"{config.model_type}-tiny" if options.tiny else name_of(options.model)
    for peer in options.peers:
        setting = _setting(peer, options, config.get_text_config().num_hidden_layers)
        print(f"\n{name} {setting}", flush=True)
        rows = Rows(options.out, where, name, setting)
        torch.manual_seed(0)
        release(device)
        try:
            run(peer, options, config, device, rows)
        except UnavailableError as error:
            print(f"skipped: {error}")
        except Exception as error:
            if peer in OURS:
                raise
            rows.fail(error)
        release_workspace()
        release(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", help="a name in shapes.py, a model type, or a config"
    )
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 64 with --tiny")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--data", choices=list(KINDS), default="fixed", help="see chats.py")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--expert-rank", type=int, help="of LoRA on experts; default: --rank")
    parser.add_argument("--lora", default="experts,attention", help="experts, attention or both")
    additions.arguments(parser)
    parser.add_argument("--chunk-mem-const", type=int, help="of Liger's loss: larger chunks")
    parser.add_argument("--attention", help="as attn_implementation; default: transformers' choice")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--generate", default="", help="batch sizes, instead of training")
    parser.add_argument("--loss", choices=["stock", "liger"], default="stock")
    parser.add_argument(
        "--adapters", choices=["bf16", "fp32"], default="bf16", help="fp32 trains under autocast"
    )
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--pack", choices=["building", "after"], default="building")
    parser.add_argument("--losses", type=int, default=0, help="record those of the first N steps")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    parser.add_argument("--profile", type=Path, help="a CSV file of the kernels of one more step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "model.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    options = parser.parse_args()
    options.seq = options.seq or (64 if options.tiny else 4096)
    options.lora = sorted(set(options.lora.split(",")), reverse=True)
    options.peers = options.peers.split(",")
    if not set(options.lora) <= {"attention", "experts"}:
        parser.error(f"--lora {','.join(options.lora)}: expected experts, attention or both")
    unknown = set(options.peers) - {*PEERS, *OURS}
    if unknown:
        parser.error(
            f"--peers {', '.join(sorted(unknown))}: expected some of {', '.join(PEERS)}, mxfp4"
        )
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps: expected 1 or more")
    if options.losses > options.warmup + options.steps:
        parser.error(f"--losses {options.losses}: expected no more than --warmup and --steps")
    if options.loss == "liger" and options.data != "fixed":
        parser.error("--loss liger: only with --data fixed; for others --liger-loss")
    if options.chunk_mem_const and not (options.liger or options.liger_loss):
        parser.error("--chunk-mem-const: only with --liger or --liger-loss")
    additions.check(parser, options)
    return options


def _lora(peer: str, options: argparse.Namespace) -> list[str]:
    wanted: list[str] = options.lora if peer not in ("frozen", "bnb") else ["attention"]
    return wanted


def _setting(peer: str, options: argparse.Namespace, layers: int) -> str:
    fitted = options.fit is not None and peer in OURS
    added = additions.words(options, fits=peer in OURS, offloads=peer == "e4b")
    added += [options.optimizer] if options.optimizer != "adamw" else []
    again = "reentrant" if peer == "e4b" else "non-reentrant"  # e4b's fast path has its own
    kept = "fit" if fitted else again if options.checkpointing else "none"
    packed = {"frozen": "bf16", "peft": "bf16", "mxfp4": "mxfp4", "e4b": "nf4"}
    return (
        f"layers={layers} lora={','.join(_lora(peer, options))} r={options.rank} "
        f"seq={options.seq} batch={options.micro_batch} "
        f"checkpointing={kept} {packed.get(peer, 'nf4+double')}"
        f"{' liger' if options.loss == 'liger' else ''} peer={peer} adapters={options.adapters}"
        f"{' with=' + ','.join(added) if added else ''}"
        f"{f' memory={options.fit}' if fitted and options.fit != additions.DEVICE else ''}"
        f"{f' expert_rank={options.expert_rank}' if options.expert_rank else ''}"
        f"{f' chunk_mem_const={options.chunk_mem_const}' if options.chunk_mem_const else ''}"
        f"{f' attention={options.attention}' if options.attention else ''}"
        f"{f' data={options.data}' if options.data != 'fixed' else ''}"
        f"{' generate' if options.generate else ''}"
        f"{' pack=after' if options.pack == 'after' and peer == 'ours' else ''}"
    )


def run(
    peer: str, options: argparse.Namespace, config: Any, device: torch.device, rows: Rows
) -> None:
    """Run one peer, within what it changes outside of its model.

    Raises:
        UnavailableError: The peer is not here, or has nothing of its own under these options.
    """
    peers.versions(peer)
    with peers.axolotl(device) if peer == "axolotl" else nullcontext():
        run_alone(peer, options, config, device, rows)


def run_alone(
    peer: str, options: argparse.Namespace, config: Any, device: torch.device, rows: Rows
) -> None:
    """Build, pack, adapt and train one peer's model.

    Raises:
        UnavailableError: The peer has nothing of its own under these options.
    """
    if peer == "peft" and "experts" not in options.lora:
        raise UnavailableError("without LoRA on experts this is the frozen peer")
    loss_of = _loss(options, device)
    rows.add("allocated before", "bytes", allocated(device))
    start = time.perf_counter()
    early = peer in ("bnb", "axolotl", "e4b", "mxfp4")
    packer = None
    if early or (peer == "ours" and options.pack == "building"):
        rank = options.expert_rank or options.rank
        packer = Packer(peer, config, rank=rank, offload=options.offload)
    model = build(config, device, None if packer is None else packer.visit)
    synchronize(device)
    rows.add("building time", "s", time.perf_counter() - start)
    if packer is not None:
        packer.put(model)
        rows.add("experts before", "bytes", packer.before)
        rows.add("experts packed", "bytes", packer.after)
        rows.add("packed weight", "bytes/weight", 2 * packer.after / packer.before)
        rows.add("packing time", "s", packer.seconds)
        if packer.offloaded:
            rows.add("experts in host memory", "bytes", packer.host)
    if device.type == "cuda":
        rows.add("peak while building", "bytes", torch.cuda.max_memory_allocated(device))
    if peer in OURS:
        pack(model, device, rows if packer is None else None)
    elif peer != "e4b":
        model.set_experts_implementation("scattermoe" if peer == "axolotl" else "grouped_mm")
    release(device)
    if device.type == "cuda":
        rows.add("model", "bytes", allocated(device))
    peft_model = adapt(peer, model, options)
    additions.add(peft_model, options, fits=peer in OURS)
    with peers.e4b_training(peft_model) if peer == "e4b" else nullcontext():
        measure(peer, peft_model, options, device, rows, loss_of)


def measure(
    peer: str,
    peft_model: Any,
    options: argparse.Namespace,
    device: torch.device,
    rows: Rows,
    loss_of: Callable[[Any, Batch], Tensor],
) -> None:
    """Train one peer's adapted model, or let it generate."""
    if options.generate:
        for batch in map(int, options.generate.split(",")):
            with additions.prepared(peft_model, options, fits=False):
                generate(peft_model, batch, device, rows)
        return
    eager = not (options.compile or options.graphs or options.fit is not None)
    if eager and not options.checkpointing and device.type == "cuda":
        record_kept(peft_model, options, device, rows)
    with additions.prepared(peft_model, options, fits=peer in OURS, rows=rows):
        train(peft_model, loss_of, options, device, rows)


def generate(peft_model: Any, batch: int, device: torch.device, rows: Rows) -> None:
    """Measure greedy decoding with a static cache, the prompt and the first token included."""
    model = peft_model.get_base_model().eval()
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    model.config.get_text_config().use_cache = True
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, 64), device=device)
    seconds: list[float] = []
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        peft_model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, use_cache=True,
            cache_implementation="static",
        )  # fmt: skip
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    rows.add(f"generate, batch {batch}, first call", "s", seconds[0])
    tokens = (batch * NEW_TOKENS / each for each in seconds[1:])
    rows.add(f"generate, batch {batch}", "tokens/s", *tokens)
    if device.type == "cuda":
        rows.add("peak in generating", "bytes", torch.cuda.max_memory_allocated(device))


def attention_layers(model: nn.Module) -> list[str]:
    """Full names of the Linear layers of attention modules.

    Raises:
        ValueError: There are none.
    """
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "attn" in name.rpartition(".")[0].lower()
    ]
    if not names:
        raise ValueError(f"{type(model).__name__}: no Linear layer within a module named *attn*")
    return names


def adapt(peer: str, model: Any, options: argparse.Namespace) -> Any:
    """LoRA as the peer has it, under gradient checkpointing unless told otherwise."""
    import peft

    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.get_text_config().use_cache = False
    wanted = _lora(peer, options)
    experts = [param.name for param in moe_qlora.detect(model)]
    if peer in OURS:
        experts = moe_qlora.target_parameters(model)
    config = lora_config(
        model, experts, [w for w in wanted if peer != "e4b" or w != "experts"], options
    )
    get = moe_qlora.get_peft_model if peer in OURS else peft.get_peft_model
    adapted = get(model, config, autocast_adapter_dtype=options.adapters == "fp32")
    for name, parameter in adapted.named_parameters():
        if peer == "e4b" and "_lora_" in name:  # PEFT has frozen what is not its own
            parameter.requires_grad_(True)
    return adapted


def lora_config(
    model: nn.Module, experts: list[str], wanted: list[str], options: argparse.Namespace
) -> Any:
    """Return PEFT's config of LoRA on attention, on the named expert weights, or on both."""
    import peft

    ranks = {}
    if options.expert_rank and "experts" in wanted:
        ranks = {rf"(.*\.)?{re.escape(name)}": options.expert_rank for name in experts}
    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        rank_pattern=ranks,
        target_modules=attention_layers(model) if "attention" in wanted else [],
        target_parameters=experts if "experts" in wanted else None,
        task_type="CAUSAL_LM",
    )


def _loss(options: argparse.Namespace, device: torch.device) -> Callable[[Any, Batch], Tensor]:
    if options.data in LOSSES:
        return LOSSES[options.data]
    if options.loss == "stock":
        chunks = {"chunk_mem_const": options.chunk_mem_const} if options.chunk_mem_const else {}
        return lambda model, batch: model(**batch, **chunks).loss
    if device.type != "cuda":
        raise UnavailableError("Liger's loss needs a GPU")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda model, batch: chunked_loss(fused, model, batch["input_ids"])


def chunked_loss(fused: Callable[..., Tensor], model: Any, ids: Tensor) -> Tensor:
    """The stock loss, by a function that takes the head's weight and hidden states.

    Args:
        fused: Of weight `(V, H)`, hidden states `(T, H)`, labels `(T,)` with -100 for none, bias.
        model: A PeftModel of a causal model.
        ids: `(B, S)`, labels as well.
    """
    inner = model.get_base_model()
    hidden = inner.base_model(input_ids=ids).last_hidden_state
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    head = inner.get_output_embeddings()
    return fused(head.weight, hidden.flatten(0, 1), labels.flatten(), head.bias)


def record_kept(model: Any, options: argparse.Namespace, device: torch.device, rows: Rows) -> None:
    """What one decoder layer keeps between forward and backward."""
    kept: list[int] = []
    starts: list[int] = []
    handles = []
    for layer in model.get_base_model().base_model.layers:
        enter = layer.register_forward_pre_hook(lambda *_: starts.append(allocated(device)))
        leave = layer.register_forward_hook(lambda *_: kept.append(allocated(device) - starts[-1]))
        handles += [enter, leave]
    ids = torch.zeros(options.micro_batch, options.seq, dtype=torch.long, device=device)
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    rows.add("kept by a layer", "bytes", *kept)


if __name__ == "__main__":
    main()
