"""The delta rule over whole sequences: checks, layout, and choice of the implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import Interpret, Segments, check_rule
from pallas_kernels.blocks import token_precision
from pallas_kernels.chunk_program import Unroll
from pallas_kernels.chunk_scan import chunk_scan
from pallas_kernels.delta_rule import gpu, reference
from pallas_kernels.delta_rule.chunk import DeltaRuleChunk
from pallas_kernels.layout import Beside, gates_to_chunks
from pallas_kernels.residuals import Residuals, check_residuals, most_residuals

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "reference")
MOST_CHANNELS = 256  # maximum for keys and values
# Groups of heads in one program on a TPU; the heads of a group lie side by side. With more groups, products wait less for each
# other, until the registers are full.
_TOGETHER, _TOGETHER_NARROW = 4, 8
# Chunks in one program, whose systems do not depend on each other.
_UNROLL, _UNROLL_NARROW = Unroll(2, 1), Unroll(4, 2)


def delta_rule(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    beta: Float[Array, "batch time heads"],
    decay: Float[Array, "batch time heads"] | None = None,
    initial: Float[Array, "batch heads value_dim key_dim"] | None = None,
    *,
    chunk_size: int = 64,
    segments: Segments | None = None,
    residuals: Residuals | None = None,
    implementation: str = "pallas_tpu",
    interpret: Interpret = False,
) -> tuple[Float[Array, "batch time heads value_dim"], Float[Array, "batch heads value_dim key_dim"]]:
    """W_t = α_t W_{t−1} + β_t (v_t − α_t W_{t−1} k_t) k_tᵀ and y_t = W_t q_t (Yang et al. 2024; gated: 2412.06464), block-parallel.

    Args:
      q, k: [batch, time, heads, key_dim], float32 or bfloat16. Kernels support key_dim and value_dim up to 256.
      v: [batch, time, heads, value_dim], in the same dtype.
      beta: β, [batch, time, heads].
      decay: α in [0, 1], [batch, time, heads]. None means 1.
      initial: W before the first token, [batch, heads, value_dim, key_dim]. None means zero.
      chunk_size: tokens per block, a power of two ≥ 8. It does not affect the result.
      segments: packed segments on a grid of chunks of chunk_size tokens, which divides time. Padding needs β = 0 and α = 1. None
        means one segment.
      residuals: what a forward pass on a TPU keeps of each chunk for the backward pass, beside W before it. "recompute" keeps
        nothing, "inverse" the inverse of the chunk's system, "all" also what is written. None means the most of them that
        takes at most 2.5 times the memory of "recompute".
      implementation: "pallas_tpu" is a kernel that keeps W on chip for the whole sequence and recomputes in its backward pass what
        was not kept.
        "pallas_gpu" has kernels for single chunks of at most 64 tokens, and between them one that carries W from chunk to chunk and
        stores it before each chunk in device memory. Neither has a forward-mode derivative. "reference" computes token by token.
      interpret: passed to `pallas_call`.

    Returns:
      y [batch, time, heads, value_dim], in q's dtype, and the last W, float32.

    Raises:
      ValueError: wrong shapes or dtypes, or an unknown implementation, chunk size or `residuals`.
    """
    others = lambda batch, time, heads, key_dim, value_dim: {
        "beta": (beta, (batch, time, heads)),
        "decay": (decay, (batch, time, heads)),
        "initial": (initial, (batch, heads, value_dim, key_dim)),
    }
    check_rule("delta_rule", q, k, v, others, chunk_size, segments, implementation, IMPLEMENTATIONS)
    check_residuals("delta_rule", residuals)
    (batch, _, heads, key_dim), value_dim = q.shape, v.shape[-1]
    if initial is None:
        initial = jnp.zeros((batch, heads, value_dim, key_dim), jnp.float32)
    if implementation == "reference":
        return reference.delta_rule(q, k, v, beta, decay, initial, segments, chunk_size)
    if max(key_dim, value_dim) > MOST_CHANNELS:
        raise ValueError(
            f"delta_rule: kernels support head dimensions up to {MOST_CHANNELS}, q {q.shape}, v {v.shape}."
        )
    if implementation == "pallas_gpu":
        if segments is not None and chunk_size < 16:
            raise ValueError(f"delta_rule: chunk_size={chunk_size}, must be at least 16 with segments on a GPU.")
        return gpu.delta_rule(q, k, v, beta, decay, initial, chunk_size, segments, interpret)
    gates = gates_to_chunks([(beta, 0.0)] if decay is None else [(beta, 0.0), (decay, 1.0)], chunk_size)
    beside = Beside.of(heads, chunk_size)
    narrow = q.dtype == jnp.bfloat16 and chunk_size <= 64 and max(key_dim, value_dim) <= 128
    if residuals is None:
        of_inverse = 4 * chunk_size**2
        of_all = of_inverse + q.dtype.itemsize * chunk_size * value_dim
        residuals = most_residuals(4 * key_dim * value_dim, of_inverse, of_all)
    chunk = DeltaRuleChunk(decay is not None, token_precision(q.dtype), beside.heads, residuals=residuals)
    restarts = None
    if segments is not None:
        restarts = segments.marks, (beside.weights(segments.start_of_heads(segments.start)),)
    (final,), (y,) = chunk_scan(
        chunk, (beside.weights(initial),), tuple(map(beside.tokens, (q, k, v))), beside.gates(gates),
        together=_TOGETHER_NARROW if narrow else _TOGETHER, unroll=_UNROLL_NARROW if narrow else _UNROLL,
        interpret=interpret, dtype=q.dtype, restarts=restarts,
    )  # fmt: skip
    return y.reshape(v.shape), beside.separate(final, key_dim)
