"""The cross entropy of next tokens, without the logits of a whole sequence at once."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """How the training loss is computed.

    Attributes:
      chunk: tokens of each sequence whose logits exist at a time. None: all.
      z_loss: see `cross_entropy_sum`. It does not count in an evaluation.
    """

    chunk: int | None = 512
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        inside = self.chunk is None or check.is_integer(self.chunk, 1)
        check.require(inside, "loss.chunk", self.chunk, "at least 1, or None for all tokens at once")
        inside = check.is_number(self.z_loss) and 0 <= self.z_loss < math.inf
        check.require(inside, "loss.z_loss", self.z_loss, "0 or more, and finite")


def cross_entropy_sum(
    head: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, weights: jax.Array, *,
    chunk: int | None = None, z_loss: float = 0.0, parts: int = 1,
) -> jax.Array:  # fmt: skip
    """Returns the weighted sum of the cross entropies of all tokens, in nats, a float32 scalar.

    With a chunk, the logits of that many tokens of each sequence exist at a time; the backward pass computes them again. The result
    differs from that of all tokens at once only by the order of a sum.

    Args:
      head: hidden [..., dim] → logits [..., vocabulary].
      hidden: [batch, time, dim].
      targets: int32 [batch, time].
      weights: [batch, time].
      chunk: tokens of each sequence. None: all.
      z_loss: adds this times the square of the log of the softmax's normalizer to every token's loss, which keeps it near 0 (PaLM,
        arXiv:2204.02311, §5: 1e-4).
      parts: number of devices over which the tokens of a sequence are divided, which divides time. Each has chunks of its own part,
        so that none needs another's tokens.
    """

    def total(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        logits = head(hidden).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        if z_loss:
            losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return jnp.sum(losses * weights.astype(jnp.float32))

    time = targets.shape[1] // parts
    if chunk is None or chunk >= time:
        return total(hidden, targets, weights)
    chunks = -(-time // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[batch, parts · time, ...] → [chunks, batch (, parts), chunk, ...], filled up with tokens of weight 0."""
        rows = x.shape[:1] if parts == 1 else (x.shape[0], parts)
        x = x.reshape(*rows, time, *x.shape[2:])
        pad = ((0, chunks * chunk - time), *((0, 0),) * (x.ndim - len(rows) - 1))
        x = jnp.pad(x, (*((0, 0),) * len(rows), *pad))
        return jnp.moveaxis(x.reshape(*rows, chunks, chunk, *x.shape[len(rows) + 1 :]), len(rows), 0)

    @jax.checkpoint
    def add(carry: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return carry + total(*part), None

    start = jnp.zeros((), jnp.float32)
    return jax.lax.scan(add, start, (split(hidden), split(targets), split(weights)))[0]
