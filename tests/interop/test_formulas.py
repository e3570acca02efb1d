"""Imported models against their published formulas in NumPy, float64, token by token, from the peer's tensors and config.json.

They need neither PyTorch nor Triton. `test_peers.py` compares with the peers' own models.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.interop import import_weights
from atlasjax.nn import Mamba3Config, ModelConfig, SSMConfig
from atlasjax.train.load import load_run
from tests.interop import peers
from tests.marks import some_slow
from tests.nn import mamba3_formula
from tests.nn.baseline_formulas import rms, sigmoid, silu, softplus, unit
from tests.streams import streamed

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


def mamba3(tokens, w, config):
    """flash-linear-attention's `Mamba3ForCausalLM`, which runs on CUDA alone: its `in_proj` cut as `_project_and_split` does."""
    inner, heads = config["num_heads"] * config["head_dim"], config["num_heads"]
    rank, state, groups = config["mimo_rank"], config["state_size"], config["n_groups"]
    sizes = [inner, inner, rank * groups * state, rank * groups * state, heads, heads, heads]
    own = ModelConfig(
        ssm=SSMConfig(state_dim=state, head_dim=config["head_dim"], groups=groups), mamba3=Mamba3Config(rank, output_norm=True),
        norm_eps=1e-5,
    )  # fmt: skip
    x = w["backbone.embeddings.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        layer = inside(w, f"backbone.layers.{n}.")
        mixer = inside(layer, "mixer.")
        z, v, B, C, step, rate, blend, angles = np.split(mixer["in_proj.weight"].T, np.cumsum(sizes), axis=1)
        kernels = {
            "inputs": np.hstack([z, v]), "selection": np.hstack([B, C]), "gates": np.stack([step, rate, blend], 1), "rates": angles,
            "out": mixer["out_proj.weight"].T,
        }  # fmt: skip
        p = {name: {"kernel": kernel} for name, kernel in kernels.items()}
        p |= {f"{x}_norm": {"scale": mixer[f"{x}_norm.weight"]} for x in "BC"}
        p |= {name: np.swapaxes(mixer[name], 0, 1) for name in ("B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")}
        p |= {"dt_bias": mixer["dt_bias"], "D": mixer["D"], "norm": {"scale": mixer["norm.weight"].reshape(heads, -1)}}
        x = x + mamba3_formula.mamba3(p, rms(x, 1e-5) * layer["norm.weight"], own)
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


def qwen3_5_delta(x, w, config, largest=1):
    """transformers' `Qwen3_5GatedDeltaNet`. largest: that β may be."""
    heads, more = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    size = heads * config["linear_key_head_dim"]
    taps = w["conv1d.weight"][:, 0].T
    mixed = x @ w["in_proj_qkv.weight"].T
    padded = np.concatenate([np.zeros((len(taps) - 1, mixed.shape[1])), mixed])
    mixed = silu(np.array([(taps * padded[t : t + len(taps)]).sum(0) for t in range(len(x))]))
    q, k, v = np.split(mixed, [size, 2 * size], axis=-1)
    split = lambda a, count: a.reshape(len(x), count, -1)
    q, k = (np.repeat(unit(split(a, heads)), more, axis=1) for a in (q, k))
    q, v, z = q / np.sqrt(q.shape[-1]), split(v, heads * more), split(x @ w["in_proj_z.weight"].T, heads * more)
    beta, a = largest * sigmoid(x @ w["in_proj_b.weight"].T), x @ w["in_proj_a.weight"].T
    alpha = np.exp(-np.exp(w["A_log"]) * softplus(a + w["dt_bias"]))
    S, ys = np.zeros((heads * more, k.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        S = alpha[t, :, None, None] * S
        S = S + beta[t, :, None, None] * k[t, :, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))[:, None]
        ys.append(np.einsum("hk,hkv->hv", q[t], S))
    y = rms(np.array(ys), config["rms_norm_eps"]) * w["norm.weight"] * silu(z)
    return y.reshape(len(x), -1) @ w["out_proj.weight"].T


def qwen3_5_attention(x, w, config):
    """transformers' `Qwen3_5Attention`."""
    heads, shared, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    positions = config["rope_parameters"]
    rotary = int(size * positions["partial_rotary_factor"])
    angle = np.arange(len(x))[:, None, None] * positions["rope_theta"] ** (-np.arange(0, rotary, 2) / rotary)
    project = lambda name, count: (x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]).reshape(len(x), count, -1)
    norm = lambda a, name: rms(a, config["rms_norm_eps"]) * (1 + w[f"{name}_norm.weight"])

    def rotate(a):  # pairs as complex numbers
        pairs = (a[..., : rotary // 2] + 1j * a[..., rotary // 2 : rotary]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag, a[..., rotary:]], -1)

    q, gate = np.split(project("q", heads), 2, axis=-1)
    q, k, v = rotate(norm(q, "q")), rotate(norm(project("k", shared), "k")), project("v", shared)
    k, v = (np.repeat(a, heads // shared, axis=1) for a in (k, v))
    logits = np.einsum("thk,shk->hts", q, k) / np.sqrt(size)
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * np.tri(len(x))
    y = np.einsum("hts,shv->thv", weights / weights.sum(-1, keepdims=True), v) * sigmoid(gate)
    return y.reshape(len(x), -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


def qwen3_5(tokens, w, config):
    config = {"rms_norm_eps": 1e-6, **config["text_config"]}
    w = inside(w, "model.language_model.")
    norm = lambda x, scale: rms(x, config["rms_norm_eps"]) * (1 + scale)
    x = w["embed_tokens.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        layer = inside(w, f"layers.{n}.")
        mixer, mix = ("linear_attn.", qwen3_5_delta) if n == 0 else ("self_attn.", qwen3_5_attention)
        x = x + mix(norm(x, layer["input_layernorm.weight"]), inside(layer, mixer), config)
        y, mlp = norm(x, layer["post_attention_layernorm.weight"]), inside(layer, "mlp.")
        x = x + (silu(y @ mlp["gate_proj.weight"].T) * (y @ mlp["up_proj.weight"].T)) @ mlp["down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T


def olmo_hybrid(tokens, w, config):
    """transformers' `OlmoHybridForCausalLM`: a layer of Gated DeltaNet with β up to 2, and one of attention with post-norms."""
    norm = lambda x, scale: rms(x, 1e-6) * scale
    mlp = lambda y, w: (silu(y @ w["gate_proj.weight"].T) * (y @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T
    x = w["model.embed_tokens.weight"][tokens]
    layer = inside(w, "model.layers.0.")
    delta = inside(layer, "linear_attn.")
    joined = {
        "in_proj_qkv.weight": np.concatenate([delta[f"{x}_proj.weight"] for x in "qkv"]),
        "conv1d.weight": np.concatenate([delta[f"{x}_conv1d.weight"] for x in "qkv"]),
        "in_proj_z.weight": delta["g_proj.weight"], "in_proj_b.weight": delta["b_proj.weight"],
        "in_proj_a.weight": delta["a_proj.weight"], "norm.weight": delta["o_norm.weight"],
        "out_proj.weight": delta["o_proj.weight"], "A_log": delta["A_log"], "dt_bias": delta["dt_bias"],
    }  # fmt: skip
    y = norm(x, layer["attention_layer_norm.weight"])
    x = x + qwen3_5_delta(y, joined, {**config, "rms_norm_eps": 1e-5}, largest=2)
    x = x + mlp(norm(x, layer["feedforward_layer_norm.weight"]), inside(layer, "mlp."))
    layer = inside(w, "model.layers.1.")
    own, heads = inside(layer, "self_attn."), config["num_attention_heads"]
    q, k = (norm(x @ own[f"{name}_proj.weight"].T, own[f"{name}_norm.weight"]) for name in "qk")
    split = lambda a: a.reshape(len(x), -1, config["hidden_size"] // heads)
    q, k, v = split(q), split(k), split(x @ own["v_proj.weight"].T)
    k, v = (np.repeat(a, heads // config["num_key_value_heads"], axis=1) for a in (k, v))
    weights = np.exp(np.einsum("thk,shk->hts", q, k) / np.sqrt(q.shape[-1])) * np.tri(len(x))
    y = np.einsum("hts,shv->thv", weights / weights.sum(-1, keepdims=True), v).reshape(len(x), -1)
    x = x + norm(y @ own["o_proj.weight"].T, layer["post_attention_layernorm.weight"])
    x = x + norm(mlp(x, inside(layer, "mlp.")), layer["post_feedforward_layernorm.weight"])
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def inside(w, prefix):
    """The tensors whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


FORMULAS = {
    "mamba": mamba,
    "mamba3": mamba3,
    "qwen3_5 with images": qwen3_5,
    "olmo_hybrid": olmo_hybrid,
    "rwkv7": rwkv7,
}


@pytest.mark.parametrize("kind", some_slow(FORMULAS, ["mamba3"]))
def test_logits(tmp_path, kind):
    source = peers.write(tmp_path / "source", kind)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    model = load_run(tmp_path / "run").model
    w = {name: x.astype(np.float64) for name, x in peers.tensors(kind).items()}
    config = json.loads((source / "config.json").read_text())
    tokens = np.random.default_rng(0).integers(0, 256, (2, 131))
    expected = np.array([FORMULAS[kind](row, w, config) for row in tokens])

    @nnx.jit
    def both(model, tokens):
        """At once, and as a prefill of 60 tokens and two more pieces."""
        return model(tokens), streamed(model.extend, tokens, model.init_cache(*tokens.shape), (0, 60, 61, 131))[0]

    for name, got in zip(("at once", "streamed"), both(model, jnp.asarray(tokens)), strict=True):
        difference = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
        print(f"{kind} {name}: largest difference / largest logit: {difference:.1e}")
        assert difference < 1e-5
