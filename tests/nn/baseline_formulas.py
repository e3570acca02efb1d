"""The baselines' published formulas for one row, token by token in numpy: (parameters, x [time, dim], config) → [time, dim].

Slow and obvious. `p` is the nested dictionary of the mixer's parameters, float64.
"""

import numpy as np

from atlasjax.nn import GatedDeltaNetConfig, HeadNormConfig, KDAConfig, MesaConfig, MultiplierConfig, SSMConfig


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def linear(p, x):
    return np.tensordot(x, p["kernel"], axes=1)


def conv(p, x):
    """Depthwise and causal; the last tap weighs the token itself."""
    kernel = p["kernel"]
    width = len(kernel)
    past = lambda t, j: x[t - j] if t >= j else np.zeros_like(x[0])
    return np.array([sum(kernel[width - 1 - j] * past(t, j) for j in range(width)) for t in range(len(x))])


def run(step, start, *tokens):
    """A recurrence for each head: tokens [time, heads, …]; step(S, token of each) → (S, y)."""
    time, heads = tokens[0].shape[:2]
    ys = []
    for h in range(heads):
        S, out = start, []
        for t in range(time):
            S, y = step(S, *(x[t, h] for x in tokens))
            out.append(y)
        ys.append(out)
    return np.moveaxis(np.array(ys), 0, 1)


def split(p, x, config, convolved):
    dk, dv = config.resolved_head_dim, config.value_expansion * config.resolved_head_dim
    groups = config.value_heads // config.num_heads  # heads of values of a head of keys
    dv *= groups
    inputs = linear(p["inputs"]["linear"], x)
    if convolved:
        mixed = silu(conv(p["inputs"]["conv"], inputs[..., : 2 * dk + dv]))
        inputs = np.concatenate([mixed, inputs[..., 2 * dk + dv :]], -1)
    q, k, v, z = np.split(inputs, [dk, 2 * dk, 2 * dk + dv], axis=-1)
    heads = lambda a: a.reshape(len(x), config.num_heads * groups, -1)
    return np.repeat(q, groups, 1), np.repeat(k, groups, 1), heads(v), heads(z)


def gated_output(p, y, config, z=None):
    y = rms(y, config.head_norm.eps or config.norm_eps) * p["norm"]["scale"]  # one scale, or one for each head
    y = y if z is None else y * silu(z)
    return linear(p["out"], y.reshape(len(y), -1))


