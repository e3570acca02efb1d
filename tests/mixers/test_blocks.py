"""The grid of blocks, through all mixers that read block by block: pieces of a stream, short sequences, and their cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import attention as softmax
from atlasjax.mixers import block_recurrence, infini, melodi, memorizing
from atlasjax.mixers.elastic import attention as elastic
from atlasjax.mixers.elastic import banks, hippo, sampling
from tests.comparisons import close
from tests.marks import some_slow

HEADS, DIM, SIZE = 2, 4, 3
NAMES = ("elastic", "block_attention", "memorizing", "infini", "melodi", "block_recurrence")


pytestmark = pytest.mark.usefixtures("compile_fast")


def mixer(name, size, batch, length):
    """A mixer of x [batch, time, heads · dim]: over whole sequences, its extend, and its state before the first token."""
    sizes, gate = (size, HEADS, DIM, DIM, jnp.float32), jnp.array([-0.5, 1.0])
    split = lambda x: [x.reshape(*x.shape[:2], HEADS, DIM) * scale for scale in (1.0, -0.7, 2.0)]
    if name == "melodi":
        shapes = ((HEADS * DIM, HEADS, 3 * DIM), (HEADS * DIM, HEADS * DIM), (3, HEADS * DIM), (size + 3, 3), (3,))
        arrays = [jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5 for i, shape in enumerate(shapes)]
        weights = melodi.Weights(*arrays, *[jnp.ones(HEADS * DIM)] * 3)
        return (
            lambda x, **options: melodi.attention(x, weights, **options),
            lambda x, state: melodi.extend(x, weights, state),
            melodi.init_state(batch, weights, jnp.float32),
        )
    if name in ("elastic", "block_attention"):
        count = max(1, elastic.blocks_needed(length, size))
        bank, r = elastic.no_bank(count, size), None
        if name == "elastic":
            r = sampling.sampled_reconstruction(5, "exponential", 6, 20.0)
            bank = banks.Bank(
                *(np.stack(x) for x in zip(*(hippo.block(5, m * size, (m + 1) * size) for m in range(count))))
            )
        return (
            lambda x, **options: elastic.attention(*split(x), bank, r, **options),
            lambda x, state: elastic.extend(*split(x), state, bank, r),
            elastic.init_state(batch, length, size, r, *sizes[1:]),
        )
    module, given, options, state = {
        "memorizing": (memorizing, (gate,), {"queue_length": 5}, lambda: memorizing.init_state(batch, 5, *sizes)),
        "infini": (infini, (gate,), {}, lambda: infini.init_state(batch, *sizes)),
        "block_recurrence": (block_recurrence, (), {}, lambda: block_recurrence.init_state(batch, *sizes)),
    }[name]
    return (
        lambda x, **more: module.attention(*split(x), *given, block_size=size, **options, **more),
        lambda x, state: module.extend(*split(x), *given, state),
        state(),
    )


def tokens(batch, time):
    return jax.random.normal(jax.random.key(0), (batch, time, HEADS * DIM))


# Each mixer streams at every split in its own file; here the blocks that they share, from every place in one.
@pytest.mark.parametrize("name", some_slow(NAMES, {"melodi", "infini"}))
def test_pieces_of_every_length_from_every_position(name):
    """Row p of the batch has read p tokens, up to the middle of the third block."""
    batch, time = 2 * SIZE + 2, 4 * SIZE
    attention, extend, state = mixer(name, SIZE, batch, time)
    extend, x = jax.jit(extend), tokens(batch, time)
    y, states = np.asarray(jax.jit(attention)(x)).reshape(batch, time, -1), [state]
    for t in range(batch - 1):
        states.append(extend(x[:, t : t + 1], states[-1])[1])
    start = jax.tree.map(lambda *rows: jnp.stack([row[p] for p, row in enumerate(rows)]), *states)
    from_each = lambda x, first, count: np.stack([x[p, p + first : p + first + count] for p in range(batch)])
    for count in (1, 2, SIZE, SIZE + 1):
        piece, state = extend(from_each(x, 0, count), start)
        close(piece.reshape(batch, count, -1), from_each(y, 0, count))
        piece, _ = extend(from_each(x, count, 1), state)
        close(piece.reshape(batch, 1, -1), from_each(y, count, 1))


def flops(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", some_slow(NAMES, {"melodi", "infini", "elastic"}))
def test_a_short_piece_costs_little_more_than_as_many_tokens(name):
    """It may touch two blocks, whose keys it all sees, and does not compute the queries of whole blocks."""
    size = 256
    _, extend, state = mixer(name, size, 1, 4 * size)
    cost = {count: flops(extend, tokens(1, count), state) for count in (1, 4)}
    assert cost[4] < 2.5 * 4 * cost[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_shorter_than_a_block_costs_what_attention_costs(name):
    attention, _, _ = mixer(name, 256, 1, 256)
    x = tokens(1, 8)
    reference = flops(lambda x: softmax.attention(*[x.reshape(1, 8, HEADS, DIM)] * 3), x)
    projections = 2 * 8 * (HEADS * DIM) ** 2 * 4 if name == "melodi" else 0
    assert flops(attention, x) < 1.5 * reference + projections


@pytest.mark.parametrize("name", some_slow(NAMES, {"melodi", "infini", "elastic"}))
def test_documents_beyond_the_bound_are_nan(name):
    """Also where the blocks that the bound allows would have room for them."""
    attention, _, _ = mixer(name, SIZE, 1, 20)
    x, ids = tokens(1, 20), jnp.repeat(jnp.array([[3, 1, 2, 3]]), 5, axis=1)
    run = functools.partial(jax.jit(attention, static_argnames="max_segments"), x, segment_ids=ids)
    few, every = run(max_segments=2), run(max_segments=4)
    np.testing.assert_allclose(few[:, :10], every[:, :10], atol=1e-6)
    assert np.isnan(few[:, 10:]).all()
    assert np.isfinite(every).all()
