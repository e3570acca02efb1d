"""Momentum DeltaNet's published formula: see `baseline_formulas`."""

import numpy as np

from atlasjax.nn import GatedDeltaNetConfig
from tests.nn.baseline_formulas import gated_output, linear, run, sigmoid, softplus, split, unit


def momentum_deltanet(p, x, config):
    q, k, v, z = split(p, x, config, convolved=True)
    eta, a, b, m = np.moveaxis(linear(p["gates"], x), 1, 0)
    A, Mu, factor, D = (
        np.repeat(np.exp(p[name]), v.shape[1] // config.num_heads)
        for name in ("A_log", "Mu_log", "log_factor", "D_log")
    )
    eta = 1 + np.tanh(eta / np.sqrt(x.shape[-1]))
    angle = np.arctan(eta * factor)
    alpha = np.cos(angle) ** 2 * np.exp(-A * softplus(a + p["dt_bias"]))
    beta = np.sin(angle) ** 2 * sigmoid(b) * (2 if config.gated_deltanet.negative_eigenvalues else 1)
    mu = np.exp(np.maximum(-Mu * softplus(m + p["mu_bias"]), -2))

    def step(both, q, k, v, alpha, beta, mu, eta):
        W, M = both
        M = mu * M + eta * np.outer(alpha * W @ k - v, k)
        W = alpha * W - beta * M
        return (W, M), W @ q

    start = (np.zeros((v.shape[-1], k.shape[-1])),) * 2
    y = run(step, start, unit(q - D[:, None] * k), unit(k), v, alpha, beta, mu, eta)
    return gated_output(p, y, config, z)


FORMULAS = {"momentum_deltanet": momentum_deltanet}
FORMS = {
    "momentum_deltanet, three heads of values": (
        "momentum_deltanet", {"gated_deltanet": GatedDeltaNetConfig(value_heads=6, negative_eigenvalues=True)}
    ),
}  # fmt: skip
