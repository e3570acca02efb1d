"""Self-modifying Titans for one row, token by token in numpy, as the formulas of `baseline_formulas`."""

import math

import numpy as np

from atlasjax.nn import SelfModifyingConfig
from tests.nn.baseline_formulas import conv

ERF = np.vectorize(math.erf)
SLOPE, WEIGHT_NORM = 16.0, 2.0
GENERATORS = ("key", "value", "step_size", "retention")


def gelu(z):
    return z * (1.0 + ERF(z / math.sqrt(2.0))) / 2.0


def gelu_slope(z):
    return (1.0 + ERF(z / math.sqrt(2.0))) / 2.0 + z * np.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def apply(m, x):
    return m.get("skip", np.eye(len(x))) @ x + m["W1"] @ gelu(m["W2"] @ x)


def write(m, start, k, v, eta, alpha, chunk=None):
    """One token of delta gradient descent on ‖M(k) − M(v)‖², with the gradient at the memory `start`; bounded with a chunk."""
    z = start["W2"] @ k
    error = 2.0 * (apply(start, k) - apply(start, v))
    if chunk is not None:
        error = error * min(1.0, SLOPE / np.abs(error).max())
        back = gelu_slope(z) * (start["W1"].T @ error)
        share = (gelu(z) ** 2).sum() + ((back**2).sum() / (error**2).sum() + 1.0) * (k**2).sum()
        eta = min(eta, 1.0 / (2.0 * chunk * share))
    toward_k = alpha * np.eye(len(k)) - eta * np.outer(k, k)
    after = {
        "W1": alpha * m["W1"] - eta * np.outer(error, gelu(z)),
        "W2": m["W2"] @ toward_k - eta * np.outer(gelu_slope(z) * (start["W1"].T @ error), k),
    }
    return after | ({"skip": m["skip"] @ toward_k - eta * np.outer(error, k)} if "skip" in m else {})


def within_norm(w):
    return w * min(1.0, WEIGHT_NORM * len(w) ** 0.5 / np.sqrt((w**2).sum()))


def self_modifying(p, x, config):
    heads, given = config.num_heads, config.self_modifying
    x = conv(p["conv"], x)
    q = unit(np.tensordot(x, p["query"]["kernel"], 1))
    x = x.reshape(q.shape)
    chunks = dict.fromkeys(GENERATORS, given.generator_chunk or given.chunk_size) | {"memory": given.chunk_size}
    y = np.zeros_like(q)
    for h in range(heads):
        now = {name: {part: w[h] for part, w in p[name].items()} for name in ("memory", *GENERATORS)}
        start = dict(now)
        for t in range(len(x)):
            for name in now:
                if t % chunks[name] == 0:
                    if given.bounded and t:
                        now[name] = {part: within_norm(w) for part, w in now[name].items()}
                    start[name] = now[name]
            z = x[t, h]
            k, v = unit(apply(start["key"], z)), apply(start["value"], z)
            eta = 1e-3 * np.logaddexp(0.0, apply(start["step_size"], z)[0])
            alpha = np.exp(-np.logaddexp(0.0, -apply(start["retention"], z)[0] - p["bias"][h]))
            y[t, h] = apply(start["memory"], q[t, h])
            now = {
                name: write(m, start[name], k, v, eta, alpha, chunks[name] if given.bounded else None)
                for name, m in now.items()
            }
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
