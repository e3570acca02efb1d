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
# # Memories on numbers
#
# A memory learns a function from keys to values while it reads. Neither has to come from text. Here keys are vectors of floats, and
# values are single numbers.
#
# First, memories without any training forecast a chaotic series whose law changes. Then a memory becomes a layer of a small Flax
# model of our own, which is trained to learn functions from examples in its context.

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
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from atlasjax import memory, nn, rules
from atlasjax.memory import features, structures

plt.rcParams["figure.dpi"] = 80
STEPS = int(os.environ.get("NOTEBOOK_STEPS", 400))  # the tests of the repository take fewer

# %% [markdown]
# ## A series whose law changes
#
# The Hénon map, x_t = 1 − a x²_{t−1} + 0.3 x_{t−2}, is chaotic for a = 1.4. At step 150, a becomes 1.1. The key of a step has what
# is known before it, the two last values; its value is the next one. We take 32 series, as a batch.

# %%
TOKENS, CHANGE, SERIES = 300, 150, 32
path = [*np.random.default_rng(0).uniform(-0.2, 0.2, (2, SERIES))]
for t in range(TOKENS):
    path.append(1 - (1.4 if t < CHANGE else 1.1) * path[-1] ** 2 + 0.3 * path[-2])
path = jnp.asarray(np.stack(path, axis=1), jnp.float32)
keys = jnp.stack([path[:, 1:-1], path[:, :-2]], axis=-1)[:, :, None]  # [batch, time, heads, 2]
values = path[:, 2:, None, None]  # [batch, time, heads, 1]

figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
axis.plot(path[0, 2:], color="#08519c", linewidth=0.9)
axis.axvline(CHANGE, color="0.8", zorder=0)
axis.set(xlabel="step", ylabel="x", xlim=(0, TOKENS))
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Forecast before write
#
# `memory.scan` writes a token before it reads: its output for token t comes from a memory that knows the pair of token t. A
# forecast must not. So we ask one token later: the query of token t is the key of token t + 1. What a fresh memory says about the
# first token comes from `memory.read`.


# %%
def forecasts(rule, gates):
    """What a fresh memory says of each value before it reads it: [batch, time, heads, 1]."""
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=1)
    following = jnp.roll(keys, -1, axis=1)  # the last output asks about no token, and is dropped
    y, _ = memory.scan(rule, params, None, following, keys, values, gates)
    first = memory.read(rule, params, memory.init_state(rule, params, batch_size=SERIES), keys[:, :1])
    return jnp.concatenate([first, y[:, :-1]], axis=1)


# %% [markdown]
# The same in a loop, as one would do it where the values really come one after another: read, then write.


# %%
def forecasts_one_by_one(rule, gates):
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=1)

    def token(state, pair):
        k, v = pair
        forecast = memory.read(rule, params, state, k[:, None])[:, 0]
        _, state = memory.step(rule, params, state, k, k, v, gates)
        return state, forecast

    pairs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (keys, values))  # time first
    fresh = memory.init_state(rule, params, batch_size=SERIES)
    return jnp.swapaxes(jax.jit(lambda pairs: jax.lax.scan(token, fresh, pairs)[1])(pairs), 0, 1)


# %% [markdown]
# ## Four memories
#
# A matrix can hold linear laws only. With polynomial features of degree 2, it can hold this one. The Omega rule corrects the errors
# of the last eight tokens together. The last memory is an MLP. MLP memories add their input to their output, so keys and values
# must have one size; `PlainMLP` has no such residual, so values may be single numbers. The step sizes are the best of six on other
# series (`python docs/figures/forecasts.py`).

# %%
matrix, squares = structures.Matrix(), features.Polynomial(2)
omega = {"retention": 1.0, "window_weights": 1.0}
MEMORIES = {
    "delta rule": (rules.delta_rule(), memory.Gates(step_size=0.05)),
    "delta rule, polynomial features": (
        rules.omeganet(1, 1, matrix, squares),
        memory.Gates(step_size=0.8, retention=1.0),
    ),
    "Omega rule, polynomial features": (rules.omeganet(1, 8, matrix, squares), memory.Gates(step_size=0.2, **omega)),
    "Omega rule, polynomial features, MLP": (
        rules.omeganet(1, 8, structures.PlainMLP(), squares),
        memory.Gates(step_size=0.8, **omega),
    ),
}
said = {name: forecasts(*choice) for name, choice in MEMORIES.items()}
errors = {name: np.abs(y - values)[..., 0, 0].mean(axis=0) for name, y in said.items()}
for name, error in errors.items():
    print(f"{name:38s} error over the last 50 steps {error[-50:].mean():.4f}")
again = forecasts_one_by_one(*MEMORIES["Omega rule, polynomial features"])
print("difference to one by one:", float(jnp.abs(again - said["Omega rule, polynomial features"]).max()))
assert jnp.allclose(again, said["Omega rule, polynomial features"], atol=1e-3)

figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
for (name, error), color in zip(errors.items(), ("#d6701c", "#e3b505", "#4f9ad1", "#08306b"), strict=True):
    axis.semilogy(error, label=name, color=color, linewidth=1.4)
