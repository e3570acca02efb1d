"""The arithmetic of one block of tokens of one head, without forming a weight or a gradient for each token.

The inputs are the gradient factors of the block's tokens and of the window before them. Every inner gradient is an outer product,
∇_W ℓ_i = left_i ⊗ input_i for each weight W. So with

    S_t = b_t S_0 + Σ_i D[t,i] ∇_i     M_t = a_t M_0 + s_t S_0 + Σ_i C[t,i] ∇_i     C = T_α diag(β) D,  D = −T_θ diag(η) Γ

a read is M_t h = a_t M_0 h + s_t S_0 h + Σ_i C[t,i] (input_i · h) left_i: masked matmuls, as in attention (the dual form).
T_α[t,i] = α_{i+1} … α_t (t ≥ i), Γ[t,i] = γ_{t,t−i}. The products are computed by multiplication, not as exponentials of
differences of logarithms. So values and derivatives are exact at α = 0 and θ = 0, with no overflow and no division by zero.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.memory.products import product, wide_dtype

_MASKED = 32  # tokens of the largest triangular system that is inverted by products of its own size

# φ(q) [tokens, D], its part of degree one if the structure adds it to its output, and gates of a soup [tokens, n] if there is one.
Queries = tuple[jax.Array, jax.Array | None, jax.Array | None]
Linear = Callable[[str, jax.Array], jax.Array]


class Read(NamedTuple):
    """Reads a block's queries: `read(linear)`, with weights applied by `linear(name, h)`, h: [tokens, in] → [tokens, out].

    `apply(linear, queries)` reads some of the tokens, with the rows of `queries`, [tokens, …], that belong to them.
    """

    apply: Callable[[Linear, Queries], jax.Array]
    queries: Queries

    def __call__(self, linear: Linear) -> jax.Array:
        return self.apply(linear, self.queries)


class BlockGates(NamedTuple):
    """Gates of a block of m tokens. E counts the tokens of the block and of the window before it.

    retention: [m], [m, D] or None (α = 1). step_size: [m]. momentum_decay: [m] or None (no momentum state). write_size: β [m], or
    None (β = 1). gamma: Γ [m, E]. real: [m], 1 for tokens and 0 for padding. None if the gates of padding (α = 1, θ = 1, η = 0,
    β = 0, γ = 0) suffice to make it a no-op.
    """

    retention: jax.Array | None
    step_size: jax.Array
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    gamma: jax.Array
    real: jax.Array | None


class Factors(NamedTuple):
    """Gradient factors of one weight for E tokens, ∇_i = left[i] ⊗ inputs[i]: left [E, out], inputs [E, in]."""

    left: jax.Array
    inputs: jax.Array


def product_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of what products multiply, where tokens are in `dtype`: theirs, but float32 for float16.

    Memories and inner gradients are larger than tokens and outputs: they may exceed the maximum of float16, 65504.
    """
    return jnp.dtype(jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype)


def dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """a @ b with inputs in the compute dtype; accumulation and result are at least float32."""
    wide = wide_dtype(dtype)
    if a.ndim == b.ndim == 2:
        return product(a.astype(dtype), b.astype(dtype), "nn", wide)
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=wide)


def applied(h: jax.Array, weight: jax.Array, dtype: jnp.dtype, precision: jax.lax.Precision | None = None) -> jax.Array:
    """h @ weight.T as in `dot`, for rows h [tokens, in] and weight [out, in]. precision: that of the product; None is jax's."""
    return product(h.astype(dtype), weight.astype(dtype), "nt", wide_dtype(dtype), precision)


@jax.custom_jvp
def gram(x: jax.Array) -> jax.Array:
    """x xᵀ of rows x [tokens, in]. It is symmetric, so its derivative takes one product and not one for each factor."""
    return applied(x, x, x.dtype)


@gram.defjvp
def _gram_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    change = applied(dx, x, x.dtype)
    return gram(x), change + change.T


