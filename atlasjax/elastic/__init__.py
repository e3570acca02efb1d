"""Elastic Memory (arXiv 2602.11212): a history compressed to Legendre coefficients, and attention that reads it.

`hippo` has the matrices and the functions compress and reconstruct, `banks` the matrices of all blocks of a context, `sampling` the
positions at which memory is read, and `attention` the layer: all pure functions, usable alone.
"""

from atlasjax.elastic import attention, banks, hippo, sampling
from atlasjax.elastic.banks import Bank

__all__ = ["Bank", "attention", "banks", "hippo", "sampling"]
