# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A memory rule of your own
#
# A memory rule has five components: a structure, an inner loss, a feature map, an inner optimizer and a retention. Each of them
# can be a class that you write here, in the notebook. As for its own rules, the library computes the rule in chunks, with exact
# gradients, and as a stream.
#
# We write two inner losses that are robust to outliers, and an inner optimizer that uses only signs. Then we let them learn
# key–value pairs when one value in eight has a large error.

# %% cellView="form"
# @title Install atlasjax, if it is missing
import importlib.metadata
import importlib.util
import os
import pathlib
import site
import subprocess
import sys

CLONE = ""  # the folder of a clone, if it is not the working folder, the one above, or a folder in it
ADDRESS = ""  # where pip finds the repository if there is no clone

here = pathlib.Path.cwd()
nearby = [here, here.parent, *(path.parent for path in sorted(here.glob("*/pyproject.toml")))]
clones = [pathlib.Path(CLONE).expanduser()] if CLONE else nearby
clone = next((str(path) for path in clones if os.path.isfile(path / "atlasjax/__init__.py")), None)
source = clone or (f"git+{ADDRESS}" if ADDRESS and not CLONE else None)


def visible():
    """Whether this kernel can import the package: a folder of that name, such as a clone, is none."""
    if getattr(sys.modules.get("atlasjax"), "__file__", None) is None:
        sys.modules.pop("atlasjax", None)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("atlasjax")
    return spec is not None and spec.origin is not None


def loaded():
    """Versions of what this kernel has imported and pip might replace."""
    names = {"numpy", "jax", "jaxlib", "flax"} & set(sys.modules)
    return {name: importlib.metadata.version(name) for name in sorted(names)}


