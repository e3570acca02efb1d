"""The cross entropy of next tokens, without the logits of a whole sequence at once."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.products import wide_dtype


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

    With a chunk, the logits of that many tokens of each sequence exist at a time. If gradients are needed, they are computed then,
    so that no logit is computed twice. The result differs from that of all tokens at once only by the order of a sum.
    A chunk excludes forward-mode derivatives (jvp, jacfwd).

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

    def total(head: Callable[..., jax.Array], hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        logits = head(hidden).astype(jnp.float32)
        import optax  # here, so that a config needs none of it

        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        if z_loss:
            losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return jnp.sum(losses * weights)

    for name, array in {"hidden": hidden, "targets": targets, "weights": weights}.items():
        check.plain_array("cross_entropy_sum", name, array)
    weights = weights.astype(jnp.float32)  # an evaluation gives bools, and bfloat16 cannot count tokens
    time = targets.shape[1] // parts
    if chunk is None or chunk >= time:
        return total(head, hidden, targets, weights)
    chunks = -(-time // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[batch, parts · time, ...] → [chunks, batch (, parts), chunk, ...], filled up with tokens of weight 0."""
        rows = x.shape[:1] if parts == 1 else (x.shape[0], parts)
        x = x.reshape(*rows, time, *x.shape[2:])
        pad = ((0, chunks * chunk - time), *((0, 0),) * (x.ndim - len(rows) - 1))
        x = jnp.pad(x, (*((0, 0),) * len(rows), *pad))
        return jnp.moveaxis(x.reshape(*rows, chunks, chunk, *x.shape[len(rows) + 1 :]), len(rows), 0)

    chunked = split(hidden), split(targets), split(weights)
    # A custom derivative is one of arguments, so the parameters in `head` become arguments.
    pure, params = jax.closure_convert(head, chunked[0][0])
    return _sum_of_chunks(lambda params, *x: total(lambda hidden: pure(hidden, *params), *x), tuple(params), chunked)


_Params = tuple[jax.Array, ...]  # in the head
_Chunks = tuple[jax.Array, jax.Array, jax.Array]  # hidden, targets and weights of one chunk; of all with a leading axis
_Gradients = tuple[_Params, jax.Array, jax.Array]  # of the parameters, hidden and weights
_Loss = Callable[..., jax.Array]  # (parameters, hidden, targets, weights) of a chunk → its sum


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_chunks(loss: _Loss, params: _Params, chunks: _Chunks) -> jax.Array:
    def add(carry: jax.Array, chunk: _Chunks) -> tuple[jax.Array, None]:
        return carry + loss(params, *chunk), None

    return jax.lax.scan(add, jnp.zeros((), jnp.float32), chunks)[0]


def _sum_forward(loss: _Loss, params: _Params, chunks: _Chunks) -> tuple[jax.Array, _Gradients]:
    """The sum, and all gradients for a cotangent of 1."""

    def add(carry: tuple[jax.Array, _Params], chunk: _Chunks) -> tuple[tuple[jax.Array, _Params], Any]:
        value, (dparams, *dchunk) = jax.value_and_grad(loss, argnums=(0, 1, 3))(params, *chunk)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), carry, (value, dparams)), dchunk

    # Many chunks are summed, so at least in float32 also where the parameters are not.
    sums = tuple(jnp.zeros(x.shape, wide_dtype(x.dtype)) for x in params)
    (total, sums), (dhidden, dweights) = jax.lax.scan(add, (jnp.zeros((), jnp.float32), sums), chunks)
    # Gradients are kept in place of inputs: the loss is a sum, so a cotangent only scales them.
    return total, (tuple(x.astype(like.dtype) for x, like in zip(sums, params, strict=True)), dhidden, dweights)


def _sum_backward(
    loss: _Loss, gradients: _Gradients, d: jax.Array
) -> tuple[_Params, tuple[jax.Array, None, jax.Array]]:
    dparams, dhidden, dweights = jax.tree.map(lambda x: (x * d).astype(x.dtype), gradients)
    return dparams, (dhidden, None, dweights)


_sum_of_chunks.defvjp(_sum_forward, _sum_backward)
