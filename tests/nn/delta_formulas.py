"""Formulas of the delta rules with several writes or several keys, as in `baseline_formulas`."""

import numpy as np

from atlasjax.nn import DeltaProductConfig
from tests.nn.baseline_formulas import conv, gated_output, linear, run, sigmoid, silu, softplus, unit


def decay(logits, A_log, dt_bias):
    return np.exp(-np.exp(A_log) * softplus(logits + dt_bias))


def zero(v, k):
    return np.zeros((v.shape[-1], k.shape[-1]))


def gated_deltaproduct(p, x, config):
    given = config.gated_deltaproduct
    n, dk, dv, key_heads = given.writes, config.resolved_head_dim, config.value_dim, config.num_heads
    heads = given.value_heads or key_heads
    groups = heads // key_heads
    parts = linear(p["inputs"]["linear"], x)  # of each head of keys: q, the n keys, the n values of its groups, z
    ends = np.cumsum([dk, n * dk, n * groups * dv])
    parts = np.concatenate([silu(conv(p["inputs"]["conv"], parts[..., : ends[2]])), parts[..., ends[2] :]], -1)
    q, k, v, z = np.split(parts, ends, axis=-1)
    # [time, heads, …], with the writes of a head as its rows.
    k = np.repeat(unit(k.reshape(len(x), key_heads, n, dk)), groups, 1)
    v = np.moveaxis(v.reshape(len(x), key_heads, n, groups, dv), 2, 3).reshape(len(x), heads, n, dv)
    logits = linear(p["gates"], x)
    beta = np.moveaxis((1 + given.negative_eigenvalues) * sigmoid(logits[:, :n]), 1, 2)
    alpha = decay(logits[:, n], p["A_log"], p["dt_bias"]) if given.forget_gate else np.ones((len(x), heads))

    def step(S, q, k, v, alpha, beta):
        S = alpha * S
        for j in range(n):
            S = S + beta[j] * np.outer(v[j] - S @ k[j], k[j])
        return S, S @ q

    y = run(step, zero(v, k), np.repeat(unit(q), groups, 1), k, v, alpha, beta)
    return gated_output(p, y, config, z.reshape(len(x), heads, dv))


FORMULAS = {"gated_deltaproduct": gated_deltaproduct}
FORMS = {
    "gated_deltaproduct, three writes": (
        "gated_deltaproduct",
        {"gated_deltaproduct": DeltaProductConfig(writes=3, value_heads=4, negative_eigenvalues=False)},
    ),
    "gated_deltaproduct, without a forget gate": (
        "gated_deltaproduct",
        {"gated_deltaproduct": DeltaProductConfig(forget_gate=False)},
    ),
}
