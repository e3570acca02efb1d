"""Linear rules with decays for each channel over whole sequences: checks, layout, and choice of the implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import Interpret, Segments, check_rule
from pallas_kernels.blocks import token_precision
from pallas_kernels.chunk_program import Unroll
from pallas_kernels.chunk_scan import chunk_scan
from pallas_kernels.layout import Beside, gates_to_chunks
from pallas_kernels.linear_rule import reference
from pallas_kernels.linear_rule.chunk import LinearChunk
from pallas_kernels.residuals import Residuals, check_residuals, most_residuals

IMPLEMENTATIONS = ("pallas_tpu", "reference")
MOST_CHANNELS = 256  # maximum for keys and values
_MOST_TOGETHER = 8  # groups of heads in one program; the heads of a group lie side by side
_MOST_LANES = {jnp.dtype(jnp.float32): 512, jnp.dtype(jnp.bfloat16): 1024}  # of all of them
# Chunks in one program, without and with a removal, whose second one in the backward kernel saves 3% and compiles twice as long.
_UNROLL, _UNROLL_REMOVAL = Unroll(4, 2), Unroll(2, 1)


def linear_rule(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    decay: Float[Array, "batch time heads key_dim"],
    beta: Float[Array, "batch time heads"],
    removal: tuple[Float[Array, "batch time heads key_dim"], Float[Array, "batch time heads key_dim"]] | None = None,
    initial: Float[Array, "batch heads value_dim key_dim"] | None = None,
    *,
    delta: bool = False,
    decay_first: bool = False,
    chunk_size: int = 64,
    segments: Segments | None = None,
    residuals: Residuals | None = None,
    implementation: str = "pallas_tpu",
    interpret: Interpret = False,
) -> tuple[Float[Array, "batch time heads value_dim"], Float[Array, "batch heads value_dim key_dim"]]:
    """W_t = W_{t−1} Diag(α_t) + β_t (v_t k_tᵀ − (W̃_t r_t) s_tᵀ) and y_t = W_t q_t, block-parallel.

    Without r and s this is gated linear attention (GLA; Yang et al. 2312.06635), with r = s = k the delta rule with a decay for
    each channel, and with r = κ̂ and s = a ⊙ κ̂ RWKV-7 (Peng et al. 2503.14456). W̃_t is W_{t−1}, or W_{t−1} Diag(α_t).

    Args:
      q, k: [batch, time, heads, key_dim], float32 or bfloat16. The kernel supports key_dim and value_dim up to 256.
      v: [batch, time, heads, value_dim], in the same dtype.
      decay: α in [0, 1], [batch, time, heads, key_dim].
      beta: β, [batch, time, heads]; it scales all that a token writes.
      removal: r and s, [batch, time, heads, key_dim] each, of any floating dtype. None means none, or k with `delta`.
      initial: W before the first token, [batch, heads, value_dim, key_dim]. None means zero.
      delta: whether r = s = k: β_t (v_t − W̃_t k_t) k_tᵀ is written.
      decay_first: whether the removal reads the decayed memory W_{t−1} Diag(α_t).
      chunk_size: tokens per block, a power of two ≥ 8. It does not affect the result.
      segments: packed segments on a grid of chunks of chunk_size tokens, which divides time. Padding needs β = 0 and α = 1. None
        means one segment.
      residuals: what a forward pass keeps of each chunk for the backward pass, beside W before it. "recompute" keeps nothing;
        "inverse" keeps that of the chunk's system and the scores of r, if there is a removal; "all" also those of q and what is
        written. None means the most of them that takes at most 2.5 times the memory of "recompute".
      implementation: "pallas_tpu" is a kernel that keeps W on chip for the whole sequence and recomputes in its backward pass what
        was not kept. It has no forward-mode derivative. "reference" computes token by token.
      interpret: passed to `pallas_call`.

    Returns:
      y [batch, time, heads, value_dim], in q's dtype, and the last W, float32.

    Raises:
      ValueError: wrong shapes or dtypes, both `delta` and `removal`, or an unknown implementation, chunk size or `residuals`.
    """
    others = lambda batch, time, heads, key_dim, value_dim: {
        "decay": (decay, (batch, time, heads, key_dim)),
        "beta": (beta, (batch, time, heads)),
        "initial": (initial, (batch, heads, value_dim, key_dim)),
        **{f"removal[{i}]": (x, (batch, time, heads, key_dim)) for i, x in enumerate(removal or ())},
    }
    check_rule("linear_rule", q, k, v, others, chunk_size, segments, implementation, IMPLEMENTATIONS)
    if delta and removal is not None:
        raise ValueError("linear_rule: delta=True removes at k, so removal must be None.")
    check_residuals("linear_rule", residuals)
    (batch, time, heads, key_dim), value_dim = q.shape, v.shape[-1]
    if initial is None:
        initial = jnp.zeros((batch, heads, value_dim, key_dim), jnp.float32)
    if implementation == "reference":
        return reference.linear_rule(
            q, k, v, decay, beta, removal, initial, delta=delta, decay_first=decay_first, segments=segments, chunk_size=chunk_size
        )  # fmt: skip
    if max(key_dim, value_dim) > MOST_CHANNELS:
        raise ValueError(
            f"linear_rule: the kernel supports head dimensions up to {MOST_CHANNELS}, q {q.shape}, v {v.shape}."
        )
    beside, removes = Beside.of(heads, chunk_size), delta or removal is not None
    if residuals is None:
        keys = 2 if removal is not None else int(delta)
        residuals = _most_residuals(key_dim, value_dim, chunk_size, keys, q.dtype.itemsize)
    chunk = LinearChunk(removes, delta, decay_first, token_precision(q.dtype), beside.heads, residuals=residuals)
    # Padding keeps the memory. `chunk_scan` would fill it with zeros.
    decay = jnp.pad(decay, ((0, 0), (0, -time % chunk_size), (0, 0), (0, 0)), constant_values=1.0)
    whole = decay.shape[1]
    tokens = [x if x.shape[1] == whole else _padded(x, whole) for x in (q, k, v, decay, *(removal or ()))]
    restarts = None
    if segments is not None:
        restarts = segments.marks, (beside.weights(segments.start_of_heads(segments.start)),)
    width = beside.heads * max(key_dim, value_dim, chunk_size)
    # Groups of heads in one program hide each other's waits; more lanes than these would not fit.
    together = max(1, min(_MOST_TOGETHER, _MOST_LANES[q.dtype] // width))
    gates = beside.gates(gates_to_chunks([(beta, 0.0)], chunk_size))
    (final,), (y,) = chunk_scan(
        chunk, (beside.weights(initial),), tuple(map(beside.tokens, tokens)), gates, together=together,
        unroll=_UNROLL_REMOVAL if removes else _UNROLL,
        interpret=interpret, dtype=q.dtype, restarts=restarts,
    )  # fmt: skip
    return y[:, :time].reshape(v.shape), beside.separate(final, key_dim)


def _most_residuals(key_dim: int, value_dim: int, size: int, keys: int, width: int) -> Residuals:
    """The default. keys: of the removal and, if they are others, of what is written; width: bytes of a number of a token."""
    state, scores = 4 * key_dim * value_dim, max(keys, 1) * width * size**2
    if not keys:
        return most_residuals(state, scores, scores)
    inverse = 4 * size**2 + scores
    return most_residuals(state, inverse, inverse + scores + width * size * value_dim)


def _padded(x: Float[Array, "batch time heads dim"], time: int) -> Float[Array, "batch time heads dim"]:
    return jnp.pad(x, ((0, 0), (0, time - x.shape[1]), (0, 0), (0, 0)))
