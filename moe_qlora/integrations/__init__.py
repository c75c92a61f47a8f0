"""Packed experts inside other training programs ("hosts"); importing this imports no host."""

from .host import ExpertsHost
from .settings import ExpertsSettings

__all__ = ["ExpertsHost", "ExpertsSettings"]
