"""LaCT token by token in NumPy, with the gradients of SwiGLU written out."""

import numpy as np

from pallas_kernels.newton_schulz import SCHEDULES


def orthogonal(g):
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for a, b, c in SCHEDULES["lact"]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def gradient(W1, W2, W3, k, v):
    """−∇ of −⟨M(k), v⟩, M(x) = W1 (SiLU(W2 x) ⊙ W3 x)."""
    gate, up = W2 @ k, W3 @ k
    sigma = 1 / (1 + np.exp(-gate))
    silu, slope = gate * sigma, sigma * (1 + gate * (1 - sigma))
    below = W1.T @ v
    return np.outer(v, silu * up), np.outer(below * up * slope, k), np.outer(below * silu, k)


def lact(weights, q, k, v, eta, theta, chunk, schedule):
    """One head: tokens [time, …] → y, the weights after the last whole chunk, and what the tokens after it have summed."""
    lengths = [np.linalg.norm(w, axis=1, keepdims=True) for w in weights]
    before = [np.zeros_like(w) for w in weights]
    sums, thetas, ys = [np.zeros_like(w) for w in weights], 0.0, []
    for t in range(len(q)):
        W1, W2, W3 = weights
        gate = W2 @ q[t]
        ys.append(W1 @ (gate / (1 + np.exp(-gate)) * (W3 @ q[t])))
        sums = [g + eta[t, i] * new for i, (g, new) in enumerate(zip(sums, gradient(*weights, k[t], v[t])))]
        thetas += theta[t]
        if (t + 1) % chunk == 0:
            before = [g + thetas / chunk * old for g, old in zip(sums, before)]
            moved = [w + (orthogonal(g) if schedule else g) for w, g in zip(weights, before)]
            rows = [np.linalg.norm(w, axis=1, keepdims=True) for w in moved]
            weights = [w / (row + 1e-5) * length for w, row, length in zip(moved, rows, lengths)]
            sums, thetas = [np.zeros_like(w) for w in weights], 0.0
    return np.array(ys), weights, sums
