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
# # Recall and Memory Caching
#
# How many key–value pairs can a memory hold? We write pairs to a fresh memory and read them back. Nothing is trained.
#
# The first half compares rules: linear attention, the delta rule, a window of tokens (the Omega rule of
# [ATLAS](https://arxiv.org/abs/2505.23735)), polynomial features and deep memories. The second half uses the delta rule with a
# memory that grows: [Memory Caching](https://arxiv.org/abs/2602.24281) keeps a copy of the memory at the end of every segment.

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

plt.rcParams["figure.dpi"] = 80
print("running on", jax.devices()[0].device_kind)

# %% [markdown]
# ## Writing pairs repeatedly
#
# Keys and values are random directions in 16 dimensions. For every number of pairs n, we write all n pairs eight times in turn,
# and measure ‖recalled − value‖ after the first pass and after the last. The best step size depends on the rule and on n, so we
# try several and show the best result. All step sizes, numbers of pairs and independent sets of pairs form a single batch.

# %%
DIM, PASSES, SETS = 16, 8, 4
COUNTS = np.array([4, 8, 16, 24, 32, 64, 96])
rng = np.random.default_rng(0)
unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
keys, values = unit(rng.standard_normal((2, SETS, COUNTS.max(), 1, DIM))).astype(np.float32)  # [set, pair, heads, dim]
turn = np.arange(PASSES * COUNTS.max())[:, None] % COUNTS  # [token, count]: which pair comes


def start(rule, batch_size, max_length=None):
    """Fresh parameters and state. A matrix starts at zero, an MLP at random: one of zeros could not learn."""
    params = memory.init_params(rule, jax.random.key(1), num_heads=1, key_dim=DIM, value_dim=DIM)
    return params, memory.init_state(rule, params, batch_size=batch_size, max_length=max_length)


def passes(rule, step_sizes, coefficients=None, **gates):
    """Mean error of all n pairs after the first and the last pass, at the best step size: [2, count]."""
    steps, counts, sets = (x.ravel() for x in np.meshgrid(step_sizes, range(len(COUNTS)), range(SETS), indexing="ij"))
    gates = memory.Gates(step_size=jnp.asarray(steps, jnp.float32)[:, None], **gates)
    params, state = start(rule, len(steps))
    if coefficients is not None:
        params = params._replace(coefficients=jnp.array([coefficients]))
    k, v = jnp.asarray(keys[sets]), jnp.asarray(values[sets])
    mine = jnp.arange(k.shape[1]) < COUNTS[counts][:, None]

    def token(state, pair):
        row = jnp.arange(len(pair))
        _, state = memory.step(rule, params, state, k[row, pair], k[row, pair], v[row, pair], gates)
        error = jnp.linalg.norm(memory.read(rule, params, state, k) - v, axis=-1)[..., 0]
        return state, jnp.sum(error * mine, axis=1) / mine.sum(axis=1)

    curves = jax.jit(lambda state: jax.lax.scan(token, state, turn[:, counts])[1])(state)
    ends = np.stack([np.asarray(curves)[n * COUNTS[counts] - 1, np.arange(len(steps))] for n in (1, PASSES)])
    return ends.reshape(2, len(step_sizes), len(COUNTS), SETS).mean(axis=3).min(axis=1)


# %% [markdown]
# The feature map has all monomials of the key up to degree 2, with one weight per degree. In a model the weights are learned, and
# they start at those of exp: φ(q)·φ(k) = 1 + q·k + (q·k)²/2. Since nothing is trained here, we try these weights and also the
# squares alone, (q·k)².

