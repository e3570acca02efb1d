"""Newton–Schulz for GPUs (Pallas-Triton): a program processes one matrix after another, in square tiles.

`tiles` explains why. In the Gram form a program's workspace holds only square matrices; in the direct form it also holds X before
and after a step. The backward passes recompute the steps and keep the fields of `gram.Step`, or X, A and the polynomial of each
step. The arithmetic and notation are those of `gram` and `direct`, written as phases over tiles because the matrices are not
values. The steps are a loop whose coefficients are data, so that compile time does not grow with their number.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret
from pallas_kernels.newton_schulz.reference import EPSILON, Triple
from pallas_kernels.newton_schulz.tiles import Arithmetic, Index, Matrix, divide, identity, repeat

_WARPS = {16: 1, 32: 1, 64: 4}  # by tile size; exact products of larger tiles need more shared memory than there is
# Number of programs, each with a workspace: as many as registers allow at a time, eight per multiprocessor of an H200.
_ALL_WARPS = 132 * 8


def _scale(square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From ‖S‖²: 1 / (‖S‖ + ε), zero if S is zero, and ‖S‖, one if S is zero. Scalars."""
    norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    return jnp.where(square > 0, 1.0 / (norm + EPSILON), 0.0), norm


@dataclasses.dataclass(frozen=True)
class _Call:
    """The context of a program: arithmetic, the steps' coefficients as a reference [steps, 3], and its workspace."""

    on: Arithmetic
    triples: jax.Ref
    steps: int
    tile: int
    square: jax.Ref  # [matrices, rows, rows]
    wide: jax.Ref | None  # [matrices, rows, columns], or None

    def small(self, place: Index) -> Matrix:
        return Matrix(self.square, place, self.tile)

    def large(self, place: Index) -> Matrix:
        assert self.wide is not None
        return Matrix(self.wide, place, self.tile)

    def triple(self, step: Index) -> tuple[jax.Array, ...]:
        return tuple(self.triples[step, i] for i in range(3))


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Storage of the Gram form's A, P, T and Q: those of all steps for the backward pass, otherwise only for the next step."""

    call: _Call
    keep: bool

    @staticmethod
    def places(steps: int, keep: bool) -> int:
        return 4 * steps + 10 if keep else 5

    def a(self, i: Index) -> Matrix:
        return self.call.small(4 * i if self.keep else 0)

    def p(self, i: Index) -> Matrix:
        return self.call.small(4 * i + 1 if self.keep else 1)

    def t(self, i: Index) -> Matrix:
        return self.call.small(4 * i + 2 if self.keep else 2)

    def q(self, i: Index) -> Matrix:
        return self.call.small(4 * i + 3 if self.keep else 3 + divide(i, 2)[1])

    @property
    def gram(self) -> Matrix:
        """S Sᵀ. Once A_0 is computed, only the backward pass needs it."""
        return self.extra(0) if self.keep else self.t(0)

    def extra(self, number: Index) -> Matrix:
        return self.call.small(4 * self.call.steps + 4 + number)


def _gram_steps(call: _Call, s: Matrix, chain: _Chain) -> None:
    """A_0, …, Q_steps of `gram.forward`."""
    on = call.on
    gram, a, q = chain.gram, chain.a(0), chain.q(0)
    square = gram.shape

    def product(i: Index, j: Index) -> None:
        gram[i, j] = on.dot(s, s, i, j, transposed=True)

    on.each_tile(square, product)
    scale, _ = _scale(on.trace(gram))

    def begin(i: Index, j: Index) -> None:
        a[i, j] = gram[i, j] * (scale * scale)
        q[i, j] = identity(call.tile, i, j) * scale

    on.each_tile(square, begin)

    def step(number: Index) -> None:
        ca, cb, cc = call.triple(number)
        a, p, t, q = (of(number) for of in (chain.a, chain.p, chain.t, chain.q))
        next_a, next_q = chain.a(number + 1), chain.q(number + 1)

        def polynomial(i: Index, j: Index) -> None:
            p[i, j] = ca * identity(call.tile, i, j) + cb * a[i, j] + cc * on.dot(a, a, i, j)

        def multiply(i: Index, j: Index) -> None:
            next_q[i, j] = on.dot(p, q, i, j)

        def advance_t(i: Index, j: Index) -> None:
            t[i, j] = on.dot(p, a, i, j)

        def advance_a(i: Index, j: Index) -> None:
            next_a[i, j] = on.dot(t, p, i, j)

        on.each_tile(square, polynomial)
        on.each_tile(square, multiply)

        @pl.when(number < call.steps - 1)
        def advance() -> None:
            on.each_tile(square, advance_t)
            on.each_tile(square, advance_a)

    repeat(call.steps, step)


