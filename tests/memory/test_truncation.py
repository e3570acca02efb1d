"""Truncated backpropagation through a memory: `memory.scan(…, truncation=…)`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.memory import structures
from atlasjax.nn import AttentionConfig, MemoryConfig, ModelConfig
from atlasjax.nn.mixers import make_mixer
from atlasjax.presets import get_preset
from tests.marks import each_name, some_slow
from tests.memory.cases import RULES, assert_close, make_inputs

TIME, PIECE = 40, 16  # two pieces, and a shorter one
RULES_CUT = "titans_at_its_limits", "atlas", "gated_delta_rule", "own_features"


def in_pieces(rule, params, state, tokens, segment_ids=None, max_segments=None):
    """The calls that a truncated scan stands for."""
    ys = []
    for start in range(0, TIME, PIECE):
        part, ids = jax.tree.map(lambda x, i=start: x[:, i : i + PIECE], (tokens, segment_ids))
        y, state = memory.scan(rule, params, state, *part, segment_ids=ids, max_segments=max_segments)
        ys.append(y)
        state = jax.lax.stop_gradient(state)
    return jnp.concatenate(ys, axis=1), state


def graded(run):
    """A jitted function that gives outputs, state and gradients; the loss of its first argument's weights of the tokens."""

    def loss(inputs, weights):
        y, state = run(*inputs)
        return jnp.sum(weights[:, None, None] * jnp.sin(3 * y)), (y, state)

    return jax.jit(lambda weights, *inputs: jax.value_and_grad(loss, has_aux=True)(inputs, weights))


