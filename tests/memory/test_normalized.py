"""Normalized linear attention: the published sums in NumPy, the engine against the definition, streams, packed rows, its bound."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, nn, rules
from atlasjax.memory import CachedRule, NormalizedRule, features
from tests.marks import some_slow
from tests.memory.cases import assert_close, check_every_split_and_read, graded
from tests.streams import streamed

TIME = 23
IDS = jnp.asarray(np.stack([np.repeat([0, 1, 4], [5, 9, 9]), np.repeat([3, 4], [16, 7])]))


def decaying(rule):
    return NormalizedRule(dataclasses.replace(rule, features=features.EluPlusOne()))


CASES = {
    "elu": rules.normalized_linear_attention(8),
    "square": rules.normalized_linear_attention(features=features.Homogeneous(2), eps=1e-2),
    "gla": decaying(rules.gla(8)),
}


def make_inputs(rule, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    wide = jnp.promote_types(dtype, jnp.float32)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=3)
    params = jax.tree.map(lambda x: jnp.asarray(x + rng.standard_normal(x.shape), wide), params)
    q, k, v = (jnp.asarray(rng.standard_normal((2, TIME, 2, dim)), dtype) for dim in (4, 4, 3))
    drawn = {"step_size": rng.uniform(0.0, 1.0, (2, TIME, 2)), "retention": rng.uniform(0.7, 1.0, (2, TIME, 2, 4))}
    gates = {name: jnp.asarray(drawn[name], wide) for name in rule.gate_channels(4, 3)}
    return params, q, k, v, memory.Gates(**gates)


def published(rule, params, q, k, v, gates):
    """Every read as a quotient of sums over all earlier tokens: no memory at all."""
    elu = rule.rule.features == features.EluPlusOne()
    phi = lambda x: np.where(x > 0, x + 1, np.exp(x)) if elu else np.outer(x, x).ravel()
    per_channel, y = gates.retention is not None, np.zeros(v.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        decay = lambda i, b=b, t=t, h=h: gates.retention[b, i : t + 1, h].prod(0) if per_channel else 1.0
        weight = np.array(
            [gates.step_size[b, i, h] * phi(q[b, t, h]) @ (decay(i + 1) * phi(k[b, i, h])) for i in range(t + 1)]
        )
        start = params.weights["W"][h] @ (
            decay(0) * np.asarray(rule.rule.features.apply(None, jnp.asarray(q[b, t, h])))
        )
        y[b, t, h] = (rule.eps * start + weight @ v[b, : t + 1, h]) / (rule.eps + weight.sum())
    return y


@pytest.mark.parametrize("name", some_slow(CASES, ["gla"]))
def test_values_and_gradients_of_packed_rows(name, x64):
    rule, args = CASES[name], make_inputs(CASES[name])
    found = graded(memory.scan, rule, *args, segment_ids=IDS, max_segments=4)
    assert_close(found, graded(memory.reference, rule, *args, segment_ids=IDS), 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_published_quotient(name, x64):
    rule = CASES[name]
    args = make_inputs(rule)
    y, _ = memory.scan(rule, args[0], None, *args[1:])
    assert_close(y, published(rule, *jax.tree.map(np.asarray, args)), 1e-12)


@pytest.mark.parametrize("name", some_slow(CASES, ["gla"]))
def test_every_split(name, x64):
    rule = CASES[name]
    params, *tokens = make_inputs(rule)
    check_every_split_and_read(rule, params, tokens, 5, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_float32_and_bfloat16(dtype, tolerance):
    rule = CASES["elu"]
    params, *tokens = make_inputs(rule, jnp.dtype(dtype))
    y, state = memory.scan(rule, params, None, *tokens)
    expected, _ = memory.reference(rule, params, None, *jax.tree.map(lambda x: x.astype(jnp.float32), tokens))
    assert (y.dtype, state.memory["W"].dtype) == (dtype, jnp.float32)
    assert_close(y.astype(jnp.float32), expected, tolerance)


def test_reads_are_averages(x64):
    """Nothing read is larger than the largest value or what a fresh memory reads, also where nothing was written or all is zero."""
    for name, rule in CASES.items():
        params, q, k, v, gates = make_inputs(rule)
        fresh = memory.read(rule, params, memory.init_state(rule, params, batch_size=2), q)
        skip = jnp.einsum("hvd,bthd->bthv", params.weights["W"], rule.rule.features.apply(None, q))
        assert_close(fresh, skip, 1e-12)
        if name == "gla":  # its decay per channel changes W_0 φ(q)
            continue
        for factor in (0.0, 1e-9, 1.0, 1e9):
            few = gates._replace(step_size=gates.step_size * factor)
            y, _ = memory.scan(rule, params, None, q, k, v, few)
            assert (jnp.abs(y) <= jnp.maximum(jnp.abs(skip), jnp.abs(v).max()) * (1 + 1e-9)).all()
    zero = jnp.zeros_like(q)
    y, _ = memory.scan(
        CASES["square"], make_inputs(CASES["square"])[0], None, zero, zero, v, gates._replace(retention=None)
    )
    assert not y.any()


def test_segments_of_a_cache_are_averages(x64):
    rule = CachedRule(CASES["elu"], segment_size=8, aggregation="grm")
    params, q, k, v, gates = make_inputs(CASES["elu"])
    gates = gates._replace(connector=k)
    found = jax.jit(lambda: memory.scan(rule, params, None, q, k, v, gates)[0])()
    assert_close(found, memory.reference(rule, params, None, q, k, v, gates)[0], 1e-12)


def test_what_cannot_be_normalized():
    for wrong in (rules.delta_rule(), rules.swla(window=2), rules.titans()):
        with pytest.raises(ValueError, match="must be a sum of outer products"):
            NormalizedRule(wrong)
    for odd in (features.Identity(), features.Homogeneous(3)):
        with pytest.raises(ValueError, match="is_positive"):
            rules.normalized_linear_attention(features=odd)


def test_a_degree_alone(x64):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 7, 5))
    for degree in (1, 2, 3, 4):
        phi = features.Homogeneous(degree)
        found = phi.apply(None, jnp.asarray(q)) @ phi.apply(None, jnp.asarray(k)).T
        assert_close(found, (q @ k.T) ** degree, 1e-12)
        assert phi.key_dim(phi.dim(5)) == 5


def test_a_language_model_has_it_by_its_address():
    """Trained from W_0 = 0, and streamed."""
    config = nn.ModelConfig(
        vocab_size=11, dim=8, num_layers=1, num_heads=2, head_dim=4, mlp_dim=8, dtype="float32", mixer="memory",
        memory=nn.MemoryConfig(rule="atlasjax.rules:normalized_linear_attention"),
    )  # fmt: skip
    model, tokens = nn.LanguageModel(config, rngs=nnx.Rngs(0)), jnp.arange(18).reshape(2, 9) % 11
    logits, gradient = nnx.jit(lambda model: (model(tokens), nnx.grad(lambda m: jnp.square(m(tokens)).mean())(model)))(
        model
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    extend = functools.partial(nnx.jit(lambda model, x, state: model.extend(x, state)), model)
    assert_close(streamed(extend, tokens, model.init_cache(2, 9), range(10))[0], logits, 1e-5)
