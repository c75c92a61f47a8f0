"""Bandwidth of decoding a stack, against a device copy and bitsandbytes; appends to decode.csv.

python tools/bench/decode.py                     Qwen3-30B-A3B's gate_up: 402.7 M weights
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from bitsandbytes import functional
from common import RESULTS, Rows, environment, event_times

from moe_qlora.packing import codec
from moe_qlora.packing.decoders import to_quant_state
from moe_qlora.packing.settings import CodecSettings


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="128,1536,2048", help="E,rows,columns")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    options = parser.parse_args()
    from moe_qlora.kernels import grouped_mm

    device = torch.device("cuda", 0)
    where = environment(device, options.commit)
    shape = tuple(int(size) for size in options.shape.split(","))
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(weight)
    copied = event_times(lambda: other.copy_(weight), options.repeat)
    rows = Rows(options.out, where, "copy", f"shape={options.shape} bf16")
    rows.add("bandwidth", "TB/s", *(2 * weight.nbytes / ms / 1e9 for ms in copied))
    for kind, double in (("nf4", True), ("nf4", False), ("fp4", True), ("int8", False)):
        storage = torch.int8 if kind == "int8" else torch.uint8
        stack = codec.pack(weight, CodecSettings(kind, double, storage))
        setting = f"shape={options.shape} {kind}{'+double' if double else ''} bf16"
        moved = stack.nbytes + other.nbytes
        ours = event_times(partial(grouped_mm.decode, stack, other), options.repeat)
        rows = Rows(options.out, where, "decode", setting)
        rows.add("bandwidth", "TB/s", *(moved / ms / 1e9 for ms in ours))
        whole = codec.unpack(stack)
        if not torch.equal(other, whole):
            raise RuntimeError(f"{setting}: not what bitsandbytes decodes to")
        unpack = partial(codec.unpack, stack)
        portable = event_times(unpack, options.repeat)
        rows = Rows(options.out, where, "codec", setting)
        rows.add("bandwidth", "TB/s", *(moved / ms / 1e9 for ms in portable))
        if kind == "int8":
            continue
        whole_stack = partial(functional.dequantize_4bit, stack.codes, to_quant_state(stack))
        theirs = event_times(whole_stack, options.repeat)
        rows = Rows(options.out, where, "bitsandbytes", setting)
        rows.add("bandwidth", "TB/s", *(moved / ms / 1e9 for ms in theirs))


if __name__ == "__main__":
    main()
