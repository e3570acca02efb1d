"""Imported models against their published formulas in NumPy, float64, token by token, from the peer's tensors and config.json.

They need neither PyTorch nor Triton. `test_peers.py` compares with the peers' own models.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.interop import import_weights
from atlasjax.train.load import load_run
from tests.interop import peers
from tests.nn.baseline_formulas import rms, sigmoid, silu, softplus, unit

pytestmark = pytest.mark.usefixtures("compile_fast")


def mamba_mixer(x, w, config):
    """transformers' `MambaMixer`."""
    rank, state = config["time_step_rank"], config["state_size"]
    u, z = np.split(x @ w["in_proj.weight"].T, 2, axis=-1)
    taps = w["conv1d.weight"][:, 0].T
    padded = np.concatenate([np.zeros((len(taps) - 1, u.shape[1])), u])
    u = silu(np.array([(taps * padded[t : t + len(taps)]).sum(0) for t in range(len(u))]) + w["conv1d.bias"])
    low, B, C = np.split(u @ w["x_proj.weight"].T, [rank, rank + state], axis=-1)
    delta, A = softplus(low @ w["dt_proj.weight"].T + w["dt_proj.bias"]), -np.exp(w["A_log"])
    h, ys = np.zeros(A.shape), []
    for t in range(len(u)):
        h = np.exp(delta[t, :, None] * A) * h + np.outer(delta[t] * u[t], B[t])
        ys.append(h @ C[t] + w["D"] * u[t])
    return (np.array(ys) * silu(z)) @ w["out_proj.weight"].T


def mamba(tokens, w, config):
    x = w["backbone.embeddings.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        layer = inside(w, f"backbone.layers.{n}.")
        x = x + mamba_mixer(rms(x, 1e-5) * layer["norm.weight"], inside(layer, "mixer."), config)
    return rms(x, 1e-5) * w["backbone.norm_f.weight"] @ w["lm_head.weight"].T


def rwkv7_mixer(x, w, config, first):
    """flash-linear-attention's `RWKV7Attention`; first: v of the first layer, None in that layer."""
    heads, eps = config["num_heads"], config["norm_eps"]
    delta = np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x
    xr, xw, xk, xv, xa, xg = (x + delta * w[f"x_{name}"][0, 0] for name in "rwkvag")
    low = lambda name, x, act: act(x @ w[f"{name}_lora.lora.0.weight"].T) @ w[f"{name}_lora.lora.2.weight"].T
    same = lambda x: x
    r, k, v = xr @ w["r_proj.weight"].T, xk @ w["k_proj.weight"].T, xv @ w["v_proj.weight"].T
    if first is None:
        first = v
    else:
        v = v + sigmoid(low("v", xv, same) + w["v_lora.lora.2.bias"]) * (first - v)
    decay = np.exp(-np.exp(-0.5) * sigmoid(low("w", xw, np.tanh) + w["w_lora.lora.2.bias"]))
    a = sigmoid(low("a", xa, same) + w["a_lora.lora.2.bias"])
    split = lambda x: x.reshape(len(x), heads, -1)
    kk, k = unit(split(k * w["k_k"])), k + k * (a - 1) * w["k_a"]
    r, decay, k, v, a, ys = split(r), split(decay), split(k), split(v), split(a), []
    S = np.zeros((heads, k.shape[-1], v.shape[-1]))
    for t in range(len(x)):
        removed = np.einsum("hk,hkv->hv", kk[t], S)
        S = decay[t][..., None] * S - (kk[t] * a[t])[..., None] * removed[:, None] + k[t][..., None] * v[t][:, None]
        ys.append(np.einsum("hk,hkv->hv", r[t], S))
    y = np.array(ys)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps * k.shape[-1])
    y = y.reshape(len(x), -1) * w["g_norm.weight"] + w["g_norm.bias"]
    y = y + ((r * k * w["r_k"]).sum(-1, keepdims=True) * v).reshape(len(x), -1)
    return (y * low("g", xg, sigmoid)) @ w["o_proj.weight"].T, first


def rwkv7(tokens, w, config):
    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return rms(x, config["norm_eps"]) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x, first = norm(w["model.embeddings.weight"][tokens], "model.layers.0.pre_norm"), None
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        y, first = rwkv7_mixer(norm(x, layer + "attn_norm"), inside(w, layer + "attn."), config, first)
        x = x + y
        y, ffn = norm(x, layer + "ffn_norm"), inside(w, layer + "ffn.")
        y = y + (np.concatenate([np.zeros_like(y[:1]), y[:-1]]) - y) * ffn["x_k"]
        x = x + np.maximum(y @ ffn["key.weight"].T, 0) ** 2 @ ffn["value.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def inside(w, prefix):
    """The tensors whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


FORMULAS = {"mamba": mamba, "rwkv7": rwkv7}


@pytest.mark.parametrize("kind", FORMULAS)
def test_logits(tmp_path, kind):
    source = peers.write(tmp_path / "source", kind)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    model = load_run(tmp_path / "run").model
    w = {name: x.astype(np.float64) for name, x in peers.tensors(kind).items()}
    config = json.loads((source / "config.json").read_text())
    tokens = np.random.default_rng(0).integers(0, 256, (2, 131))
    expected = np.array([FORMULAS[kind](row, w, config) for row in tokens])
    got = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)), np.float64)
    difference = np.abs(got - expected).max() / np.abs(expected).max()
    print(f"{kind}: largest difference / largest logit: {difference:.1e}")
    assert difference < 1e-5
