"""`rules.momentum_delta` against flash-linear-attention's recurrence (fla-core, `ops/momentum_delta_rule/naive.py`), and the mixer
against its layer (`layers/momentum_deltanet.py`) in plain PyTorch around that recurrence, because the layer itself needs Triton."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn import GatedDeltaNetConfig, HeadNormConfig, ModelConfig
from atlasjax.nn.mixers import MIXERS
from tests.interop.fla_naive import F, compare, convolved, naive, rms, torch, unit
from tests.memory.cases import assert_close

BATCH, TIME, HEADS, KEY, VALUE = 2, 45, 3, 5, 10


def recurrence(*arrays, **options):
    return naive("momentum_delta_rule").recurrent_momentum_delta_rule_ref(*arrays, **options)


def tokens():
    """q, k, v, log α, log μ, β, η as the layer makes them, and a state: W and fla's M, transposed."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape)
    k = normal(BATCH, TIME, HEADS, KEY)
    share = rng.uniform(0, 1, (BATCH, TIME, HEADS))
    gates = np.log(1 - share + 1e-3), rng.uniform(-2, 0, share.shape), share, rng.uniform(0, 2, share.shape)
    arrays = (
        normal(*k.shape), k / np.linalg.norm(k, axis=-1, keepdims=True), normal(BATCH, TIME, HEADS, VALUE), *gates,
        normal(BATCH, HEADS, KEY, VALUE), normal(BATCH, HEADS, KEY, VALUE),
    )  # fmt: skip
    names = ("q", "k", "v", "alpha", "mu", "beta", "eta", "S", "M")
    return {name: x.astype(np.float32) for name, x in zip(names, arrays, strict=True)}


def theirs(times_alpha, *inputs):
    q, k, v, log_alpha, log_mu, beta, eta, S, M = inputs
    p = k * log_alpha.exp()[..., None] if times_alpha else k
    return recurrence(q, k, v, log_alpha, log_mu, p, beta, eta, 1.0, S, M, output_final_state=True)


def ours(times_alpha, *inputs):
    q, k, v, log_alpha, log_mu, beta, eta, S, M = inputs
    rule = rules.momentum_delta(decay_first=times_alpha)
    params = memory.MemoryParams({"W": jnp.zeros((HEADS, VALUE, KEY))}, None, None)
    state = memory.init_state(rule, params, batch_size=BATCH)
    state = state._replace(memory={"W": S.swapaxes(2, 3)}, momentum={"W": -M.swapaxes(2, 3)})
    gates = memory.Gates(retention=jnp.exp(log_alpha), momentum_decay=jnp.exp(log_mu), write_size=beta, step_size=eta)
    y, after = memory.scan(rule, params, state, q, k, v, gates)
    return y, jnp.stack([after.memory["W"], -after.momentum["W"]]).swapaxes(3, 4)


@pytest.mark.parametrize("times_alpha", [True, False])
def test_rule(times_alpha):
    """Outputs, the state and all gradients, from a state that is not zero."""
    ours_, theirs_ = (functools.partial(function, times_alpha) for function in (ours, theirs))
    compare(ours_, theirs_, tokens(), 2e-6, gradient_tolerance=2e-5)


def layer(x, w, heads, negative):
    """fla's `MomentumDeltaNet.forward` with default arguments, which divides queries by √KEY. w: our parameters as tensors."""
    groups = w["dt_bias"].shape[0] // heads
    inputs = torch.einsum("btd,dhk->bthk", x, w["inputs"]["linear"]["kernel"])
    taps = w["inputs"]["conv"]["kernel"].flatten(1).T[:, None]  # [channels, 1, taps]
    mixed = convolved(inputs[..., : taps.shape[0] // heads].flatten(2), taps)
    q, k, v = mixed.unflatten(-1, (heads, -1)).split([KEY, KEY, groups * VALUE], -1)
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    v, g = (a.flatten(2).unflatten(-1, (heads * groups, VALUE)) for a in (v, inputs[..., 2 * KEY + groups * VALUE :]))

    e, a, b, m = torch.einsum("btd,dgh->gbth", x, w["gates"]["kernel"])
    A, Mu, factor, D = (w[n].repeat_interleave(groups).exp() for n in ("A_log", "Mu_log", "log_factor", "D_log"))
    log_mu = (-Mu * F.softplus(m + w["mu_bias"])).clamp_min(-2.0)
    eta = F.tanh(e / x.shape[-1] ** 0.5) + 1
    theta = torch.arctan(eta * factor)
    beta = torch.sin(theta) ** 2 * F.sigmoid(b) * (2.0 if negative else 1.0)
    log_alpha = (torch.cos(theta) ** 2).log() - A * F.softplus(a + w["dt_bias"])
    q, k = unit(q - D[:, None] * k), unit(k)
    y, _ = recurrence(q, k, v, log_alpha, log_mu, k * log_alpha.exp()[..., None], beta, eta)
    y = rms(y, w["norm"]["scale"], 1e-5) * F.silu(g)
    return y.flatten(2) @ w["out"]["kernel"]


@pytest.mark.parametrize("negative", [False, True])
def test_mixer(negative):
    """Outputs and the gradients of the input and of all parameters, with two heads of values for each head of keys."""
    config = ModelConfig(
        dim=12, num_heads=2, head_dim=KEY, value_expansion=2, dtype="float32",
        gated_deltanet=GatedDeltaNetConfig(value_heads=4, negative_eigenvalues=negative),
        head_norm=HeadNormConfig(shared=True, eps=KEY * 1e-5),  # for queries without √KEY
    )  # fmt: skip
    graphdef, params = nnx.split(MIXERS["momentum_deltanet"](config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(np.float32), params)
    x = rng.standard_normal((BATCH, TIME, 12)).astype(np.float32)

    of_torch = jax.tree.map(lambda p: torch.tensor(np.asarray(p), requires_grad=True), nnx.to_pure_dict(params))
    x_of_torch = torch.tensor(x, requires_grad=True)
    expected = layer(x_of_torch, of_torch, config.num_heads, negative)
    (expected.sin() * expected).sum().backward()

    def run(x, params):
        y = nnx.merge(graphdef, params)(x)
        return jnp.sum(jnp.sin(y) * y), y

    (_, y), (of_x, of_params) = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(jnp.asarray(x), params)
    assert_close(y, expected.detach().numpy(), 1e-5)
    assert_close(of_x, x_of_torch.grad.numpy(), 5e-5)
    assert_close(nnx.to_pure_dict(of_params), jax.tree.map(lambda p: p.grad.numpy(), of_torch), 5e-5)
