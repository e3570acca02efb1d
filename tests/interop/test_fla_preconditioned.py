"""Preconditioned DeltaNet and Comba against flash-linear-attention's slow PyTorch references: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.mixers.curvature import preconditioned_keys
from tests.interop.fla_naive import compare, naive

BATCH, TIME, HEADS, KEY, VALUE = 2, 37, 2, 4, 5  # tokens of more than one block
CENTER = np.array([-0.2, 0.6], np.float32)

pytestmark = pytest.mark.usefixtures("compile_fast")


def ours(rule, q, keys, v, gates):
    params = memory.MemoryParams({"W": jnp.zeros((v.shape[2], VALUE, KEY))}, None, None)
    return memory.scan(rule, params, None, q * KEY**-0.5, keys, v, gates)[0]


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True))


def pgdn(q, k, v, g, beta, g_a, beta_a, center):
    """Two heads of values for each one of keys, which share its curvature."""
    k = unit(k)
    keys, _ = preconditioned_keys(k, beta_a, jnp.exp(g_a), center)
    q, k, keys = (jnp.repeat(x, 2, axis=2) for x in (unit(q), k, keys))
    return ours(rules.pgdn(), q, keys, v, memory.Gates(jnp.exp(g), beta, removal_key=k))


def their_pgdn(q, k, v, g, beta, g_a, beta_a, center):
    recurrence = naive("precond_gated_delta_rule").naive_recurrent_precond_gated_delta_rule
    return recurrence(q, k, v, g_a, g, beta_a, beta, log_atk_scale=center)[0]


def pkda(q, k, v, g, beta, g_a, beta_a, center):
    keys, _ = preconditioned_keys(k, beta_a, jnp.exp(g_a), center)
    return ours(rules.pkda(), q, keys, v, memory.Gates(jnp.exp(g), beta, removal_key=k))


def their_pkda(q, k, v, g, beta, g_a, beta_a, center):
    return naive("precond_kda").naive_recurrent_precond_kda(q, k, v, g, g_a, beta_a, beta, log_atk_scale=center)[0]


def comba(q, k, v, g, beta, p):
    return ours(rules.comba(), q, k, v, memory.Gates(jnp.exp(g), beta, removal_key=p))


def their_comba(q, k, v, g, beta, p):
    """Their chunk form is what their kernels compute. `naive_recurrent_comba` is another function: it decays first."""
    return naive("comba").naive_chunk_comba(q, k, v, p, g, beta, chunk_size=8)[0]


@pytest.mark.parametrize(("us", "them"), [(pgdn, their_pgdn), (pkda, their_pkda), (comba, their_comba)])
def test_values_and_gradients(us, them):
    rng = np.random.default_rng(0)
    heads = 2 * HEADS if us is pgdn else HEADS  # of values
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    uniform = lambda low, *shape: rng.uniform(low, 1, shape).astype(np.float32)
    q, k, v = normal(BATCH, TIME, HEADS, KEY), normal(BATCH, TIME, HEADS, KEY), normal(BATCH, TIME, heads, VALUE)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = np.log(uniform(0.8, BATCH, TIME, heads, *([KEY] if us is pkda else [])))
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": uniform(0, BATCH, TIME, heads)}
    if us is comba:
        arrays |= {"p": k * uniform(0.3, BATCH, TIME, HEADS, 1)}
    else:
        arrays |= {
            "g_a": np.log(uniform(0.8, BATCH, TIME, HEADS)),
            "beta_a": uniform(0, BATCH, TIME, HEADS),
            "center": CENTER,
        }
    compare(us, them, arrays, 1e-5)
