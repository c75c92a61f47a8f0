"""Kernels for packed experts: torch and Triton only, no transformers and no PEFT.

In go a `weights.PackedWeight`, rows of activations, top-k assignments and LoRA factors; out come a
layer's output and its gradients. Open `moe_layer.py` first. A fused layer calls, in this order:

    moe_layer.py            the whole layer, forward and backward
    routing.py              sorts top-k assignments by expert, cuts the rows into tiles
    factors.py              pads LoRA's factors for the kernels; their gradients
    row_kernels.py          kernels over sorted rows: products with a factor, sums to tokens
    gate_kernels.py         the gate between both projections, and its backward
    table.py                a matmul and the interface of its kernels; chooses and tries them
    quantized_mm.py         few rows: multiplies on the codes, any GPU
    quantized_mm_hopper.py  the same on Hopper; quantized_mm_rs.py, for more rows
    grouped_mm.py           many rows: codes to 16 bit, then torch's grouped matmul or our own
    workspace.py            the buffer that is dequantized into
    cards.py                device capabilities
    lang.py                 Triton, or names for it without; launches kernels, nothing on meta

A kernel is one of these files with a `KERNEL` record, and its row in `table.py`. `weights.py`
defines the packed weight, `limits.py` the numbers and size rules that decide between all of these.
"""
