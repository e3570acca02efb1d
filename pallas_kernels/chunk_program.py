"""The layout of one program of `chunk_scan`: some heads, whose channels lie in lanes, and some chunks of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import Arrays, Index
from pallas_kernels.layout import LANES

Item = TypeVar("Item")

# (carry, inputs) → (carry, outputs), all float32 matrices. Hashable, and restricted to operations that Mosaic compiles.
Chunk = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
Read = Callable[[int], Arrays]  # inputs of one of a program's chunks


def in_turn(function: Callable[..., Any], *trees: Any) -> Any:
    """`jax.vmap(function)(*trees)`, written out for one entry of the leading axes after another.

    The compiler keeps the order of such operations roughly. So a value is used soon after it is computed, and fewer registers are
    spilled than where each operation is done for all entries. Only chains of products that wait for each other are faster by vmap.
    """
    count = jax.tree.leaves(trees)[0].shape[0]
    results = [function(*jax.tree.map(lambda x, i=i: x[i], trees)) for i in range(count)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *results)


class Unroll(NamedTuple):
    """Chunks that one program advances in turn, in the forward and in the backward kernel: powers of two."""

    forward: int = 1
    backward: int = 1

    def dividing(self, count: int) -> "Unroll":
        """The same number of chunks, or fewer if that does not divide the number of all."""
        return Unroll(*(math.gcd(number, count) for number in self))


class Lanes(NamedTuple):
    """How the channels of heads lie in the lanes of a program.

    Attributes:
      together: number of heads in one program.
      padded: whether each head begins a tile of 128 lanes. Otherwise heads follow each other without space.
    """

    together: int
    padded: bool

    @classmethod
    def of(cls, heads: int, wanted: int, widths: set[int]) -> "Lanes":
        """The largest division of the heads into groups of at most `wanted`, without padding if one fills whole tiles.

        A block has whole tiles or all channels. Without vmap (`wanted` = 1) a program has one head.
        """
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        fills = lambda size: all(size * width % LANES == 0 for width in widths)
        whole = [size for size in sizes if size == heads or fills(size)]
        fitting = [size for size in whole if size <= wanted]
        # More than wanted may be needed: of one tile, to fill whole tiles twice as many (heads of 96 or 48), to have all channels
        # half as many again (11 heads of 64), because vector memory has no space for 13 where 8 are wanted.
        few = lambda size: size * max(widths) <= LANES or size <= (2 * wanted if fills(size) else wanted * 3 // 2)
        narrow = [size for size in whole if few(size)] if wanted > 1 else []
        if fitting or narrow:
            return cls(max([*fitting, *narrow[:1]]), padded=False)
        return cls(max(size for size in sizes if size <= wanted), padded=True)

    def stride(self, width: int) -> int:
        """Lanes from one head to the next."""
        return -(-width // LANES) * LANES if self.padded else width

    def split(self, x: jax.Array, width: int) -> jax.Array:
        """[m, lanes] → [together, m, width], or [m, width] for one head."""
        if self.together == 1:
            return x[:, :width]
        stride = self.stride(width)
        return jnp.stack([x[:, i * stride : i * stride + width] for i in range(self.together)])

    def store(self, ref: jax.Ref, y: jax.Array) -> None:
        """The inverse of `split`, into a block."""
        width = y.shape[-1]
        stride = self.stride(width)
        y = y.astype(ref.dtype)
        if stride == width:
            ref[...] = y if self.together == 1 else jnp.concatenate(list(y), axis=1)
        else:
            for i in range(self.together):
                ref[:, i * stride : i * stride + width] = y if self.together == 1 else y[i]


class Shapes(NamedTuple):
    """Where heads lie in lanes, the channels of one head of each input and output that has tokens, and the chunks of a program."""

    lanes: Lanes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    unroll: Unroll

    def chunk(self, chunk: Chunk) -> Chunk:
        """`chunk` for all heads of a program, by its own `of_heads` if it has one."""
        return chunk if self.lanes.together == 1 else getattr(chunk, "of_heads", None) or jax.vmap(chunk)

    def stages(self, chunk: Any) -> tuple[Callable[[Read], Callable[[int], Any]], Callable[..., Any]]:
        """For the chunks of a forward program in turn: a function from the inputs of each (by number) to those of the other
        function, which is `chunk` for all heads.

        With `chunk.ahead` it has two parts: `prepare` is done for all these chunks together, whose products then do not wait for
        each other, and `advance` takes its results.
        """
        if not getattr(chunk, "ahead", False):
            return lambda read: read, self.chunk(chunk)
        heads, count = self.lanes.together, self.unroll.forward
        advance = chunk.advance if heads == 1 else jax.vmap(chunk.advance)
        join = jnp.stack if heads == 1 else jnp.concatenate
        place = lambda c: c if heads == 1 else slice(c * heads, (c + 1) * heads)

        def prepare(read: Read) -> Callable[[int], Any]:
            xs = [read(c) for c in range(count)]
            found = chunk.prepare(jax.tree.map(lambda *x: join(x), *xs))
            return [(x, jax.tree.map(lambda y, c=c: y[place(c)], found)) for c, x in enumerate(xs)].__getitem__

        return prepare, lambda carry, xs: advance(carry, *xs)

    def read(self, refs: Sequence[jax.Ref], c: int) -> Arrays:
        """Inputs of a program's chunk c: those with tokens, then gates."""
        *tokens, gates = refs
        split = map(self.lanes.split, wide([ref.at[c] for ref in tokens]), self.inputs)
        return (*split, *self.heads([gates.at[:, c]]))

    def heads(self, refs: Sequence[jax.Ref]) -> Arrays:
        """Blocks [together, …, …] as the chunk takes them."""
        return tuple(x[0] if self.lanes.together == 1 else x for x in wide(refs))