@each_name(RULES_CUT, slow=["titans_at_its_limits", "atlas", "own_features"])
def test_gradients_end_at_the_pieces(name):
    rule = RULES[name]
    params, *tokens = make_inputs(rule, time=TIME)
    every = np.ones(TIME, np.float32)
    run = graded(lambda p, t: memory.scan(rule, p, None, *t, truncation=PIECE))
    found = run(every, params, tokens)
    assert_close(found, graded(lambda p, t: in_pieces(rule, p, None, t))(every, params, tokens), 2e-5)
    exact = jax.jit(lambda p, t: memory.scan(rule, p, None, *t))(params, tokens)
    assert_close(found[0][1], exact, 2e-5)
    # The loss of the last piece alone, which no token of a piece before it has a gradient of.
    last = np.where(np.arange(TIME) < TIME // PIECE * PIECE, 0, every)
    of_tokens = jax.tree.leaves(run(last, params, tokens)[1][1])
    assert all(float(jnp.abs(g[:, last == 0]).max()) == 0 for g in of_tokens)
    assert all(float(jnp.abs(g[:, last > 0]).max()) > 0 for g in of_tokens)


@pytest.mark.slow
@each_name(RULES_CUT)
def test_exact_gradients_are_others(name):
    """Those of the first piece's values, whose later uses a truncated scan leaves out."""
    rule = RULES[name]
    params, *tokens = make_inputs(rule, time=TIME)
    runs = [lambda p, t, n=n: memory.scan(rule, p, None, *t, truncation=n) for n in (PIECE, None)]
    truncated, exact = (graded(run)(np.ones(TIME, np.float32), params, tokens)[1][1][2][:, :PIECE] for run in runs)
    assert float(jnp.abs(truncated - exact).max()) > 1e-4 * float(jnp.abs(exact).max())


# The bounded deep rule takes three times as long to compile.
FROM_INSIDE = {"matrix": rules.titans(8, structures.Matrix()).unbounded(), "bounded": RULES["titans"]}


@pytest.mark.parametrize("packed", some_slow([False, True], [False]))
@pytest.mark.parametrize("name", ["matrix", pytest.param("bounded", marks=pytest.mark.slow)])
def test_from_inside_a_chunk_and_packed(name, packed):
    """Pieces need not begin with a chunk, and the state that was given has the gradient of the first piece."""
    rule = FROM_INSIDE[name]
    params, *tokens = make_inputs(rule, time=TIME + 5)
    head, tokens = (jax.tree.map(lambda x: x[:, part], tokens) for part in (slice(5), slice(5, None)))  # noqa: B023
    given = {"segment_ids": jnp.asarray(np.repeat([0, 1, 4], [3, 20, 17]))[None].repeat(2, 0), "max_segments": 3}
    more = given if packed else {}
    _, before = memory.scan(rule, params, None, *head)

    def from_state(run):
        from_weights = lambda params, tokens, weights: run(params, before._replace(memory=weights), tokens)
        return graded(from_weights)(np.ones(TIME, np.float32), params, tokens, before.memory)

    found = from_state(lambda p, s, t: memory.scan(rule, p, s, *t, truncation=PIECE, **more))
    assert_close(found, from_state(lambda p, s, t: in_pieces(rule, p, s, t, **more)), 2e-5)
    assert all(float(jnp.abs(x).max()) > 0 for x in found[1][2].values())


def test_a_short_call_is_one_piece():
    rule = RULES["titans"]
    params, *tokens = make_inputs(rule, time=PIECE)
    text = lambda **given: str(jax.make_jaxpr(functools.partial(memory.scan, rule, **given))(params, None, *tokens))
    assert text(truncation=PIECE) == text()


def test_bad_input():
    rule = rules.titans(chunk_size=8)
    params, *tokens = make_inputs(rule, time=16)
    with pytest.raises(ValueError, match="truncation is 12; it must be a multiple of the rule's chunk size, 8"):
        memory.scan(rule, params, None, *tokens, truncation=12)
    with pytest.raises(ValueError, match=r"truncation must be an integer ≥ 1, got 0\."):
        memory.scan(rule, params, None, *tokens, truncation=0)
    with pytest.raises(ValueError, match="MemoryConfig: truncation is 12"):
        MemoryConfig("titans", chunk_size=8, truncation=12)
    linear = rules.gated_delta_rule()
    params, *tokens = make_inputs(linear, time=16)
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    partition = memory.Partition(mesh, time=("sequence",))
    with pytest.raises(ValueError, match=r"truncation is given, but partition\.time divides the tokens"):
        memory.scan(linear, params, None, *tokens, truncation=8, partition=partition)


@pytest.mark.parametrize("mixer", some_slow(["memory", "mac"], ["mac"]))
def test_in_a_layer(mixer):
    """The outputs of the last segment do not depend on tokens of the first in the gradient, but in their values."""
    config = ModelConfig(
        vocab_size=8, dim=8, num_layers=1, num_heads=2, mixer=mixer, conv_width=2, dtype="float32", remat=False,
        memory=MemoryConfig("titans", chunk_size=4, truncation=8), attention=AttentionConfig(window=8, segment_size=8),
    )  # fmt: skip
    graphdef, params = nnx.split(make_mixer(mixer, config, rngs=nnx.Rngs(0)), nnx.Param)
    x = jax.random.normal(jax.random.key(0), (1, 24, 8))
    last = lambda x: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)[:, 16:]))
    change, gradient = jax.jit(lambda x: (last(x.at[:, :8].multiply(2.0)) - last(x), jax.grad(last)(x)))(x)
    assert abs(float(change)) > 1e-6
    size = jnp.max(jnp.abs(gradient[0]), axis=-1)
    assert float(size[:14].max()) == 0.0  # the convolution sees one token of the segment before
    assert float(size[16:].min()) > 0.0


def test_in_presets():
    """Those of Muon memories that are not cached have it; segments of MAC must divide it."""
    expected = {
        "atlas-tiny": 1024, "atlas-340m": 4096, "atlas++-mag-340m": 512, "titans-tiny": None, "atlas-grm-tiny": None
    }  # fmt: skip
    assert {name: get_preset(name).memory.truncation for name in expected} == expected
    config = get_preset("atlas-mac-tiny")
    wrong = dataclasses.replace(config, attention=dataclasses.replace(config.attention, segment_size=192))
    with pytest.raises(ValueError, match=r"memory\.truncation=1024 must be a multiple of attention\.segment_size=192"):
        make_mixer("mac", wrong, rngs=nnx.Rngs(0))