def _gram_forward(call: _Call, s: Matrix, y: Matrix) -> None:
    chain = _Chain(call, keep=False)
    _gram_steps(call, s, chain)
    q = chain.q(call.steps)

    def write(i: Index, j: Index) -> None:
        y[i, j] = call.on.dot(q, s, i, j)

    call.on.each_tile(s.shape, write)


def _gram_backward(call: _Call, s: Matrix, dy: Matrix, ds: Matrix) -> None:
    """`gram.backward`, then dS = Q dY + (D + Dᵀ) S, where D is the cotangent of S Sᵀ."""
    on, chain = call.on, _Chain(call, keep=True)
    _gram_steps(call, s, chain)
    square = chain.gram.shape
    da, dp, outer, both = (chain.extra(number) for number in (1, 2, 3, 2))
    dq = lambda number: chain.extra(4 + divide(number, 2)[1])

    def begin(i: Index, j: Index) -> None:
        dq(call.steps)[i, j] = on.dot(dy, s, i, j, transposed=True)
        da[i, j] = jnp.zeros((call.tile, call.tile), jnp.float32)  # A_steps is not used
        outer[i, j] = jnp.zeros((call.tile, call.tile), jnp.float32)

    on.each_tile(square, begin)

    def step(passed: Index) -> None:
        """From the cotangents of A_{i+1} and Q_{i+1} to those of A_i and Q_i."""
        number = call.steps - 1 - passed
        _, cb, cc = call.triple(number)
        a, p, t, q = (of(number) for of in (chain.a, chain.p, chain.t, chain.q))
        later, earlier = dq(number + 1), dq(number)

        def polynomial(i: Index, j: Index) -> None:
            total = on.dot(later, q, i, j)
            dp[i, j] = jax.lax.cond(passed > 0, lambda: on.dot(t, da, i, j, on.dot(da, t, i, j, total)), lambda: total)

        def carry(i: Index, j: Index) -> None:
            outer[i, j] = on.dot(p, da, i, j)

        def advance(i: Index, j: Index) -> None:
            total = cb * dp[i, j] + cc * on.dot(a, dp, i, j, on.dot(dp, a, i, j))
            da[i, j] = on.dot(outer, p, i, j, total)

        def chain_rule(i: Index, j: Index) -> None:
            earlier[i, j] = on.dot(p, later, i, j)

        on.each_tile(square, polynomial)
        on.each_tile(square, carry)
        on.each_tile(square, advance)
        on.each_tile(square, chain_rule)

    repeat(call.steps, step)
    gram, first, q = chain.gram, dq(0), chain.q(call.steps)
    scale, norm = _scale(on.trace(gram))
    inner = on.total(square, lambda i, j: da[i, j] * gram[i, j])
    slope = -0.5 * scale * scale / norm * (on.trace(first) + 2 * scale * inner)

    def symmetric(i: Index, j: Index) -> None:
        both[i, j] = scale * scale * (da[i, j] + da[j, i].T) + 2 * slope * identity(call.tile, i, j)

    def write(i: Index, j: Index) -> None:
        ds[i, j] = on.dot(both, s, i, j, on.dot(q, dy, i, j))

    on.each_tile(square, symmetric)
    on.each_tile(s.shape, write)


