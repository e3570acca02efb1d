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
# # Watching a memory learn at test time
#
# A *neural memory* is a small network whose weights are updated as it reads. Every token provides a key and a value. The memory
# takes a gradient step towards mapping the key to the value, and is then read with a query.
#
# Here we give four memories the same stream of key–value pairs, one token at a time. After **every** token we ask each memory for
# **all** pairs. Nothing is trained beforehand: all the learning that you see happens at test time.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import features, structures

# %% [markdown]
# ## The stream
#
# There are 24 pairs with keys of size 8. That is more pairs than a key has dimensions, so a matrix cannot hold them all.

# %%
PAIRS, DIM = 24, 8
rng = np.random.default_rng(0)
unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
keys = jnp.asarray(unit(rng.standard_normal((PAIRS, DIM))), jnp.float32)
values = jnp.asarray(unit(rng.standard_normal((PAIRS, DIM))), jnp.float32)
EPOCHS = 4  # the stream repeats, as a text repeats its words
order = np.concatenate([rng.permutation(PAIRS) for _ in range(EPOCHS)])

# %% [markdown]
# ## Four memories
#
# Each is a `MemoryRule`, which specifies the memory, the loss, the features and the optimizer. `chunk_size=1` is the exact online
# rule.
#
# - **Linear attention** adds v kᵀ and never corrects itself.
# - **The delta rule** takes a gradient step on the error, with the same matrix.
# - **The delta rule with polynomial features** takes the same step on all monomials of the key up to degree 2 (45 features
#   instead of 8). This is how ATLAS overcomes the limit of the matrix.
# - **Atlas** combines an MLP, the loss over the last 4 tokens (the Omega rule), and Muon as the inner optimizer.

# %%
MEMORIES = {
    "linear attention": (rules.linear_attention(), {"step_size": 1.0}),
    "delta rule": (rules.delta_rule(), {"step_size": 1.0}),
    "delta rule, degree-2 features": (
        rules.omeganet(1, 1, structures.Matrix(), features.Polynomial(2)),
        {"step_size": 0.4, "retention": 1.0},
    ),
    "Atlas": (
        rules.atlas(1, 4, features=features.Polynomial(2)),
        {"step_size": 0.02, "retention": 1.0, "momentum_decay": 0.5, "window_weights": 1.0},
    ),
}


def watch(rule, gate_values):
    """Error of every pair after every token: [tokens, pairs]. One `memory.step` and one `memory.read` a token."""
    params = memory.init_params(rule, jax.random.key(1), num_heads=1, key_dim=DIM, value_dim=DIM)
    state = memory.init_state(rule, params, batch_size=1)
    shapes = {name: (1, 1) if n is None else (1, 1, n) for name, n in rule.gate_channels(DIM).items()}
    gates = memory.Gates(**{name: jnp.full(shape, gate_values[name]) for name, shape in shapes.items()})

    @jax.jit
    def token(state, index):
        k, v = keys[index][None, None], values[index][None, None]
        _, state = memory.step(rule, params, state, k, k, v, gates)
        recalled = memory.read(rule, params, state, keys[None, :, None])[0, :, 0]
        return state, jnp.linalg.norm(recalled - values, axis=-1)

    errors = []
    for index in order:
        state, error = token(state, index)
        errors.append(error)
    return np.asarray(errors)


errors = {name: watch(*choice) for name, choice in MEMORIES.items()}

# %% [markdown]
# ## What each remembers
#
# There is one row per pair and one column per token read. Dark means recalled. A white dot marks the moment when a pair is written.

# %%
figure, axes = plt.subplots(2, 2, figsize=(12, 7), sharex=True, sharey=True, layout="constrained")
for axis, (name, error) in zip(axes.flat, errors.items()):
    image = axis.imshow(error.T, aspect="auto", cmap="magma", vmin=0, vmax=1.5, interpolation="nearest")
    axis.plot(np.arange(len(order)), order, ".", color="white", markersize=2.5)
    axis.set_title(f"{name}: mean error at the end {error[-1].mean():.2f}")
for axis in axes[-1]:
    axis.set_xlabel("tokens read")
for axis in axes[:, 0]:
    axis.set_ylabel("pair")
figure.colorbar(image, ax=axes, label="‖recalled − value‖")
plt.show()

# %%
figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
for name, error in errors.items():
    axis.plot(np.arange(1, len(order) + 1), error.mean(axis=1), label=name)
for epoch in range(1, EPOCHS):
    axis.axvline(epoch * PAIRS, color="0.85", zorder=0)
axis.set_xlabel("tokens read (grey lines: the stream starts over)")
axis.set_ylabel("mean error over all pairs")
axis.set_ylim(0, 2)  # linear attention leaves the picture: it adds, and never corrects
axis.legend()
plt.show()

# %% [markdown]
# ## The same, faster
#
# A loop over `step` is useful for watching a memory, and for decoding. `memory.scan` computes the same function for a whole
# sequence, in chunks.

# %%
rule, gate_values = MEMORIES["delta rule"]
params = memory.init_params(rule, jax.random.key(1), num_heads=1, key_dim=DIM, value_dim=DIM)
k, v = keys[order][None, :, None], values[order][None, :, None]
y, state = memory.scan(rule, params, None, k, k, v, memory.Gates(step_size=jnp.ones((1, len(order), 1))))
recalled = memory.read(rule, params, state, keys[None, :, None])[0, :, 0]
last = float(jnp.linalg.norm(recalled - values, axis=-1).mean())
print(f"mean error after scan {last:.4f}, after {len(order)} steps {errors['delta rule'][-1].mean():.4f}")
assert abs(last - errors["delta rule"][-1].mean()) < 1e-4

# %% [markdown]
# ## Things to try
#
# - Use more pairs, or larger keys. When does the matrix have enough room?
# - Use `rules.atlas(...).with_newton_schulz(steps=1)`: less test-time compute for the same memory.
# - Set `retention` below 1. Which pairs are forgotten first?

# %%
final = {name: error[-1].mean() for name, error in errors.items()}
assert final["delta rule, degree-2 features"] < final["delta rule"] < final["linear attention"]
