"""The command line `moe-qlora`."""

from __future__ import annotations
