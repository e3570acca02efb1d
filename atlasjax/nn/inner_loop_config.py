"""Config of the inner loop: feed-forward layers whose weights are trained on the text that the model reads."""

import dataclasses

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class InnerLoopConfig:
    """Test-time training end to end (TTT-E2E, arXiv 2512.23675), and the continuum memory system of HOPE (Nested Learning, NeurIPS
    2025, Eq. 30 and 31): the last layers have further SwiGLU networks, whose weights take a step of gradient descent on the loss of
    the next token after every so many tokens of each sequence. Training goes through these steps.

    With one period this is TTT-E2E. With several, each layer has a chain of such networks, one for each period, in their order.

    Attributes:
      layers: number of layers that have them, the last ones of the model, which needs one before them. None: a quarter, at least 1.
      periods: tokens between the steps of each network of a layer. All are multiples of the shortest, the chunk: its tokens are
        read with the same weights.
      learning_rate: of the steps, on the mean loss of the tokens since the last one.
      clip: largest norm of the gradient of all networks of one period. None: no limit.
      mlp_dim: hidden width of each network. None: the feed-forward network's.

    Raises:
      ValueError: a field is out of range, or periods are no multiples of the shortest.
    """

    layers: int | None = None
    periods: tuple[int, ...] = (1024,)
    learning_rate: float = 1.0
    clip: float | None = 1.0
    mlp_dim: int | None = None

    def __post_init__(self) -> None:
        check.integers(self, dict.fromkeys(("layers", "mlp_dim"), 1), ("layers", "mlp_dim"))
        check.number("InnerLoopConfig", "learning_rate", self.learning_rate, above=0)
        if self.clip is not None:
            check.number("InnerLoopConfig", "clip", self.clip, above=0)
        periods = self.periods
        if not isinstance(periods, tuple) or not periods or not all(check.is_integer(period, 1) for period in periods):
            raise ValueError(f"InnerLoopConfig: periods={periods!r} must be a tuple of integers ≥ 1, such as (1024,).")
        if any(period % self.chunk for period in periods):
            raise ValueError(f"InnerLoopConfig: periods={periods} must all be multiples of the shortest, {self.chunk}.")

    @property
    def chunk(self) -> int:
        """Tokens that are read with the same weights."""
        return min(self.periods)

    def layers_of(self, num_layers: int) -> int:
        """Number of layers with such networks, of a model with `num_layers`."""
        return max(1, num_layers // 4) if self.layers is None else self.layers

    def check_length(self, length: int, where: str) -> None:
        """Raises ValueError if sequences of `length` tokens end before the first step. The message starts with `where`."""
        if length <= self.chunk:
            raise ValueError(
                f"{where} is {length}; it must be above the shortest of model.inner_loop.periods, which is {self.chunk}, or no "
                "weights are ever trained on the text."
            )
