"""Newton–Schulz: which form and which implementation, derivatives, batching."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batching import rows_folded
from pallas_kernels.newton_schulz import forms, gpu, gram, tpu
from pallas_kernels.newton_schulz.forms import FORMS, GRAM_STEPS
from pallas_kernels.newton_schulz.reference import SCHEDULES, Triple, coefficients
from pallas_kernels.newton_schulz.reference import newton_schulz as definition

_KERNELS = {"pallas_tpu": tpu, "pallas_gpu": gpu}
IMPLEMENTATIONS = ("xla", *_KERNELS)
MOST_ROWS, MOST_COLUMNS = 256, 1024  # of kernels, the shorter side and the longer
_HIGHEST = jax.lax.Precision.HIGHEST


def newton_schulz(
    s: jax.Array,
    steps: int = 5,
    schedule: Sequence[Triple] = SCHEDULES["standard"],
    *,
    form: str | None = "direct",
    implementation: str = "xla",
    precision: jax.lax.Precision = _HIGHEST,
    interpret: Any = False,
) -> jax.Array:
    """Newton–Schulz of each matrix in a batch: X ← a X + (b A + c A²) X with A = X Xᵀ from X = S / (‖S‖_F + ε) (A Eq. 57, §5).

    Args:
      s: [..., rows, columns], floating point. Iterated on the side with fewer rows.
      steps: number of steps, ≥ 0; 0 only normalizes. Rounding in the null space grows by the first coefficient at each
        step, so results of different machines agree only for about 7 steps with the standard schedule.
      schedule: triples (a, b, c), one a step; the last one repeats.
      form: "direct", as written; "gram", on S Sᵀ alone, with half the operations at columns = 4 rows, good to 3e-4
        after five steps, and refused beyond seven; None: the one with fewer operations.
      implementation: "xla"; "pallas_tpu", one kernel that keeps a matrix on chip for all steps, forward and backward;
        "pallas_gpu", one kernel whose matrices lie in caches, in tiles. Kernels have no forward-mode derivative.
      precision: of the products of kernels and of the Gram form. A TPU's default, and that of "pallas_gpu", rounds their inputs to
        bfloat16, which is noise where S has a small rank; otherwise "pallas_gpu" multiplies in three passes of TF32.
      interpret: run the kernel's Python on any machine (for tests), as `pallas_call` takes it.

    Returns:
      An array of the shape of `s`, float32 (float64 for float64 input and "xla"). A zero matrix gives zero, with derivative zero.

    Raises:
      ValueError: a form or an implementation that does not exist, or that cannot do these sizes, dtype or steps.
    """
    triples = coefficients(schedule, steps)
    rows, columns = sorted(s.shape[-2:])
    form = _choose_form(form, rows, columns, steps)
    if implementation == "xla":
        return definition(s, steps, schedule) if form == "direct" else _gram_xla(s, triples, precision)
    if implementation not in _KERNELS:
        raise ValueError(f"newton_schulz: implementation={implementation!r}, should be one of {IMPLEMENTATIONS}.")
    if s.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"newton_schulz: {implementation!r} takes float32 or bfloat16, s is {s.dtype} {s.shape}.")
    if columns > MOST_COLUMNS or rows > MOST_ROWS:
        most = f"{MOST_ROWS} × {MOST_COLUMNS:,}"
        raise ValueError(f"newton_schulz: {implementation!r} takes matrices up to {most}, s has {s.shape}.")
    transposed = s.shape[-2] > s.shape[-1]
    x = s.mT if transposed else s
    y = _kernel(x.reshape(-1, rows, columns), triples, form, precision, implementation, interpret).reshape(x.shape)
    return y.mT if transposed else y


def _choose_form(form: str | None, rows: int, columns: int, steps: int) -> str:
    if form is None:
        return forms.cheaper(rows, columns, steps)
    if form not in FORMS:
        raise ValueError(f"newton_schulz: form={form!r}, should be one of {FORMS}.")
    if form == "gram" and steps > GRAM_STEPS:
        raise ValueError(f"newton_schulz: form='gram' is exact enough for at most {GRAM_STEPS} steps, got {steps}.")
    return form


def _gram_xla(s: jax.Array, triples: Sequence[Triple], precision: jax.lax.Precision) -> jax.Array:
    dot = functools.partial(jnp.matmul, precision=precision)

    def one(x: jax.Array) -> jax.Array:
        qs, _ = gram.forward(dot, [dot(x, x.T)], triples)
        return dot(qs[0], x)

    transposed = s.shape[-2] > s.shape[-1]
    x = (s.mT if transposed else s).astype(jnp.promote_types(s.dtype, jnp.float32))
    y = jax.vmap(one)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    return y.mT if transposed else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _kernel(
    s: jax.Array,
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    implementation: str,
    interpret: Any,
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
    interpret: Any,
    s: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array]:
    options = {"triples": triples, "form": form, "precision": precision, "interpret": interpret}
    ds = rows_folded(functools.partial(_KERNELS[implementation].backward, **options))(s, dy)
    return (ds.astype(s.dtype),)


_kernel.defvjp(_kernel_forward, _kernel_backward)
