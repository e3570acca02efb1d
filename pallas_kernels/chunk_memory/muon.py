"""A block of tokens of a memory written by Muon, with matrix operations only. The TPU kernel runs it per block.

    S_t = θ_t S_{t−1} − Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; k_{t−j}, v_{t−j})        M_t = α_t M_{t−1} + η_t NS(S_t)

Newton–Schulz is not linear, so there is no dual form. The momenta of a block's writing tokens are formed and orthogonalized a few
matrices at a time, so that their products do not wait for each other. A read does not need M_t itself:

    M_t h = a_t M_0 h + Σ_{j ≤ t} P[t,j] η_j NS(S_j) h        P[t,j] = α_{j+1} … α_t
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import Arrays
from pallas_kernels.blocks import HIGHEST, Precision, entry, finer, iota, product, transposed
from pallas_kernels.chunk_memory.bound import Factors, Weights, within_norm
from pallas_kernels.chunk_memory.chunk import MemoryChunk, after_window, gradient_factors, window_rows
from pallas_kernels.chunk_memory.gates import window_matrix
from pallas_kernels.newton_schulz import forms
from pallas_kernels.newton_schulz.reference import Triple
from pallas_kernels.triangular import decay_products

# Number of writes orthogonalized at a time, in a loop, forward and backward. Unrolled code takes long to compile, and exact
# products keep a matrix unit busy with fewer matrices.
_TOGETHER = {HIGHEST: (2, 1), Precision.HIGH: (4, 2)}
# Most numbers in the matrices of one such group backward. Two of 256 × 512 need more than a v5p's vector memory.
_MOST_NUMBERS_BACKWARD = 2**17

Matrices = tuple[jax.Array, ...]


def writes(numbers: int, dtype: jax.typing.DTypeLike) -> int:
    """Writes per block of a memory with `numbers` weights. The momentum and the update of each write are on chip.

    dtype: of the tokens. With float32 tokens products are exact, which takes more space.
    """
    if numbers <= 2**17:
        return 8
    return 2 if jnp.dtype(dtype) == jnp.float32 else 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def orthogonalized(triples: tuple[Triple, ...], precision: Precision, matrices: Matrices) -> Matrices:
    """Newton–Schulz of matrices with rows ≤ columns, by `forms.cheapest`."""
    form, precision = _form(triples, precision, matrices)
    run = lambda group: forms.forward(group, triples, form, precision)
    return _in_groups(run, _TOGETHER[precision][0], matrices)


def _orthogonalized_forward(
    triples: tuple[Triple, ...], precision: Precision, matrices: Matrices
) -> tuple[Matrices, Matrices]:
    return orthogonalized(triples, precision, matrices), matrices


def _orthogonalized_backward(
    triples: tuple[Triple, ...], precision: Precision, matrices: Matrices, cotangents: Matrices
) -> tuple[Matrices]:
    form, precision = _form(triples, precision, matrices)
    run = lambda group, d: forms.backward(group, d, triples, form, precision)
    together = _TOGETHER[precision][1]
    while together > 1 and together * matrices[0].size > _MOST_NUMBERS_BACKWARD:
        together //= 2
    return (_in_groups(run, together, matrices, cotangents),)


orthogonalized.defvjp(_orthogonalized_forward, _orthogonalized_backward)


def _in_groups(run: Callable[..., Sequence[jax.Array]], together: int, *lists: Matrices) -> Matrices:
    """Applies run(matrices[, …]) → matrices to groups of `together` matrices. The loop's arrays are scratch."""
    count = len(lists[0])
    if count <= together:
        return tuple(run(*lists))

    def loop(*refs: jax.Ref) -> Matrices:
        for ref, matrices in zip(refs, lists):
            for i, x in enumerate(matrices):
                ref[i] = x

        def group(number: jax.Array, _: None) -> None:
            places = [number * together + i for i in range(together)]
            results = run(*(tuple(ref[i] for i in places) for ref in refs))
            for i, x in zip(places, results):
                refs[0][i] = x

        jax.lax.fori_loop(0, count // together, group, None)
        return tuple(refs[0][i] for i in range(count))

    return pl.run_scoped(loop, *(pltpu.VMEM((count, *x[0].shape), jnp.float32) for x in lists))


def _form(triples: tuple[Triple, ...], precision: Precision, matrices: Matrices) -> tuple[str, Precision]:
    rows, cols = matrices[0].shape
    return forms.cheapest(rows, cols, len(triples), precision)


@dataclasses.dataclass(frozen=True)
class MuonChunk:
    """A `chunk_scan.Chunk` whose chunks are the blocks of a memory's chunk.

    Carry: M_{t'} by name, then the carry of `memory`. Inputs: those of `memory`, with one more row of gates, which is 1 for the
    tokens of a block that begins a chunk. m is a multiple of `every`.

    Attributes:
      memory: the chunk of the same memory without Newton–Schulz, with momentum.
      triples: coefficients of Newton–Schulz, one triple per step.
      every: the memory is written once every `every` tokens.
      newton_schulz: function for matrices with rows ≤ columns. None runs it on chip, inside the kernel that runs this chunk.
      transposed: transposes a matrix: by a product on a TPU.
    """

    memory: MemoryChunk
    triples: tuple[Triple, ...]
    every: int
    newton_schulz: Callable[[jax.Array], jax.Array] | None = None
    transposed: Callable[[jax.Array], jax.Array] = transposed

    def __call__(self, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        names, window, structure = self.memory.names, self.memory.window, self.memory.structure
        dot = functools.partial(product, precision=self.memory.precision)
        q, k, v, rows = xs
        gates = self.transposed(rows)
        step, real = gates[:, :1], gates[:, 1:2]
        alpha = rows[2:3] if self.memory.retention else None
        index = 2 + self.memory.retention
        theta = rows[index : index + 1]
        begins = entry(gates[:, -1:], 0)
        start, memory, momenta = self._begun(carry, begins)
        m = q.shape[0]
        left_over: tuple[jax.Array, ...] = ()
        gamma = (iota(m, 0) == iota(m, 1)).astype(jnp.float32)  # Γᵀ [E, m]
        if window > 1:
            k, v, real, left_over = after_window(carry[-3:], k, v, real)
            gamma = self.transposed(window_matrix(gates[:, index + 1 : index + 1 + window], window_rows(window)))
        # Exact also for bfloat16 tokens: Newton–Schulz enlarges small singular values, and with them the rounding of products.
        at_start = lambda name, h: product(h, start[name], 1, 1)
        widths = {name: w.shape[0] for name, w in start.items()}
        factors = gradient_factors(structure, self.memory.objective, at_start, widths, k, v).factors

        products, beta = decay_products(theta)
        D = -real * product(gamma, products, 1, 1)  # [E, m]: coefficient of each token's gradient in each token's S
        pairwise, a = (iota(m, 0) >= iota(m, 1)).astype(jnp.float32), None
        if alpha is not None:
            pairwise, a = decay_products(alpha)
        writers = range(self.every - 1, m, self.every)

        updates, after_momenta = self._updates(momenta, factors, beta, D)
        weight = {j: entry(step, j) * pairwise[:, j : j + 1] for j in writers}  # [m, 1]

        def linear(name: str, h: jax.Array) -> jax.Array:
            out = dot(h, memory[name], 1, 1)
            if a is not None:
                out = a * out
            for j, update in zip(writers, updates[name]):
                out = out + weight[j] * dot(h, update, 1, 1)
            return out

        y = structure.apply(linear, q, q, None)
        after = []
        for name in names:
            w = memory[name] if a is None else entry(a, m - 1) * memory[name]
            for j, update in zip(writers, updates[name]):
                w = w + entry(weight[j], m - 1) * update
            after.append(w)
        return (*start.values(), *after, *after_momenta, *left_over), (y,)

    def _begun(self, carry: Arrays, begins: jax.Array) -> tuple[Weights, Weights, Weights]:
        """M_{t'}, M and S before the block, by name. begins: 1 if it is the first one of its chunk, else 0, [1, 1]."""
        names, count = self.memory.names, len(self.memory.names)
        start, memory, momenta = (dict(zip(names, carry[i * count : (i + 1) * count])) for i in range(3))
        if (norm_bound := self.memory.norm_bound) is not None:
            begun = lambda w: (begins * within_norm(norm_bound * w.shape[0] ** 0.5, w) + (1.0 - begins)) * w
            memory, momenta = jax.tree.map(begun, memory), jax.tree.map(begun, momenta)
        return {name: begins * memory[name] + (1.0 - begins) * w for name, w in start.items()}, memory, momenta

    def _updates(
        self, momenta: Weights, factors: Factors, beta: jax.Array, coefficients: jax.Array
    ) -> tuple[dict[str, list[jax.Array]], Matrices]:
        """NS(S_j) of the writing tokens of each weight, and the last S of each. coefficients: D [E, m]."""
        writers = range(self.every - 1, coefficients.shape[1], self.every)
        updates: dict[str, list[jax.Array]] = {}
        last = []
        for name in self.memory.names:
            left, inputs = factors[name]
            # Newton–Schulz takes matrices with rows ≤ columns; Sᵀ is formed as such, and only S and NS(S) are transposed.
            tall = left.shape[1] > inputs.shape[1]
            first = momenta[name].T if tall else momenta[name]
            high, wide = (inputs, left) if tall else (left, inputs)
            S = [entry(beta, j) * first + product(high * coefficients[:, j : j + 1], wide, 0, 0) for j in writers]
            last.append(S[-1].T if tall else S[-1])
            if self.newton_schulz is None:
                out = orthogonalized(self.triples, finer(self.memory.precision), tuple(S))
            else:
                out = tuple(self.newton_schulz(jnp.stack(S)))
            updates[name] = [x.T if tall else x for x in out]
        return updates, tuple(last)
