"""The figure of the README: four memories learn the same key–value pairs as they read.

python docs/figures/learning.py        # writes learning.png beside this file; seconds on a CPU
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import features, structures

PAIRS, DIM, PASSES = 24, 8, 10
MEMORIES = {
    "linear attention": (rules.linear_attention(), {"step_size": 1.0}),
    "delta rule": (rules.delta_rule(), {"step_size": 1.0}),
    "delta rule, polynomial features": (
        rules.omeganet(1, 1, structures.Matrix(), features.Polynomial(2)),
        {"step_size": 0.4, "retention": 1.0},
    ),
    "Atlas: MLP, Omega rule, Muon": (
        rules.atlas(1, 4, features=features.Polynomial(2)),
        {"step_size": 0.02, "retention": 1.0, "momentum_decay": 0.5, "window_weights": 1.0},
    ),
}


def pairs_and_order():
    """Unit keys and values [pairs, dim], and the order in which they are read [tokens]."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys, values = (jnp.asarray(unit(rng.standard_normal((PAIRS, DIM))), jnp.float32) for _ in range(2))
    return keys, values, np.concatenate([rng.permutation(PAIRS) for _ in range(PASSES)])


def mean_errors(rule, gate_values):
    """‖recalled − value‖, mean over all pairs, after every token read: [tokens]."""
    keys, values, order = pairs_and_order()
    params = memory.init_params(rule, jax.random.key(1), num_heads=1, key_dim=DIM, value_dim=DIM)
    shapes = {name: (1, 1) if n is None else (1, 1, n) for name, n in rule.gate_channels(DIM).items()}
    gates = memory.Gates(**{name: jnp.full(shape, gate_values[name]) for name, shape in shapes.items()})

    def token(state, index):
        k, v = keys[index][None, None], values[index][None, None]
        _, state = memory.step(rule, params, state, k, k, v, gates)
        recalled = memory.read(rule, params, state, keys[None, :, None])[0, :, 0]
        return state, jnp.linalg.norm(recalled - values, axis=-1).mean()

    state = memory.init_state(rule, params, batch_size=1)
    return np.asarray(jax.jit(lambda state: jax.lax.scan(token, state, jnp.asarray(order))[1])(state))


def main():
    figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for name, choice in MEMORIES.items():
        errors = mean_errors(*choice)
        axis.plot(np.arange(1, len(errors) + 1), errors, label=name)
    for reading in range(1, PASSES):
        axis.axvline(reading * PAIRS, color="0.85", zorder=0)
    axis.set_xlabel(f"tokens read (grey lines: the {PAIRS} pairs are read again)")
    axis.set_ylabel("mean error over all pairs")
    axis.set_xlim(0, PASSES * PAIRS)
    axis.set_ylim(0, 2)  # linear attention exceeds this: it only adds and never corrects
    axis.legend(loc="upper right", fontsize=9)
    figure.savefig(pathlib.Path(__file__).with_name("learning.png"), dpi=130)


if __name__ == "__main__":
    main()
