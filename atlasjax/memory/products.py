"""Products of matrices whose derivatives leave the axes of every array in their places.

jax differentiates a product of matrices to products whose results have their axes in another order, and transposes them. XLA's CPU
backend keeps these transposes where there is a batch of heads. It multiplies factors that lie the wrong way, at two thirds of its
speed, and reads results across their rows. Here the three products are one primitive, and the derivatives of each are among them.

The derivative by a layer's weights, xᵀ d over all tokens, suffers most: jax transposes dᵀ x, and the backend copies d in transposed
order before it multiplies. `dense` is a layer's product, with derivatives that need no copy.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.varying import vary_like

Form = Literal["nn", "nt", "tn"]  # x y, x yᵀ, xᵀ y: which factor is transposed, as in BLAS
Precision = jax.lax.Precision

_Derivatives = tuple[Callable[..., jax.Array], Callable[..., jax.Array]]

_CONTRACTED = {"nn": (-1, -2), "nt": (-1, -1), "tn": (-2, -2)}


def wide_dtype(*dtypes: jnp.dtype) -> jnp.dtype:
    """The widest of floating point dtypes, and at least float32: what sums of numbers of these dtypes are kept in.

    `jnp.promote_types` of different dtypes is an error under `jax_numpy_dtype_promotion=strict`.
    """
    return max([jnp.dtype(jnp.float32), *map(jnp.dtype, dtypes)], key=lambda dtype: dtype.itemsize)


def _bilinear(
    name: str, function: Callable[..., jax.Array], options: tuple[str, ...], shape: Callable[..., Any],
    derivatives: _Derivatives, batched: Callable[..., Any],
) -> Primitive:  # fmt: skip
    """A primitive that computes `function` of two arrays and `options`, which are static.

    Args:
      shape: of the arrays' shapes and the options, the result's.
      derivatives: by each array, from the cotangent and both arrays, of which the one it is by is only known by its `aval`.
      batched: of arrays with a batch and its axes (None: without it), the result and its axis.
    """
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(function, static_argnames=options))
    primitive.def_abstract_eval(shape)
    ad.defbilinear(primitive, *derivatives)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive


def product(x: jax.Array, y: jax.Array, form: Form, dtype: jnp.dtype, precision: Precision | None = None) -> jax.Array:
    """x y ("nn"), x yᵀ ("nt") or xᵀ y ("tn") of two matrices, with leading axes of both as a batch. `dtype` is the result's."""
    return _product.bind(*vary_like((x, y)), form=form, dtype=jnp.dtype(dtype), precision=precision)


def _dimensions(x: Any, y: Any, form: Form) -> jax.lax.DotDimensionNumbers:
    lead = tuple(range(x.ndim - 2))
    of_x, of_y = _CONTRACTED[form]
    return ((x.ndim + of_x,), (y.ndim + of_y,)), (lead, lead)


def _dot_general(x: jax.Array, y: jax.Array, *, form: Form, dtype: jnp.dtype, precision: Precision | None) -> jax.Array:
    return jax.lax.dot_general(x, y, _dimensions(x, y, form), precision=precision, preferred_element_type=dtype)


def _shape(x: Any, y: Any, *, form: Form, dtype: jnp.dtype, precision: Precision | None) -> Any:
    options = {"precision": precision, "preferred_element_type": dtype, "out_sharding": None}
    return jax.lax.dot_general_p.abstract_eval(x, y, dimension_numbers=_dimensions(x, y, form), **options)[0]


def _of_x(d: jax.Array, x: Any, y: jax.Array, *, form: Form, **options: Any) -> jax.Array:
    factors: dict[Form, tuple[jax.Array, jax.Array, Form]] = {
        "nn": (d, y, "nt"),
        "nt": (d, y, "nn"),
        "tn": (y, d, "nt"),
    }
    return product(*factors[form], **options).astype(x.aval.dtype)


def _of_y(d: jax.Array, x: jax.Array, y: Any, *, form: Form, **options: Any) -> jax.Array:
    factors: dict[Form, tuple[jax.Array, jax.Array, Form]] = {
        "nn": (x, d, "tn"),
        "nt": (d, x, "tn"),
        "tn": (x, d, "nn"),
    }
    return product(*factors[form], **options).astype(y.aval.dtype)


