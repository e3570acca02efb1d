"""An independent oracle: the slow PyTorch references of flash-linear-attention, values and gradients.

Its TTT-Linear is another function (it learns a bias too, adds its residual after reading, and takes a query's step size for
every token of a chunk), so it is not here.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.interop.fla_naive import compare, heads_first, naive, torch
from tests.marks import some_slow

BATCH, TIME, HEADS, KEY, VALUE = 2, 70, 3, 4, 5  # more tokens than a block of the engine


pytestmark = pytest.mark.usefixtures("compile_fast")


@dataclasses.dataclass(frozen=True)
class Case:
    """One of our rules, and their function of the same arrays, [batch, time, heads, …].

    gates: (q, *given) → our gates. theirs: (q, k, v, *given) → y. scaled: whether they divide q by √key_dim. given: names of
    `inputs` besides q, k and v.
    """

    rule: MemoryRule
    gates: Callable[..., memory.Gates]
    theirs: Callable
    scaled: bool = True
    given: tuple[str, ...] = ()


def delta(q, k, v, beta):
    return heads_first(naive("delta_rule").delta_rule_recurrence)(q, k, v, beta)[0]


def longhorn(beta_shape):
    def theirs(q, k, v, beta):
        square = (k * k).sum(-1)
        return delta(q, k, v, beta / (1 + beta * (square if beta.ndim == 3 else square[..., None])))

    return theirs


def generalized(q, k, v, alpha, kappa, rate):
    """S (Diag(α) + a bᵀ) + v kᵀ with a = −κ̂ and b = rate ⊙ κ̂."""
    recurrence = naive("generalized_delta_rule/dplr").dplr_recurrence
    return heads_first(recurrence)(q, k, v, -kappa, rate * kappa, alpha.log())[0]


def momentum(q, k, v, alpha, beta, theta):
    """Their M is our −S, their η our step size (their β, another factor of M, is one); p is the key of the error."""
    recurrence, one = naive("momentum_delta_rule").recurrent_momentum_delta_rule_ref, torch.ones_like(beta)
    return recurrence(q, k, v, alpha.log(), theta.log(), k, beta=one, eta=beta)[0]


ones = lambda x: jnp.ones(x.shape[:3])
gamma = 1.0 - 2.0 ** (-5.0 - np.arange(HEADS))

CASES = {
    "linear attention": Case(
        rules.linear_attention(),
        lambda q: memory.Gates(step_size=ones(q)),
        lambda q, k, v: naive("linear_attn").naive_recurrent_linear_attn(q, k, v)[0],
    ),
    "based: a polynomial of degree 2": Case(
        rules.polysketch(),
        lambda q: memory.Gates(step_size=ones(q)),
        lambda q, k, v: heads_first(naive("based").naive_parallel_based)(q, k, v, scale=1.0, use_norm=False),
        scaled=False,
    ),
    "retention": Case(
        rules.retnet(),
        lambda q: memory.Gates(retention=jnp.broadcast_to(gamma, q.shape[:3]).astype(q.dtype), step_size=ones(q)),
        lambda q, k, v: heads_first(naive("retention").naive_retention)(q, k, v),
    ),
    "simple GLA, Mamba-2's": Case(
        rules.retnet(),
        lambda q, alpha: memory.Gates(retention=alpha, step_size=ones(q)),
        lambda q, k, v, alpha: naive("simple_gla").naive_recurrent_simple_gla(q, k, v, alpha.log())[0],
        given=("alpha",),
    ),
    "GLA": Case(
        rules.gla(),
        lambda q, alphas: memory.Gates(retention=alphas, step_size=ones(q)),
        lambda q, k, v, alphas: naive("gla").naive_recurrent_gla(q, k, v, alphas.log())[0],
        given=("alphas",),
    ),
    "delta rule": Case(
        rules.delta_rule(), lambda q, beta: memory.Gates(step_size=beta), delta, given=("beta",)
    ),
    "Longhorn": Case(
        rules.longhorn(), lambda q, beta: memory.Gates(step_size=beta), longhorn("head"), given=("beta",)
    ),
    "Longhorn, a step for each channel": Case(
        rules.longhorn_channel(), lambda q, betas: memory.Gates(step_size=betas), longhorn("channel"), given=("betas",)
    ),
    "gated delta rule": Case(
        rules.gated_delta_rule(),
        lambda q, alpha, beta: memory.Gates(retention=alpha, step_size=beta),
        lambda q, k, v, alpha, beta: naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
            q, k, v, beta, alpha.log()
        )[0],
        given=("alpha", "beta"),
    ),
    "Kimi's delta rule": Case(
        rules.kda(),
        lambda q, alphas, beta: memory.Gates(retention=alphas, step_size=beta),
        lambda q, k, v, alphas, beta: naive("kda").naive_recurrent_kda(q, k, v, alphas.log(), beta)[0],
        given=("alphas", "beta"),
    ),
    "RWKV-7": Case(
        rules.rwkv7(),
        lambda q, alphas, kappa, rate: memory.Gates(retention=alphas, removal_key=kappa, removal=rate),
        generalized,
        given=("alphas", "kappa", "rate"),
    ),
    "momentum": Case(
        rules.titans(chunk_size=1, structure=structures.Matrix()).unbounded(),
        lambda q, alpha, beta, theta: memory.Gates(retention=alpha, step_size=beta, momentum_decay=theta),
        momentum,
        given=("alpha", "beta", "theta"),
    ),
}  # fmt: skip


def inputs():
    """Keys and κ̂ of unit length, decays between 0.6 and 1, other gates between 0.1 and 0.9; float32."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    shape = (BATCH, TIME, HEADS)
    arrays = {
        "q": rng.normal(size=(*shape, KEY)),
        "k": unit(rng.normal(size=(*shape, KEY))),
        "v": rng.normal(size=(*shape, VALUE)),
        "alpha": rng.uniform(0.6, 1.0, shape),
        "alphas": rng.uniform(0.6, 1.0, (*shape, KEY)),
        "beta": rng.uniform(0.1, 0.9, shape),
        "betas": rng.uniform(0.1, 0.9, (*shape, VALUE)),
        "theta": rng.uniform(0.1, 0.9, shape),
        "kappa": unit(rng.normal(size=(*shape, KEY))),
        "rate": rng.uniform(0.1, 0.9, (*shape, KEY)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


# Each rule once; a polynomial's is in test_closed_forms.py too.
@pytest.mark.parametrize(
    "name",
    some_slow(CASES, ["based: a polynomial of degree 2", "retention", "RWKV-7", "Longhorn, a step for each channel"]),
)
def test_rule_is_their_reference(name):
    case, arrays = CASES[name], inputs()
    params = memory.init_params(case.rule, jax.random.key(0), num_heads=HEADS, key_dim=KEY, value_dim=VALUE)

    def ours(q, k, v, *gates):
        if case.scaled:
            q = q * KEY**-0.5
        return memory.scan(case.rule, params, None, q, k, v, case.gates(q, *gates))[0]

    compare(ours, case.theirs, {key: arrays[key] for key in ("q", "k", "v", *case.given)}, 2e-5)
