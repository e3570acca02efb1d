"""Gated DeltaProduct against flash-linear-attention's slow PyTorch reference: values and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.mixers.delta_product import interleaved, last_reads
from tests.interop.fla_naive import compare, naive

BATCH, TIME, HEADS, KEY, VALUE = 2, 37, 2, 4, 5  # rows of more than one block

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.parametrize(("writes", "forgets"), [(2, True), (3, False)])
def test_values_and_gradients(writes, forgets):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, v = normal(BATCH, TIME, HEADS, KEY), normal(BATCH, TIME, writes, HEADS, VALUE)
    k = normal(BATCH, TIME, writes, HEADS, KEY)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, (BATCH, TIME, writes, HEADS)).astype(np.float32)
    g = np.log(rng.uniform(0.8, 1, (BATCH, TIME, HEADS))).astype(np.float32)
    rule = rules.gated_delta_rule() if forgets else rules.delta_rule()
    params = memory.MemoryParams({"W": jnp.zeros((HEADS, VALUE, KEY))}, None, None)

    def ours(q, k, v, beta, g=None):
        alpha = None if g is None else jnp.exp(g)
        rows = interleaved(q * KEY**-0.5, k, v, memory.Gates(alpha, beta))
        return last_reads(memory.scan(rule, params, None, *rows[:4])[0], writes)

    def theirs(q, k, v, beta, g=None):
        k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
        recurrence = naive("gated_delta_product").naive_recurrent_gated_delta_product
        return recurrence(q, k, v, g, beta, KEY**-0.5, num_householder=writes)[0]

    arrays = {"q": q, "k": k, "v": v, "beta": beta} | ({"g": g} if forgets else {})
    compare(ours, theirs, arrays, 1e-5)
