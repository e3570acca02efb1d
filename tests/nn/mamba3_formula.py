"""Mamba-3's published formula for one row, token by token in numpy, as `baseline_formulas`; with the state as complex numbers.

A rotation of keys and queries by cumulative angles is a complex state that turns by each token's own angle. So nothing here has a
sum of angles, and no channel is rotated: pairs of channels are complex numbers.
"""

import numpy as np

from atlasjax.nn import Mamba3Config, SSMConfig


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def complex_pairs(x, count, adjacent):
    """Channels [..., N] as [..., N − count] numbers, the first `count` of them complex: pairs (2i, 2i + 1), or (i, i + N / 2)."""
    N = x.shape[-1]
    first = np.arange(count) * (2 if adjacent else 1)
    second = first + (1 if adjacent else N // 2)
    rest = np.setdiff1d(np.arange(N), np.concatenate([first, second]))
    return np.concatenate([x[..., first] + 1j * x[..., second], x[..., rest]], -1)


def recurrence(x, delta, A, blend, B, C, D, turn):
    """One head: x [time, R, P]; delta, A, blend [time]; B, C [time, R, n] complex; turn [time, n] in radians → y, H [P, n]."""
    H = np.zeros((x.shape[2], B.shape[2]), complex)
    before, ys = np.zeros_like(H), []
    for t in range(len(x)):
        pairs = sum(np.outer(v, np.conj(k)) for v, k in zip(x[t], B[t]))
        alpha = np.exp(A[t] * delta[t])
        beta, gamma = (1 - blend[t]) * delta[t] * alpha, blend[t] * delta[t]
        H = np.exp(1j * turn[t]) * (alpha * H + beta * before) + gamma * pairs
        before = pairs
        ys.append([np.real(H @ q) + D * v for q, v in zip(C[t], x[t])])
    return np.array(ys), H


def mamba3(p, x, config):
    ssm, own = config.ssm, config.mamba3
    heads, rank, count = len(p["D"]), own.rank, p["rates"]["kernel"].shape[-1]
    linear = lambda p: np.tensordot(x, p["kernel"], axes=1)
    rms = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
    z, v = np.moveaxis(linear(p["inputs"]).reshape(len(x), 2, heads, -1), 1, 0)
    selected = linear(p["selection"]).reshape(len(x), 2, rank, ssm.groups, -1)
    logits = linear(p["gates"])
    delta, A = softplus(logits[:, 0] + p["dt_bias"]), -np.maximum(softplus(logits[:, 1]), 1e-4)
    blend, rate = sigmoid(logits[:, 2]), np.pi * np.tanh(linear(p["rates"]))
    ones = np.ones((rank, heads, ssm.head_dim))
    out = np.zeros((len(x), heads, ssm.head_dim))
    for h in range(heads):
        B, C = (
            complex_pairs(
                rms(selected[:, i, :, h * ssm.groups // heads]) * p[f"{n}_norm"]["scale"] + p[f"{n}_bias"][:, h],
                count, adjacent=rank == 1,
            )
            for i, n in enumerate("BC")
        )  # fmt: skip
        turn = np.pad(delta[:, h, None] * rate, ((0, 0), (0, B.shape[-1] - count)))
        values = v[:, None, h] * p.get("mimo_x", ones)[None, :, h]
        y, _ = recurrence(values, delta[:, h], A[:, h], blend[:, h], B, C, p["D"][h], turn)
        if own.output_norm:
            y = rms(y) * p["norm"]["scale"][h]
        gate = z[:, None, h] * p.get("mimo_z", ones)[None, :, h]
        out[:, h] = (y * gate * sigmoid(gate) * p.get("mimo_o", ones)[None, :, h]).sum(1)
    return np.tensordot(out.reshape(len(x), -1), p["out"]["kernel"], axes=1)


FORMULAS = {"mamba3": mamba3}
_SIZES = SSMConfig(state_dim=6, expand=2, head_dim=8)
FORMS = {
    "mamba3": ("mamba3", {"ssm": _SIZES}),
    "mamba3, three groups, all rotated": (
        "mamba3",
        {"ssm": SSMConfig(state_dim=4, head_dim=4, groups=3), "mamba3": Mamba3Config(1, 1.0, output_norm=True)},
    ),
    "mamba3, rank 2": ("mamba3", {"ssm": SSMConfig(state_dim=6, head_dim=8, groups=3), "mamba3": Mamba3Config(2)}),
    "mamba3, rank 3, a norm": (
        "mamba3",
        {"ssm": _SIZES, "mamba3": Mamba3Config(3, 1.0, output_norm=True)},
    ),
}