def retnet(p, x, config):
    q, k, v, z = split(p, x, config, convolved=False)
    half = q.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(half) / half)

    def rotate(u):  # pairs as complex numbers
        turned = (u[..., :half] + 1j * u[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    q, k = rotate(q), rotate(k) / np.sqrt(q.shape[-1])
    gamma = np.tile(1 - 2.0 ** (-5 - np.arange(q.shape[1])), (len(x), 1))
    step = lambda S, q, k, v, gamma: ((S := gamma * S + np.outer(v, k)), S @ q)
    return gated_output(p, run(step, 0.0, q, k, v, gamma), config, z)


def gla(p, x, config):
    q, k, v, z = split(p, x, config, convolved=False)
    alpha = sigmoid(linear(p["decay_out"], linear(p["decay_in"], x)) + p["decay_bias"]) ** (1 / 16)
    step = lambda S, q, k, v, a: ((S := S * a + np.outer(v, k)), S @ q)
    return gated_output(p, run(step, 0.0, q, k / np.sqrt(q.shape[-1]), v, alpha), config, z)


def delta_step(S, q, k, v, alpha, beta):
    S = alpha * S
    S = S + beta * np.outer(v - S @ k, k)
    return S, S @ q


def deltanet(p, x, config):
    q, k, v, _ = split(p, x, config, convolved=True)
    beta = sigmoid(linear(p["write"], x))
    start = np.zeros((v.shape[-1], k.shape[-1]))
    return gated_output(p, run(delta_step, start, unit(q), unit(k), v, np.ones_like(beta), beta), config)


def gated_deltanet(p, x, config):
    q, k, v, z = split(p, x, config, convolved=True)
    beta, a = np.moveaxis(linear(p["gates"], x), 1, 0)
    alpha = np.exp(-np.exp(p["A_log"]) * softplus(a + p["dt_bias"]))
    start = np.zeros((v.shape[-1], k.shape[-1]))
    return gated_output(p, run(delta_step, start, unit(q), unit(k), v, alpha, sigmoid(beta)), config, z)


def low_rank(p, x):
    return linear(p["up"], linear(p["down"], x) if "down" in p else x) + p["up"].get("bias", 0.0)


def kda_inputs(p, x, config):
    """q and k of heads of keys, v of heads of values, the logits of further gates, and α of the heads that have one."""
    dk, heads = config.resolved_head_dim, config.kda.value_heads or config.num_heads
    convolved = 2 * dk + heads // config.num_heads * config.value_dim
    inputs = linear(p["inputs"]["linear"], x)
    q, k, v = np.split(silu(conv(p["inputs"]["conv"], inputs[..., :convolved])), [dk, 2 * dk], axis=-1)
    logits = low_rank(p["decay"]["logits"], x) + p["decay"]["dt_bias"]
    rate, bound = np.exp(p["decay"]["A_log"])[:, None], config.kda.lower_bound
    alpha = np.exp(-rate * softplus(logits) if bound is None else bound * sigmoid(rate * logits))
    return unit(q), unit(k), v.reshape(len(x), heads, -1), inputs[..., convolved:], alpha


def kda_output(p, y, x, config):
    y = rms(y, config.norm_eps) * p["norm"]["scale"] * sigmoid(low_rank(p["gate"], x))
    return linear(p["out"], y.reshape(len(y), -1))


def kda(p, x, config):
    q, k, v, _, alpha = kda_inputs(p, x, config)
    q, k = (np.repeat(a, v.shape[1] // config.num_heads, 1) for a in (q, k))
    beta = (2 if config.kda.negative_eigenvalues else 1) * sigmoid(linear(p["beta"], x))
    start = np.zeros((v.shape[-1], k.shape[-1]))
    return kda_output(p, run(delta_step, start, q, k, v, alpha, beta), x, config)


def gdn2(p, x, config):
    q, k, v, logits, alpha = kda_inputs(p, x, config)
    more = v.shape[1] // config.num_heads
    b, w = np.split(sigmoid(logits), [k.shape[-1]], axis=-1)
    read = (2 if config.kda.negative_eigenvalues else 1) * b * k
    q, k, read, alpha = (np.repeat(a, more, 1) for a in (q, k, read, alpha))

    def step(S, q, k, read, v, alpha):
        S = S @ np.diag(alpha)
        S = S + np.outer(v - S @ read, k)
        return S, S @ q

    start = np.zeros((v.shape[-1], k.shape[-1]))
    return kda_output(p, run(step, start, q, k, read, w.reshape(v.shape) * v, alpha), x, config)


def mesa(p, x, config):
    dk, dv = config.resolved_head_dim, config.value_dim
    inputs = linear(p["inputs"]["linear"], x)
    mixed = silu(conv(p["inputs"]["conv"], inputs[..., : 2 * dk]))
    q, k = unit(mixed[..., :dk]), unit(mixed[..., dk:])
    v, z = inputs[..., 2 * dk : 2 * dk + dv], inputs[..., 2 * dk + dv :]
    alpha, beta = np.moveaxis(sigmoid(linear(p["gates"], x) + p["gate_bias"]), 1, 0)
    ridge = np.tile(0.25 + softplus(p["ridge"]), (len(x), 1, 1))

    def step(S, q, k, v, alpha, beta, ridge):
        H, G = S
        H, G = alpha * H + beta * np.outer(k, k), alpha * G + beta * np.outer(v, k)
        return (H, G), G @ np.linalg.solve(H + np.diag(ridge), q)

    start = np.zeros((dk, dk)), np.zeros((dv, dk))
    y = run(step, start, q, k, v, alpha, beta, ridge)
    return gated_output(p, y, config, z if config.mesa.output_gate else None)


def mamba_block(p, x, config, recur):
    u, z = np.moveaxis(linear(p["inputs"], x), 1, 0)
    u = silu(conv(p["conv"], u) + p["conv_bias"])
    rank = p["step"]["kernel"].shape[0]
    low, B, C = np.split(linear(p["selection"], u), [rank, rank + config.ssm.state_dim], axis=-1)
    if config.ssm.selection_eps is not None:
        low, B, C = (rms(part, config.ssm.selection_eps) for part in (low, B, C))
    logits = linear(p["step"], low) + p["step_bias"]
    y = recur(u, logits, B, C) + p["D"] * u
    return linear(p["out"], y * silu(z))


def mamba(p, x, config):
    A = -np.exp(p["A_log"])

    def recur(u, logits, B, C):
        h, ys = np.zeros_like(A), []
        for t in range(len(u)):
            delta = softplus(logits[t])
            h = np.exp(delta[:, None] * A) * h + np.outer(delta * u[t], B[t])
            ys.append(h @ C[t])
        return np.array(ys)

    return mamba_block(p, x, config, recur)


def longhorn(p, x, config):
    def recur(u, logits, k, q):
        S, ys = np.zeros((u.shape[1], k.shape[1])), []
        for t in range(len(u)):
            beta = sigmoid(logits[t])
            delta = beta / (1 + beta * (k[t] @ k[t]))
            S = S + delta[:, None] * np.outer(u[t] - S @ k[t], k[t])
            ys.append(S @ q[t])
        return np.array(ys)

    return mamba_block(p, x, config, recur)


def mamba2(p, x, config):
    z_factor, u_factor, _, _, delta_factor = config.multipliers.ssm
    z, u = np.moveaxis(linear(p["inputs"], x), 1, 0)
    u = silu(conv(p["conv"], u_factor * u) + p["conv_bias"])
    delta, A = softplus(delta_factor * linear(p["step"], x) + p["dt_bias"]), -np.exp(p["A_log"])
    delta = np.clip(delta, config.ssm.least_step, config.ssm.largest_step or np.inf)
    u = u.reshape(len(x), len(A), -1)
    B, C = selected(p, x, config)
    step = lambda h, u, delta, decay, B, C: ((h := decay * h + delta * np.outer(u, B)), h @ C)
    y = run(step, 0.0, u, delta, np.exp(delta * A), B, C) + p["D"][:, None] * u
    return config.multipliers.ssm_out * grouped_output(p, y, z_factor * z, config)


def selected(p, x, config):
    """Mamba-2's B and C of each head, [time, heads, state]."""
    groups, heads = config.ssm.groups, len(p["A_log"])
    factors = np.repeat(config.multipliers.ssm[2:4], groups * config.ssm.state_dim)
    both = silu(conv(p["selection_conv"], factors * linear(p["selection"], x)) + p["selection_bias"])
    both = both.reshape(len(x), 2, groups, -1)
    return (np.array([[row[h * groups // heads] for h in range(heads)] for row in w]) for w in np.moveaxis(both, 1, 0))


def grouped_output(p, y, z, config):
    norm = lambda y: (
        rms(y.reshape(len(y), config.ssm.groups, -1), config.norm_eps).reshape(len(y), -1) * p["norm"]["scale"]
    )
    y, gate = y.reshape(len(y), -1), silu(z)
    forms = {"gated": lambda: norm(y * gate), "before_gate": lambda: norm(y) * gate, "none": lambda: y * gate}
    return linear(p["out"], forms[config.ssm.output_norm]())


def short_conv(p, x, config):
    B, C, z = np.moveaxis(linear(p["inputs"], x), 1, 0)
    return linear(p["out"], C * conv(p["conv"], B * z))


def rwkv7(p, x, config):
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    xr, xw, xk, xv, xa, xg = (x + mu * (before - x) for mu in p["shift"])
    low_rank = lambda p, x, act: linear(p["up"], act(linear(p["down"], x)))
    r, k, v = linear(p["r"], xr), linear(p["k"], xk), linear(p["v"], xv)
    w = np.exp(-np.exp(-0.5) * sigmoid(low_rank(p["w"], xw, np.tanh) + p["w"]["bias"]))
    a = sigmoid(low_rank(p["a"], xa, lambda y: y) + p["a"]["bias"])
    g = low_rank(p["g"], xg, sigmoid)
    kappa = unit(k * p["removal_scale"])
    k = k * (1 + (a - 1) * p["replacement"])
    step = lambda S, r, w, k, v, kappa, a: (
        (S := S @ (np.diag(w) - np.outer(kappa, a * kappa)) + np.outer(v, k)),
        S @ r,
    )
    y = run(step, np.zeros((v.shape[-1], k.shape[-1])), r, w, k, v, kappa, a)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5 * k.shape[-1]) * p["norm_scale"] + p["norm_bias"]
    y = (y + (r * k * p["bonus"]).sum(-1, keepdims=True) * v) * g
    return linear(p["out"], y.reshape(len(x), -1))


def log_linear_sum(q, k, v, decay, share):
    """Σ_s share(t, level) (decays s + 1 … t) ⟨q_t, k_s⟩ v_s of each head; share: (t, level) → [heads]."""
    y = np.zeros_like(v)
    for t in range(len(q)):
        for s in range(t + 1):
            weight = share(t, (t ^ s).bit_length()) * decay[s + 1 : t + 1].prod(0) * (q[t] * k[s]).sum(-1)
            y[t] += weight[:, None] * v[s]
    return y


def level_weights(p, x):
    return softplus(p["scale"] * linear(p["linear"], x))


def log_linear(p, x, config):
    q, k, v, z = split(p, x, config, convolved=True)
    weights = level_weights(p["levels"], x)
    y = log_linear_sum(unit(q), unit(k), v, np.ones(q.shape[:2]), lambda t, level: weights[t, :, min(level, 14)])
    return gated_output(p, y, config, z)


def log_linear_plus_plus(p, x, config):
    q, k, v, rest = split(p, x, config, convolved=True)
    z, u = np.split(rest, [v.shape[-1]], axis=-1)
    q, k = unit(q), unit(k)

    def share(t, level):
        """The softmax over the means of the keys of the segments that t has."""
        levels = np.array([(t ^ s).bit_length() for s in range(t + 1)])
        scores = {n: (u[t] * k[: t + 1][levels == n].mean(0)).sum(-1) for n in set(levels)}
        return np.exp(scores[level]) / sum(map(np.exp, scores.values()))

    return gated_output(p, log_linear_sum(q, k, v, np.ones(q.shape[:2]), share), config, z)


def log_linear_mamba2(p, x, config):
    """With λ = 1 it would be `mamba2`."""
    z, u = np.moveaxis(linear(p["inputs"], x), 1, 0)
    u = silu(conv(p["conv"], u) + p["conv_bias"])
    B, C = selected(p, x, config)
    delta, A = softplus(linear(p["step"], x) + p["dt_bias"]), -np.exp(p["A_log"])
    u = u.reshape(len(x), len(A), -1)
    weights = level_weights(p["levels"], x)
    share = lambda t, level: weights[t, :, min(level, 14)]
    y = log_linear_sum(C, B, delta[..., None] * u, np.exp(delta * A), share) + p["D"][:, None] * u
    return grouped_output(p, y, z, config)


FORMULAS = {
    "mamba": mamba,
    "mamba2": mamba2,
    "retnet": retnet,
    "gla": gla,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
    "gdn2": gdn2,
    "mesa": mesa,
    "rwkv7": rwkv7,
    "longhorn": longhorn,
    "log_linear": log_linear,
    "log_linear_plus_plus": log_linear_plus_plus,
    "log_linear_mamba2": log_linear_mamba2,
    "short_conv": short_conv,
}
# Forms of a mixer that public weights have: the mixer, and what its config changes. One with the mixer's own name is for all of its
# tests: sizes so small that 14 tokens are several blocks.
FORMS = {
    "mamba, of Falcon-Mamba": ("mamba", {"ssm": SSMConfig(state_dim=3, selection_eps=0.1)}),
    "mamba2, three groups": ("mamba2", {"ssm": SSMConfig(state_dim=3, expand=2, head_dim=4, groups=3)}),
    "mamba2, of Falcon-H1, norm before the gate": (
        "mamba2",
        {
            "ssm": SSMConfig(
                state_dim=3, inner=20, head_dim=4, output_norm="before_gate", least_step=0.3, largest_step=0.9
            ),
            "multipliers": MultiplierConfig(ssm=(0.5, 0.8, 1.2, 1.5, 0.7), ssm_out=0.3),
        },
    ),
    "mamba2, of Falcon-H1, no norm": (
        "mamba2",
        {"ssm": SSMConfig(state_dim=3, inner=20, head_dim=4, output_norm="none")},
    ),
    "log_linear_mamba2, three groups": ("log_linear_mamba2", {"ssm": SSMConfig(state_dim=3, head_dim=4, groups=3)}),
    "deltanet, one norm": ("deltanet", {"head_norm": HeadNormConfig(shared=True)}),
    "gated_deltanet, one norm": ("gated_deltanet", {"head_norm": HeadNormConfig(shared=True, eps=0.3)}),
    "gated_deltanet, three heads of values": ("gated_deltanet", {"gated_deltanet": GatedDeltaNetConfig(value_heads=6)}),
    "kda, bounded, full matrices, three heads of values": (
        "kda",
        {"kda": KDAConfig(value_heads=6, negative_eigenvalues=True, lower_bound=-5.0, rank=0, gate_bias=True)},
    ),
    "gdn2, three heads of values": ("gdn2", {"kda": KDAConfig(value_heads=6, negative_eigenvalues=True)}),
    "mesa, solved exactly, with an output gate": ("mesa", {"mesa": MesaConfig(output_gate=True, solver="exact")}),
    "gla, one norm": ("gla", {"head_norm": HeadNormConfig(shared=True, eps=0.3)}),
}
