"""Mixers called outside `jit`: the second call compiles nothing. Their loops over blocks were compiled again in every call."""

import jax
import jax.numpy as jnp
import pytest

from atlasjax.mixers import attention, block_recurrence, infini, log_linear, mamba, mamba2, mamba3, melodi, memorizing
from atlasjax.mixers.elastic import attention as elastic
from atlasjax.mixers.elastic import banks, hippo, sampling
from tests.marks import some_slow

SIZE = 4
X = jnp.ones((1, 11, 2, 4))
GATE = jnp.zeros(2)


def elastic_arguments():
    blocks = zip(*(hippo.block(3, m * SIZE, (m + 1) * SIZE) for m in range(4)))
    return banks.Bank(*map(jnp.stack, blocks)), sampling.sampled_reconstruction(3, "uniform", 2)


BANK = elastic_arguments()
MELODI = melodi.Weights(*(jnp.ones(s) for s in ((8, 2, 12), (8, 8), (2, 8), (SIZE + 2, 2), (2,), (8,), (8,), (8,))))
ROWS = X.reshape(1, 11, 8)
LONG = jnp.ones((1, 300, 1, 2))  # several blocks of queries

# name → (of tokens x with packed documents or without, the tokens, state, of tokens x and a state)
MIXERS = {
    "attention": (
        lambda x, **documents: attention.attention(x, x, x, **documents),
        LONG,
        attention.init_window(1, 3, 1, 2, 2, jnp.float32),
        lambda x, state: attention.extend(x, x, x, state),
    ),
    "block recurrence": (
        lambda x, **documents: block_recurrence.attention(x, x, x, block_size=SIZE, **documents),
        X,
        block_recurrence.init_state(1, SIZE, 2, 4, 4, jnp.float32),
        lambda x, state: block_recurrence.extend(x, x, x, state),
    ),
    "memorizing": (
        lambda x, **documents: memorizing.attention(x, x, x, GATE, queue_length=6, block_size=SIZE, **documents),
        X,
        memorizing.init_state(1, 6, SIZE, 2, 4, 4, jnp.float32),
        lambda x, state: memorizing.extend(x, x, x, GATE, state),
    ),
    "infini": (
        lambda x, **documents: infini.attention(x, x, x, GATE, block_size=SIZE, **documents),
        X,
        infini.init_state(1, SIZE, 2, 4, 4, jnp.float32),
        lambda x, state: infini.extend(x, x, x, GATE, state),
    ),
    "elastic": (
        lambda x, **documents: elastic.attention(x, x, x, *BANK, **documents),
        X,
        elastic.init_state(1, 16, SIZE, BANK[1], 2, 4, 4, jnp.float32),
        lambda x, state: elastic.extend(x, x, x, state, *BANK),
    ),
    "melodi": (
        lambda x, **documents: melodi.attention(x, MELODI, **documents),
        ROWS,
        melodi.init_state(1, MELODI, jnp.float32),
        lambda x, state: melodi.extend(x, MELODI, state),
    ),
    "log-linear": (
        lambda x, **documents: log_linear.attention(
            x, x, x, log_linear.segment_weights(x, x, **documents), **documents
        ),
        X,
        log_linear.init_state(1, 2, 4, 4, 16),
        lambda x, state: log_linear.extend(state, x, x, x, connector=x),
    ),
    "mamba": (
        lambda x: mamba.selective_scan(x, x, -jnp.ones((8, 2)), x[..., :2], x[..., :2])[0],
        ROWS,
        mamba.init_state(1, 8, 2),
        lambda x, state: mamba.selective_scan(x, x, -jnp.ones((8, 2)), x[..., :2], x[..., :2], state=state),
    ),
}


# Mixers of blocks of tokens are made in one way.
@pytest.mark.parametrize("name", some_slow(MIXERS, {"infini", "melodi", "elastic", "block recurrence"}))
def test_a_call_is_compiled_once(name, compiled):
    whole, x, state, extend = MIXERS[name]
    calls = {
        "whole": lambda: whole(x),
        "gradient": lambda: jax.grad(lambda x: whole(x).sum())(x),
        "piece": lambda: extend(x[:, :7], state),
        "token": lambda: extend(x[:, :1], state),
    }
    if name != "mamba":
        ids = jnp.zeros(x.shape[:2], int).at[:, 5:].set(1)
        calls["documents"] = lambda: whole(x, segment_ids=ids)
        if name not in ("attention", "log-linear"):
            calls["bounded documents"] = lambda: whole(x, segment_ids=ids, max_segments=3)
    for call, run in calls.items():
        run()
        compiled.clear()
        run()
        assert not compiled, call


@pytest.mark.parametrize("module", [mamba, mamba2, mamba3])
def test_a_definition_is_compiled_once(module, compiled):
    groups = X[:, :, :1]
    run = {
        mamba: lambda: mamba.reference(ROWS, ROWS, -jnp.ones((8, 2)), ROWS[..., :2], ROWS[..., :2]),
        mamba2: lambda: mamba2.reference(X, X[..., 0], -jnp.ones(2), groups, groups),
        mamba3: lambda: mamba3.reference(X[:, :, None], *[X[..., 0]] * 3, *[X[:, :, None]] * 2),
    }[module]
    run()
    compiled.clear()
    run()
    assert not compiled
