"""Configurations of Elastic Memory and of block attention without a memory."""

import dataclasses

from atlasjax import check
from atlasjax.mixers.elastic.hippo import DISCRETIZATIONS
from atlasjax.mixers.elastic.sampling import SAMPLINGS
from atlasjax.names import lookup


@dataclasses.dataclass(frozen=True)
class BlockAttentionConfig:
    """Attention within blocks, without a memory.

    Attributes:
      block_size: L ≥ 1 tokens per block. A token sees only its own block.

    Raises:
      ValueError: a field is out of range.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"block_size": 1})


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """Elastic Memory (arXiv 2602.11212): the history as Legendre coefficients, read at sampled positions.

    Attributes:
      order: N ≥ 1 coefficients per channel of keys and values.
      samples: L_mem ≥ 1 positions at which the history is read. None: as many as coefficients.
      block_size: L ≥ 1 tokens per block. A token sees its own block exactly and everything before it through the memory.
      sampling: a name in `sampling.SAMPLINGS`. It may differ from the one used in training.
      context: t ≥ 1, the history length that defines the sample positions. Other lengths are read at the same relative positions.
      alpha: ratio in (0, 1) of "exponential". None: the newest sample lies half a token before the end of `context` tokens.
      discretization: "zoh", which is exact; "forward", "backward" or "bilinear".
      legacy_hippo: number time as the published HiPPO code does.
      rotate_memory_queries: whether the memory is read with rotated queries, as printed in the paper, or with unrotated ones.

    Raises:
      ValueError: a field is out of range, a name is unknown, or alpha is given for a sampling other than "exponential".
    """

    order: int = 540
    samples: int | None = None
    block_size: int = 1024
    sampling: str = "exponential"
    context: int = 8192
    alpha: float | None = None
    discretization: str = "zoh"
    legacy_hippo: bool = False
    rotate_memory_queries: bool = True

    def __post_init__(self) -> None:
        check.integers(self, {"order": 1, "samples": 1, "block_size": 1, "context": 1}, ("samples",))
        lookup("sampling", self.sampling, SAMPLINGS)
        lookup("discretization", self.discretization, DISCRETIZATIONS)
        check.declared(self)
        check.number("ElasticConfig", "alpha", self.alpha, above=0, below=1, optional=True)
        if self.alpha is not None and self.sampling != "exponential":
            raise ValueError(f"ElasticConfig: alpha={self.alpha} clashes with sampling={self.sampling!r}.")