# Sources that merely lie in the path do not bring what they need.
folders = [path for path in sys.path if path not in ("", str(here), clone)]
if not any(importlib.metadata.distributions(name="atlasjax", path=folders)):
    if source is None:
        raise RuntimeError(f"no clone of atlasjax in {clones[0]}: set CLONE to the folder of one and run this again")
    print("installing atlasjax from", source)
    before = loaded()
    if importlib.util.find_spec("pip") is None:
        subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True, check=False)
    # A copy: this kernel would not see an editable install.
    command = [sys.executable, "-m", "pip", "install", "--quiet", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not install {source}: {done.stderr.strip()[-2000:]}")
    if loaded() != before:
        raise RuntimeError(f"restart the kernel and run this again: pip has replaced {before} by {loaded()}")
if not visible():  # installed while this kernel was running
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        site.addsitedir(folder)
if not visible() and clone is not None:  # an editable install, behind a folder of its name
    sys.path.insert(0, clone)
if not visible():
    raise RuntimeError("atlasjax is installed, but this kernel does not see it: restart the kernel")

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from atlasjax import memory
from atlasjax.memory import objectives, optimizers, structures

print("running on", jax.devices()[0].device_kind)

# %% [markdown]
# ## Two losses
#
# A loss takes the memory's output and the value, and returns one number per token. Nothing else is needed, because the inner
# gradient is computed by automatic differentiation. `has_target` claims that the loss is convex with its minimum at the value,
# which allows the library to bound the step sizes.


# %%
@dataclasses.dataclass(frozen=True)
class LogCosh(objectives.Objective):
    """Quadratic near the target, linear far from it, channel by channel."""

    has_target = True

    def loss(self, out, v, threshold=None):
        error = jnp.abs(out - v)
        return jnp.sum(error + jnp.log1p(jnp.exp(-2.0 * error)) - jnp.log(2.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Welsch(objectives.Objective):
    """1 − exp(−‖error‖²/2s²): beyond s an error hardly counts. It is not convex, so it claims nothing."""

    scale: float = 1.5

    def loss(self, out, v, threshold=None):
        square = jnp.sum(jnp.square(out - v), axis=-1)
        return self.scale**2 * (1.0 - jnp.exp(-0.5 * square / self.scale**2))


# %% [markdown]
# ## An optimizer
#
# For one token, `update` maps the state and the gradient to the change of every weight and the next state. This optimizer is not
# linear in the gradient, so the chunked form of gradient descent does not apply. The general engine runs it.


# %%
@dataclasses.dataclass(frozen=True)
class SignMomentum(optimizers.Optimizer):
    has_momentum = True

    def update(self, state, gradient, step_size, momentum_decay):
        S = {name: momentum_decay * state[name] + (1.0 - momentum_decay) * g for name, g in gradient.items()}
        return {name: -step_size * jnp.sign(s) for name, s in S.items()}, S


# %% [markdown]
# ## A stream with outliers
#
# Sixteen pairs are repeated in random order. One token in eight has a value with a large error.

# %%
PAIRS, DIM, TOKENS = 16, 16, 640
rng = np.random.default_rng(0)
unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
keys, values = unit(rng.standard_normal((PAIRS, DIM))), unit(rng.standard_normal((PAIRS, DIM)))
order = np.concatenate([rng.permutation(PAIRS) for _ in range(TOKENS // PAIRS)])
wild = rng.random(TOKENS) < 1 / 8
seen = values[order] + wild[:, None] * 3.0 * rng.standard_normal((TOKENS, DIM)) / DIM**0.5 * 4.0
token = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]  # [batch, time, heads, dim]
k, v, asked = token(keys[order]), token(seen), token(keys)

# %% [markdown]
# ## Four memories
#
# The same MLP learns with four rules. The step sizes are chosen so that each rule would learn as fast as possible without outliers.

# %%
MLP = structures.MLP(depth=2, expansion=2)
plain = optimizers.GradientDescent()
RULES = {
    "ℓ2 (the usual loss)": (memory.MemoryRule(MLP, objectives.L2(), optimizer=plain, chunk_size=4), 0.2),
    "log-cosh": (memory.MemoryRule(MLP, LogCosh(), optimizer=plain, chunk_size=4), 0.2),
    "Welsch": (memory.MemoryRule(MLP, Welsch(), optimizer=plain, chunk_size=4), 0.2),
    "log-cosh, sign momentum": (memory.MemoryRule(MLP, LogCosh(), optimizer=SignMomentum(), chunk_size=4), 3e-3),
}

# %% [markdown]
# After every token we ask the memory for all sixteen pairs and compare with the true values. `memory.read` does not write.


# %%
def errors(rule, step_size):
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=DIM, value_dim=DIM)
    theta = 0.8 if rule.optimizer.has_momentum else None
    gates = memory.Gates(retention=1.0, step_size=step_size, momentum_decay=theta)

    def one(state, pair):
        k, v = (x[None, None] for x in pair)
        _, state = memory.step(rule, params, state, k, k, v, gates)
        error = memory.read(rule, params, state, asked)[0, :, 0] - values
        return state, jnp.mean(jnp.sum(error**2, axis=-1))

    return jax.jit(lambda k, v: jax.lax.scan(one, memory.init_state(rule, params, batch_size=1), (k, v))[1])(
        k[0, :, 0], v[0, :, 0]
    )


curves = {name: np.asarray(errors(*case)) for name, case in RULES.items()}
for name, curve in curves.items():
    print(f"{name:26s} mean squared error over the last 160 tokens: {curve[-160:].mean():.3f}")

# %%
smooth = lambda x, n=16: np.convolve(np.pad(x, (n - 1, 0), mode="edge"), np.ones(n) / n, mode="valid")
fig, ax = plt.subplots(figsize=(8, 4.2))
for (name, curve), color in zip(curves.items(), ("#8c8c8c", "#1f77b4", "#d62728", "#2ca02c"), strict=True):
    ax.plot(curve, color=color, alpha=0.2, linewidth=0.8)
    ax.plot(smooth(curve), color=color, linewidth=2, label=name)
ax.vlines(np.flatnonzero(wild), 0.02, 0.022, color="black", linewidth=0.6)
ax.annotate("outliers", (8, 0.0225), fontsize=8)
ax.set_yscale("log")
ax.set_xlabel("tokens read")
ax.set_ylabel("error over all pairs (squared)")
ax.set_title("A memory that reads outliers, by its inner loss")
ax.spines[["top", "right"]].set_visible(False)
ax.set_ylim(0.015, 60)
ax.legend(frameon=False, ncols=2, loc="upper left")
fig.tight_layout()

# %% [markdown]
# ## It is the same function everywhere
#
# `memory.reference` is the token-by-token definition. The chunked engine agrees with it, and so does a stream that is split at any
# token. Gradients flow to everything outside the memory.

# %%
rule = memory.MemoryRule(MLP, Welsch(), optimizer=optimizers.Momentum(), window=3, chunk_size=8)
params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=DIM, value_dim=DIM)
gates = memory.Gates(retention=0.99, step_size=0.02, momentum_decay=0.8, window_weights=1.0)
y, state = memory.scan(rule, params, None, k, k, v, gates)
expected, _ = memory.reference(rule, params, None, k, k, v, gates)
first, middle = memory.scan(rule, params, None, k[:, :37], k[:, :37], v[:, :37], gates)
rest, _ = memory.scan(rule, params, middle, k[:, 37:], k[:, 37:], v[:, 37:], gates)
print("engine − definition:", float(jnp.abs(y - expected).max()))
print("cut at token 37:    ", float(jnp.abs(jnp.concatenate([first, rest], 1) - y).max()))
slope = jax.grad(lambda v: jnp.sum(memory.scan(rule, params, None, k, k, v, gates)[0] ** 2))(v)
print("gradient of the outputs with respect to the values is finite:", bool(jnp.isfinite(slope).all()))
