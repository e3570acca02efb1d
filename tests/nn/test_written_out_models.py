"""Whole models of the tables, written out in NumPy in float64: Samba, Gated DeltaNet-H2 and Log-Linear++ from tokens to logits.

Which layers there are and in which order is written here, and not read from the presets: Samba (Ren et al. 2024) is Mamba, MLP,
sliding-window attention, MLP; Gated DeltaNet-H2 (Yang et al. 2025) is Mamba-2, Gated DeltaNet, sliding-window attention, each with
an MLP after it. Every layer is x + f(RMSNorm(x)); MLPs are SwiGLU, and the head is the embedding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import LanguageModel, SSMConfig
from atlasjax.presets import get_preset
from tests.nn import baseline_formulas as formulas
from tests.nn.lact_formulas import rotate, window_attention

WINDOW, TIME, VOCAB = 4, 11, 13


def sliding_window_attention(p, x, config):
    q, k, v = np.split(formulas.linear(p["attention"]["inputs"], x), 3, axis=-1)
    y = window_attention(rotate(q), rotate(k), v, WINDOW)
    return formulas.linear(p["out"], y.reshape(len(x), -1))


def swiglu(p, x):
    gate, wide = np.moveaxis(formulas.linear(p["gate_and_wide"], x), 1, 0)
    return formulas.linear(p["out"], formulas.silu(gate) * wide)


MODELS = {
    "samba": (formulas.mamba, sliding_window_attention),
    "gated-deltanet-h2": (formulas.mamba2, formulas.gated_deltanet, sliding_window_attention),
    "log-linear++": (formulas.log_linear_plus_plus,),
}


def written_out(p, tokens, config, mixers):
    norm = lambda p, x: formulas.rms(x, config.norm_eps) * p["scale"]
    x = p["embedding"][tokens]
    for i in range(2):  # repetitions of the pattern
        for j, mixer in enumerate(mixers):
            of_layer = p["layers"] if len(mixers) == 1 else p["layers"][f"layer_{j}"]
            layer = jax.tree.map(lambda z, i=i: z[i], of_layer)
            x = x + mixer(layer["mixer"], norm(layer["mixer_norm"], x), config)
            x = x + swiglu(layer["mlp"], norm(layer["mlp_norm"], x))
    return norm(p["norm"], x) @ p["embedding"].T


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    preset, mixers = get_preset(f"{name}-tiny"), MODELS[name]
    config = dataclasses.replace(
        preset, vocab_size=VOCAB, dim=8, num_layers=2 * len(mixers), num_heads=2, head_dim=4, mlp_dim=12,
        ssm=SSMConfig(state_dim=3, expand=2, head_dim=8),
        attention=dataclasses.replace(preset.attention, window=WINDOW, persistent_tokens=0),
    )  # fmt: skip
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)
    tokens = rng.integers(0, VOCAB, (1, TIME))
    logits = jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens))(params, jnp.asarray(tokens))
    plain = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    expected = written_out(plain, tokens[0], config, mixers)
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
