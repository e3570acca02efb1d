"""Mesa memories against flash-linear-attention's slow forms, exact and by conjugate gradients, and its layer in plain PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn import HeadNormConfig, MesaConfig, ModelConfig
from atlasjax.nn.mixers import MIXERS
from tests.interop.fla_naive import F, close, compare, convolved, heads, naive, rms, torch, unit
from tests.marks import some_slow

BATCH, TIME, HEADS, DIM = 2, 48, 2, 8
NAMES = ("q", "k", "v", "g", "lamb", "beta")


def inputs():
    """Float32 arrays as fla takes them: g = log α, λ ≥ 0.25."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = rng.standard_normal((3, BATCH, TIME, HEADS, DIM))
    alpha, beta = rng.uniform(0.8, 1.0, (BATCH, TIME, HEADS)), rng.uniform(0.0, 1.0, (BATCH, TIME, HEADS))
    arrays = unit(q), unit(k), v, np.log(alpha), rng.uniform(0.5, 1.5, (HEADS, DIM)), beta
    return {name: x.astype(np.float32) for name, x in zip(NAMES, arrays, strict=True)}


def ours(rule, q, k, v, g, lamb, beta):
    params = memory.MesaParams({"W": jnp.zeros((HEADS, DIM, DIM))}, jnp.log(jnp.expm1(lamb - rule.floor)))
    y, state = memory.scan(rule, params, None, q, k, v, memory.Gates(retention=jnp.exp(g), step_size=beta))
    return y, state.key_sums, jnp.swapaxes(state.value_sums, -1, -2)


def theirs(name, *arrays):
    return getattr(naive("mesa_net"), name)(*arrays, **({"chunk_size": 16} if name.endswith("CG") else {}))


# Its conjugate gradients end early: 1e-5 is added to every denominator.
@pytest.mark.parametrize(
    ("name", "tolerance"), [("naive_mesa_net_exact", 2e-5), ("naive_mesa_net_CG", 2e-2)], ids=["exact", "CG"]
)
@pytest.mark.parametrize("solver", some_slow(["conjugate_gradient", "exact"], ["exact"]))
def test_values_and_gradients(name, tolerance, solver):
    """y, H and G."""
    compare(functools.partial(ours, rules.mesa(solver)), functools.partial(theirs, name), inputs(), tolerance)


@pytest.mark.parametrize("gate", [False, True])
def test_the_layer(gate):
    """`fla/layers/mesa_net.py` in plain PyTorch around the exact form, with the weights of the mixer."""
    config = ModelConfig(
        dim=12, num_heads=HEADS, head_dim=DIM, mixer="mesa", head_norm=HeadNormConfig(shared=True), dtype="float32",
        mesa=MesaConfig(output_gate=gate),
    )  # fmt: skip
    mixer, rng = MIXERS["mesa"](config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    graphdef, params = nnx.split(mixer, nnx.Param)
    params = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32), params)
    x = rng.standard_normal((BATCH, TIME, 12)).astype(np.float32)
    w = jax.tree.map(lambda a: torch.from_numpy(np.array(a)), nnx.to_pure_dict(params))
    given = torch.from_numpy(x)
    q, k, v, *z = torch.einsum("btd,dhc->bthc", given, w["inputs"]["linear"]["kernel"]).split(DIM, dim=-1)
    taps = w["inputs"]["conv"]["kernel"].flatten(1).T[:, None]
    mixed = heads(convolved(torch.cat([q, k], -1).flatten(2), taps), HEADS)
    a, b = (torch.einsum("btd,dnh->btnh", given, w["gates"]["kernel"]) + w["gate_bias"]).unbind(2)
    lamb = F.softplus(w["ridge"]) + 0.25
    q, k = (unit(u) for u in mixed.split(DIM, dim=-1))
    y = naive("mesa_net").naive_mesa_net_exact(q, k, v, F.logsigmoid(a), lamb, b.sigmoid())[0]
    y = rms(y, w["norm"]["scale"], config.norm_eps) * (F.silu(z[0]) if gate else 1.0)
    close(nnx.merge(graphdef, params)(jnp.asarray(x)), y.flatten(2) @ w["out"]["kernel"], 2e-5, "layer")
