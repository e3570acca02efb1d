"""Formulas of the delta rules with several writes or several keys, as in `baseline_formulas`."""

import numpy as np

from atlasjax.nn import DeltaProductConfig, GatedDeltaNetConfig, KDAConfig
from tests.nn.baseline_formulas import (
    conv,
    gated_output,
    kda_inputs,
    kda_output,
    linear,
    rms,
    run,
    sigmoid,
    silu,
    softplus,
    split,
    unit,
)  # fmt: skip


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


def of_keys(x, groups):
    """One number for each head of keys → for every entry of its heads of values."""
    return np.repeat(x, groups)[:, None]


def keyed_step(S, q, k, v, alpha, beta, read_key):
    S = S * alpha
    S = S + beta * np.outer(v - S @ read_key, k)
    return S, S @ q


def comba(p, x, config):
    q, k, v, z = split(p, x, config, convolved=True)
    groups = q.shape[1] // config.num_heads
    read_key = k * of_keys(sigmoid(p["inner_decay"]), groups)
    q = q - of_keys(p["correction"], groups) * read_key
    beta, a = np.moveaxis(linear(p["gates"], x), 1, 0)

    def step(S, q, k, v, alpha, beta, read_key):
        S = alpha * S + beta * np.outer(v - S @ read_key, k)
        return S, S @ q

    alpha = decay(a, p["A_log"], p["dt_bias"])
    y = run(step, zero(v, k), unit(q), unit(k), v, alpha, sigmoid(beta), unit(read_key))
    return linear(p["out"], (rms(y, config.norm_eps) * p["norm"]["scale"] * sigmoid(z)).reshape(len(x), -1))


def preconditioned(p, x, k):
    """m ⊙ k for keys of unit length [time, heads, key_dim], and for as many curvatures."""
    beta, a = np.moveaxis(linear(p["gates"], x), 1, 0)
    beta, alpha = sigmoid(beta)[..., None], decay(a, p["A_log"], p["dt_bias"])[..., None]
    keys, a = np.zeros_like(k), np.zeros(k.shape[1:])
    for t in range(len(x)):
        a = alpha[t] * a + beta[t] * k[t] ** 2
        distance = np.log(a + 1e-6) - p["center"][:, None]
        keys[t] = k[t] * 1.5 ** (-distance / (1 + abs(distance)))
    return keys


def pgdn(p, x, config):
    q, k, v, z = split(p, x, config, convolved=True)
    groups, k = q.shape[1] // config.num_heads, unit(k)
    keys = np.repeat(preconditioned(p["curvature"], x, k[:, ::groups]), groups, 1)
    beta, a = np.moveaxis(linear(p["gates"], x), 1, 0)
    y = run(keyed_step, zero(v, k), unit(q), keys, v, decay(a, p["A_log"], p["dt_bias"]), sigmoid(beta), k)
    return gated_output(p, y, config, z)


def pkda(p, x, config):
    q, k, v, _, alpha = kda_inputs(p, x, config)
    q, k = (np.repeat(a, v.shape[1] // config.num_heads, 1) for a in (q, k))
    beta = (1 + config.kda.negative_eigenvalues) * sigmoid(linear(p["beta"], x))
    beta = np.repeat(beta, v.shape[1] // config.num_heads, 1)
    keys = preconditioned(p["curvature"], x, k)
    return kda_output(p, run(keyed_step, zero(v, k), q, keys, v, alpha, beta, k), x, config)


FORMULAS = {"gated_deltaproduct": gated_deltaproduct, "comba": comba, "pgdn": pgdn, "pkda": pkda}
FORMS = {
    "gated_deltaproduct, three writes": (
        "gated_deltaproduct",
        {"gated_deltaproduct": DeltaProductConfig(writes=3, value_heads=4, negative_eigenvalues=False)},
    ),
    "gated_deltaproduct, without a forget gate": (
        "gated_deltaproduct",
        {"gated_deltaproduct": DeltaProductConfig(forget_gate=False)},
    ),
    "comba, heads that share keys": (
        "comba",
        {"gated_deltanet": GatedDeltaNetConfig(value_heads=4)},
    ),
    "pgdn, heads that share keys": ("pgdn", {"gated_deltanet": GatedDeltaNetConfig(value_heads=4)}),
    "pkda, heads that share keys": ("pkda", {"kda": KDAConfig(value_heads=4, gate_bias=True)}),
}
