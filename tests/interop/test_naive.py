"""Imported models against flash-linear-attention's layers in plain PyTorch, built around its slow operations, at odd lengths.

Its own models need Triton; `test_peers.py` runs them in Triton's interpreter, which is too slow for long sequences.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.interop import import_weights
from atlasjax.train.load import load_run
from tests.interop import peers
from tests.interop.fla_naive import F, convolved, heads, naive, rms, torch, unit
from tests.marks import some_slow


def mesa(x, w, count):
    """The reads of `fla/layers/mesa_net.py`, solved exactly."""
    q, k = (unit(heads(convolved(x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"]), count)) for name in "qk")
    a, b = (x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"] for name in "ab")
    ridge, v = heads(F.softplus(w["lambda_params"]) + 0.25, count), heads(x @ w["v_proj.weight"].T, count)
    return naive("mesa_net").naive_mesa_net_exact(q, k, v, F.logsigmoid(a), ridge, b.sigmoid())[0]


def attn(kind, x, w, config):
    """The token mixer, as `fla/layers/gated_deltanet.py`, `delta_net.py`, `gla.py` and `mesa_net.py`."""
    more = config.get("num_v_heads", config["num_heads"]) // config["num_heads"]  # heads of values for one of keys
    count, eps = config["num_heads"], config.get("norm_eps", config.get("rms_norm_eps", 1e-6))
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    if kind == "mesa_net":
        y = rms(mesa(x, w, count), w["o_norm.weight"], eps)
    elif kind == "gla":
        q, k, v = (heads(y, count) for y in (q, k, v))
        gk = (x @ w["gk_proj.0.weight"].T) @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
        y = naive("gla").naive_recurrent_gla(q, k, v, heads(F.logsigmoid(gk) / 16, count))[0]
        y = rms(y, w["g_norm_swish_gate.weight"], eps)
    else:
        q, k, v = (
            heads(convolved(y, w[f"{name}_conv1d.weight"]), n)
            for name, y, n in zip("qkv", (q, k, v), (count, count, count * more))
        )
        q, k = (y.repeat_interleave(more, dim=2) for y in (q, k))
        q, k, beta = unit(q), unit(k), (x @ w["b_proj.weight"].T).sigmoid()
        if kind == "delta_net":
            inputs = (y.transpose(1, 2) for y in (q, k, v, beta))
            y = naive("delta_rule").delta_rule_recurrence(*inputs)[0].transpose(1, 2)
        else:
            g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
            y = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0]
        y = rms(y, w["o_norm.weight"], eps)
    if "g_proj.weight" in w:
        y = y * F.silu(heads(x @ w["g_proj.weight"].T, count * more))
    return y.flatten(-2) @ w["o_proj.weight"].T


def attention(x, w, given):
    """The layer `fla/layers/attn.py`, with PyTorch's attention."""
    q, k, v = (heads(F.linear(x, w[f"{name}_proj.weight"], w[f"{name}_proj.bias"]), count)
               for name, count in zip("qkv", (given["num_heads"], *[given["num_kv_heads"]] * 2)))  # fmt: skip
    position, half = torch.arange(x.shape[1]), q.shape[-1] // 2
    angle = position[:, None, None] * given["rope_theta"] ** (-torch.arange(half) / half)

    def rotate(y):  # pairs as complex numbers
        turned = torch.complex(*y.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    k, v = (y.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for y in (rotate(k), v))
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < given["window_size"])
    y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (rotate(q), k, v)), attn_mask=visible)
    return y.transpose(1, 2).flatten(-2) @ w["o_proj.weight"].T


def logits(kind, config, w, tokens):
    """The model, as `fla/models/…/modeling_*.py` without fused kernels."""
    eps = config.get("norm_eps", config.get("rms_norm_eps", 1e-6))
    x, softmax = w["model.embeddings.weight"][tokens], config["attn"] or {"layers": []}
    for n in range(config["num_hidden_layers"]):
        layer = {name.removeprefix(f"model.layers.{n}."): y for name, y in w.items() if f"layers.{n}." in name}
        mixer = {name.removeprefix("attn."): y for name, y in layer.items() if name.startswith("attn.")}
        y = rms(x, layer["attn_norm.weight"], eps)
        x = x + (attention(y, mixer, softmax) if n in softmax["layers"] else attn(kind, y, mixer, config))
        y = rms(x, layer["mlp_norm.weight"], eps)
        gated = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


@pytest.mark.parametrize(
    "name",
    some_slow(["gated_deltanet", "gated_deltanet with attention", "delta_net", "gla", "mesa_net"], ["gated_deltanet"]),
)
def test_logits_at_odd_lengths(tmp_path, name):
    kind, source = name.partition(" ")[0], peers.write(tmp_path / "source", name)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    model = load_run(tmp_path / "run").model
    weights = {name: torch.from_numpy(x) for name, x in peers.tensors(name).items()}
    config = json.loads((source / "config.json").read_text())
    for length in (1, 131):
        tokens = np.random.default_rng(length).integers(0, 256, (2, length))
        expected = logits(kind, config, weights, torch.from_numpy(tokens)).numpy()
        found = np.abs(np.asarray(model(jnp.asarray(tokens))) - expected).max() / np.abs(expected).max()
        print(f"{name}, {length} tokens: largest difference / largest logit: {found:.1e}")
        assert found < 1e-5
