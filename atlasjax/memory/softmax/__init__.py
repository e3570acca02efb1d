"""Memories on softmax attention's infinite features (A §4): DeepTransformer, SWDT, DOT. The rule is `SoftmaxRule`."""

from atlasjax.memory.softmax.rule import SoftmaxRule
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState

__all__ = ["SoftmaxParams", "SoftmaxRule", "SoftmaxState"]
