"""A block of tokens of one head, and the functions that write it: `dual`, `formed`, `mapped` and `sequential` have them."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from atlasjax.memory.axes.optimizers import OptimizerState
from atlasjax.memory.blocks import BlockGates, Factors, Read
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.step_sizes import Origin
from atlasjax.memory.gates import Weights

Written = tuple[Weights, OptimizerState, jax.Array]
"""(M, S, y) after a block."""


class Block(NamedTuple):
    """A block before it is written.

    Attributes:
      memory, momentum: M and S before its first token.
      factors: name → the gradients of its tokens and of the window before it.
      gates: those of its tokens.
      origin: the reference point of bounded steps. None: the gates have the step sizes.
      read: reads its queries.
      dtype: of the inputs of products.
    """

    memory: Weights
    momentum: OptimizerState
    factors: dict[str, Factors]
    gates: BlockGates
    origin: Origin | None
    read: Read
    dtype: jnp.dtype


class BlockFunction(Protocol):
    """Writes and reads a block of a rule that it is made for (`chunk.block_function`)."""

    def __call__(self, rule: MemorySpec, block: Block, /) -> Written: ...
