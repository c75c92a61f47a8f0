"""What `model.py` and `losses.py` add to a model for speed, in the order that it must have.

    Liger, torch.compile of each layer    `add`
    offload_experts (--offload), join_lora (--merge-lora), graph_layers, then fit_memory
                                          `prepared`: what compiled layers keep is measured

`--prepare` is `prepare_training`, which does all of it for ours; peers then have the same as far as
it is not ours alone.

With graphs, `graph_layers` compiles the layers itself, so that they are recorded as compiled. The
compiler's own norms and rotary embedding are quicker than Liger's: `--liger-loss` beside it.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from chats import LOSSES, sequences
from common import Rows

import moe_qlora

ALLOCATOR = "PYTORCH_ALLOC_CONF"
DEVICE = "device"
"""The memory of `--fit` without a figure: all that the device has free."""

ALL = 0
"""`--offload` without a number."""

KINDS = {"keep": "layers kept", "part": "layers kept in part", "recompute": "layers recomputed"}
"""The metric that counts the layers of each choice of `fit_memory`."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line for all of this."""
    parser.add_argument("--liger", action="store_true", help="norms, rotary embedding and loss")
    parser.add_argument("--liger-loss", action="store_true", help="Liger's loss alone")
    parser.add_argument(
        "--merge-lora", action="store_true", help="LoRA on one input as one product; ours only"
    )
    parser.add_argument(
        "--offload",
        nargs="?",
        type=int,
        const=ALL,
        metavar="LAYERS",
        help="packed experts in host memory, of all layers or the last so many; ours and e4b",
    )
    parser.add_argument(
        "--link", type=float, metavar="GB/S", help="copy experts no faster than this; ours only"
    )
    parser.add_argument("--compile", action="store_true", help="each decoder layer")
    parser.add_argument("--graphs", action="store_true", help="decoder layers as CUDA graphs")
    parser.add_argument(
        "--graphs-keep", action="store_true", help="--graphs that compute nothing again"
    )
    parser.add_argument(
        "--prepare",
        nargs="?",
        const=DEVICE,
        metavar="MEMORY",
        help="prepare_training; --liger-loss --chunk-mem-const 8 --compile --merge-lora --graphs "
        "--fit MEMORY for what a peer takes of it, and for what a row says",
    )
    parser.add_argument(
        "--fit",
        nargs="?",
        const=DEVICE,
        metavar="MEMORY",
        help="fit_memory, to bytes or 24GiB; default: what the device has free. Peers keep all",
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Settle what the options say together; `--fit` and `--graphs-keep` end checkpointing."""
    if options.prepare is not None:
        options.liger_loss = options.compile = options.merge_lora = options.graphs = True
        options.fit, options.chunk_mem_const = options.prepare, 8
    if options.fit is not None and options.graphs_keep:
        parser.error("--fit and --graphs-keep: expected one of them; graphs keep what is fitted")
    if options.fit is not None and options.generate:
        parser.error("--fit and --generate: expected one of them; decoding keeps no activations")
    options.graphs = options.graphs or options.graphs_keep
    if options.fit is not None or options.graphs_keep:
        options.checkpointing = False


def words(options: argparse.Namespace, *, fits: bool, offloads: bool = False) -> list[str]:
    """What a row's `with=` says of the additions.

    Args:
        options: The command line's.
        fits: Whether this peer takes what is ours alone: `fit_memory`, `join_lora`, a slow link.
        offloads: Whether it takes `--offload`; ours do.
    """
    keeps = options.graphs_keep or (options.fit is not None and not fits)
    graphs = {"graphs": options.graphs and not keeps, "graphs-keep": options.graphs and keeps}
    liger = {"liger": options.liger, "liger-loss": options.liger_loss}
    ours = {"merge-lora": options.merge_lora and fits}
    if options.offload is not None and (fits or offloads):
        ours["offload" if options.offload == ALL else f"offload-{options.offload}"] = True
    if options.link:
        ours[f"link-{options.link:g}"] = fits
    asked = {**liger, **ours, "compile": options.compile, **graphs}
    asked["expandable-segments"] = "expandable_segments:True" in os.environ.get(ALLOCATOR, "")
    return [name for name, wanted in asked.items() if wanted]


def add(peft_model: Any, options: argparse.Namespace, *, fits: bool) -> None:
    """Switch on Liger, and torch.compile unless graphs do, where they are asked for.

    With `--prepare`, `prepared` does it for those that take what is ours alone.
    """
    if fits and options.prepare is not None:
        return
    model = peft_model.get_base_model()
    if options.liger or options.liger_loss:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        others = {} if options.liger else {"rope": False, "rms_norm": False}
        _apply_liger_kernel_to_instance(model=model, swiglu=False, **others)
    if options.compile and not options.graphs:
        for layer in model.base_model.layers:
            layer.compile()


@contextmanager
def prepared(
    peft_model: Any, options: argparse.Namespace, *, fits: bool, rows: Rows | None = None
) -> Iterator[Any]:
    """Fit the model's activations to memory and record its layers, as far as it is asked for.

    Args:
        peft_model: After `add`; on the device.
        options: The command line's.
        fits: Whether this peer takes `fit_memory` and `join_lora`; the others' graphs keep
            everything instead.
        rows: Records what was chosen, and afterwards how far its peak was from the one measured.

    Yields:
        The graphs, or None.
    """
    library: Any = moe_qlora
    with ExitStack() as stack:
        graphs, fit, off = None, None, None
        if options.offload is not None and fits:
            off = stack.enter_context(
                library.offload_experts(peft_model, layers=options.offload or None)
            )
            print(off, flush=True)
            if options.link:
                stack.enter_context(slow_link(options.link))
        if options.prepare is not None and fits:
            made = stack.enter_context(library.prepare_training(peft_model, **_sizes(options)))
            print(made, flush=True)
            graphs, fit = made.graphs, made.fit
            if rows is not None:
                _record_choice(fit, rows)
        elif options.merge_lora and fits:
            from moe_qlora.speed.joined_lora import join_lora

            stack.enter_context(join_lora(peft_model))
        if options.graphs and graphs is None:
            how = {"compiled": True} if options.compile else {}
            if "graphs-keep" in words(options, fits=fits):
                how["keep"] = True
            graphs = stack.enter_context(library.graph_layers(peft_model, **how))
        if options.fit is not None and fits and fit is None:
            fit = stack.enter_context(library.fit_memory(peft_model, **_sizes(options)))
            print(fit, flush=True)
            if rows is not None:
                _record_choice(fit, rows)
        yield graphs
        if off is not None and rows is not None:
            rows.add("experts in host memory", "bytes", off.host_nbytes)
            rows.add("copies to the device", "copies", off.copies)
        if graphs is not None and rows is not None:
            rows.add("recorded calls", "calls", graphs.recorded)
        device = next(peft_model.parameters()).device
        if fit is not None and rows is not None and device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(device)
            rows.add("planned peak, error", "%", 100 * (fit.peak / measured - 1))


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    memory: Any = None if options.fit == DEVICE else options.fit
    memory = int(memory) if memory and memory.isdigit() else memory
    sizes = {"batch_size": sequences(options), "seq_len": options.seq, "memory": memory}
    loss = {"loss": LOSSES[options.data]} if options.data in LOSSES else {}
    return sizes | loss


@contextmanager
def slow_link(gigabytes: float) -> Iterator[None]:
    """Let copies of offloaded experts take as long as over a link of so many GB (10^9) a second.

    The copy stream sleeps for what a copy was too quick; the clock is that of a busy GPU.
    """
    from moe_qlora.speed.hosted import pace
    from moe_qlora.speed.slots import CudaCopier

    copy, cycles = CudaCopier.copy, 100_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    clock = cycles / (start.elapsed_time(end) * 1e-3)
    fast = pace(torch.device("cuda", torch.cuda.current_device())).link  # Bytes a second
    missing = max(0.0, 1e-9 / gigabytes - 1 / fast) * clock  # Cycles a byte

    def slowly(self: Any, to: Any, source: Any, after: Any) -> Any:
        copy(self, to, source, after)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(missing * source.nbytes))
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    with mock.patch.object(CudaCopier, "copy", slowly):
        yield


def _record_choice(fit: Any, rows: Rows) -> None:
    rows.add("planned peak", "bytes", fit.peak)
    rows.add("memory to fit", "bytes", fit.memory)
    count = Counter(layer.activations for layer in fit.layers)
    for kind, metric in KINDS.items():
        rows.add(metric, "layers", count[kind])