def outer(left: jax.Array, inputs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Σ_i left[i] ⊗ inputs[i] as in `dot`, [out, in], of rows left [tokens, out] and inputs [tokens, in]."""
    return product(left.astype(dtype), inputs.astype(dtype), "tn", wide_dtype(dtype))


def exact(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in full precision. jax's own product, because losses use it inside Pallas kernels, which lower no other primitive."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def spread(x: jax.Array, size: int, axis: int) -> jax.Array:
    """`jnp.broadcast_to` of an x with one entry along `axis`, to `size` entries.

    Its derivative, a sum over that axis, adds halves or, for the last axis, is a product with ones: others are slow on CPUs.
    """
    return jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis:][1:]))


@spread.defjvp
def _spread_jvp(
    size: int, axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    if axis == -1:
        return spread(x, size, axis), exact(tangent, jnp.ones((1, size), tangent.dtype))
    if x.ndim == 2:
        return spread(x, size, axis), exact(jnp.ones((size, 1), tangent.dtype), tangent)
    return spread(x, size, axis), _doubled(tangent, size, axis)


def _doubled(x: jax.Array, size: int, axis: int) -> jax.Array:
    """`spread` by concatenation, whose transpose adds halves."""
    if size == 1:
        return x
    half = _doubled(x, size // 2, axis)
    return jnp.concatenate([half, half, *[x] * (size % 2)], axis=axis)


def row_sums(x: jax.Array) -> jax.Array:
    """Sums over the last axis, as a product with ones: see `spread`."""
    return exact(x, jnp.ones((x.shape[-1], 1), x.dtype))[..., 0]


@jax.custom_jvp
def largest_entry(x: jax.Array) -> jax.Array:
    """`jnp.max` over the last axis, whose derivative goes to one of the largest entries.

    That of `jnp.max` compares every entry with the maximum and divides by how many are equal. A compiler that computes `x` a second
    time for it, and rounds otherwise, finds none, and the derivative is 0/0.
    """
    return jnp.max(x, axis=-1)


@largest_entry.defjvp
def _largest_entry_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    chosen = number == jnp.argmax(x, axis=-1, keepdims=True)
    return largest_entry(x), jnp.sum(jnp.where(chosen, tangent, 0.0), axis=-1)


def inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """⟨a, b⟩ over the last two axes, [..., 1, 1], as a product: see `spread`."""
    return jnp.einsum("...oi,...oi->...", a, b, precision=jax.lax.Precision.HIGHEST)[..., None, None]


def scaled_rows(a: jax.Array, x: jax.Array) -> jax.Array:
    """a[:, None] * x of [rows, columns], whose derivative with respect to `a` is a product with ones."""
    return spread(a[:, None], x.shape[1], -1) * x


def scaled_columns(a: jax.Array, x: jax.Array) -> jax.Array:
    """x * a of [rows, columns], with a derivative as in `scaled_rows`."""
    return x * spread(a[None], x.shape[0], 0)


@jax.custom_jvp
def scaled(a: jax.Array, x: jax.Array) -> jax.Array:
    """a * x of a scalar and a matrix. The derivative of `a` is a product of two vectors and not a sum, as in `spread`."""
    return a * x


@scaled.defjvp
def _scaled_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (a, x), (da, dx) = primals, tangents
    change = jax.lax.dot_general(da[None], x[None], (((0,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return a * x, a * dx + change


def divisible(x: jax.Array) -> jax.Array:
    """Whether each x ≥ 0 is a valid divisor, also of a derivative: that of a quotient divides by x², which must not underflow.

    If it did, a quotient that is not selected would have the derivative 0 · ∞ = NaN.
    """
    return x >= float(jnp.finfo(x.dtype).tiny) ** 0.5


def capped(step: float, step_size: jax.Array, decrease: jax.Array, square: jax.Array) -> jax.Array:
    """η̄ = min(η, step a/‖g‖²), elementwise, and η where the gradient is zero."""
    valid = divisible(square)
    most = step * decrease / jnp.where(valid, square, 1.0)
    return jnp.where(valid, jnp.minimum(step_size, most), step_size)


def neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd entries of the first axis. The derivative is a concatenation, whereas that of slices would be padding."""
    first, second = jax.lax.split(x.reshape(-1, 2, *x.shape[1:]), (1, 1), axis=1)
    return first[:, 0], second[:, 0]


def before(x: jax.Array, first: float, rows: int = 1) -> jax.Array:
    """x [m, …] shifted down by some rows, with `first` in those above. One operation, and one of its transpose."""
    return jax.lax.pad(x, jnp.asarray(first, x.dtype), ((rows, -rows, 0), *((0, 0, 0),) * (x.ndim - 1)))


def decay_products(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products of consecutive decays.

    Args:
      decay: [m] or [m, channels].

    Returns:
      from_start: decay_0 … decay_t, [m, …]; pairwise: decay_{i+1} … decay_t for t ≥ i, else 0, [m, m, …].
    """
    return _products_of_scalars(decay) if decay.ndim == 1 else _products_of_channels(decay)


@jax.custom_jvp
@jax.jit
def _products_of_scalars(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`decay_products` of [m], by products of 1, 8, 64, … factors: few loops, so that they compile fast."""
    m, size = decay.shape[0], 1
    products = jnp.where(np.tri(m, k=-1, dtype=bool), decay[:, None], 1.0)
    while size < m:
        starts = range(0, min(8 * size, m), size)
        padded = jnp.pad(products, ((starts[-1], 0), (0, 0)), constant_values=1.0)
        products = functools.reduce(jnp.multiply, (jax.lax.slice_in_dim(padded, i, i + m) for i in starts))
        size *= 8
    pairwise = jnp.where(np.tri(m, dtype=bool), products, 0.0)
    return pairwise[:, 0] * decay[0], pairwise


@_products_of_scalars.defjvp
def _products_of_scalars_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """A product changes by the sum, over its factors j, of those after j times those before: P diag(dα) P, shifted by a row."""
    start, pairwise = _products_of_scalars(*primals)
    after = scaled_columns(tangents[0], pairwise)
    return (start, pairwise), (exact(after, before(start, 1.0)), exact(after, before(pairwise, 0.0)))


def _products_of_channels(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`decay_products` of [m, channels], where the products of the derivative above would cost more: by merging neighbours."""
    m = decay.shape[0]
    padding = (1 << (m - 1).bit_length()) - m
    start = jnp.pad(decay, ((0, padding), (0, 0)), constant_values=1.0)[:, None]
    products = jnp.ones_like(start)[:, None]  # [parts, 1, 1, channels]: parts of one token each
    while products.shape[0] > 1:
        (first, second), (start_first, start_second) = neighbours(products), neighbours(start)
        across = start_second[:, :, None] * first[:, -1:]
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
        below = jnp.concatenate([across, second], axis=2)
        products = jnp.concatenate([above, below], axis=1)
        start = jnp.concatenate([start_first, start_first[:, -1:] * start_second], axis=1)
    return start[0, :m], products[0, :m, :m]


@jax.custom_jvp
@jax.jit
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)⁻¹ of a strictly lower triangular L [m, m], by recursive halving: only products, equivalent to block substitution.

    The inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]]. XLA's own triangular solve of many small systems is far
    slower, both on CPUs and on accelerators.
    """
    m = lower.shape[0]
    padding = (1 << (m - 1).bit_length()) - m
    return _inverse_by_halves(jnp.pad(lower, ((0, padding), (0, padding))))[:m, :m]


def _inverse_by_halves(lower: jax.Array) -> jax.Array:
    """`unit_lower_inverse` of a power of two tokens."""
    m = lower.shape[0]
    if m <= _MASKED:
        return _inverse_by_masks(lower)
    half = m // 2
    both = jnp.stack([lower[:half, :half], lower[half:, half:]])
    first, second = jax.vmap(_inverse_by_halves)(both)
    corner = -exact(exact(second, lower[half:, :half]), first)
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=1)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=1)])


