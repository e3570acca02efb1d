"""What kernels for GPUs share: products on tensor cores, and how a kernel is compiled by Pallas' Triton backend.

Sizes of values are powers of two, of products at least 16; values are neither sliced nor concatenated, only references are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# product(x, y, x_axis, y_axis): contracts two matrices, accumulated in float32.
Product = Callable[[jax.Array, jax.Array, int, int], jax.Array]


LEAST = 16  # rows and columns of a product on tensor cores


def padded(size: int) -> int:
    """The size of a kernel's matrices for a dimension of tokens: a power of two. Channels of zeros stay zero."""
    return max(LEAST, 1 << (size - 1).bit_length())


def products(dtype: jax.typing.DTypeLike, interpret: Any) -> Product:
    """The product of matrices for inputs of a dtype: one pass of bfloat16, or three of TF32 for float32.

    Plain TF32 is noise where a matrix is nearly singular; IEEE products use no tensor core and spill registers. An interpreter on a
    CPU has no TF32: it computes in float32.
    """
    single = jnp.dtype(dtype) == jnp.bfloat16
    exact = jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
        if single:
            x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        axes = (((x_axis,), (y_axis,)), ((), ()))
        return jax.lax.dot_general(x, y, axes, precision=None if single else exact, preferred_element_type=jnp.float32)

    return product


def call(kernel: Any, *, warps: int, interpret: Any, stages: int = 1, **options: Any) -> Callable[..., Any]:
    """`pallas_call` by the Triton backend, whatever the default of this jax is.

    With more than one stage a loop loads operands of later iterations early. Only for kernels that read nothing which they write:
    a load of a state could come before the iteration that writes it.
    """
    options |= {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=stages)}
    return pl.pallas_call(kernel, interpret=interpret, **options)
