"""Softmax memories (A §4): DeepTransformer, SWDT and DOT. The functions of `atlasjax.memory` for a `SoftmaxRule`."""

from atlasjax.memory.softmax.api import IMPLEMENTATIONS, read, reference, scan, step
from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState, init_params, init_state

__all__ = [
    "IMPLEMENTATIONS",
    "SoftmaxParams",
    "SoftmaxRule",
    "SoftmaxState",
    "init_params",
    "init_state",
    "read",
    "reference",
    "scan",
    "step",
]
