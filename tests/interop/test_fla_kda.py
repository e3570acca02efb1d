"""Kimi Delta Attention and Gated DeltaNet-2: flash-linear-attention's slow forms, its layers around them, transformers' layers.

Values, and gradients by torch's autograd. fla's own layers need Triton; here they are plain PyTorch.
"""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.nn import HeadNormConfig, KDAConfig, ModelConfig
from atlasjax.nn.mixers import MIXERS
from tests.interop.fla_naive import F, close, compare, convolved, heads, naive, rms, torch, unit
from tests.marks import some_slow

pytestmark = pytest.mark.usefixtures("compile_fast")

BATCH, TIME, KEY_HEADS, GROUPS, KEY, VALUE = 2, 37, 2, 3, 4, 5
DIM, EPS = 12, 1e-5


def inputs():
    """q, k, v, g, β and the initial state, float32: three heads of values for one of keys, and decays that are zero."""
    rng = np.random.default_rng(0)
    keys, values = (BATCH, TIME, KEY_HEADS), (BATCH, TIME, KEY_HEADS * GROUPS)
    alpha = rng.uniform(0.6, 1.0, (*values, KEY))
    alpha[:, 9, 1], alpha[:, 20, :, 2] = 0.0, 0.0
    with np.errstate(divide="ignore"):
        arrays = {
            "q": rng.normal(size=(*keys, KEY)),
            "k": unit(torch.tensor(rng.normal(size=(*keys, KEY)))).numpy(),
            "v": rng.normal(size=(*values, VALUE)),
            "g": np.log(alpha),
            "beta": rng.uniform(0.1, 1.9, values),
            "start": rng.normal(size=(BATCH, KEY_HEADS * GROUPS, KEY, VALUE)),
        }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def test_rule_is_their_recurrence():
    rule = rules.kda()
    params = memory.init_params(rule, jax.random.key(0), num_heads=KEY_HEADS * GROUPS, key_dim=KEY, value_dim=VALUE)
    state = memory.init_state(rule, params, batch_size=BATCH)

    def ours(q, k, v, g, beta, start):
        q, k = (jnp.repeat(x, GROUPS, axis=2) for x in (q * KEY**-0.5, k))
        begun = state._replace(memory={"W": jnp.swapaxes(start, -1, -2)})
        y, after = memory.scan(rule, params, begun, q, k, v, memory.Gates(retention=jnp.exp(g), step_size=beta))
        return y, jnp.swapaxes(after.memory["W"], -1, -2)

    def theirs(*arrays):
        *tokens, start = arrays
        return naive("kda").naive_recurrent_kda(*tokens, initial_state=start, output_final_state=True)

    compare(ours, theirs, inputs(), 2e-5)


