"""Gated DeltaProduct against flash-linear-attention's slow PyTorch reference: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.mixers.delta_product import interleaved, last_reads

NEEDS = "needs the extra 'oracle' (torch, einops, fla-core)"
torch = pytest.importorskip("torch", reason=NEEDS)
fla = pytest.importorskip("tests.interop.test_naive", reason=NEEDS)

BATCH, TIME, HEADS, KEY, VALUE = 2, 37, 2, 4, 5  # rows of more than one block

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.parametrize(("writes", "forgets"), [(2, True), (3, False)])
def test_values_and_gradients(writes, forgets):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, v, weights = (
        normal(BATCH, TIME, HEADS, KEY),
        normal(BATCH, TIME, writes, HEADS, VALUE),
        normal(BATCH, TIME, HEADS, VALUE),
    )
    k = normal(BATCH, TIME, writes, HEADS, KEY)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, (BATCH, TIME, writes, HEADS)).astype(np.float32)
    g = np.log(rng.uniform(0.8, 1, (BATCH, TIME, HEADS))).astype(np.float32)
    rule = rules.gated_delta_rule() if forgets else rules.delta_rule()
    params = memory.MemoryParams({"W": jnp.zeros((HEADS, VALUE, KEY))}, None, None)

    def ours(q, k, v, beta, g):
        alpha = jnp.exp(g) if forgets else None
        rows = interleaved(q * KEY**-0.5, k, v, memory.Gates(alpha, beta))
        return last_reads(memory.scan(rule, params, None, *rows[:4])[0], writes)

    def theirs(q, k, v, beta, g):
        k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
        naive = fla.naive("gated_delta_product").naive_recurrent_gated_delta_product
        return naive(q, k, v, g if forgets else None, beta, KEY**-0.5, num_householder=writes)[0]

    given = (q, k, v, beta, g)[: 5 if forgets else 4]
    call = lambda function: lambda *x: function(*x, *(g,) * (not forgets))
    tensors = [torch.tensor(x, requires_grad=True) for x in given]
    expected = call(theirs)(*tensors)
    (expected * torch.from_numpy(weights)).sum().backward()
    summed = lambda *x: (jnp.sum(weights * (y := call(ours)(*x))), y)
    (_, got), gradients = jax.jit(jax.value_and_grad(summed, range(len(given)), has_aux=True))(*given)
    for a, b in zip((got, *gradients), (expected, *(x.grad for x in tensors)), strict=True):
        b = b.detach().numpy()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
