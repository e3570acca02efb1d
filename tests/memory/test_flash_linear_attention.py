"""An independent oracle: the slow PyTorch references of flash-linear-attention, values and gradients.

They are files of the package fla-core that need neither triton nor a GPU; the package itself does, so each file is loaded alone.
Its TTT-Linear is another function (it learns a bias too, adds its residual after reading, and takes a query's step size for
every token of a chunk), so it is not here.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.marks import some_slow

NEEDS = "needs the extra 'oracle' (torch, fla-core)"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("einops", reason=NEEDS)
try:
    FLA = importlib.metadata.distribution("fla-core")
except importlib.metadata.PackageNotFoundError:
    pytest.skip(NEEDS, allow_module_level=True)

BATCH, TIME, HEADS, KEY, VALUE = 2, 70, 3, 4, 5  # more tokens than a block of the engine


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def fla(operation):
    """The module fla/ops/<operation>/naive.py."""
    path = FLA.locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation.replace('/', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_first(function):
    """For references that take and give [batch, heads, time, …]."""

    def call(*arrays, **options):
        out = function(*(x.transpose(1, 2) for x in arrays), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


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
    return heads_first(fla("delta_rule").delta_rule_recurrence)(q, k, v, beta)


def longhorn(beta_shape):
    def theirs(q, k, v, beta):
        square = (k * k).sum(-1)
        return delta(q, k, v, beta / (1 + beta * (square if beta.ndim == 3 else square[..., None])))

    return theirs


def generalized(q, k, v, alpha, kappa, rate):
    """S (Diag(α) + a bᵀ) + v kᵀ with a = −κ̂ and b = rate ⊙ κ̂."""
    naive = fla("generalized_delta_rule/dplr")
    return heads_first(naive.dplr_recurrence)(q, k, v, -kappa, rate * kappa, alpha.log())


def momentum(q, k, v, alpha, beta, theta):
    """Their M is our −S, their η our step size (their β, another factor of M, is one); p is the key of the error."""
    naive = fla("momentum_delta_rule")
    one = torch.ones_like(beta)
    out = naive.recurrent_momentum_delta_rule_ref(q, k, v, alpha.log(), theta.log(), k, beta=one, eta=beta)
    return out[0]


ones = lambda x: jnp.ones(x.shape[:3])
gamma = 1.0 - 2.0 ** (-5.0 - np.arange(HEADS))

CASES = {
    "linear attention": Case(
        rules.linear_attention(),
        lambda q: memory.Gates(step_size=ones(q)),
        lambda q, k, v: fla("linear_attn").naive_recurrent_linear_attn(q, k, v)[0],
    ),
    "based: a polynomial of degree 2": Case(
        rules.polysketch(),
        lambda q: memory.Gates(step_size=ones(q)),
        lambda q, k, v: heads_first(fla("based").naive_parallel_based)(q, k, v, scale=1.0, use_norm=False),
        scaled=False,
    ),
    "retention": Case(
        rules.retnet(),
        lambda q: memory.Gates(retention=jnp.broadcast_to(gamma, q.shape[:3]).astype(q.dtype), step_size=ones(q)),
        lambda q, k, v: heads_first(fla("retention").naive_retention)(q, k, v),
    ),
    "simple GLA, Mamba-2's": Case(
        rules.retnet(),
        lambda q, alpha: memory.Gates(retention=alpha, step_size=ones(q)),
        lambda q, k, v, alpha: fla("simple_gla").naive_recurrent_simple_gla(q, k, v, alpha.log())[0],
        given=("alpha",),
    ),
    "GLA": Case(
        rules.gla(),
        lambda q, alphas: memory.Gates(retention=alphas, step_size=ones(q)),
        lambda q, k, v, alphas: fla("gla").naive_recurrent_gla(q, k, v, alphas.log())[0],
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
        lambda q, k, v, alpha, beta: fla("gated_delta_rule").naive_recurrent_gated_delta_rule(
            q, k, v, beta, alpha.log()
        )[0],
        given=("alpha", "beta"),
    ),
    "Kimi's delta rule": Case(
        rules.kda(),
        lambda q, alphas, beta: memory.Gates(retention=alphas, step_size=beta),
        lambda q, k, v, alphas, beta: fla("kda").naive_recurrent_kda(q, k, v, alphas.log(), beta)[0],
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
    given = {key: arrays[key] for key in ("q", "k", "v", *case.given)}
    weights = np.random.default_rng(1).normal(size=(BATCH, TIME, HEADS, VALUE)).astype(np.float32)

    tensors = {key: torch.tensor(x, requires_grad=True) for key, x in given.items()}
    expected = case.theirs(*tensors.values())
    (expected * torch.tensor(weights)).sum().backward()

    params = memory.init_params(case.rule, jax.random.key(0), num_heads=HEADS, key_dim=KEY, value_dim=VALUE)

    def ours(q, k, v, *gates):
        if case.scaled:
            q = q * KEY**-0.5
        y, _ = memory.scan(case.rule, params, None, q, k, v, case.gates(q, *gates))
        return jnp.sum(y * weights), y

    grad = jax.jit(jax.grad(ours, argnums=tuple(range(len(given))), has_aux=True))
    gradients, y = grad(*(jnp.asarray(x) for x in given.values()))

    def close(got, want, what):
        want = want.detach().numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=what)

    close(y, expected, "values")
    for (key, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert np.abs(gradient).max() > 0
        close(gradient, tensor.grad, f"gradient of {key}")
