"""The figure of the README: memories forecast chaotic series whose law changes, and learn each law as they read.

python docs/figures/forecasts.py        # writes forecasts.png beside this file and prints its numbers; a minute on a CPU

The step size of every memory and the width of attention's kernel are the best of those below on other series.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import features, structures

TOKENS, CHANGE, SERIES, WINDOW = 400, 200, 64, 8
STEP_SIZES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
SHARPNESS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
MATRIX, SQUARES = structures.Matrix(), features.Polynomial(2)
MEMORIES = {
    "delta rule": rules.delta_rule(),
    "delta rule, polynomial features": rules.omeganet(1, 1, MATRIX, SQUARES),
    "Omega rule, polynomial features": rules.omeganet(1, WINDOW, MATRIX, SQUARES),
    "Omega rule, polynomial features, MLP": rules.omeganet(1, WINDOW, structures.PlainMLP(), SQUARES),
}
COLORS = {
    "attention over all pairs": "#7f7f7f",
    "delta rule": "#d6701c",
    "delta rule, polynomial features": "#e3b505",
    "Omega rule, polynomial features": "#4f9ad1",
    "Omega rule, polynomial features, MLP": "#08306b",
}


def series(seed):
    """Hénon maps x_t = 1 − a x_{t−1}² + 0.3 x_{t−2}, a = 1.4 and then 1.1, as pairs.

    Returns keys (x_{t−1}, x_{t−2}) [series, time, 1, 2] and values x_t [series, time, 1, 1].
    """
    before, now = np.random.default_rng(seed).uniform(-0.2, 0.2, (2, SERIES))
    path = [before, now]
    for t in range(TOKENS):
        path.append(1 - (1.4 if t < CHANGE else 1.1) * path[-1] ** 2 + 0.3 * path[-2])
    path = jnp.asarray(np.stack(path, axis=1), jnp.float32)
    return jnp.stack([path[:, 1:-1], path[:, :-2]], axis=-1)[:, :, None], path[:, 2:, None, None]


def forecasts(rule, step_size, keys, values):
    """What a fresh memory says of each value before it reads it: like `values`.

    A call reads after it writes: the output for a token is asked with the key of the next one.
    """
    gates = {name: 1.0 for name in rule.gate_channels(2, 1)} | {"step_size": step_size}
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=1)
    following = jnp.roll(keys, -1, axis=1)
    y, _ = memory.scan(rule, params, None, following, keys, values, memory.Gates(**gates))
    first = memory.read(rule, params, memory.init_state(rule, params, batch_size=len(keys)), keys[:, :1])
    return jnp.concatenate([first, y[:, :-1]], axis=1)


@jax.jit
def attention(sharpness, keys, values):
    """Softmax attention to all pairs before: the same, with scores −sharpness · ‖k_t − k_i‖²."""
    k, v = keys[:, :, 0], values[:, :, 0]
    scores = -sharpness * jnp.sum((k[:, :, None] - k[:, None]) ** 2, axis=-1)
    past = jnp.tril(jnp.ones((TOKENS, TOKENS), bool), -1)
    weights = jnp.where(past, jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1), 0.0)
    return (weights @ v)[:, :, None]


def mean_errors(forecast, choices):
    """|forecast − value| of the best choice on other series, mean over series: [time]."""
    error = lambda choice, seed: np.abs(forecast(choice, *series(seed)) - series(seed)[1])[..., 0, 0].mean(axis=0)
    best = min(choices, key=lambda choice: error(choice, 1).mean())
    return error(best, 0), best


def main():
    made = {"attention over all pairs": mean_errors(attention, SHARPNESS)}
    for name, rule in MEMORIES.items():
        made[name] = mean_errors(lambda step, *pairs, rule=rule: forecasts(rule, step, *pairs), STEP_SIZES)
    figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for name, (errors, best) in made.items():
        parts = [errors[start : start + 50].mean() for start in (CHANGE - 50, CHANGE, TOKENS - 50)]
        print(
            f"{name:38s} best {best:<7g} error before, after the change and at the end:", *(f"{x:.3f}" for x in parts)
        )
        axis.semilogy(np.arange(TOKENS), errors, color=COLORS[name], label=name, linewidth=1.5)
    axis.axvline(CHANGE, color="0.8", zorder=0)
    axis.annotate("the law changes", (CHANGE, 1.6), xytext=(4, 0), textcoords="offset points", color="0.4", fontsize=9)
    axis.set(xlabel="tokens read", ylabel="error of the next value", xlim=(0, TOKENS), ylim=(1e-3, 2.2))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower left", fontsize=8.5, frameon=False)
    figure.savefig(pathlib.Path(__file__).with_name("forecasts.png"), dpi=130)


if __name__ == "__main__":
    main()