def _direct_steps(
    call: _Call, s: Matrix, x: Callable[[Index], Matrix], a_and_p: Callable[[Index], tuple[Matrix, Matrix]]
) -> jax.Array:
    """Writes X_0, …, X_steps, and A and the polynomial of each step. Returns ‖S‖²."""
    on, first = call.on, x(0)
    square = on.total(s.shape, lambda i, j: s[i, j] * s[i, j])
    scale, _ = _scale(square)

    def begin(i: Index, j: Index) -> None:
        first[i, j] = s[i, j] * scale

    on.each_tile(s.shape, begin)

    def step(number: Index) -> None:
        ca, cb, cc = call.triple(number)
        before, after = x(number), x(number + 1)
        a, p = a_and_p(number)

        def product(i: Index, j: Index) -> None:
            a[i, j] = on.dot(before, before, i, j, transposed=True)

        def polynomial(i: Index, j: Index) -> None:
            p[i, j] = cb * a[i, j] + cc * on.dot(a, a, i, j)

        def advance(i: Index, j: Index) -> None:
            after[i, j] = on.dot(p, before, i, j, ca * before[i, j])

        on.each_tile(a.shape, product)
        on.each_tile(a.shape, polynomial)
        on.each_tile(s.shape, advance)

    repeat(call.steps, step)
    return square


def _direct_forward(call: _Call, s: Matrix, y: Matrix) -> None:
    x = lambda number: call.large(divide(number, 2)[1])
    _direct_steps(call, s, x, lambda _: (call.small(0), call.small(1)))
    result = x(call.steps)

    def write(i: Index, j: Index) -> None:
        y[i, j] = result[i, j]

    call.on.each_tile(s.shape, write)


def _direct_backward(call: _Call, s: Matrix, dy: Matrix, ds: Matrix) -> None:
    """`direct.backward`, with (dA + dAᵀ) X in place of its last two products."""
    on, x = call.on, call.large
    a_and_p = lambda number: (call.small(3 + 2 * number), call.small(4 + 2 * number))
    scale, norm = _scale(_direct_steps(call, s, x, a_and_p))
    dp, da, both = (call.small(place) for place in range(3))
    d = lambda number: call.large(call.steps + 1 + divide(number, 2)[1])
    start = d(call.steps)

    def begin(i: Index, j: Index) -> None:
        start[i, j] = dy[i, j]

    on.each_tile(s.shape, begin)

    def step(passed: Index) -> None:
        number = call.steps - 1 - passed
        ca, cb, cc = call.triple(number)
        before, later, earlier = x(number), d(number + 1), d(number)
        a, p = a_and_p(number)

        def polynomial(i: Index, j: Index) -> None:
            dp[i, j] = on.dot(later, before, i, j, transposed=True)

        def gram(i: Index, j: Index) -> None:
            da[i, j] = cb * dp[i, j] + cc * on.dot(a, dp, i, j, on.dot(dp, a, i, j))

        def symmetric(i: Index, j: Index) -> None:
            both[i, j] = da[i, j] + da[j, i].T

        def advance(i: Index, j: Index) -> None:
            earlier[i, j] = on.dot(both, before, i, j, on.dot(p, later, i, j, ca * later[i, j]))

        on.each_tile(a.shape, polynomial)
        on.each_tile(a.shape, gram)
        on.each_tile(a.shape, symmetric)
        on.each_tile(s.shape, advance)

    repeat(call.steps, step)
    first = d(0)
    inner = on.total(s.shape, lambda i, j: s[i, j] * first[i, j])

    def write(i: Index, j: Index) -> None:
        ds[i, j] = scale * first[i, j] - (scale * scale * inner / norm) * s[i, j]

    on.each_tile(s.shape, write)


