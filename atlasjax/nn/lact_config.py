"""Config of the mixer "lact"."""

import dataclasses
from typing import Literal

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class LaCTConfig:
    """The memory of LaCT (mixer "lact", arXiv 2505.23884), as in its published language models.

    Attributes:
      heads: number of heads of the memory, which share out the channels of the attention's heads. Must divide them.
      chunk_size: tokens per write. It is also the attention's window if `attention.window` is None: what a chunk's tokens cannot
        read in the memory, they see there.
      expansion: hidden width of the memory / channels of one of its heads.
      momentum: whether a write takes a part of the last chunk's.
      schedule: Newton–Schulz coefficients for the writes, a name in `pallas_kernels.newton_schulz.SCHEDULES`. None: no
        orthogonalization.
      rank: the initial memory's two inner matrices are 0.5 I plus a product of this rank. None: they are matrices as they are.

    Raises:
      ValueError: a field is out of range.
    """

    heads: int = 4
    chunk_size: int = 2048
    expansion: int = 1
    momentum: bool = True
    schedule: Literal["lact", "standard", "polar_express"] | None = "lact"
    rank: int | None = 32

    def __post_init__(self) -> None:
        check.integers(self, dict.fromkeys(("heads", "chunk_size", "expansion", "rank"), 1), ("rank",))
        check.declared(self)
