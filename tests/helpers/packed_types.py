"""The 4-bit types, with and without double quantization, in each storage and weight dtype."""

import itertools

import torch

MATRIX = list(
    itertools.product(
        ["nf4", "fp4"],
        [False, True],
        [torch.uint8, torch.bfloat16, torch.float32],
        [torch.float32, torch.bfloat16, torch.float16],
    )
)
