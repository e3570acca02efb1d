"""The selective scan of Mamba (Gu & Dao 2023, §3.2 and Algorithm 2): a diagonal linear recurrence whose step depends on the token.

    h_t = exp(Δ_t A) ⊙ h_{t−1} + (Δ_t x_t) B_tᵀ          one state of N numbers for each channel
    y_t = h_t C_t + D ⊙ x_t

A is discretized exactly (zero-order hold) and B by Euler's rule, as published. Decays are only multiplied, never divided or
computed as differences of logarithms. So Δ = 0 (padding) and a Δ so large that everything is forgotten are exact.

States are laid out as [batch, state, channels], because channels fill the lanes of a vector unit and N = 16 would not.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlasjax.memory.check import check_shape, check_sizes
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.shapes import check_shapes
from atlasjax.names import lookup

_CHUNK = 64  # tokens whose states are in memory at the same time; does not change the result

_AXES = {
    "x": "batch time channels",
    "delta": "batch time channels",
    "A": "channels state",
    "B": "batch time state",
    "C": "batch time state",
    "D": "channels",
    "state": "batch state channels",
}

# (h [batch, state, channels], x and Δ [time, batch, channels], A [state, channels], B and C [time, batch, state],
# keep [time, batch]) → (the next h, y [time, batch, channels])
_Chunk = Callable[..., tuple[jax.Array, jax.Array]]

# x, Δ, A, B, C, D, state and resets of a call.
_Optional = jax.Array | None
_Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, _Optional, _Optional, _Optional]


def init_state(batch_size: int, channels: int, state_dim: int) -> Float[Array, "batch state channels"]:
    """The state before the first token: zeros [batch, state, channels], float32.

    Raises:
      ValueError: a size is not an integer ≥ 1.
    """
    check_sizes("mamba.init_state", batch_size=batch_size, channels=channels, state_dim=state_dim)
    return jnp.zeros((batch_size, state_dim, channels), jnp.float32)


def selective_scan(
    x: Float[Array, "batch time channels"],
    delta: Float[Array, "batch time channels"],
    A: Float[Array, "channels state"],
    B: Float[Array, "batch time state"],
    C: Float[Array, "batch time state"],
    D: Float[Array, " channels"] | None = None,
    *,
    state: Float[Array, "batch state channels"] | None = None,
    resets: Bool[Array, "batch time"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch state channels"]]:
    """The recurrence over a sequence. The backward pass stores one state per 64 tokens and recomputes the others.

    Splitting a sequence into several calls gives the outputs and final state of one call. Computes in float32 (float64 for float64
    inputs).

    Args:
      x: the input, [batch, time, channels], floating point; any time ≥ 1.
      delta: step sizes Δ ≥ 0, like x.
      A: [channels, state], negative.
      B: [batch, time, state], shared by the channels.
      C: like B.
      D: the skip connection, [channels], or None.
      state: h before the first token, [batch, state, channels]. None means zeros.
      resets: boolean [batch, time]. The state is reset before each token where it is True.
      implementation: "sequential" (token by token within a chunk), "associative" (a parallel scan within a chunk: fewer, larger
        operations, four times the temporary memory), or None: associative on GPUs, where every token would otherwise cost a kernel
        launch, and sequential elsewhere (half the time on a CPU; not slower by a TPU compiler's estimate).

    Returns:
      y: like x, in x's dtype, and the final state.

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    check_shapes("selective_scan", _AXES, x=x, delta=delta, A=A, B=B, C=C, D=D, state=state, optional=("D", "state"))
    _check_resets("selective_scan", resets, *x.shape[:2])
    if implementation is not None:
        lookup("implementation", implementation, _IMPLEMENTATIONS)
    return _selective_scan((x, delta, A, B, C, D, state, resets), implementation)


@functools.partial(jax.jit, static_argnames=("implementation",))
def _selective_scan(inputs: _Inputs, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    x, delta, A, B, C, D, state, resets = inputs
    batch, time, channels = x.shape
    wide = wide_dtype(x.dtype)
    state = jnp.zeros((batch, A.shape[1], channels), wide) if state is None else state.astype(wide)
    # A factor of the decay: a reset costs no selection of states.
    keep = jnp.ones((batch, time), wide) if resets is None else jnp.where(resets, 0.0, 1.0).astype(wide)

    chunk = min(_CHUNK, time)
    num_chunks = -(-time // chunk)

    def chunks(z: jax.Array, fill: float) -> jax.Array:
        """[batch, time, …] → [chunks, chunk, batch, …]."""
        widths = [(0, 0), (0, num_chunks * chunk - time)] + [(0, 0)] * (z.ndim - 2)
        z = jnp.swapaxes(jnp.pad(z, widths, constant_values=fill), 0, 1)
        return z.reshape(num_chunks, chunk, *z.shape[1:])

    # Padding: Δ = 0 neither decays nor writes.
    tokens = (*(chunks(z, 0.0) for z in (x, delta, B, C)), chunks(keep, 1.0))
    run = functools.partial(_scan_chunks, state, A.astype(wide).T, tokens)
    if implementation is None:
        parallel = functools.partial(run, _associative)
        state, y = jax.lax.platform_dependent(cuda=parallel, rocm=parallel, default=functools.partial(run, _sequential))
    else:
        state, y = run(_IMPLEMENTATIONS[implementation])
    y = jnp.swapaxes(y.reshape(num_chunks * chunk, batch, channels)[:time], 0, 1)
    if D is not None:
        y = y + D.astype(wide)[None, None] * x.astype(wide)
    return y.astype(x.dtype), state


def _scan_chunks(
    state: jax.Array, A: jax.Array, tokens: tuple[jax.Array, ...], implementation: _Chunk
) -> tuple[jax.Array, jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(h: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, delta, B, C, keep = (z.astype(h.dtype) for z in tokens)
        return implementation(h, x, delta, A, B, C, keep)

    return jax.lax.scan(body, state, tokens)


def _sequential(h, x, delta, A, B, C, keep):
    def token(h, token):
        x, delta, B, C, keep = token
        # Decays are formed token by token: of all tokens they would be [time, state, channels].
        decay = keep[:, None, None] * jnp.exp(delta[:, None] * A[None])
        h = decay * h + (delta * x)[:, None] * B[:, :, None]
        return h, jnp.sum(h * C[:, :, None], axis=1)

    return jax.lax.scan(token, h, (x, delta, B, C, keep))


def _associative(h, x, delta, A, B, C, keep):
    decay = keep[:, :, None, None] * jnp.exp(delta[:, :, None] * A[None, None])
    write = (delta * x)[:, :, None] * B[..., None]

    def after(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    decays, writes = jax.lax.associative_scan(after, (decay, write), axis=0)
    # The scan starts from zero; the state before the chunk decays by all decays so far.
    states = decays * h[None] + writes
    return states[-1], jnp.sum(states * C[..., None], axis=2)


_IMPLEMENTATIONS: dict[str, _Chunk] = {"sequential": _sequential, "associative": _associative}


def reference(
    x: Float[Array, "batch time channels"],
    delta: Float[Array, "batch time channels"],
    A: Float[Array, "channels state"],
    B: Float[Array, "batch time state"],
    C: Float[Array, "batch time state"],
    D: Float[Array, " channels"] | None = None,
    *,
    state: Float[Array, "batch state channels"] | None = None,
    resets: Bool[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch state channels"]]:
    """The definition, token by token; arguments, results and errors as in `selective_scan`."""
    check_shapes("mamba.reference", _AXES, x=x, delta=delta, A=A, B=B, C=C, D=D, state=state, optional=("D", "state"))
    _check_resets("mamba.reference", resets, *x.shape[:2])
    return _reference((x, delta, A, B, C, D, state, resets))


@jax.jit
def _reference(inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    x, delta, A, B, C, D, state, resets = inputs
    wide = wide_dtype(x.dtype)
    x_, delta, A, B, C = (z.astype(wide) for z in (x, delta, A, B, C))
    start = jnp.zeros((x.shape[0], A.shape[1], x.shape[2]), wide) if state is None else state.astype(wide)
    resets = jnp.zeros(x.shape[:2], bool) if resets is None else resets

    def token(h, t):
        """h: [batch, channels, state]."""
        h = jnp.where(resets[:, t, None, None], 0.0, h)
        h = jnp.exp(delta[:, t, :, None] * A[None]) * h + (delta[:, t] * x_[:, t])[:, :, None] * B[:, t, None]
        y = jnp.einsum("bcn,bn->bc", h, C[:, t], precision=jax.lax.Precision.HIGHEST)
        return h, y if D is None else y + D[None] * x_[:, t]

    last, y = jax.lax.scan(token, jnp.swapaxes(start, 1, 2), jnp.arange(x.shape[1]))
    return jnp.swapaxes(y, 0, 1).astype(x.dtype), jnp.swapaxes(last, 1, 2)


def _check_resets(where: str, resets: jax.Array | None, batch: int, time: int) -> None:
    if resets is None:
        return
    check_shape("resets", resets, (batch, time), where)
    if resets.dtype != jnp.bool_:
        raise TypeError(f"{where}: resets must be boolean, got {resets.dtype}.")