def _places(form: str, steps: int, *, backward: bool) -> tuple[int, int]:
    """Numbers of square and wide matrices in the workspace of a program."""
    if form == "gram":
        return _Chain.places(steps, backward), 0
    return (2 * steps + 3, steps + 3) if backward else (2, 2)


_KERNELS: dict[tuple[str, bool], Callable[..., None]] = {
    ("gram", False): _gram_forward, ("gram", True): _gram_backward,
    ("direct", False): _direct_forward, ("direct", True): _direct_backward,
}  # fmt: skip


def _kernel(
    ones: jax.Ref,
    triples: jax.Ref,
    *refs: jax.Ref,
    arrays: int,
    programs: int,
    steps: int,
    tile: int,
    body: Callable[..., None],
    exact: bool,
    interpret: Interpret,
) -> None:
    """The other references are S, dY if any, and the result, each with all matrices, and the workspaces of this program."""
    arguments, (square, *wide) = refs[:arrays], refs[arrays:]
    call = _Call(Arithmetic.of(exact, interpret, ones[0]), triples, steps, tile, square, wide[0] if wide else None)
    program = pl.program_id(0)

    def run(turn: Index) -> None:
        body(call, *(Matrix(ref, program + turn * programs, tile) for ref in arguments))

    repeat(divide(arguments[0].shape[0] + programs - 1 - program, programs)[0], run)


def _run(
    inputs: Sequence[jax.Array],
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    interpret: Interpret,
    *,
    backward: bool,
) -> jax.Array:
    number, *sizes = inputs[0].shape
    if not number:
        return jnp.zeros(inputs[0].shape, jnp.float32)
    # Zero padding of a matrix stays zero and does not change its norm.
    tile = min(max(pl.next_power_of_2(sizes[0]), min(_WARPS)), max(_WARPS))
    rows, columns = (-(-size // tile) * tile for size in sizes)
    padded = [jnp.pad(x, ((0, 0), (0, rows - sizes[0]), (0, columns - sizes[1]))) for x in inputs]
    steps, programs = len(triples), min(number, _ALL_WARPS // _WARPS[tile])
    squares, wides = _places(form, steps, backward=backward)
    workspaces = [(squares, rows, rows)] + [(wides, rows, columns)] * (wides > 0)
    kernel = functools.partial(
        _kernel, arrays=len(inputs) + 1, programs=programs, steps=steps, tile=tile, body=_KERNELS[form, backward],
        exact=precision != jax.lax.Precision.DEFAULT, interpret=interpret,
    )  # fmt: skip
    y, *_ = gpu.call(
        kernel,
        warps=_WARPS[tile],
        interpret=interpret,
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct((number, rows, columns), jnp.float32)]
        + [jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for shape in workspaces],
        in_specs=[pl.BlockSpec()] * (len(inputs) + 2),
        out_specs=[pl.BlockSpec()] + [pl.BlockSpec((None, *shape), lambda i: (i, 0, 0, 0)) for shape in workspaces],
        name=f"newton_schulz_{form}_{'backward' if backward else 'forward'}_{rows}x{columns}",
    )(jnp.ones(1, jnp.int32), jnp.asarray(triples or ((0.0,) * 3,), jnp.float32), *padded)
    return y[:, : sizes[0], : sizes[1]]


def forward(
    s: jax.Array, *, triples: tuple[Triple, ...], form: str, precision: jax.lax.Precision, interpret: Interpret = False
) -> jax.Array:
    """NS of matrices [number, rows ≤ columns, columns], float32."""
    return _run([s], triples, form, precision, interpret, backward=False)


def backward(
    s: jax.Array,
    dy: jax.Array,
    *,
    triples: tuple[Triple, ...],
    form: str,
    precision: jax.lax.Precision,
    interpret: Interpret = False,
) -> jax.Array:
    """The cotangent of S from that of NS(S), float32 [number, rows, columns]."""
    return _run([s, dy], triples, form, precision, interpret, backward=True)
