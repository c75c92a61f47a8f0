"""Packed experts inside other training programs ("hosts"); importing this imports no host.

host.py       ExpertsHost: one method for each step of a loader
settings.py   ExpertsSettings: the `moe_qlora:` block of a host's file
axolotl.py    axolotl's plugin
trl.py        TRL's RL with vLLM, which gets adapters; its trainers need nothing else
"""

from .host import ExpertsHost
from .settings import ExpertsSettings

__all__ = ["ExpertsHost", "ExpertsSettings"]
