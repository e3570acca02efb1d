"""Sizes that `jax.export` does not know: any batch size is served; a number of tokens is refused by name, where blocks need it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from atlasjax import memory, rules
from atlasjax.mixers import attention, block_recurrence, gam, infini, log_linear, mamba, memorizing
from atlasjax.mixers.elastic import attention as elastic
from atlasjax.mixers.elastic import banks, hippo
from atlasjax.nn import abstract_model
from atlasjax.presets import get_preset

B, T = export.symbolic_shape("b,t")
H, D = 2, 4
RULES = {
    "titans": rules.titans(chunk_size=4),
    "delta_rule": rules.delta_rule(),
    "swdt": rules.swdt(chunk_size=4, cache_window=3),
    "cached": memory.CachedRule(rules.delta_rule(), "grm", segment_size=4, capacity=2),
}
BANK, R = banks.Bank(np.zeros((3, 8, 8), np.float32), np.zeros((3, 8, 2), np.float32)), np.zeros((8, 8), np.float32)
GATE, A = np.ones(H, np.float32), -np.ones((D, 6), np.float32)
GAM = gam.Params(*(np.ones(shape, np.float32) for shape in ((3, D), (D,), (6, D), (D, 2, D), (2, D))))
# Mixer → its call with tokens [batch, time, heads, dim].
MIXERS = {
    "elastic": lambda x: elastic.attention(x, x, x, BANK, R),
    "attention": lambda x: attention.attention(x, x, x, window=3),
    "infini": lambda x: infini.attention(x, x, x, GATE, block_size=2),
    "memorizing": lambda x: memorizing.attention(x, x, x, GATE, block_size=2, queue_length=4),
    "block_recurrence": lambda x: block_recurrence.attention(x, x, x, block_size=2),
    "log_linear": lambda x: log_linear.attention(x, x, x, jnp.ones((*x.shape[:3], 4))),
    "mamba": lambda x: mamba.selective_scan(x[:, :, 0], x[:, :, 0], A, *(jnp.ones((*x.shape[:2], 6)),) * 2),
    "hippo": lambda x: hippo.compress(x[:, :, 0], 8),
}


def tokens(batch, time):
    return jax.ShapeDtypeStruct((batch, time, H, D), jnp.float32)


def scan(rule, q):
    params = memory.init_params(rule, jax.random.key(0), num_heads=H, key_dim=D, value_dim=D)
    channels = rule.gate_channels(D, D)
    gates = memory.Gates(
        **{name: jnp.full(q.shape[:3] if n is None else (*q.shape[:3], n), 0.1) for name, n in channels.items()}
    )
    y, _ = memory.scan(rule, params, None, q, q, q, gates)
    first = jax.tree.map(lambda x: x[:, 0], (q, q, q, gates))
    return y, memory.step(rule, params, memory.init_state(rule, params, batch_size=q.shape[0], max_length=8), *first)[0]


def refused(call, *arguments):
    with pytest.raises(ValueError, match="has the symbolic time t; the number of tokens must be known") as error:
        jax.eval_shape(call, *arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", RULES)
def test_memories(name):
    call = lambda q: scan(RULES[name], q)
    y, of_token = jax.eval_shape(call, tokens(B, 5))
    assert y.shape == (B, 5, H, D)
    assert of_token.shape == (B, H, D)
    refused(call, tokens(2, T))


@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name):
    y = jax.tree.leaves(jax.eval_shape(MIXERS[name], tokens(B, 5)))[0]
    assert y.shape[0] == B
    refused(MIXERS[name], tokens(2, T))


def test_what_needs_no_blocks_takes_any_time():
    y, _ = jax.eval_shape(lambda x: gam.mix(GAM, x), jax.ShapeDtypeStruct((B, T, D), jnp.float32))
    assert y.shape == (B, T, D)


def test_models():
    graphdef, params = nnx.split(abstract_model(get_preset("titans-tiny")), nnx.Param)

    def extend(params, ids):
        model = nnx.merge(graphdef, params)
        return model.extend(ids, model.init_cache(ids.shape[0], 8))

    ids = lambda batch, time: jax.ShapeDtypeStruct((batch, time), jnp.int32)
    assert jax.eval_shape(extend, params, ids(B, 1))[0].shape[:2] == (B, 1)
    refused(lambda params, ids: nnx.merge(graphdef, params)(ids), params, ids(2, T))
    refused(extend, params, ids(2, T))


@pytest.mark.parametrize("name", RULES)
def test_positions_are_counted_in_int32(name):
    """At most 2^31 - 1 tokens a call. Only shapes are made here."""
    with pytest.raises(ValueError, match=r"q has 2,147,483,648 tokens; it must have fewer than 2\^31"):
        jax.eval_shape(lambda q: scan(RULES[name], q), tokens(1, 2**31))
