"""Without a GPU, Triton kernels run in its interpreter, to be chosen before Triton's import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
