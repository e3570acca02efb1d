"""The cross entropy in chunks is that of all tokens at once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.train import LossConfig, TrainConfig
from atlasjax.train.loss import cross_entropy_sum

BATCH, TIME, DIM, VOCABULARY = 2, 7, 5, 11


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    head = jax.random.normal(keys[0], (DIM, VOCABULARY))
    hidden = jax.random.normal(keys[1], (BATCH, TIME, DIM)).astype(dtype)
    targets = jax.random.randint(keys[2], (BATCH, TIME), 0, VOCABULARY)
    weights = jnp.asarray([[1, 0, 1, 1, 0.5, 1, 1], [0, 0, 0, 1, 1, 1, 0]])
    return head, hidden, targets, weights


def definition(head, hidden, targets, weights, z_loss):
    """Token by token, in float64."""
    head, hidden, weights = (np.asarray(x, np.float64) for x in (head, hidden, weights))
    total = 0.0
    for b in range(BATCH):
        for t in range(TIME):
            logits = hidden[b, t] @ head
            normalizer = np.log(np.exp(logits).sum())
            total += weights[b, t] * (normalizer - logits[targets[b, t]] + z_loss * normalizer**2)
    return total


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 100])
def test_every_chunk_gives_the_definition(chunk, z_loss):
    head, hidden, targets, weights = inputs()
    run = jax.jit(
        lambda head, hidden: cross_entropy_sum(lambda h: h @ head, hidden, targets, weights, chunk=chunk, z_loss=z_loss)
    )
    np.testing.assert_allclose(run(head, hidden), definition(head, hidden, targets, weights, z_loss), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_in_chunks(dtype):
    head, hidden, targets, weights = inputs(dtype)

    def loss(head, hidden, chunk):
        return cross_entropy_sum(lambda h: h @ head.astype(dtype), hidden, targets, weights, chunk=chunk, z_loss=1e-2)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    whole, parts = gradients(head, hidden, None), gradients(head, hidden, 3)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(whole))
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x.astype(jnp.float32), g) for g in (whole, parts)), atol=tolerance * scale
    )


def test_gradients_of_weights_in_chunks():
    head, hidden, targets, weights = inputs()
    loss = lambda weights, chunk: cross_entropy_sum(lambda h: h @ head, hidden, targets, weights, chunk=chunk)
    np.testing.assert_allclose(jax.grad(loss)(weights, 3), jax.grad(loss)(weights, None), rtol=1e-5)


def test_second_derivatives_in_chunks():
    head, hidden, targets, weights = inputs()
    direction = jax.random.normal(jax.random.key(9), head.shape)

    def along(head, chunk):  # a derivative of the gradient, in both modes
        gradient = jax.grad(lambda h: cross_entropy_sum(lambda x: x @ h, hidden, targets, weights, chunk=chunk))
        backward = jax.grad(lambda h: jnp.vdot(gradient(h), direction))(head)
        return backward, jax.jvp(gradient, (head,), (direction,))[1]

    whole, parts = along(head, None), along(head, 3)
    chex.assert_trees_all_close(parts, whole, atol=1e-5 * float(jnp.max(jnp.abs(whole[0]))))


def test_no_logit_is_computed_twice():
    head, hidden, targets, weights = inputs()
    loss = lambda head, hidden: cross_entropy_sum(lambda h: h @ head, hidden, targets, weights, chunk=1)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(head, hidden).as_text()
    assert text.count("stablehlo.dot_general") == 3  # the logits, and what both factors have of their cotangent


def test_no_array_holds_the_logits_of_all_tokens():
    head, hidden, targets, weights = inputs()
    hidden, targets, weights = (jnp.tile(x, (1, 16) + (1,) * (x.ndim - 2)) for x in (hidden, targets, weights))

    def largest(chunk):
        loss = lambda head: cross_entropy_sum(lambda h: h @ head, hidden, targets, weights, chunk=chunk)
        text = jax.jit(jax.grad(loss)).lower(head).as_text()
        return f"{16 * TIME}x{VOCABULARY}x" in text

    assert largest(None)
    assert not largest(8)


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 0), ("chunk", 1.5), ("chunk", True), ("z_loss", -1.0), ("z_loss", float("inf"))]
)
def test_bad_values(field, value):
    with pytest.raises(ValueError, match=rf"loss\.{field} is {value}; it must be"):
        LossConfig(**{field: value})


def test_a_config_from_before_has_the_default():
    assert TrainConfig.__dataclass_fields__["loss"].default_factory() == LossConfig(chunk=512, z_loss=0.0)