class Blocks(NamedTuple):
    """Block specs on the grid batch × groups of heads × groups of `unroll` chunks. `chunks`: grid step → group of chunks."""

    shapes: Shapes
    size: int
    unroll: int
    chunks: Callable[[Index], Index]

    def of_heads(self, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """Arrays [batch, heads, …, …]."""
        shape = lambda x: (None, self.shapes.lanes.together, *x.shape[2:])
        return [pl.BlockSpec(shape(x), lambda row, group, i: (row, group, 0, 0)) for x in arrays]

    def of_chunks(self, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
        """Arrays [batch, heads, chunks, …, …]."""
        shape = lambda x: (None, self.shapes.lanes.together, self.unroll, *x.shape[3:])
        return [pl.BlockSpec(shape(x), lambda row, group, i: (row, group, self.chunks(i), 0, 0)) for x in arrays]

    def of_tokens(self, widths: Sequence[int]) -> list[pl.BlockSpec]:
        """Arrays [batch, chunks, m, lanes]."""
        lanes = self.shapes.lanes
        shape = lambda width: (None, self.unroll, self.size, lanes.together * lanes.stride(width))
        return [pl.BlockSpec(shape(width), lambda row, group, i: (row, self.chunks(i), 0, group)) for width in widths]

    def of_marks(self, marks: Sequence[jax.Array]) -> list[pl.BlockSpec]:
        """Marks [batch, 1, chunks], in scalar memory."""
        return [
            pl.BlockSpec((None, *x.shape[1:]), lambda row, group, i: (row, 0, 0), memory_space=pltpu.SMEM)
            for x in marks
        ]


def in_groups(items: Sequence[Item], sizes: Sequence[int]) -> list[tuple[Item, ...]]:
    """Consecutive groups of items with the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(items[start : start + size]))
        start += size
    assert start == len(items), (start, len(items))
    return parts


def wide(refs: Sequence[jax.Ref]) -> Arrays:
    return tuple(ref[...].astype(jnp.float32) for ref in refs)
