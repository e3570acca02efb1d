"""Residuals: the values of a chunk that a forward kernel keeps for the backward kernel, beside the memory before the chunk."""

import dataclasses
from typing import Literal, Self, get_args

Residuals = Literal["recompute", "inverse", "all"]
RESIDUALS: tuple[Residuals, ...] = get_args(Residuals)
_MOST = 2.5  # bytes for a backward pass, as a multiple of those of the memory before each chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepingChunk:
    """A chunk function whose forward kernel can keep some of its values (`chunk_scan`).

    Attributes:
      residuals: which.
      keeps: whether they are further outputs.
      backward: whether it is the form for the backward kernel, where they are further inputs and not computed again.
    """

    residuals: Residuals = "recompute"
    keeps: bool = False
    backward: bool = False

    @property
    def keeps_something(self) -> bool:
        """Whether `residuals` are anything."""
        return self.residuals != "recompute"

    @property
    def keeping(self) -> Self:
        """The same function for a forward kernel before a backward one."""
        return dataclasses.replace(self, keeps=self.keeps_something)

    @property
    def differentiated(self) -> Self:
        """The same function for the backward kernel."""
        return dataclasses.replace(self, backward=True)


def check_residuals(where: str, residuals: Residuals | None) -> None:
    """Raises ValueError unless `residuals` is one of `RESIDUALS` or None."""
    if residuals not in (None, *RESIDUALS):
        raise ValueError(f"{where}: residuals={residuals!r}, must be one of {RESIDUALS} or None.")


def most_residuals(state: int, of_inverse: int, of_all: int) -> Residuals:
    """The most that takes at most 2.5 times the bytes of `state`, with it.

    Args:
      state: bytes of the memory before a chunk, which are kept in any case.
      of_inverse, of_all: further bytes of "inverse" and of "all".
    """
    if state + of_all <= _MOST * state:
        return "all"
    return "inverse" if state + of_inverse <= _MOST * state else "recompute"
