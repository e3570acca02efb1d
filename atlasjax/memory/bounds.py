"""Bounds on a memory's steps and weights, which keep it from diverging whatever its gates and keys become in training.

`Bound` is that of a `MemoryRule`. A `SoftmaxRule` has the cap on single steps, η̄ below, and nothing else of it.

All gradients of a chunk are taken at M_{t'}, the memory at the chunk's start. A chunk of similar keys therefore corrects the same
error once per token, and overshoots. `Bound.step` scales each step by the remaining error of its token. With g_t the windowed
gradient of the recurrence and

    a_t = Σ_j γ_{t,j} ⟨∂ℓ/∂out, out − v⟩_{t−j}      first-order decrease of the loss down to the target
    n_t = a_t + 1e-4 · (a_t of an output of zero)    so that a small error cannot make a step large
    x_t = ⟨g_t, M_{t−1} + H θ_t S_{t−1} − M_{t'}⟩      change of the loss since M_{t'}, including that by momentum to come

the step size of the recurrence becomes

    η'_t = η̄_t (1 + x_t/n_t),      η̄_t = min(η_t, step/H · a_t / ‖g_t‖²)

For ℓ2, a_t is the squared error, and 1 + x_t/n_t is the fraction of the error, along its own direction, that remains at token t. It
may be negative after an overshoot. η̄ keeps a single token from stepping past its target: for a matrix memory it means that
η̄_t ‖φ(k_t)‖² ≤ step/H. Both use only the current and earlier tokens, so the rule stays causal. x_t needs only what a
state holds, so streaming stays exact. Within a chunk x_t is linear in earlier steps: a unit lower-triangular system (`solve`).

H is `Bound.horizon` with momentum, and 1 without. θ_t is at most 1 − 1/H, so momentum adds a write at most H times, whatever the
later θ are. A limit that uses the token's own θ_t is not enough: a token with a small θ takes a full step, and tokens with θ near 1
then repeat it. Wherever the actual θ are smaller, the memory ends between M_{t−1} and the point that x_t assumes.

Why the memory cannot diverge (step ≤ 1; n = a; no momentum): consider a weight W in which the output is homogeneous of degree one.
This holds for W1 always; for W2 under ReLU, and under GELU up to a bounded term. Then ⟨g_t, W_{t'}⟩ = a_t + ⟨∂ℓ/∂out, v − r⟩, where
r is the residual's part of the output. For α = 1 and ℓ2 or Huber's loss, each such weight satisfies, at each token t of a chunk,

    ‖W_t‖² ≤ ‖W_{t'}‖² + Σ_{t' < i ≤ t} η_i ‖v_i − r_i‖²

So its norm grows at most as the square root of the number of tokens, for any keys. docs/semantics.md has the proof, and the effect
of retention, windows, momentum and n.

`Bound.slope` and `Bound.weight_norm` hold for every loss and all gates. A token whose ∂ℓ/∂out has an entry above `slope` counts
with a smaller weight, so that its largest entry is `slope`. At the start of a chunk, weights and momenta whose norm exceeds
`weight_norm` are scaled back. Both limits are far above what occurs in use. They keep numbers within the range of float32 when keys
are huge. A deep memory under the dot-product loss, which has no minimum, has no other bound.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory import meshes
from atlasjax.memory.axes.objectives import Objective
from atlasjax.memory.blocks import (
    capped,
    divisible,
    inner,
    row_sums,
    scaled_columns,
    scaled_rows,
    spread,
    unit_lower_solve,
)

# Keeps a small error from making a step large. Errors below √1e-4 of their targets are not corrected for the chunk's earlier
# writes, so a chunk of large steps and equal keys ends that far from its target. With 1e-2 that was a tenth of the target.
_SOFTENING = 1e-4
# A weight within its norm is scaled to a norm of at most this before squares are summed: weights up to 2^111 times larger do not
# overflow, and those of 2^-15 times that norm still count.
_FAR = 2.0**-48
# How many times momentum may add a token's write to the memory. Less follows long momentum less; more limits each write more.
HORIZON = 32.0


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bounds that keep a memory from diverging; the docstring of `atlasjax.memory.bounds` has the recurrence.

    Attributes:
      step: > 0, how far a token may step, to first order. 1 means onto its target, 2 equally far past it. None means that step
        sizes are the gates, as in the papers.
      slope: > 0, the maximum of |∂ℓ/∂out| over the channels of a token, to which the loss of a token with a larger one is scaled
        down. None means no limit.
      weight_norm: > 0, the maximum of ‖W‖_F / √rows, the root mean square of a weight's row norms, at the start of a chunk. None
        means no limit.
      horizon: H ≥ 1, how many times momentum may add a token's write. With `step`, θ is at most 1 − 1/H, and a write at most 1/H
        of the step. Optimizers without momentum do not use it.

    Raises:
      ValueError: a number is not positive, or `horizon` is below 1.
    """

    step: float | None = 1.0
    slope: float | None = 1024.0
    weight_norm: float | None = 1024.0
    horizon: float = HORIZON

    def __post_init__(self) -> None:
        for name in ("step", "slope", "weight_norm"):
            check.number("Bound", name, getattr(self, name), above=0, optional=True)
        check.number("Bound", "horizon", self.horizon, least=1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def within_slope(slope: float, d: jax.Array) -> jax.Array:
    """d [..., value_dim], scaled down so that no entry of a token is larger than `slope`."""
    return slope / jnp.maximum(jnp.max(jnp.abs(d), axis=-1, keepdims=True), slope) * d


@within_slope.defjvp
def _within_slope_jvp(
    slope: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The scale changes with the largest entry, one of them if there are several: its number is found, its size taken from there.

    Comparing every entry with the maximum could find none, if a compiler computes d a second time and rounds otherwise.
    """
    (d,), (change,) = primals, tangents
    number = jax.lax.broadcasted_iota(jnp.int32, d.shape, d.ndim - 1)
    chosen = jnp.where(number == jnp.argmax(jnp.abs(d), axis=-1, keepdims=True), jnp.sign(d), 0.0)
    largest = row_sums(chosen * d)[..., None]
    most = jnp.maximum(largest, slope)
    share = jnp.where(largest > slope, row_sums(chosen * change)[..., None] / most, 0.0)
    return within_slope(slope, d), slope / most * (change - spread(share, d.shape[-1], -1) * d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _limited(slope: float, out: jax.Array) -> jax.Array:
    """out [..., value_dim], with a derivative whose largest entry per token is at most `slope`."""
    return out


_limited.defvjp(lambda slope, out: (out, None), lambda slope, _, d: (within_slope(slope, d),))


@dataclasses.dataclass(frozen=True)
class LimitedSlope(Objective):
    """`objective` with the gradient of each token scaled down so that no entry of ∂ℓ/∂out is larger than `slope`."""

    objective: Objective
    slope: float

    def loss(self, out: jax.Array, v: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        return self.objective.loss(_limited(self.slope, out), v, threshold)


def toward_target(objective: Objective, out: jax.Array, v: jax.Array, threshold: jax.Array | None) -> jax.Array:
    """⟨∂ℓ/∂out, out − v⟩ by channel, [..., value_dim], from out and v [..., value_dim]. Its sum is ≥ 0 for a convex loss whose
    minimum is v."""
    slope = jax.grad(lambda o: jnp.sum(objective.loss(o, v, threshold)))(meshes.vary_like(out, v))
    return slope * (out - v)


def within_horizon(horizon: float, momentum_decay: jax.Array) -> jax.Array:
    """min(θ, 1 − 1/H): whatever θ is from now on, momentum adds S at most H times."""
    return jnp.minimum(momentum_decay, 1.0 - 1.0 / horizon)


def softened(decrease: jax.Array, empty: jax.Array) -> jax.Array:
    """n from a, and from a at an output of zero."""
    return decrease + _SOFTENING * empty


def capped_delta(step: float, step_size: jax.Array, key: jax.Array) -> jax.Array:
    """η̄ of a delta rule, where a/‖g‖² = 1/‖φ(k)‖². step_size: [...] or [..., value_dim]; key: [..., D]."""
    square = row_sums(key * key)
    if step_size.ndim == key.ndim:
        square = square[..., None]
    return capped(step, step_size, jnp.ones_like(square), square)


def left_over(moved: jax.Array, scale: jax.Array) -> jax.Array:
    """1 + x/n, and 1 where n is zero."""
    valid = divisible(scale)
    return 1.0 + jnp.where(valid, moved, 0.0) / jnp.where(valid, scale, 1.0)


def solve(moved: jax.Array, scale: jax.Array, products: jax.Array) -> jax.Array:
    """1 + x_t/n_t for the m tokens of a block, including the effect of each step on later tokens.

    Args:
      moved: x_t without the block's own steps, [m].
      scale: n_t, [m].
      products: [m, m], by how much the unscaled step of token j lowers x_t, for j < t.
    """
    if moved.size == 1:
        return left_over(moved, scale)
    valid = divisible(scale)
    safe = jnp.where(valid, scale, 1.0)
    root = jnp.where(valid, jax.lax.rsqrt(safe), 1.0)
    # The unknowns are multiplied by √n. Where n is zero the unknown is 1. The step is zero too, but the step's derivative with
    # respect to the token is not, so later tokens keep its column.
    lower = jnp.tril(scaled_columns(root, scaled_rows(jnp.where(valid, root, 0.0), products)), -1)
    solved = unit_lower_solve(lower, jnp.where(valid, root * (safe + moved), 1.0))
    return jnp.where(valid, root * solved, 1.0)


def largest_norm(weights: dict[str, jax.Array]) -> jax.Array:
    """The largest ‖W‖_F / √out over weights [..., out, in], float32 [...]."""

    def one(w: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(w), axis=(-2, -1))  # factored out, because its square could overflow
        unit = w / jnp.where(divisible(largest), largest, 1.0)[..., None, None]
        return largest * jnp.sqrt(jnp.sum(unit * unit, axis=(-2, -1)) / w.shape[-2])

    return functools.reduce(jnp.maximum, map(one, weights.values())).astype(jnp.float32)


def within_norm(weight_norm: float, memory: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Scales each weight with ‖W‖_F > weight_norm √out back to that norm; name → [..., out, in]."""
    return jax.tree.map(lambda w: _scaled_back(weight_norm * w.shape[-2] ** 0.5, w), memory)


def _norm_parts(most: float, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """W so small that no square overflows; that matrix's squared norm, not 0; min(1, most / ‖W‖)."""
    far = _FAR if most < 2.0**64 else 1.0
    small = w * (far / most)
    square = jnp.maximum(inner(small, small), jnp.finfo(w.dtype).tiny)
    return small, square, jnp.minimum(far / jnp.sqrt(square), 1.0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _scaled_back(most: float, w: jax.Array) -> jax.Array:
    """W [..., out, in] with a norm of at most `most`."""
    return _norm_parts(most, w)[2] * w


@_scaled_back.defjvp
def _scaled_back_jvp(most: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The change of a scaled-back matrix has no component along the matrix itself."""
    (w,), (change,) = primals, tangents
    small, square, scale = _norm_parts(most, w)
    along = jnp.where(scale < 1.0, inner(small, change) / square, 0.0)
    return scale * w, scale * (change - along * small)
