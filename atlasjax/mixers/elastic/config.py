"""Sizes of Elastic Memory, and of attention within blocks alone."""

import dataclasses

from atlasjax import check
from atlasjax.mixers.elastic.hippo import DISCRETIZATIONS
from atlasjax.mixers.elastic.sampling import SAMPLINGS
from atlasjax.names import lookup


@dataclasses.dataclass(frozen=True)
class BlockAttentionConfig:
    """Attention within blocks, without a memory.

    Attributes:
      block_size: L ≥ 1 tokens of a block, which sees itself alone.

    Raises:
      ValueError: a field out of its range.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        check.integers(self, {"block_size": 1})


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """Elastic Memory (arXiv 2602.11212): the past as Legendre coefficients, read at sampled positions.

    Attributes:
      order: N ≥ 1 coefficients of each channel of keys and values.
      samples: L_mem ≥ 1 positions at which the past is read; None: as many as coefficients.
      block_size: L ≥ 1 tokens of a block, which sees itself exactly and what was before it through memory.
      sampling: a name of `sampling.SAMPLINGS`; may be another one than in training.
      context: t ≥ 1 tokens for which the sampling is laid out; a shorter or longer past is read at the same fractions of it.
      alpha: ratio in (0, 1) of "exponential"; None: the newest sample lies half a token before the end of `context` tokens.
      discretization: "zoh", which is exact; "forward", "backward" or "bilinear".
      legacy_hippo: number time as the published HiPPO code does.
      rotate_memory_queries: whether queries ask memory rotated, as printed in the paper, or as they are.

    Raises:
      ValueError: a field out of its range, an unknown name, or an alpha for another sampling than "exponential".
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
        for name in ("legacy_hippo", "rotate_memory_queries"):
            check.boolean("ElasticConfig", name, getattr(self, name))
        check.number("ElasticConfig", "alpha", self.alpha, above=0, below=1, optional=True)
        if self.alpha is not None and self.sampling != "exponential":
            raise ValueError(f"ElasticConfig: alpha={self.alpha} clashes with sampling={self.sampling!r}.")