# %%
matrix, identity, degree2 = structures.Matrix(), features.Identity(), features.Polynomial(2)
quadratic = rules.omeganet(1, 1, matrix, degree2)
keep = {"retention": 1.0}
windowed = {"window_weights": 1.0, **keep}
RULES = {
    "linear attention": (rules.linear_attention(), (0.02, 0.05, 0.125, 0.5, 1.0), {}),
    "delta rule": (rules.delta_rule(), (0.25, 0.5, 1.0), {}),
    "Omega rule, window of 8": (rules.omeganet(1, 8, matrix, identity), (0.05, 0.1, 0.2), windowed),
    "delta rule, 1 + q·k + (q·k)²/2": (quadratic, (0.1, 0.2, 0.4), keep),
    "delta rule, (q·k)²": (quadratic, (0.25, 0.5, 1.0), {"coefficients": (0.0, 0.0, 1.0), **keep}),
    "deep memory": (rules.titans_no_momentum(1), (0.1, 0.2, 0.4), keep),
    "Atlas": (
        rules.atlas(1, 8, structures.MLP(expansion=1), degree2),
        (0.003, 0.01, 0.03, 0.1),
        {"momentum_decay": 0.5, **windowed},
    ),
}
results = {name: passes(rule, steps, **others) for name, (rule, steps, others) in RULES.items()}
for name, (rule, *_) in RULES.items():
    size = sum(w.size for w in start(rule, 1)[1].memory.values())
    once, again = results[name][:, list(COUNTS).index(32)]
    print(f"{name:32s}{size:6,} numbers   error of 32 pairs: {once:.2f}, after {PASSES} passes {again:.2f}")

