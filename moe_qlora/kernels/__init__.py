"""What computes with packed experts: torch and Triton only, and nothing of transformers or PEFT.

In go a `weights.PackedWeight`, rows of activations, top-k assignments and LoRA factors; out come a
layer's output and its gradients. Open `moe_layer.py` first. A fused layer calls, in this order:

    moe_layer.py            the whole layer, forward and backward
    routing.py              sorts top-k assignments by expert, cuts the rows into tiles
    factors.py              pads LoRA's factors for the kernels
    row_kernels.py          kernels over sorted rows: gather, gate, sum to tokens, LoRA's gradients
    row_launches.py         how these are cut and launched
    expert_mm.py            x W for each expert's rows, by what follows
    quantized_mm.py         few rows: multiplies on the codes, any GPU
    quantized_mm_few.py     the same for the fewest, as in generation
    quantized_mm_hopper.py  the same on Hopper; quantized_mm_registers.py, for more rows
    register_weights.py     weights in registers, for the kernels of fewest and of more rows
    quantized_check.py      whether these work on a device, found out once
    dequantize.py           many rows: codes to 16 bit, for a grouped matmul
    grouped_mm.py           our own, for cards where torch's is slow
    workspace.py            the buffer that dequantize.py writes into
    autotune.py             the quickest cuts of both matmuls, measured on request
    cards.py                what a card can do, and who therefore multiplies
    launch.py               launches kernels with little of the host's time

One projection runs by `projection.py` (grouped matmul) or `reference.py` (any device, and what the
others are held against). `weights.py` has the packed weight, `limits.py` the numbers and size rules
that decide between all of these.
"""
