"""Kernel memories (A §4): DeepTransformer, SWDT and DOT. The functions of `atlasjax.memory` for a `KernelRule`."""

from atlasjax.memory.kernelized.api import IMPLEMENTATIONS, read, reference, scan, step
from atlasjax.memory.kernelized.rule import KernelRule
from atlasjax.memory.kernelized.state import KernelParams, KernelState, init_params, init_state

__all__ = [
    "IMPLEMENTATIONS",
    "KernelParams",
    "KernelRule",
    "KernelState",
    "init_params",
    "init_state",
    "read",
    "reference",
    "scan",
    "step",
]
