"""Self-modifying Titans for one row, token by token in numpy, as the formulas of `baseline_formulas`."""

import math

import numpy as np

from atlasjax.nn import SelfModifyingConfig
from tests.nn.baseline_formulas import conv

ERF = np.vectorize(math.erf)
GENERATORS = ("key", "value", "step_size", "retention")


def gelu(z):
    return z * (1.0 + ERF(z / math.sqrt(2.0))) / 2.0


def gelu_slope(z):
    return (1.0 + ERF(z / math.sqrt(2.0))) / 2.0 + z * np.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def apply(m, x):
    return m.get("skip", np.eye(len(x))) @ x + m["W1"] @ gelu(m["W2"] @ x)


def write(m, start, k, v, eta, alpha):
    """One token of delta gradient descent on ‖M(k) − M(v)‖², with the gradient at the memory `start`."""
    z = start["W2"] @ k
    error = 2.0 * (apply(start, k) - apply(start, v))
    toward_k = alpha * np.eye(len(k)) - eta * np.outer(k, k)
    after = {
        "W1": alpha * m["W1"] - eta * np.outer(error, gelu(z)),
        "W2": m["W2"] @ toward_k - eta * np.outer(gelu_slope(z) * (start["W1"].T @ error), k),
    }
    return after | ({"skip": m["skip"] @ toward_k - eta * np.outer(error, k)} if "skip" in m else {})


def self_modifying(p, x, config):
    heads, given = config.num_heads, config.self_modifying
    x = conv(p["conv"], x)
    q = unit(np.tensordot(x, p["query"]["kernel"], 1))
    x = x.reshape(q.shape)
    y = np.zeros_like(q)
    for h in range(heads):
        now = {name: {part: w[h] for part, w in p[name].items()} for name in ("memory", *GENERATORS)}
        start = dict(now)
        for t in range(len(x)):
            for name in now:
                if t % (given.chunk_size if name == "memory" else given.generator_chunk or given.chunk_size) == 0:
                    start[name] = now[name]
            z = x[t, h]
            k, v = unit(apply(start["key"], z)), apply(start["value"], z)
            eta = 1e-3 * np.log1p(np.exp(apply(start["step_size"], z)[0]))
            alpha = 1.0 / (1.0 + np.exp(-apply(start["retention"], z)[0] - p["bias"][h]))
            y[t, h] = apply(start["memory"], q[t, h])
            now = {name: write(m, start[name], k, v, eta, alpha) for name, m in now.items()}
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + config.norm_eps) * p["norm"]["scale"]
    return y.reshape(len(x), -1) @ p["out"]["kernel"]


FORMULAS = {"self_modifying_titans": self_modifying}
_HEADS = {"head_dim": None, "value_expansion": 1}
FORMS = {
    "self_modifying_titans": ("self_modifying_titans", {"self_modifying": SelfModifyingConfig(4), **_HEADS}),
    "self_modifying_titans, chunks of 2 and 4": (
        "self_modifying_titans",
        {"self_modifying": SelfModifyingConfig(2, generator_chunk=4, expansion=2), **_HEADS},
    ),
}
