"""Several writes for each token, as in DeltaProduct (Siems et al. 2025, arXiv 2502.10297), by any rule with chunks of one token.

    W̃ = W_{t−1} Diag(α_t),  then for j = 1 … n:  W̃ ← W̃ + η_{t,j} (v_{t,j} − W̃ k_{t,j}) k_{t,j}ᵀ        W_t = W̃,  y_t = W_t q_t

Token t is n rows of `memory.scan`: the first has its retention, the last its query. The product of n transitions I − η k kᵀ can be
any rotation of n dimensions, where a single one is at most a reflection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check, memory
from atlasjax.memory.check import check_ids, check_sizes
from atlasjax.mixers.shapes import check_shapes

_PER_WRITE = "batch time writes heads"
_AXES = {
    "q": "batch time heads key_dim",
    "k": f"{_PER_WRITE} key_dim",
    "v": f"{_PER_WRITE} value_dim",
}
_GATES = {"step_size": _PER_WRITE, "removal_key": f"{_PER_WRITE} key_dim", "removal": f"{_PER_WRITE} key_dim"}


class Rows(NamedTuple):
    """Arguments of `memory.scan` for n rows a token: q, k, v and gates of [batch, time · n, heads, …], and segment ids or None."""

    q: Float[Array, "batch rows heads key_dim"]
    k: Float[Array, "batch rows heads key_dim"]
    v: Float[Array, "batch rows heads value_dim"]
    gates: memory.Gates
    segment_ids: Int[Array, "batch rows"] | None


def interleaved(
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time writes heads key_dim"],
    v: Float[Array, "batch time writes heads value_dim"],
    gates: memory.Gates,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Rows:
    """The rows of n writes for each token, for `memory.scan` or `memory.reference`; `last_reads` picks their outputs.

        rows = interleaved(q, k, v, memory.Gates(retention=alpha, step_size=beta), segment_ids)
        y, state = memory.scan(rules.gated_delta_rule(), params, state, *rows[:4], segment_ids=rows.segment_ids)
        y = last_reads(y, writes=2)

    fla: chunk_gated_delta_product(q, k, v, g, beta, num_householder=n), whose k, v and beta are rows already, with g = log α and
    queries that it scales by key_dim^{−1/2}. A state is that of the rule, so pieces of a stream continue from it.

    The first n − 1 rows of a token are read too, with queries of zero. With key_dim = value_dim = 128 and the XLA engine, whose
    blocks have 32 rows, such reads are 18 % of the products of a call for n = 2, and 23 % for n = 3: a read of a row takes
    d² + 2 · 32 d multiplications, its write 2 d² + 3 · 32 d.

    Args:
      q: queries, [batch, time, heads, key_dim], floating point.
      k: keys of the writes, in their order, [batch, time, writes, heads, key_dim].
      v: values, [batch, time, writes, heads, value_dim].
      gates: retention α [batch, time, heads] or [batch, time, heads, key_dim], before the first write; the others for every write:
        step_size η [batch, time, writes, heads], and where the rule has them removal_key and removal
        [batch, time, writes, heads, key_dim]. None for gates that the rule does not use.
      segment_ids: integers ≥ 0, [batch, time], or None.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype, or a gate is given that a write cannot have.
    """
    where = "delta_product.interleaved"
    check.instance(where, "gates", gates, memory.Gates)
    channels = " key_dim" if getattr(gates.retention, "ndim", 0) == 4 else ""
    axes = _GATES | {"retention": "batch time heads" + channels}
    given = {name: gate for name, gate in gates._asdict().items() if gate is not None}
    if others := ", ".join(name for name in given if name not in axes):
        raise ValueError(f"{where}: gates has {others}; a write can have {', '.join(axes)}.")
    sizes = check_shapes(where, _AXES | {f"gates.{name}": axes[name] for name in given}, q=q, k=k, v=v, gates=gates)
    last = sizes["writes"] - 1
    if segment_ids is not None:
        check_ids(segment_ids, q.shape[:2], where)
        segment_ids = jnp.repeat(jnp.asarray(segment_ids), last + 1, axis=1)
    rows = {name: _rows(gate) for name, gate in given.items() if name in _GATES}
    if "retention" in given:
        rows["retention"] = _rows(_beside(given["retention"], (0, last), 1.0))
    return Rows(_rows(_beside(q, (last, 0), 0.0)), _rows(k), _rows(v), memory.Gates(**rows), segment_ids)


def last_reads(
    y: Float[Array, "batch rows heads value_dim"], writes: int
) -> Float[Array, "batch time heads value_dim"]:
    """The outputs of the tokens, [batch, time, heads, value_dim], from those of their rows, of which each token has `writes`.

    Raises:
      TypeError: y is not an array of floating point numbers.
      ValueError: writes is not an integer ≥ 1 that divides the number of rows.
    """
    where = "delta_product.last_reads"
    check_sizes(where, writes=writes)
    check_shapes(where, {"y": "batch rows heads value_dim"}, y=y)
    if y.shape[1] % writes:
        raise ValueError(f"{where}: y has {y.shape[1]} rows, which must be a multiple of writes={writes}.")
    return y.reshape(y.shape[0], -1, writes, *y.shape[2:])[:, :, -1]


def _beside(x: jax.Array, around: tuple[int, int], fill: float) -> jax.Array:
    """[batch, time, …] → [batch, time, writes, …], with so many writes of `fill` before and after x."""
    # A padding, unlike a concatenation with zeros, keeps how x is divided over devices.
    return jnp.pad(x[:, :, None], ((0, 0), (0, 0), around, *((0, 0),) * (x.ndim - 2)), constant_values=fill)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])
