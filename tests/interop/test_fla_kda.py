"""Kimi Delta Attention against flash-linear-attention's slow form, values and gradients by torch's autograd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from tests.interop.test_naive import naive, torch

pytestmark = pytest.mark.usefixtures("compile_fast")

BATCH, TIME, KEY_HEADS, GROUPS, KEY, VALUE = 2, 37, 2, 3, 4, 5


def close(got, expected, what, tolerance=2e-5):
    expected = expected.detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=what)


def inputs():
    """q, k, v, g, β and the initial state, float32: three heads of values for one of keys, and decays that are zero."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys, values = (BATCH, TIME, KEY_HEADS), (BATCH, TIME, KEY_HEADS * GROUPS)
    alpha = rng.uniform(0.6, 1.0, (*values, KEY))
    alpha[:, 9, 1], alpha[:, 20, :, 2] = 0.0, 0.0
    with np.errstate(divide="ignore"):
        arrays = {
            "q": rng.normal(size=(*keys, KEY)),
            "k": unit(rng.normal(size=(*keys, KEY))),
            "v": rng.normal(size=(*values, VALUE)),
            "g": np.log(alpha),
            "beta": rng.uniform(0.1, 1.9, values),
            "start": rng.normal(size=(BATCH, KEY_HEADS * GROUPS, KEY, VALUE)),
        }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def test_rule_is_their_recurrence():
    given, rng = inputs(), np.random.default_rng(1)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in given.items()}
    *tokens, start = tensors.values()
    y, last = naive("kda").naive_recurrent_kda(*tokens, initial_state=start, output_final_state=True)
    weights, state_weights = rng.normal(size=y.shape).astype(np.float32), rng.normal(size=last.shape).astype(np.float32)
    ((y * torch.tensor(weights)).sum() + (last * torch.tensor(state_weights)).sum()).backward()

    rule = rules.kda()
    params = memory.init_params(rule, jax.random.key(0), num_heads=KEY_HEADS * GROUPS, key_dim=KEY, value_dim=VALUE)
    state = memory.init_state(rule, params, batch_size=BATCH)

    def ours(q, k, v, g, beta, start):
        q, k = (jnp.repeat(x, GROUPS, axis=2) for x in (q * KEY**-0.5, k))
        begun = state._replace(memory={"W": jnp.swapaxes(start, -1, -2)})
        y, after = memory.scan(rule, params, begun, q, k, v, memory.Gates(retention=jnp.exp(g), step_size=beta))
        last = jnp.swapaxes(after.memory["W"], -1, -2)
        return jnp.sum(y * weights) + jnp.sum(last * state_weights), (y, last)

    gradients, (got, after) = jax.jit(jax.grad(ours, argnums=tuple(range(6)), has_aux=True))(*given.values())
    close(got, y, "values")
    close(after, last, "final state")
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert np.abs(gradient).max() > 0
        close(gradient, tensor.grad, f"gradient of {name}")
