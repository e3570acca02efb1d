"""Newton–Schulz: choice of form and implementation, derivatives, and batching."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import Interpret
from pallas_kernels.batching import rows_folded
from pallas_kernels.newton_schulz import forms, gpu, gram, tpu
from pallas_kernels.newton_schulz.forms import FORMS, GRAM_STEPS
from pallas_kernels.newton_schulz.reference import SCHEDULES, Triple, coefficients, wide
from pallas_kernels.newton_schulz.reference import newton_schulz as definition

_KERNELS = {"pallas_tpu": tpu, "pallas_gpu": gpu}
IMPLEMENTATIONS = ("xla", *_KERNELS)
MOST_ROWS, MOST_COLUMNS = 256, 1024  # maximum of the shorter and the longer side in kernels
_HIGHEST = jax.lax.Precision.HIGHEST


def newton_schulz(
    s: Float[Array, "*matrices rows columns"],
    steps: int = 5,
    schedule: Sequence[Triple] = SCHEDULES["standard"],
    *,
    form: str | None = "direct",
    implementation: str = "xla",
    precision: jax.lax.Precision = _HIGHEST,
    interpret: Interpret = False,
) -> Float[Array, "*matrices rows columns"]:
    """Newton–Schulz of each matrix in a batch: X ← a X + (b A + c A²) X with A = X Xᵀ from X = S / (‖S‖_F + ε) (Muon; A §5).

    Args:
      s: [..., rows, columns], floating point. A matrix with more rows than columns is transposed for the iteration.
      steps: number of steps, ≥ 0; 0 only normalizes. Rounding errors in the null space grow by the first coefficient in each step,
        so results of different machines agree only for about 7 steps with the standard schedule.
      schedule: triples (a, b, c), one per step; the last one repeats.
      form: "direct" iterates as written. "gram" iterates on S Sᵀ, with half the operations at columns = 4 rows; it is accurate to
        3e-4 after five steps, and an error beyond seven. None takes the one with fewer operations.
      implementation: "xla"; "pallas_tpu", one kernel that keeps a matrix on chip for all steps, forward and backward; "pallas_gpu",
        one kernel that works in tiles on matrices in caches. Kernels have no forward-mode derivative.
      precision: precision of the products in kernels and in the Gram form. The default of a TPU and of "pallas_gpu" rounds their
        inputs to bfloat16, which gives noise where S has a small rank. HIGH takes three passes of bfloat16 on a TPU, with errors up
        to 1e-3 in the direct form and several percent in the Gram form. Otherwise "pallas_gpu" multiplies in three passes of TF32.
      interpret: runs the kernel's Python on any machine, for tests; passed to `pallas_call`.

    Returns:
      An array of the shape of `s`, float32 (float64 for float64 input and "xla"). A zero matrix gives zero, with derivative zero.

    Raises:
      ValueError: an unknown form or implementation, or one that does not support these sizes, dtype or number of steps.
    """
    triples = coefficients(schedule, steps)
    rows, columns = sorted(s.shape[-2:])
    form = _choose_form(form, rows, columns, steps)
    if implementation == "xla":
        return definition(s, steps, schedule) if form == "direct" else _gram_xla(s, triples, precision)
    if implementation not in _KERNELS:
        raise ValueError(f"newton_schulz: implementation={implementation!r}, must be one of {IMPLEMENTATIONS}.")
    if s.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"newton_schulz: {implementation!r} supports float32 and bfloat16, s is {s.dtype} with shape {s.shape}."
        )
    if columns > MOST_COLUMNS or rows > MOST_ROWS:
        most = f"{MOST_ROWS} × {MOST_COLUMNS:,}"
        raise ValueError(f"newton_schulz: {implementation!r} supports matrices up to {most}, s has shape {s.shape}.")
    transposed = s.shape[-2] > s.shape[-1]
    x = s.mT if transposed else s
    y = _kernel(x.reshape(-1, rows, columns), triples, form, precision, implementation, interpret).reshape(x.shape)
    return y.mT if transposed else y


def _choose_form(form: str | None, rows: int, columns: int, steps: int) -> str:
    if form is None:
        return forms.cheaper(rows, columns, steps)
    if form not in FORMS:
        raise ValueError(f"newton_schulz: form={form!r}, must be one of {FORMS}.")
    if form == "gram" and steps > GRAM_STEPS:
        raise ValueError(f"newton_schulz: form='gram' is accurate enough for at most {GRAM_STEPS} steps, got {steps}.")
    return form


def _gram_xla(s: jax.Array, triples: Sequence[Triple], precision: jax.lax.Precision) -> jax.Array:
    dot = functools.partial(jnp.matmul, precision=precision)

    def one(x: jax.Array) -> jax.Array:
        qs, _ = gram.forward(dot, [dot(x, x.T)], triples)
        return dot(qs[0], x)

    transposed = s.shape[-2] > s.shape[-1]
    x = wide(s.mT if transposed else s)
    y = jax.vmap(one)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    return y.mT if transposed else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _kernel(
    s: jax.Array,
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    implementation: str,
    interpret: Interpret,
) -> jax.Array:
    options = {"triples": triples, "form": form, "precision": precision, "interpret": interpret}
    return rows_folded(functools.partial(_KERNELS[implementation].forward, **options))(s)


def _kernel_forward(s: jax.Array, *options: Any) -> tuple[jax.Array, jax.Array]:
    return _kernel(s, *options), s


def _kernel_backward(
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    implementation: str,
    interpret: Interpret,
    s: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array]:
    options = {"triples": triples, "form": form, "precision": precision, "interpret": interpret}
    ds = rows_folded(functools.partial(_KERNELS[implementation].backward, **options))(s, dy)
    return (ds.astype(s.dtype),)


_kernel.defvjp(_kernel_forward, _kernel_backward)
