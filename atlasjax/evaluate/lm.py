"""Language-model quality on held-out text: loss, perplexity and bits per byte, in parallel and streamed."""

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from atlasjax import check
from atlasjax.generate.context import check_tokens
from atlasjax.nn import LanguageModel


@dataclasses.dataclass(frozen=True)
class LanguageModelResult:
    """Quality over a text.

    Attributes:
      nats: total cross entropy of all predicted tokens.
      tokens: number of predicted tokens.
      num_bytes: number of bytes of text that these tokens encode.
    """

    nats: float
    tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Mean cross entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), per token."""
        return math.exp(min(self.loss, 700.0))  # an untrained model must not overflow a float

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy in bits per byte of text, which is comparable across tokenizers."""
        return self.nats / (math.log(2) * self.num_bytes)

    def as_dict(self) -> dict[str, float]:
        """loss, perplexity, bits_per_byte and tokens, for a table or a log."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }


def evaluate(
    eval_step: Callable[[PyTree, dict[str, jax.Array]], tuple[jax.Array, jax.Array, jax.Array]],
    params: PyTree,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    max_batches: int | None = None,
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]] = jax.device_put,
) -> LanguageModelResult:
    """Evaluates a model over batches of held-out text. Deterministic: batches are summed in order, in float64 on the host.

    Args:
      eval_step: (params, batch) → (nats, tokens, bytes), as made by `train.step.eval_sums`.
      params: the model's parameters.
      batches: host batches (inputs, targets int32 [batch, time], weights float32 [batch, time], …).
      max_batches: maximum number of batches. None means all.
      put: places a host batch on the devices.

    Raises:
      ValueError: there is no token to predict.
    """
    sums: list[tuple[jax.Array, jax.Array, jax.Array]] = []
    for batch in itertools.islice(batches, max_batches):
        check.plain_array("evaluate", "batch", batch)  # `put` ignores a mask
        placed = put(batch)  # while the devices compute the batch before
        # One program at a time: XLA's CPU devices share a few threads, and many programs that reduce over devices, waiting in
        # line without depending on each other, stop for ever.
        jax.block_until_ready(sums[-1:])
        sums.append(eval_step(params, placed))
    nats, tokens, num_bytes = (sum(float(part[i]) for part in sums) for i in range(3))
    if not tokens or not num_bytes:
        raise ValueError("the held-out text has no token to predict: give it more text, or a shorter sequence_length.")
    return LanguageModelResult(nats, int(tokens), int(num_bytes))


def evaluate_stream(
    model: LanguageModel,
    tokens: np.ndarray,
    bytes_per_token: np.ndarray,
    *,
    piece: int = 512,
    sizes: np.ndarray | None = None,
) -> tuple[LanguageModelResult, np.ndarray]:
    """Evaluates one long text as a stream through the cache. If the cache is bounded, memory does not grow with the text.

    The numbers equal those of one parallel call over the whole text, up to rounding.

    Args:
      model: a `LanguageModel`.
      tokens: int32 [time], or [streams, time] for several texts in parallel.
      bytes_per_token: int [vocabulary], from the tokenizer.
      piece: number of tokens read at a time.
      sizes: the bytes of text that each token represents, integers like `tokens`. None: those of `bytes_per_token`.

    Returns:
      The result over all predicted tokens (every token but the first), and each token's cross entropy in nats,
      float32 [streams, time - 1].

    Raises:
      TypeError: an array is not of integers, masked, or of another byte order than this machine's.
      ValueError: there are fewer than two tokens or more than a model with learned positions can read, one is not in the
        vocabulary, `piece` is not positive, or `sizes` has another shape than `tokens`.
    """
    for name, array in {"tokens": tokens, "bytes_per_token": bytes_per_token}.items():
        check.plain_array("evaluate_stream", name, array)
        if not np.issubdtype(np.asarray(array).dtype, np.integer):
            raise TypeError(f"evaluate_stream: {name} must be integers, got {np.asarray(array).dtype}.")
    tokens = np.atleast_2d(np.asarray(tokens))
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be [streams, time] with at least two tokens.")
    check.require(check.is_integer(piece, 1, kinds=numbers.Integral), "piece", piece, "a positive integer")
    check_tokens(tokens, model.config.vocab_size, "tokens")
    if sizes is not None and np.atleast_2d(sizes).shape != tokens.shape:
        raise ValueError(f"sizes has shape {np.shape(sizes)}; it must be that of tokens, {tokens.shape}.")
    model.check_length(tokens.shape[1] - 1, "tokens")
    graphdef, params = nnx.split(model, nnx.Param)
    tokens = tokens.astype(np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    cache = model.init_cache(*inputs.shape)
    losses = []
    for start in range(0, inputs.shape[1], piece):
        part = slice(start, start + piece)
        loss, cache = _extend_losses(graphdef, params, inputs[:, part], targets[:, part], cache)
        losses.append(np.asarray(loss))
    per_token = np.concatenate(losses, axis=1)
    each = np.asarray(bytes_per_token, np.int64)[targets] if sizes is None else np.atleast_2d(sizes)[:, 1:]
    num_bytes = int(each.sum(dtype=np.int64))
    return LanguageModelResult(float(per_token.sum(dtype=np.float64)), targets.size, num_bytes), per_token


@functools.partial(jax.jit, static_argnums=0)
def _extend_losses(
    graphdef: nnx.GraphDef, params: PyTree, inputs: jax.Array, targets: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    logits, cache = nnx.merge(graphdef, params).extend(inputs, cache)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets), cache
