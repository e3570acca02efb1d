"""The arguments of `chunk_memory` as one value, and their checks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import DTYPES, Segments, Window
from pallas_kernels.chunk_memory.chunk import Objective, Structure
from pallas_kernels.newton_schulz.reference import Triple

Weights = dict[str, jax.Array]

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "reference")
CHUNK_SIZES = (8, 16, 32, 64, 128, 256)


class Call(NamedTuple):
    """The arguments of `api.chunk_memory` that say what is computed, under their names there."""

    structure: Structure
    objective: Objective
    weights: Weights
    momenta: Weights | None
    q: jax.Array
    k: jax.Array
    v: jax.Array
    step_size: jax.Array
    retention: jax.Array | None
    momentum_decay: jax.Array | None
    write_size: jax.Array | None
    window_weights: jax.Array | None
    chunk_size: int
    newton_schulz: tuple[Triple, ...] | None
    every: int
    step_bound: float | None
    horizon: float | None
    floor: jax.Array | None
    threshold: jax.Array | None
    norm_bound: float | None
    window: Window | None
    segments: Segments | None
    norm: dict[str, jax.Array] | None

    @property
    def ones(self) -> jax.Array:
        """A gate without effect, [batch, time, heads]."""
        return jnp.ones(self.q.shape[:3], jnp.float32)


def check(call: Call, implementation: str) -> None:
    """Raises ValueError for what `api.chunk_memory` does not take."""
    _check_tokens(call)
    if call.window is not None:
        _check_window(call, call.window)
    _check_dtypes_and_weights(call)
    _check_choices(call, implementation)


def _check_tokens(call: Call) -> None:
    q, k, v, window_weights = call.q, call.k, call.v, call.window_weights
    if q.ndim != 4 or v.ndim != 4 or not q.shape[1]:
        raise ValueError(
            f"chunk_memory: q and v have shapes {q.shape}, {v.shape}, must be [batch, time ≥ 1, heads, dim]."
        )
    tokens = q.shape[:3]
    wanted = {
        "k": (k, q.shape),
        "v": (v, (*tokens, v.shape[-1])),
        "step_size": (call.step_size, tokens),
        "retention": (call.retention, tokens),
        "momentum_decay": (call.momentum_decay, tokens),
        "write_size": (call.write_size, tokens),
        "floor": (call.floor, tokens),
        "threshold": (call.threshold, tokens),
        "window_weights": (
            window_weights,
            (*tokens, window_weights.shape[-1] if window_weights is not None and window_weights.ndim == 4 else "c"),
        ),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"chunk_memory: {name} has shape {x.shape}, must be {shape}, with q {q.shape}.")
    if window_weights is not None and not 1 <= window_weights.shape[-1] <= 64:
        raise ValueError(f"chunk_memory: window_weights has c={window_weights.shape[-1]}, must be 1 to 64.")


def _check_window(call: Call, window: Window) -> None:
    batch, _, heads, key_dim = call.q.shape
    past = (batch, heads, 0 if call.window_weights is None else call.window_weights.shape[-1] - 1)
    wanted = {
        "keys": (window.keys, (*past, key_dim)),
        "values": (window.values, (*past, call.v.shape[-1])),
        "num_real": (window.num_real, (batch,)),
        "floor": (window.floor, past),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and (x.shape != shape or not past[-1]):
            raise ValueError(
                f"chunk_memory: window.{name} has shape {x.shape}, must be {shape} with c − 1 ≥ 1 tokens of a window of c."
            )


def _check_dtypes_and_weights(call: Call) -> None:
    q, k, v, weights, momenta = call.q, call.k, call.v, call.weights, call.momenta
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        raise ValueError(
            f"chunk_memory: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, should all be float32 or all bfloat16."
        )
    if (momenta is None) != (call.momentum_decay is None):
        raise ValueError("chunk_memory: give both momenta S and momentum_decay θ, or neither; one of them is None.")
    for name, w in weights.items():
        if w.ndim != 4 or w.shape[:2] != (q.shape[0], q.shape[2]):
            expected = f"({q.shape[0]}, {q.shape[2]}, out, in)"
            raise ValueError(f"chunk_memory: weights[{name!r}] has shape {w.shape}, must be {expected}.")
        if momenta is not None and (name not in momenta or momenta[name].shape != w.shape):
            found = momenta[name].shape if name in momenta else "missing"
            raise ValueError(f"chunk_memory: momenta[{name!r}] is {found}, should have shape {w.shape}.")


def _check_choices(call: Call, implementation: str) -> None:
    muon = call.newton_schulz is not None
    if call.threshold is not None and (muon or call.window_weights is not None):
        raise ValueError("chunk_memory: threshold cannot be used with newton_schulz, nor with window_weights.")
    if call.write_size is not None and (muon or call.momenta is None):
        raise ValueError(
            "chunk_memory: write_size β needs momenta S, and cannot be used with newton_schulz, where η is such a gate."
        )
    if call.segments is not None:
        call.segments.check("chunk_memory", call.q.shape[0], call.q.shape[1], call.chunk_size)
    if muon and call.momenta is None:
        raise ValueError("chunk_memory: newton_schulz needs momenta S and momentum_decay θ, but they are None.")
    if muon and call.step_bound is not None:
        raise ValueError("chunk_memory: step_bound is for gradient steps and cannot be used with newton_schulz.")
    if call.step_bound is not None and call.momentum_decay is not None and (call.horizon is None or call.horizon < 1):
        raise ValueError(
            f"chunk_memory: horizon={call.horizon}, must be a number ≥ 1 with step_bound and momentum_decay."
        )
    if call.norm is not None and (muon or implementation == "pallas_gpu"):
        raise ValueError('chunk_memory: norm cannot be used with newton_schulz, nor with implementation="pallas_gpu".')
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"chunk_memory: implementation={implementation!r}, must be one of {IMPLEMENTATIONS}.")


def check_for_kernels(call: Call) -> None:
    """Raises ValueError for sizes that only `reference` takes."""
    size, every = call.chunk_size, call.every
    if size not in CHUNK_SIZES:
        raise ValueError(f"chunk_memory: chunk_size={size}, must be a power of two from 8 to 256.")
    if every < 1 or every & (every - 1) or every > size:
        raise ValueError(f"chunk_memory: every={every}, must be a power of two, at most chunk_size={size}.")