def _batched(arrays: tuple[jax.Array, jax.Array], axes: tuple[Any, Any], **options: Any) -> tuple[jax.Array, int]:
    if None in axes:  # then one factor serves all, and jax joins the batch with the rows of the other
        shared: Any = functools.partial(_dot_general, **options)
        return jax.vmap(shared, in_axes=axes)(*arrays), 0
    x, y = (jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True))
    return product(x, y, **options), 0


_product = _bilinear("matrix_product", _dot_general, ("form", "dtype", "precision"), _shape, (_of_x, _of_y), _batched)


def dense(
    x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None, precision: Precision | None = None
) -> jax.Array:
    """x [..., in] times kernel [in, *out] → [..., *out], in `dtype`. None: that of the arguments.

    The kernel may be wider than x. It is rounded to x's dtype, except for 16-bit x on a CPU: those have no such products, so XLA
    would write the rounded kernel, and then a float32 copy of it, at every call.
    """
    dtype = jnp.dtype(jnp.result_type(x, kernel) if dtype is None else dtype)
    return _dense.bind(*vary_like((x, kernel)), dtype=dtype, precision=precision)


def _dense_numbers(x: Any) -> jax.lax.DotDimensionNumbers:
    return ((x.ndim - 1,), (0,)), ((), ())


def _rows_times(x: jax.Array, kernel: jax.Array, *, dtype: jnp.dtype, precision: Precision | None) -> jax.Array:
    kernel = kernel.astype(x.dtype)
    return jax.lax.dot_general(x, kernel, _dense_numbers(x), precision=precision, preferred_element_type=dtype)


def _rows_times_on_cpu(x: jax.Array, kernel: jax.Array, *, dtype: jnp.dtype, precision: Precision | None) -> jax.Array:
    wide = wide_dtype(x.dtype)
    y = _rows_times(x.astype(wide), kernel, dtype=wide_dtype(dtype), precision=precision)
    return y.astype(dtype)


def _dense_shape(x: Any, kernel: Any, *, dtype: jnp.dtype, precision: Precision | None) -> Any:
    options = {"precision": precision, "preferred_element_type": dtype, "out_sharding": None}
    kernel = kernel.update(dtype=x.dtype)
    return jax.lax.dot_general_p.abstract_eval(x, kernel, dimension_numbers=_dense_numbers(x), **options)[0]


def _of_inputs(d: jax.Array, x: Any, kernel: jax.Array, *, dtype: jnp.dtype, precision: Precision | None) -> jax.Array:
    kernel = kernel.astype(x.aval.dtype)
    outputs = tuple(range(x.aval.ndim - 1, d.ndim)), tuple(range(1, kernel.ndim))
    given = jax.lax.dot_general(d, kernel, (outputs, ((), ())), precision=precision, preferred_element_type=dtype)
    return given.astype(x.aval.dtype)


def _of_kernel(d: jax.Array, x: jax.Array, kernel: Any, *, dtype: jnp.dtype, precision: Precision | None) -> jax.Array:
    tokens = tuple(range(x.ndim - 1))
    numbers = ((tokens, tokens), ((), ()))
    given = jax.lax.dot_general(x, d, numbers, precision=precision, preferred_element_type=dtype)
    return given.astype(kernel.aval.dtype)


def _dense_batched(arrays: tuple[jax.Array, jax.Array], axes: tuple[Any, Any], **options: Any) -> tuple[jax.Array, int]:
    if axes[1] is None:
        return _dense.bind(jnp.moveaxis(arrays[0], axes[0], 0), arrays[1], **options), 0
    each: Any = functools.partial(_rows_times, **options)
    return jax.vmap(each, in_axes=axes)(*arrays), 0


_dense = _bilinear(
    "dense_product", _rows_times, ("dtype", "precision"), _dense_shape, (_of_inputs, _of_kernel), _dense_batched
)
mlir.register_lowering(_dense, mlir.lower_fun(_rows_times_on_cpu, multiple_results=False), platform="cpu")
