"""Large-chunk memories against PyTorch: outer gradients through inner ones that are autograd's, and not written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from pallas_kernels.newton_schulz import SCHEDULES
from tests.memory.cases import assert_close
from tests.memory.large_chunk.cases import RULES, make_inputs

torch = pytest.importorskip("torch")


def orthogonal(g):
    x = g / (g.norm() + 1e-7)
    x = x.T if g.shape[0] > g.shape[1] else x
    for a, b, c in SCHEDULES["lact"]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def read(weights, x):
    W1, W2, W3 = weights
    return (torch.nn.functional.silu(x @ W2.T) * (x @ W3.T)) @ W1.T


def lact(weights, q, k, v, eta, theta, chunk):
    """One head, chunk by chunk."""
    start, before, ys = weights, [0.0] * 3, []
    for first in range(0, len(q), chunk):
        own = slice(first, first + chunk)
        ys.append(read(weights, q[own]))
        if first + chunk > len(q):
            break
        after = []
        for i, w in enumerate(weights):
            gain = (eta[own, i] * (read(weights, k[own]) * v[own]).sum(-1)).sum()
            (g,) = torch.autograd.grad(gain, w, create_graph=True)
            before[i] = g + theta[own].mean() * before[i]
            moved = w + orthogonal(before[i])
            after.append(moved / (moved.norm(dim=1, keepdim=True) + 1e-5) * start[i].norm(dim=1, keepdim=True))
        weights = after
    return torch.cat(ys)


def test_values_and_gradients():
    with jax.enable_x64(True):
        rule = RULES["lact"]
        params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, time=20)
        given = params.weights, q, k, v, gates.step_size, gates.momentum_decay

        def ours(weights, q, k, v, eta, theta):
            one = memory.MemoryParams(weights, None, None)
            return jnp.sum(
                jnp.sin(memory.scan(rule, one, None, q, k, v, memory.Gates(step_size=eta, momentum_decay=theta))[0])
            )

        value, gradients = jax.jit(jax.value_and_grad(ours, argnums=range(6)))(*given)
        one_head = lambda x: torch.tensor(np.asarray(x), requires_grad=True)
        weights = [one_head(params.weights[name][0]) for name in rule.names]
        tokens = [one_head(x[0, :, 0]) for x in given[1:]]
        total = lact(weights, *tokens, rule.chunk_size).sin().sum()
        total.backward()
        np.testing.assert_allclose(value, total.item(), rtol=1e-10)
        expected = [x.grad.numpy() for x in (*weights, *tokens)]
        assert_close(
            [*(gradients[0][name][0] for name in rule.names), *(x[0, :, 0] for x in gradients[1:])], expected, 1e-9
        )
