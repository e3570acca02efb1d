"""Floating-point operations of a function, counted in its jaxpr.

XLA's `cost_analysis()` counts the body of a scan once, whatever the length of the scan. Here it is counted once per iteration.
"""

import math
from collections.abc import Callable, Iterator

import jax
from jax.extend import core


def count_flops(function: Callable[..., object], *arguments: object) -> int:
    """Returns the matmul and convolution FLOPs (2 per multiply-add) of one call, over the whole batch and all devices.

    Elementwise operations are not counted. A `cond` counts as its most expensive branch, and a `while` of unknown length as one
    run of its body.

    Args:
      function: any traceable function. It is only traced, neither compiled nor run.
      *arguments: arrays or `jax.ShapeDtypeStruct`s.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _jaxpr_flops(jaxpr: core.Jaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    shapes: list[tuple[int, ...]] = [getattr(variable.aval, "shape", ()) for variable in equation.invars]
    output = math.prod(getattr(equation.outvars[0].aval, "shape", ())) if equation.outvars else 0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * output * math.prod(shapes[0][axis] for axis in contracted)
    if name == "matrix_product":  # `memory.products`
        return 2 * output * shapes[0][-2 if params["form"] == "tn" else -1]
    if name == "dense_product":  # `memory.products`
        return 2 * output * shapes[0][-1]
    if name == "ragged_dot_general":
        # Each row meets one group: contracted over the other axis, or, in the derivative by the groups' matrices, over the rows.
        dimensions = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dimensions.dot_dimension_numbers
        groups = 1 if dimensions.rhs_group_dimensions else shapes[2][0]
        return 2 * output // groups * math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = shapes[1]
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * output * math.prod(kernel) // outputs
    if name == "pallas_call":
        # The kernel's body runs once per grid cell, unless the kernel states its own cost.
        estimate = params.get("cost_estimate")
        if estimate is not None:
            return int(estimate.flops)
        return math.prod(params["grid_mapping"].grid) * sum(map(_jaxpr_flops, _sub_jaxprs(params)))
    if name == "cond":
        return max(_jaxpr_flops(branch.jaxpr) for branch in params["branches"])
    inner = sum(map(_jaxpr_flops, _sub_jaxprs(params)))
    if name == "shard_map":  # its body has the shapes of one device's share
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return inner * params["length"] if name == "scan" else inner


def _sub_jaxprs(params: dict[str, object]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
