"""`rules.momentum_delta` against flash-linear-attention's recurrence (fla-core, `ops/momentum_delta_rule/naive.py`)."""

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from tests.memory.cases import assert_close

NEEDS = "needs the extra 'oracle' or 'interop' (torch, einops, fla-core)"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("einops", reason=NEEDS)
try:
    FLA = importlib.metadata.distribution("fla-core")
except importlib.metadata.PackageNotFoundError:
    pytest.skip(NEEDS, allow_module_level=True)

BATCH, TIME, HEADS, KEY, VALUE = 2, 45, 3, 5, 7


@functools.cache
def recurrence():
    """fla's function, without its package, which needs Triton."""
    path = FLA.locate_file("fla/ops/momentum_delta_rule/naive.py")
    spec = importlib.util.spec_from_file_location("naive_momentum_delta_rule", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.recurrent_momentum_delta_rule_ref


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
    return [x.astype(np.float32) for x in arrays]


def theirs(times_alpha, *inputs):
    q, k, v, log_alpha, log_mu, beta, eta, S, M = inputs
    p = k * log_alpha.exp()[..., None] if times_alpha else k
    return recurrence()(q, k, v, log_alpha, log_mu, p, beta, eta, 1.0, S, M, output_final_state=True)


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
    inputs = tokens()
    total = lambda y, state, sin: (sin(y) * y).sum() + sin(state).sum()
    of_torch = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(times_alpha, *of_torch)
    total(*expected, torch.sin).backward()

    def run(*inputs):
        y, state = ours(times_alpha, *inputs)
        return total(y, state, jnp.sin), (y, state)

    (_, got), gradients = jax.jit(jax.value_and_grad(run, range(len(inputs)), has_aux=True))(*map(jnp.asarray, inputs))
    assert_close(got, tuple(x.detach().numpy() for x in expected), 2e-6)
    for name, ours_, theirs_ in zip(
        ["q", "k", "v", "alpha", "mu", "beta", "eta", "S", "M"], gradients, of_torch, strict=True
    ):
        assert_close(ours_, theirs_.grad.numpy(), 2e-5, name)
