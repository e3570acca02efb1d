"""Initial gates: the derivation in `atlasjax.memory.suggested` measured, and no memory that diverges at them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.memory import MemoryRule, features, objectives, retention, structures
from atlasjax.memory.fast_weights.reference import read_one
from atlasjax.memory.fast_weights.suggested import curvature
from atlasjax.memory.suggested import initial_gates
from atlasjax.nn import GateProjection, MemoryConfig, MemoryMixer, ModelConfig
from tests.marks import some_slow

DEEP = {
    "ttt_linear": rules.ttt_linear(),
    "ttt_mlp": rules.ttt_mlp(),
    "titans": rules.titans(),
    "three layers": rules.titans(structure=structures.MLP(3)),
    "gated": rules.titans(structure=structures.GatedMLP()),
    "powers": rules.omeganet(features=features.Powers(2)),
    "monomials": rules.omeganet(),
}


@pytest.mark.parametrize("name", DEEP)
def test_curvature_of_deep_memories_is_as_estimated(name):
    rule, dim = DEEP[name], 16
    params = memory.init_params(rule, jax.random.key(0), num_heads=4, key_dim=dim, value_dim=dim)

    def largest(params, key):
        k = jax.random.normal(key, (dim,))
        jacobian = jax.jacrev(lambda w: read_one(rule, params, w, k / jnp.linalg.norm(k)))(params.weights)
        flat = jnp.concatenate([j.reshape(dim, -1) for j in jacobian.values()], axis=1)
        return jnp.linalg.eigvalsh(flat @ flat.T)[-1]

    measured = jax.vmap(largest)(params, jax.random.split(jax.random.key(1), 4)).max()
    assert measured < 2.5 * curvature(rule, dim, dim)  # the initial step is a fourth of the limit


@pytest.mark.parametrize(
    "rule",
    [
        rules.delta_rule(chunk_size=1),
        rules.delta_rule(chunk_size=16),
        rules.titans(chunk_size=16, structure=structures.Matrix()),
        rules.omeganet(chunk_size=16, window=4, structure=structures.Matrix(), features=features.Polynomial(2)),
    ],
    ids=["online", "chunk", "momentum", "window"],
)
def test_step_limit_of_a_matrix_memory_in_its_worst_case(rule):
    """All keys equal, ℓ2: the initial step converges, and eight times it, twice the limit, diverges; with the bound none does."""
    rule = dataclasses.replace(rule, retention=retention.Full())
    time, dim = 64 if rule.chunk_size == 1 else 320, 4
    initial = initial_gates(rule, 1, dim, dim, None).values
    key, value = np.eye(dim, dtype=np.float32)[0], np.ones(dim, np.float32)
    k, v = (jnp.broadcast_to(x, (1, time, 1, dim)) for x in (key, value))
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=dim, value_dim=dim)

    def errors(factor, rule):
        gates = {name: jnp.asarray(x, jnp.float32) for name, x in initial.items()}
        gates["step_size"] = gates["step_size"] * factor
        channels = rule.gate_channels(dim)
        gates = {
            name: jnp.broadcast_to(
                x if channels[name] else x[:, 0], (1, time, *(x if channels[name] else x[:, 0]).shape)
            )
            for name, x in gates.items()
        }
        y, _ = memory.scan(rule, params, None, k, k, v, memory.Gates(**gates))
        return np.abs(np.asarray(y)[0, :, 0] - value).max(axis=1)

    assert errors(1.0, rule.unbounded())[-1] < 0.05
    assert not errors(8.0, rule.unbounded())[-1] < 10.0
    bounded = dataclasses.replace(rule, bound=memory.Bound())
    assert all(errors(factor, bounded)[-1] < 0.05 for factor in (1.0, 8.0, 1000.0))


@pytest.mark.parametrize("rule", rules.REGISTRY)
def test_gates_start_where_they_should(rule):
    built = rules.REGISTRY[rule]()
    heads, dim = 4, 16
    initial = initial_gates(built, heads, dim, dim, None)
    projection = GateProjection(
        built, dim=8, num_heads=heads, key_dim=dim, value_dim=dim, max_step=None, rngs=nnx.Rngs(0)
    )
    gates = projection(jnp.zeros((1, 3, 8), jnp.bfloat16))
    expected = built.gate_channels(dim, dim)
    for name, gate in gates._asdict().items():
        assert (gate is None) == (name not in expected)
        if gate is None:
            continue
        channels = expected[name]
        assert gate.dtype == jnp.float32
        assert gate.shape == ((1, 3, heads, channels) if channels else (1, 3, heads))
        np.testing.assert_allclose(gate.reshape(1, 3, heads, -1)[0, 0], initial.values[name], rtol=2e-4)
    assert np.all(initial.values.get("step_size", 0.0) <= 0.5 * initial.max_step)
    if "retention" in expected:
        alpha = initial.values["retention"]
        assert np.all(alpha > 0.96)
        assert np.all(alpha < 1)
        assert np.all(np.diff(alpha[:, 0]) > 0)


@pytest.mark.parametrize("similar_keys", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_model_with_short_chunks_starts_within_the_bound(chunk, similar_keys):
    """Momentum adds a write up to 32 times, so a step is at most half of 1/(32 λ); it was up to 32 times as much."""
    rule, heads, dim = MemoryConfig("titans", chunk_size=chunk).build(), 4, 16
    projection = GateProjection(
        rule,
        dim=8,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        max_step=None,
        similar_keys=similar_keys,
        rngs=nnx.Rngs(0),
    )
    gates = projection(jnp.zeros((1, 1, 8)))
    suggested = memory.suggested_gates(rule, batch_size=1, time=1, num_heads=heads, key_dim=dim)
    np.testing.assert_allclose(gates.step_size, suggested.step_size, rtol=2e-4)
    assert np.all(gates.step_size * curvature(rule, dim, dim) * rule.horizon < 0.501)
    assert projection.max_step > 2 * gates.step_size.max()


def test_the_bound_hardly_acts_on_a_model_with_chunks_of_one_token():
    x = jax.random.normal(jax.random.key(1), (1, 64, 16))

    def run(bounded):
        memory_config = MemoryConfig("titans", chunk_size=1, bounded=bounded)
        config = ModelConfig(dim=16, num_layers=1, num_heads=2, memory=memory_config, dtype="float32", remat=False)
        return jax.jit(MemoryMixer(config, rngs=nnx.Rngs(0)))(x)

    bounded, papers = run(True), run(False)
    apart = jnp.linalg.norm(bounded - papers) / jnp.linalg.norm(papers)
    assert 0 < apart < 0.1  # a short convolution makes the keys of neighbours similar


def test_max_step_is_the_upper_end():
    config = MemoryConfig("titans", max_step=1e-4)
    projection = GateProjection(
        config.build(), dim=8, num_heads=2, key_dim=4, value_dim=4, max_step=config.max_step, rngs=nnx.Rngs(0)
    )
    gates = projection(1e6 * jax.random.normal(jax.random.key(0), (1, 64, 8)))
    assert gates.step_size.max() == np.float32(1e-4)
    assert projection(jnp.zeros((1, 1, 8))).step_size.max() <= 0.5e-4


def test_threshold_and_channel_gates():
    rule = MemoryRule(structures.Matrix(), objectives.Huber(), retention=retention.Channel())
    projection = GateProjection(rule, dim=8, num_heads=2, key_dim=4, value_dim=4, max_step=None, rngs=nnx.Rngs(0))
    gates = projection(jnp.zeros((1, 1, 8)))
    assert gates.retention.shape == (1, 1, 2, 4)
    np.testing.assert_allclose(gates.threshold, 1.0, rtol=1e-6)


# Rules that differ from one below in one part.
LIKE_ANOTHER = (
    "deep_transformer", "dot", "omeganet", "atlas_plus_plus", "titans_no_momentum", "dla", "rwkv7_one_key", "longhorn_channel",
    "ttt_linear", "swla", "yaad", "memora", "ttt_mlp", "gla", "retnet", "polysketch", "delta_rule", "longhorn",
)  # fmt: skip


@pytest.mark.parametrize("rule", some_slow(rules.REGISTRY, LIKE_ANOTHER))
def test_long_random_input_stays_finite(rule):
    """4,096 random tokens at the initial gates, default chunk: outputs, memory and momentum stay finite, and small."""
    every = {"newton_schulz_every": 8} if rules.REGISTRY[rule]().has_fixed_steps else {}
    config = ModelConfig(
        dim=16, num_layers=1, num_heads=2, memory=MemoryConfig(rule, **every), dtype="float32", remat=False
    )
    mixer = MemoryMixer(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer, nnx.Param)
    x = jax.random.normal(jax.random.key(1), (1, 4096, 16))
    y, state = jax.jit(lambda p, x: nnx.merge(graphdef, p).extend(x, mixer.init_state(1, 4096)))(params, x)
    assert np.all(np.isfinite(y))
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(state.memory) if x.dtype == jnp.float32)
    # Linear attention without retention sums values of length below one with steps of a half: at most 4,096 / 2.
    assert largest < (2048 if rule in ("linear_attention", "polysketch") else 100)
