"""LaCT's layer for one row, token by token in numpy, as the formulas of `baseline_formulas`."""

import numpy as np

from atlasjax.nn import LaCTConfig
from tests.memory.large_chunk import formula


def silu(x):
    return x / (1.0 + np.exp(-x))


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x):
    """x [time, heads, dim]: pairs as complex numbers, turned by their position."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def window_attention(q, k, v, window):
    y = np.zeros_like(v)
    for t in range(len(q)):
        seen = slice(max(0, t - window + 1), t + 1)
        for h in range(q.shape[1]):
            weights = np.exp(k[seen, h] @ q[t, h] / np.sqrt(q.shape[-1]))
            y[t, h] = weights @ v[seen, h] / weights.sum()
    return y


def start(p, h):
    if "W2" in p:
        return [p[name][h] for name in ("W1", "W2", "W3")]
    W2, W3 = (p["left"][i, h] @ p["right"][i, h] for i in (0, 1))
    return [p["W1"][h], W2 + 0.5 * np.eye(*W2.shape), W3 + 0.5 * np.eye(*W3.shape)]


def lact(p, x, config):
    given, time, m = config.lact, len(x), p["memory"]
    d = config.resolved_head_dim
    q, k, v = np.split(np.tensordot(x, p["attention"]["inputs"]["kernel"], 1), [d, 2 * d], axis=-1)
    norm = lambda z, name: rms(z.reshape(time, -1), config.norm_eps) * p["attention"][name]["scale"]
    flat = norm(q, "q_norm"), norm(k, "k_norm")
    q, k = (z.reshape(q.shape) for z in flat)
    a = window_attention(rotate(q), rotate(k), v, config.attention.window or given.chunk_size)

    def fast(z, scale, offset):
        z = silu(z * scale + offset).reshape(time, given.heads, -1)
        z = z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6)
        return rotate(z.reshape(q.shape)).reshape(z.shape)

    fast_q, fast_k = (fast(*each) for each in zip(flat, m["scale"], m["offset"], strict=True))
    fast_v = silu(v).reshape(time, given.heads, -1)
    logits = np.tensordot(x, m["gates"], 1) + m["bias"]
    eta, theta = np.log1p(np.exp(logits[..., :3])), np.zeros((time, given.heads))
    if given.momentum:
        theta = 1.0 / (1.0 + np.exp(-logits[..., 4]))
    tokens = (fast_q, fast_k, fast_v, eta, theta)
    head = lambda h: formula.lact(start(m["start"], h), *(z[:, h] for z in tokens), given.chunk_size, given.schedule)[0]
    y = np.stack([head(h) for h in range(given.heads)], axis=1)
    y = rms(y, config.norm_eps) * m["norm"]["scale"] * silu(logits[..., 3:4])
    return np.tensordot(a.reshape(time, -1) + y.reshape(time, -1), p["out"]["kernel"], 1)


FORMULAS = {"lact": lact}
# Chunks of 4 tokens, so that 14 are several. A head of two keys: gradients of 4 tokens then have full rank, and no rounding is
# orthogonalized.
FORMS = {
    "lact": ("lact", {"lact": LaCTConfig(chunk_size=4, rank=1)}),
    "lact, one head": ("lact", {"lact": LaCTConfig(1, 5, expansion=2, momentum=False, schedule=None, rank=None)}),
}