axis.axvline(CHANGE, color="0.8", zorder=0)
axis.annotate("the law changes", (CHANGE, 1.2), xytext=(4, 0), textcoords="offset points", color="0.4")
axis.set(xlabel="step", ylabel="error of the forecast", xlim=(0, TOKENS), ylim=(1e-3, 2))
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# ## A memory in a Flax model of our own
#
# In-context regression: a sequence has examples of a linear function, another one in each sequence, and the model forecasts each
# value from the examples before it. Only training teaches the model to use its memory in this way.
#
# `nn.MemoryMixer` is a memory with projections, a short convolution and learned gates around it. It maps [batch, time, dim] to the
# same shape. Everything else here is Flax. The shift by one is in the data: the input of a step has its example and the next
# question.


# %%
class InContext(nnx.Module):
    def __init__(self, config, inputs, *, rngs):
        self.inputs = nnx.Linear(inputs, config.dim, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(config.dim, rngs=rngs) for _ in range(2)])
        self.mixer = nn.MemoryMixer(config, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(config.dim, 128, rngs=rngs), nnx.Linear(128, config.dim, rngs=rngs)
        self.output = nnx.Linear(config.dim, 1, rngs=rngs)

    def __call__(self, x):
        h = self.inputs(x)
        h = h + self.mixer(self.norms[0](h))
        h = h + self.narrow(jax.nn.gelu(self.wide(self.norms[1](h))))
        return self.output(h)[..., 0]


DIM, EXAMPLES = 3, 24


def functions(key, batch):
    """Inputs (next question, question, value) [batch, time, 2 · DIM + 1], and what is to be said [batch, time]."""
    of_weights, of_questions = jax.random.split(key)
    weights = jax.random.normal(of_weights, (batch, 1, DIM)) / DIM**0.5
    questions = jax.random.normal(of_questions, (batch, EXAMPLES + 1, DIM))
    answers = jnp.sum(weights * questions, axis=-1)
    inputs = jnp.concatenate([questions[:, 1:], questions[:, :-1], answers[:, :-1, None]], axis=-1)
    return inputs, answers[:, 1:]


config = nn.ModelConfig(
    vocab_size=1, dim=32, num_layers=1, num_heads=2, mlp_dim=128, dtype="float32",
    memory=nn.MemoryConfig("delta_rule"),
)  # fmt: skip
model = InContext(config, 2 * DIM + 1, rngs=nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(40, STEPS // 2), STEPS)
optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, key):
    inputs, targets = functions(key, 64)
    loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(inputs) - targets) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


losses = [float(step(model, optimizer, key)) for key in jax.random.split(jax.random.key(0), STEPS)]
print("squared error:", " → ".join(f"{x:.2f}" for x in losses[:: max(1, STEPS // 6)] + losses[-1:]))

# %% [markdown]
# The best that can be done is least squares on the examples so far: with three examples it knows the function. The model has one
# layer and has never seen these functions.

# %%
inputs, targets = functions(jax.random.key(1), 512)
said = nnx.jit(lambda model, inputs: model(inputs))(model, inputs)
of_model = np.square(np.asarray(said - targets)).mean(axis=0)
question, x, y = np.split(np.asarray(inputs), [DIM, 2 * DIM], axis=-1)
exact = [
    np.square((np.linalg.pinv(x[:, :n]) @ y[:, :n])[..., 0][:, None] @ question[:, n - 1, :, None] - targets[:, n - 1, None, None])
    for n in range(1, EXAMPLES + 1)
]  # fmt: skip
figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
axis.plot(range(1, EXAMPLES + 1), of_model, "o-", color="#08519c", label="the model")
axis.plot(range(1, EXAMPLES + 1), [error.mean() for error in exact], color="#d6701c", label="least squares")
axis.axhline(float(jnp.mean(targets**2)), color="0.7", zorder=0, label="always zero")
axis.set(xlabel="examples read", ylabel="squared error", ylim=(0, None))
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## One example after another
#
# The mixer keeps a state for streams. Its outputs do not depend on where a sequence is cut.

# %%
h = model.norms[0](model.inputs(inputs[:4]))
whole = model.mixer(h)
state = model.mixer.init_state(batch_size=4)
first, state = model.mixer.extend(h[:, :10], state)
pieces = [first]
for t in range(10, EXAMPLES):
    one, state = model.mixer.extend(h[:, t : t + 1], state)
    pieces.append(one)
print("largest difference:", float(jnp.abs(jnp.concatenate(pieces, axis=1) - whole).max()))

# %% [markdown]
# ## Things to try
#
# - Let the functions be squares, and use `nn.MemoryConfig("omeganet", chunk_size=8)`, whose features are polynomials.
# - Give the series noise. How small must the step size be, and does the Huber loss of `rules.yaad` help with outliers?
# - In Flax Linen, wrap the mixer: `nnx.bridge.to_linen(nn.MemoryMixer, config)`.

# %%
assert errors["Omega rule, polynomial features"][-50:].mean() < 0.1 * errors["delta rule"][-50:].mean()
if STEPS >= 400:
    assert of_model[-8:].mean() < 0.3 * of_model[0]