def make_layer(mixer, **changes):
    """(graph, parameters, config): all parameters moved off their initial values, with the norm of the peers."""
    config = ModelConfig(
        dim=DIM, num_heads=KEY_HEADS, head_dim=KEY, dtype="float32", head_norm=HeadNormConfig(shared=True, eps=KEY * EPS),
        **changes,
    )  # fmt: skip
    graph, params = nnx.split(MIXERS[mixer](config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(3)
    return graph, jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params), config


def theirs(params, config):
    """A layer's parameters, or their gradients, by the names that they have in fla."""
    p = nnx.to_pure_dict(params)
    dk, dv = KEY, config.value_dim * (config.kda.value_heads or KEY_HEADS) // KEY_HEADS
    cuts = np.cumsum([dk, dk, dv, dk])
    given = np.split(np.asarray(p["inputs"]["linear"]["kernel"]), cuts, axis=-1)
    taps = np.split(np.asarray(p["inputs"]["conv"]["kernel"]), cuts[:2], axis=-1)
    flat = lambda x: np.asarray(x).reshape(len(x), -1).T
    named = {f"{name}_proj.weight": flat(x) for name, x in zip("qkvbw", given) if x.size}
    named |= {f"{name}_conv1d.weight": flat(x)[:, None] for name, x in zip("qkv", taps)}
    for name, products in (("f", p["decay"]["logits"]), ("g", p["gate"])):
        for n, part in enumerate(part for part in ("down", "up") if part in products):
            named[f"{name}_proj.{n}.weight"] = flat(products[part]["kernel"])
    if config.kda.gate_bias:
        named["g_proj.1.bias"] = np.asarray(p["gate"]["up"]["bias"]).ravel()
    if "beta" in p:
        named["b_proj.weight"] = flat(p["beta"]["kernel"])
    named |= {"A_log": np.asarray(p["decay"]["A_log"]), "dt_bias": np.asarray(p["decay"]["dt_bias"]).ravel()}
    return named | {"o_norm.weight": np.asarray(p["norm"]["scale"]), "o_proj.weight": flat(p["out"]["kernel"])}


def their_layer(mixer, x, w, kda):
    """`fla/layers/kda.py` and `gdn2.py`: a product of two matrices is two modules without a nonlinearity in between."""
    both = lambda name: x @ w[f"{name}_proj.0.weight"].T @ w[f"{name}_proj.1.weight"].T
    value_heads = kda.value_heads or KEY_HEADS
    q, k, v = (heads(convolved(x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"]), n)
               for name, n in zip("qkv", (KEY_HEADS, KEY_HEADS, value_heads)))  # fmt: skip
    q, k, logits = unit(q), unit(k), (both("f") + w["dt_bias"]).unflatten(-1, (-1, KEY))
    rate = w["A_log"].exp()[:, None]
    g = -rate * F.softplus(logits) if kda.lower_bound is None else kda.lower_bound * (rate * logits).sigmoid()
    b = (x @ w["b_proj.weight"].T).sigmoid() * (2 if kda.negative_eigenvalues else 1)
    if mixer == "kda":
        y = naive("kda").naive_recurrent_kda(q, k, v, g, b)[0]
    else:
        q, k, g, b = (a.repeat_interleave(value_heads // KEY_HEADS, dim=2) for a in (q, k, g, heads(b, KEY_HEADS)))
        y = naive("gdn2").naive_recurrent_gdn2(q, k, v, g, b, heads((x @ w["w_proj.weight"].T).sigmoid(), value_heads))[
            0
        ]
    gate = both("g") + w.get("g_proj.1.bias", 0)
    return (rms(y, w["o_norm.weight"], EPS) * heads(gate, value_heads).sigmoid()).flatten(-2) @ w["o_proj.weight"].T


LAYERS = {
    "kda": ("kda", {"value_expansion": 2, "kda": KDAConfig(value_heads=6, gate_bias=True)}),
    "kda, bounded": ("kda", {"kda": KDAConfig(negative_eigenvalues=True, lower_bound=-5.0, gate_bias=True)}),
    "gdn2": ("gdn2", {"value_expansion": 2, "kda": KDAConfig(negative_eigenvalues=True, gate_bias=True)}),
    "gdn2, three heads of values": ("gdn2", {"kda": KDAConfig(value_heads=6, gate_bias=True)}),
}


@pytest.mark.parametrize("name", some_slow(LAYERS, ["gdn2"]))
def test_layer_is_theirs(name):
    mixer, changes = LAYERS[name]
    graph, params, config = make_layer(mixer, **changes)
    rng = np.random.default_rng(4)
    x, weights = (rng.normal(size=(BATCH, TIME, DIM)).astype(np.float32) for _ in range(2))
    given = {key: torch.tensor(value, requires_grad=True) for key, value in theirs(params, config).items()}
    input_ = torch.tensor(x, requires_grad=True)
    y = their_layer(mixer, input_, given, config.kda)
    (y * torch.tensor(weights)).sum().backward()

    def ours(params, x):
        y = nnx.merge(graph, params)(x)
        return jnp.sum(y * weights), y

    (gradients, along_x), got = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))(params, x)
    close(got, y, 2e-5, "values")
    close(along_x, input_.grad, 2e-5, "gradient of x")
    for key, gradient in theirs(gradients, config).items():
        close(gradient, given[key].grad, 2e-5, f"gradient of {key}")


def transformers_layer(monkeypatch, model, prefix, layer, **config):
    """A layer of transformers with its own PyTorch functions. Where fla can be imported, they are Triton's kernels."""
    pytest.importorskip("transformers", reason="needs the extra 'interop' (transformers)")
    monkeypatch.setitem(sys.modules, "fla", None)
    module = f"transformers.models.{model}.modeling_{model}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        classes = importlib.import_module(module)
    except ModuleNotFoundError:
        pytest.skip(f"this version of transformers has no {model}")
    made = getattr(importlib.import_module("transformers"), f"{prefix}Config")(
        hidden_size=DIM, num_hidden_layers=1, num_attention_heads=1, linear_num_heads=KEY_HEADS, linear_head_dim=KEY,
        layer_types=["linear_attention"], rms_norm_eps=EPS, **config,
    )  # fmt: skip
    built = getattr(classes, layer)(made, 0)
    sys.modules.pop(module)  # with these functions it is for this test only
    return built


@pytest.mark.parametrize(
    ("names", "kda"),
    [
        (("kimi_linear", "KimiLinear", "KimiLinearDeltaAttention"), KDAConfig()),
        (("bailing_hybrid", "BailingHybrid", "BailingHybridDeltaAttention"), KDAConfig(lower_bound=-5.0, rank=0)),
    ],
    ids=["kimi_linear", "ling"],
)
def test_layer_is_that_of_transformers(names, kda, monkeypatch):
    graph, params, config = make_layer("kda", kda=kda)
    w = theirs(params, config)
    low_rank = kda.rank is None
    found = {
        "conv1d.weight": np.concatenate([w.pop(f"{x}_conv1d.weight") for x in "qkv"]),
        "forget_gate.A_log": w.pop("A_log").reshape((1, 1, -1, 1) if low_rank else -1),
        "forget_gate.dt_bias": w.pop("dt_bias"),
    }
    for ours, here in (("f", "forget_gate.f"), ("g", "g")):
        parts = ("_a", "_b") if low_rank else ("",)
        found |= {f"{here}{part}_proj.weight": w.pop(f"{ours}_proj.{n}.weight") for n, part in enumerate(parts)}
    layer = transformers_layer(monkeypatch, *names)
    layer.load_state_dict({name: torch.tensor(x) for name, x in (found | w).items()})
    x = np.random.default_rng(5).normal(size=(BATCH, 70, DIM)).astype(np.float32)  # more than their chunk of 64
    with torch.no_grad():
        expected = layer(torch.tensor(x))
    close(jax.jit(lambda p, x: nnx.merge(graph, p)(x))(params, x), expected, 2e-5, "values")
