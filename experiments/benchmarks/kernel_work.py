"""The operations and bytes of a program's kernels, from its trace."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

PASSES = {"HIGHEST": 6}  # bfloat16 passes per float32 product; otherwise one


@dataclasses.dataclass(frozen=True)
class Product:
    """[rows, depth] × [depth, columns] in a number of bfloat16 passes, for each of some heads."""

    rows: int
    depth: int
    columns: int
    passes: int
    heads: int = 1

    @property
    def operations(self) -> int:
        return 2 * self.heads * self.rows * self.depth * self.columns

    def tiled(self, edge: int) -> int:
        """Operations of a unit that holds [edge, edge] of one operand while rows of the other pass through, eight at a time."""
        whole = lambda size, unit: -(-size // unit) * unit
        held = lambda held, passing: 2 * whole(self.depth, edge) * whole(held, edge) * whole(passing, 8)
        return self.heads * self.passes * min(held(self.columns, self.rows), held(self.rows, self.columns))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A traced `pallas_call`: its arrays, grid steps, products per step, and the total bytes moved by its blocks."""

    name: str
    arrays: int
    steps: int
    products: tuple[Product, ...]
    block_bytes: int


def kernels_of(function: Callable[..., Any], shapes: list[Any]) -> list[Kernel]:
    """The kernels of a program, from its jaxpr and without a compiler. Products whose result is unused do not count."""
    import jax
    from jax.interpreters import partial_eval

    kernels = []
    for equation in _equations(jax.make_jaxpr(function)(*shapes).jaxpr, "pallas_call"):
        body, mapping = equation.params["jaxpr"], equation.params["grid_mapping"]
        body, *_ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
        products = tuple(_product(x) for x in _equations(body, "dot_general"))
        moved = sum(_moved(block, mapping.grid) for block in mapping.block_mappings)
        kernels.append(
            Kernel(equation.params["name"], len(mapping.block_mappings), math.prod(mapping.grid), products, moved)
        )
    return kernels


def _equations(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """Equations of a primitive in a jaxpr and in the jaxprs it calls, except inside another kernel."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        elif equation.primitive.name != "pallas_call":
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from _equations(inner, primitive)


def _product(equation: Any) -> Product:
    (left_axes, _), batch = equation.params["dimension_numbers"]
    left, right = (x.aval for x in equation.invars)
    heads = math.prod(left.shape[i] for i in batch[0])  # of one program
    depth = math.prod(left.shape[i] for i in left_axes)
    precision = equation.params["precision"]
    wide = left.dtype == right.dtype == "float32"
    passes = PASSES.get(precision[0].name, 1) if precision and wide else 1
    rows, columns = (math.prod(x.shape) // depth // heads for x in (left, right))
    return Product(rows, depth, columns, passes, heads)


def _moved(block: Any, grid: tuple[int, ...]) -> int:
    """Bytes of a block over the whole grid. It is moved whenever its index changes from one step to the next."""
    import jax
    import numpy as np
    from jax.extend import core

    moves = 1
    if grid:
        places = np.stack([axis.ravel() for axis in np.indices(grid, dtype=np.int32)])
        blocks = np.stack(jax.vmap(core.jaxpr_as_fun(block.index_map_jaxpr))(*places), axis=-1)
        moves += int((blocks[1:] != blocks[:-1]).any(axis=1).sum())
    sizes = [getattr(size, "block_size", size if isinstance(size, int) else 1) for size in block.block_shape]
    return moves * math.prod(sizes) * block.array_aval.dtype.itemsize
