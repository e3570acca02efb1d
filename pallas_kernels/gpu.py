"""Code shared by the GPU kernels: products on tensor cores, and compilation with Pallas' Triton backend.

Sizes of values are powers of two, and those of products at least 16. Only references are sliced; values are neither sliced nor
concatenated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.arguments import Interpret, Product
from pallas_kernels.varying import pallas_call

LEAST = 16  # smallest number of rows and columns of a product on tensor cores

LEAST_CAPABILITY = 8.0  # that jax compiles Triton for


def padded(size: int) -> int:
    """The power of two to which a token dimension is padded in a kernel. Channels of zeros stay zero."""
    return max(LEAST, 1 << (size - 1).bit_length())


def products(dtype: jax.typing.DTypeLike, interpret: Interpret) -> Product:
    """The matrix product for inputs of a dtype: one pass of bfloat16, or three of TF32 for float32.

    Plain TF32 gives noise for nearly singular matrices, and IEEE products use no tensor cores and spill registers. The interpreter
    on a CPU has no TF32 and computes in float32.
    """
    single = jnp.dtype(dtype) == jnp.bfloat16
    exact = jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
        if single:
            x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        axes = (((x_axis,), (y_axis,)), ((), ()))
        return jax.lax.dot_general(x, y, axes, precision=None if single else exact, preferred_element_type=jnp.float32)

    return product


def too_old() -> str | None:
    """Why jax's default device cannot run GPU kernels: its compute capability is below 8.0 (a T4 has 7.5). None for others."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    if capability is None or float(capability) >= LEAST_CAPABILITY:
        return None
    return f"the GPU, a {device.device_kind}, has compute capability {capability}, and Triton needs {LEAST_CAPABILITY}"


def call(
    kernel: Callable[..., None], *, warps: int, interpret: Interpret, stages: int = 1, **options: Any
) -> Callable[..., list[jax.Array]]:
    """`pallas_call` with the Triton backend, whatever this jax version's default is.

    With more than one stage a loop prefetches the operands of later iterations. This is only for kernels that do not read what they
    write, because a load of a state could come before the iteration that writes it.
    """
    options |= {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=stages)}
    return pallas_call(kernel, implementation="pallas_gpu", interpret=interpret, **options)
