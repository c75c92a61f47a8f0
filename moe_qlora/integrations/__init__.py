"""Packed experts inside other training programs ("hosts"): one file for each, on one small class.

In goes the `moe_qlora:` block of a host's file; out comes a model with packed experts and LoRA on
them. Open host.py first: its docstring is the order of calls that every host follows.

    host.py            ExpertsHost: one method for each step of a loader
    axolotl.py         axolotl's plugin
    trl.py             TRL's RL with vLLM, which gets adapters; its trainers need nothing else
    prepare.py         `prepare_training`: all that makes a step quicker, in the right order
    liger.py           Liger's kernels on one model, and off it again

The block itself is `ExpertsSettings`, of settings.py. What a user of each host writes
is in docs/trainers.md and docs/axolotl.md. Importing this package imports no host.
"""

from .host import ExpertsHost
from .settings import ExpertsSettings

__all__ = ["ExpertsHost", "ExpertsSettings"]