# %%
COLORS = dict(zip(RULES, ("#8c8c8c", "#1f77b4", "#17becf", "#c5a3d6", "#9467bd", "#2ca02c", "#d62728"), strict=True))
figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
for axis, place, title in zip(
    axes, (0, 1), ("each pair written once", f"each pair written {PASSES} times"), strict=True
):
    for name, result in results.items():
        axis.plot(COUNTS, result[place], "o-", color=COLORS[name], linewidth=2, markersize=4, label=name)
    axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axis.axvline(DIM, color="0.6", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", xlabel="pairs", ylim=(0, 1.25), title=title)
    axis.set_xticks(COUNTS, COUNTS)
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("mean error of all pairs")
note = {"textcoords": "offset points", "color": "0.4", "fontsize": 8}
axes[1].annotate("an empty memory", (COUNTS[0], 1.0), xytext=(0, 4), **note)
axes[0].annotate("as many pairs as\nkey dimensions", (DIM, 0.02), xytext=(4, 0), **note)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# What the plot shows:
#
# - **Linear attention** never corrects itself. It gains nothing from writing again, only from smaller steps.
# - **A matrix with the delta rule** holds about as many pairs as a key has dimensions, and even for these it needs several
#   passes. This agrees with ATLAS's Proposition 1: O(d_k) pairs.
# - **Polynomial features** replace the 16 numbers of a key with 153 (Proposition 2: O(d_k^p) pairs). With the weights of exp,
#   however, all keys are similar (1 + q·k), and a single pass is no better than without features. The squares alone separate the
#   keys immediately. A model has to learn this.
# - **Deep memories** hold more than a matrix, but only after several passes. By Theorem 1, an MLP of this size has room for at
#   least O(d_k d_v) pairs, 256 here. Eight passes of gradient descent come nowhere near that. The theorem is about what the weights
#   can hold, not about what a few steps find.
# - **The Omega rule** helps a matrix in one pass when it is about full (16 to 24 pairs), by a few hundredths. For few pairs it
#   is worse, and after eight passes it equals the delta rule: a window does not add room.
# - **Atlas** moves its weights by steps of constant length (Muon). After one pass over random pairs it is the worst of all; after
#   eight it is second only to a matrix with features. Models that are trained end to end, as in the paper, learn keys and gates
#   that suit this.
#
# Random pairs have nothing in common: what a memory learns from one says nothing about another. Where values follow a law, the
# Omega rule and deep memories win ([Memories on numbers](07_memories_on_numbers.ipynb)).

# %% [markdown]
# ## Memory Caching
#
# Now we make one pass of the delta rule over 128 pairs. A copy of the memory is kept after every 8 pairs, and a read combines the
# copies:
#
# - **Residual** adds up the answers of all copies.
# - **GRM** (gated residual memory) weights them by softmax ⟨u, p⟩, where p is the mean key of a segment. In a model u is learned.
#   Here it is a multiple of the query. To see what is *stored*, we also use the mean key of the right segment, which only an
#   oracle knows.
#
# There are two kinds of streams: keys in random directions, and keys that share a topic within their segment. For comparison, we
# also show a single memory with the squares of the last section.

# %%
PAIRS, SEGMENT, SHARP = 128, 8, 60.0
segment = np.arange(PAIRS) // SEGMENT
own, topic = rng.standard_normal((2, SETS, PAIRS, 1, DIM))
STREAMS = {
    "keys in any direction": unit(own),
    "keys of a segment share a topic": unit(unit(own) + 0.6 * unit(topic[:, segment])),
}
values = jnp.asarray(unit(rng.standard_normal((SETS, PAIRS, 1, DIM))), jnp.float32)
delta = rules.delta_rule()
grm = memory.CachedRule(delta, "grm", segment_size=SEGMENT)
residual = memory.CachedRule(delta, "residual", segment_size=SEGMENT)


def recall(rule, keys, connector=None, coefficients=None):
    """Error of every pair after every token, [token, set, pair]."""
    params, state = start(rule, SETS, max_length=PAIRS)
    if coefficients is not None:
        params = params._replace(coefficients=jnp.array([coefficients]))
    channels = rule.gate_channels(DIM)
    gates = memory.Gates(
        step_size=1.0,
        retention=1.0 if "retention" in channels else None,
        connector=jnp.zeros((SETS, 1, DIM)) if "connector" in channels else None,  # of outputs, which we do not use
    )

    def token(state, pair):
        k, v = pair
        _, state = memory.step(rule, params, state, k, k, v, gates)
        recalled = memory.read(rule, params, state, keys, connector)
        return state, jnp.linalg.norm(recalled - values, axis=-1)[..., 0]

    run = jax.jit(lambda state: jax.lax.scan(token, state, (keys.swapaxes(0, 1), values.swapaxes(0, 1)))[1])
    return np.asarray(run(state))


curves = {}
for stream, keys in STREAMS.items():
    keys = jnp.asarray(keys, jnp.float32)
    pooled = keys.reshape(SETS, -1, SEGMENT, 1, DIM).mean(axis=2)
    right = SHARP * pooled.repeat(SEGMENT, axis=1) / jnp.linalg.norm(pooled, axis=-1).mean()
    curves[stream] = {
        "delta rule": recall(delta, keys),
        "delta rule, (q·k)²": recall(quadratic, keys, coefficients=(0.0, 0.0, 1.0)),
        "residual": recall(residual, keys),
        "GRM, u = query": recall(grm, keys, keys),
        f"GRM, u = {SHARP:.0f} × query": recall(grm, keys, SHARP * keys),
        "GRM, right segment known": recall(grm, keys, right),
    }

# %%
written = np.tri(PAIRS)[:, None, :]
SHADES = ("#1f77b4", "#9467bd", "#8c8c8c", "#e3a857", "#d6701c", "#2ca02c")
figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
for axis, (stream, lines) in zip(axes, curves.items(), strict=True):
    for (name, error), color in zip(lines.items(), SHADES, strict=True):
        mean = (error * written).sum((1, 2)) / written.sum((1, 2)) / SETS
        axis.plot(np.arange(1, PAIRS + 1), mean, color=color, linewidth=2, label=name)
    for edge in range(SEGMENT, PAIRS, SEGMENT):
        axis.axvline(edge + 0.5, color="0.92", linewidth=0.8, zorder=0)
    axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axis.set(xlabel="pairs written (grey lines: a memory is cached)", title=stream, ylim=(0, 1.6), xlim=(1, PAIRS))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("mean error of all pairs so far")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# The same pair by pair: each column is a moment, each row is a pair, and dark means recalled. Without caching, a pair fades as
# others are written over it. With caching, a segment stays as it was, provided that the read finds it.

# %%
SHOWN = ["delta rule", f"GRM, u = {SHARP:.0f} × query", "GRM, right segment known"]
figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.4), sharex=True, sharey=True, layout="constrained")
for row, (stream, lines) in zip(axes, curves.items(), strict=True):
    for axis, name in zip(row, SHOWN, strict=True):
        seen = np.where(np.tri(PAIRS, dtype=bool).T, lines[name].mean(axis=1).T, np.nan)
        image = axis.imshow(
            seen, cmap="magma", vmin=0, vmax=1.5, aspect="auto", interpolation="nearest", origin="lower"
        )
        axis.set_title(f"{name}\n{stream}", fontsize=9)
    row[0].set_ylabel("pair")
