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
from tests.nn.baseline_formulas import rms, silu, softplus

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


def inside(w, prefix):
    """The tensors whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


FORMULAS = {"mamba": mamba}


@pytest.mark.parametrize("kind", FORMULAS)
def test_logits(tmp_path, kind):
    source = peers.write(tmp_path / "source", kind)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    model = load_run(tmp_path / "run").model
    w = {name: x.astype(np.float64) for name, x in peers.tensors(kind).items()}
    config = json.loads((source / "config.json").read_text())
    tokens = np.random.default_rng(0).integers(0, 256, (2, 67))
    expected = np.array([FORMULAS[kind](row, w, config) for row in tokens])
    got = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)), np.float64)
    difference = np.abs(got - expected).max() / np.abs(expected).max()
    print(f"{kind}: largest difference / largest logit: {difference:.1e}")
    assert difference < 1e-5
