"""TTT-Linear and TTT-MLP (Sun et al. 2024, arXiv 2407.04620) as its paper writes them, in NumPy with gradients by hand.

f(x) = x + LN(f_res(x)), with W x or W1 gelu(W2 x) as f_res. A token descends with the gradient at the start of its mini-batch and
reads after its own step:

    W_t = W_{t'} − Σ_{t' < s ≤ t} η_s ∇ ½‖f(k_s; W_{t'}) − v_s‖²,  z_t = f(q_t; W_t)

The derivative of the LayerNorm is that of the authors' `ln_fused_l2_bwd` (ttt-lm-jax), written out again. Their biases of f_res are
zero and not learned here, and their loss is ‖·‖² with half of the step size.
"""

import numpy as np
import pytest

from atlasjax import memory, rules
from tests.memory.cases import assert_close
from tests.memory.test_published_equations import gelu, gelu_slope, one_head

EPS = 1e-6  # of the LayerNorm


def layer_norm(z, scale, bias):
    centred = z - z.mean()
    return centred / np.sqrt((centred**2).mean() + EPS) * scale + bias


def norm_and_loss_backward(z, target, scale, bias):
    """∂/∂z of ½‖LN(z) − target‖²."""
    deviation = np.sqrt(z.var() + EPS)
    normal = (z - z.mean()) / deviation
    left = (layer_norm(z, scale, bias) - target) * scale
    size = len(z)
    return (size * left - left.sum() - normal * (left * normal).sum()) / (size * deviation)


def f_res(W, x):
    return W["W1"] @ (gelu(W["W2"] @ x) if "W2" in W else x)


def gradient(W, x, back):
    """Of the matrices, from the derivative with respect to f_res."""
    if "W2" not in W:
        return {"W1": np.outer(back, x)}
    hidden = W["W2"] @ x
    return {
        "W1": np.outer(back, gelu(hidden)),
        "W2": np.outer((W["W1"].T @ back) * gelu_slope(hidden), x),
    }


@pytest.mark.parametrize("rule", [rules.ttt_linear(4), rules.ttt_mlp(4, expansion=2)], ids=["linear", "mlp"])
def test_recurrence_of_the_paper(rule, x64):
    rule = rule.unbounded()
    args, (q, k, v), gates, start = one_head(rule)
    norm = {name: np.asarray(x)[0] for name, x in args[0].norm.items()}
    scale, bias = norm["scale"], norm["bias"]
    W, expected = start, []
    for t in range(len(q)):
        if t % rule.chunk_size == 0:
            origin = W
        back = norm_and_loss_backward(f_res(origin, k[t]), v[t] - k[t], scale, bias)
        slope = gradient(origin, k[t], back)
        W = {name: W[name] - gates["step_size"][t] * slope[name] for name in W}
        expected.append(q[t] + layer_norm(f_res(W, q[t]), scale, bias))
    y, state = memory.scan(rule, *args)
    assert_close(y[0, :, 0], np.stack(expected), 1e-11)
    assert_close({name: state.memory[name][0, 0] for name in W}, W, 1e-11)