for axis in axes[-1]:
    axis.set_xlabel("pairs written")
    axis.set_xticks([0, 31, 63, 95, 127], [1, 32, 64, 96, 128])
figure.colorbar(image, ax=axes, label="error, mean of the sets")
plt.show()

# %%
floats = {
    "delta rule": DIM * DIM,
    "delta rule, (q·k)²": DIM * degree2.dim(DIM),
    "GRM": PAIRS // SEGMENT * (DIM * DIM + DIM),
}
print("numbers held after 128 pairs:", floats, "the pairs themselves:", PAIRS * 2 * DIM)
for stream, lines in curves.items():
    print(stream, {name: round(float(error[-1].mean()), 2) for name, error in lines.items()})

# %% [markdown]
# What agrees with the paper, and what does not:
#
# - **The capacity grows with the number of segments** (M §3). If the right segment is known, the error stays at its level after
#   the first segments, for any number of pairs.
# - **Finding the segment is the hard part.** With keys in random directions, the mean key of a segment says little about any
#   single key, and the read often uses the wrong memory. Keys with a topic are found more often, but they are similar to each other
#   and interfere within their segment. Without a sharp gate (u = query), GRM is an average of all memories and of little use.
# - **Residual is worse than no caching** here, because every cached memory answers every query, including those that it knows
#   nothing about. The paper finds that even this variant helps trained models, which can learn suitable keys. For linear attention
#   it changes nothing at all (M Eq. 12), as the next cell checks.
# - **Caching is not compression.** A 16 × 16 memory for every 8 pairs is as large as the 8 pairs. A single memory with the squares
#   has 2,448 numbers instead of 4,352 and is better up to about 50 pairs, but it fills up, and the caches do not.
#
# (The small spikes occur because the first pair of a new segment is its own mean key, so for a moment it is the most similar key
# for many queries.)

# %%
linear = rules.linear_attention()
params, _ = start(linear, SETS)
gates = memory.Gates(step_size=1.0)
plain, _ = memory.scan(linear, params, None, keys, keys, values, gates)
cached, _ = memory.scan(
    memory.CachedRule(linear, "residual", segment_size=SEGMENT), params, None, keys, keys, values, gates
)
print("linear attention, residual caching − none:", float(jnp.abs(plain - cached).max()))
assert jnp.allclose(plain, cached, atol=1e-4)

# %% [markdown]
# ## Things to try
#
# - Use `segment_size=16` for fewer memories that are each fuller.
# - Use `memory.CachedRule(delta, "ssc", segment_size=8, top_k=1)`: sparse selective caching reads only the best segment and the
#   current one.
# - Train a model around the memory with `python -m experiments.recall.run`.

# %%
last = {name: error[-1].mean() for name, error in curves["keys in any direction"].items()}
assert last["GRM, right segment known"] < last["delta rule"] < last["residual"]
assert results["delta rule, (q·k)²"][0, 4] < results["delta rule"][0, 4] < 1