def _inverse_by_masks(lower: jax.Array) -> jax.Array:
    """The same for few tokens: with X of the blocks of one size, X − X B X of the next one. Few operations, for larger products.

    It is a loop, so that a compiler takes it as one thing wherever it is called.
    """
    m = lower.shape[0]
    identity = jnp.eye(m, dtype=lower.dtype)
    if m == 1:
        return identity
    sizes = 1 << np.arange((m - 1).bit_length())
    block = np.arange(m)[None] // sizes[:, None]
    across = (block[:, :, None] % 2 == 1) & (block[:, :, None] - 1 == block[:, None])
    double = lambda inverse, across: inverse - exact(exact(inverse, jnp.where(across, lower, 0.0)), inverse)
    first = identity - jnp.where(across[0], lower, 0.0)
    return jax.lax.scan(lambda inverse, across: (double(inverse, across), None), first, across[1:])[0]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -exact(exact(inverse, tangents[0]), inverse)


@jax.custom_jvp
def unit_lower_solve(lower: jax.Array, right: jax.Array) -> jax.Array:
    """(I + L)⁻¹ r of a strictly lower triangular L [m, m] and r [m]. Its derivative needs no products of matrices."""
    return exact(unit_lower_inverse(lower), right)


@unit_lower_solve.defjvp
def _unit_lower_solve_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(primals[0])
    solved = exact(inverse, primals[1])
    return solved, exact(inverse, tangents[1] - exact(tangents[0], solved))


def window_matrix(gamma: jax.Array) -> jax.Array:
    """Γ [m, m + c − 1] from γ [m, c]. Row t holds γ_{t,j} in column t − j + c − 1, and zeros elsewhere."""
    m, c = gamma.shape
    if c == 1:
        return jnp.diag(gamma[:, 0])
    # Rows of length E + 1, reinterpreted as rows of length E, shift right by one more column in every row.
    width = m + c - 1
    padded = jnp.pad(gamma[:, ::-1], ((0, 0), (0, width + 1 - c)))
    return padded.reshape(-1)[: m * width].reshape(m, width)


class Coefficients(NamedTuple):
    """The tokens' memories as combinations of the block's initial memory, momentum and gradients; see the module docstring."""

    momentum_start: jax.Array | None  # b_t
    momentum_gradients: jax.Array  # D[t, i]
    memory_start: jax.Array | None  # a_t
    memory_momentum: jax.Array | None  # s_t
    memory_gradients: jax.Array  # C[t, i]


class Decays(NamedTuple):
    """Products of the scalar decays of a block's tokens. None without momentum or retention.

    momentum_start: b_t = θ_0 … θ_t, [m]. momentum: T_θ, [m, m]. start: a_t = α_0 … α_t, [m]. pairwise: T_α diag(β), [m, m].
    started: s_t, the coefficient of S_0 in M_t, [m].
    """

    momentum_start: jax.Array | None
    momentum: jax.Array | None
    start: jax.Array | None
    pairwise: jax.Array
    started: jax.Array | None


def decays(gates: BlockGates) -> Decays:
    m = gates.step_size.shape[0]
    momentum_start = across = a = s = None
    if gates.momentum_decay is not None:
        momentum_start, across = decay_products(gates.momentum_decay)
    if gates.retention is None:
        pairwise = jnp.tril(jnp.ones((m, m), gates.step_size.dtype))
    else:
        a, pairwise = decay_products(gates.retention)
    if gates.write_size is not None:
        pairwise = scaled_columns(gates.write_size, pairwise)
    if momentum_start is not None:
        s = exact(pairwise, momentum_start)
    return Decays(momentum_start, across, a, pairwise, s)


def coefficients(decays: Decays, gates: BlockGates) -> Coefficients:
    D = scaled_rows(-gates.step_size, gates.gamma)
    if decays.momentum is not None:
        D = exact(decays.momentum, D)
    return Coefficients(decays.momentum_start, D, decays.start, decays.started, exact(decays.pairwise, D))


def outer_sum(weights: jax.Array, factors: Factors, dtype: jnp.dtype) -> jax.Array:
    """Σ_i weights[i] left_i ⊗ input_i, [out, in]. The narrower factor is multiplied by the weights."""
    left, inputs = factors
    if left.shape[1] <= inputs.shape[1]:
        left = scaled_rows(weights, left)
    else:
        inputs = scaled_rows(weights, inputs)
    return outer(left, inputs, dtype)
