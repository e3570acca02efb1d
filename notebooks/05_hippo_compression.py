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
# # HiPPO compression, and how well it can be read back
#
# [Elastic Memory](https://arxiv.org/abs/2602.11212) stores the entire past of a sequence in a fixed number of coefficients. It
# treats every channel of the keys and values as a signal over time and stores its first N Legendre coefficients. They define the
# polynomial of degree N − 1 that is closest to the signal (HiPPO-LegS, Gu et al. 2020). Attention later reads samples of this
# polynomial.
#
# Here we compress signals that we can plot, read them back, and look at what is lost.

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

from atlasjax.mixers.elastic import attention, banks, hippo, sampling

plt.rcParams["figure.dpi"] = 80
print("running on", jax.devices()[0].device_kind)

# %% [markdown]
# ## A signal and its coefficients
#
# The signal has 1,024 tokens: slow waves, a burst of fast waves, and a step. `compress` returns N numbers per channel, and
# `reconstruct` evaluates them at any position. Token k occupies [k, k + 1), so it is read at k + ½.

# %%
TOKENS = 1024
x = (np.arange(TOKENS) + 0.5) / TOKENS
mixed = np.sin(2 * np.pi * 2 * x) + 0.6 * np.exp(-(((x - 0.3) / 0.05) ** 2)) * np.sin(2 * np.pi * 40 * x) + (x > 0.7)
middle = np.arange(TOKENS) + 0.5


def read_back(signal, order):
    """[time] → [time], through `order` coefficients."""
    coefficients = hippo.compress(jnp.asarray(signal, jnp.float32)[:, None], order)
    return np.asarray(hippo.reconstruct(coefficients, middle, length=TOKENS))[:, 0]


ORDERS = (8, 32, 128)
figure, axes = plt.subplots(len(ORDERS), 1, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
for axis, order in zip(axes, ORDERS, strict=True):
    again = read_back(mixed, order)
    axis.plot(middle, mixed, color="0.75", linewidth=3, label="signal")
    axis.plot(middle, again, color="#1f77b4", linewidth=1.3, label="read back")
    axis.set_title(
        f"{order} coefficients for {TOKENS:,} tokens: mean squared error {np.mean((again - mixed) ** 2):.4f}",
        fontsize=10,
    )
    axis.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False, ncols=2, loc="lower left", fontsize=9)
axes[-1].set_xlabel("token")
plt.show()

# %% [markdown]
# The first coefficients capture the waves; the burst and the step need many more. A step is never exact, because the polynomial
# overshoots near it (the Gibbs phenomenon).
#
# ## The past is compressed further as the text grows
#
# Coefficients can be updated: `compress` accepts those of the earlier tokens. Their number stays the same, so the same N numbers
# must describe a longer and longer past. Below, the signal is a constant wave, and after every 512 tokens we reconstruct everything
# from 24 coefficients.

# %%
ORDER, PIECE, PIECES = 24, 512, 6
wave = np.sin(2 * np.pi * np.arange(PIECE * PIECES) / 250).astype(np.float32)
figure, axes = plt.subplots(PIECES, 1, figsize=(9, 6.4), sharex=True, sharey=True, layout="constrained")
coefficients = None
for piece, axis in enumerate(axes):
    start, stop = piece * PIECE, (piece + 1) * PIECE
    coefficients = hippo.compress(jnp.asarray(wave[start:stop, None]), ORDER, coefficients=coefficients, start=start)
    points = np.linspace(0, stop, 800)
    axis.plot(np.arange(stop) + 0.5, wave[:stop], color="0.75", linewidth=3)
    axis.plot(points, hippo.reconstruct(coefficients, points, length=stop)[:, 0], color="#1f77b4", linewidth=1.3)
    axis.set_ylabel(f"{stop:,}", rotation=0, labelpad=18, va="center")
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
axes[-1].set_xlabel("token")
figure.supylabel("tokens read", fontsize=10)
figure.suptitle(f"one wave, {ORDER} coefficients all the time", fontsize=11)
plt.show()

# %% [markdown]
# A polynomial needs about π coefficients per period of a wave to follow it. So there is a threshold: up to 6 periods the wave is
# preserved almost exactly, and from 8 on most of it is lost. It is lost in the middle first, because polynomials have a finer
# resolution at both ends. The paper calls the measure of HiPPO-LegS uniform over the whole past. That is true of the error that it
# minimizes, but not of what it *keeps*.
#
# Updating piece by piece is exact: the coefficients equal those of the whole signal compressed at once.

# %%
whole = hippo.compress(jnp.asarray(wave[:, None]), ORDER)
print("in pieces − at once:", float(jnp.abs(whole - coefficients).max()))

# %% [markdown]
# ## Error against the number of coefficients
#
# We use the paper's signals (App. B.1, Table 12): sums of sine waves, and random noise. Our sums have waves of 1, 2, …, n periods.

# %%
NUMBERS = np.unique(np.round(np.geomspace(4, 512, 22)).astype(int))
noise = np.random.default_rng(0).standard_normal(TOKENS)
SIGNALS = {
    "1 sine wave": np.sin(2 * np.pi * x),
    "5 sine waves": sum(np.sin(2 * np.pi * w * x) for w in range(1, 6)),
    "20 sine waves": sum(np.sin(2 * np.pi * w * x) for w in range(1, 21)),
    "waves, burst and step": mixed,
    "random noise": noise,
}


def relative_error(signal, order):
    """Mean squared error over the mean square of the signal, in float64."""
    again = hippo.reconstruction(order, middle, TOKENS) @ (hippo.kernel(order, 0, TOKENS) @ signal)
    return np.mean((again - signal) ** 2) / np.mean(signal**2)


errors = {name: [relative_error(signal, order) for order in NUMBERS] for name, signal in SIGNALS.items()}
figure, axis = plt.subplots(figsize=(9.5, 4.4), layout="constrained")
for (name, error), color in zip(errors.items(), ("#9ecae1", "#4292c6", "#084594", "#d6701c", "#8c8c8c"), strict=True):
    axis.plot(NUMBERS, error, "o-", color=color, markersize=3.5, label=name)
axis.plot(NUMBERS, 1 - NUMBERS / TOKENS, color="black", linewidth=1, linestyle=":", label="1 − N / tokens")
axis.set(xscale="log", yscale="log", xlabel="coefficients N", ylabel="error / mean square", ylim=(1e-10, 3))
axis.set_xticks([4, 8, 16, 32, 64, 128, 256, 512], [4, 8, 16, 32, 64, 128, 256, 512])
axis.minorticks_off()
axis.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside right center", frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# - Waves have a threshold at about π times their number of periods. Beyond it, the error falls by orders of magnitude.
# - Then the error rises slightly. The compression treats a token as a constant piece of signal, and near the two ends polynomials
#   are fine enough to follow the corners of these pieces. Almost all of this error is in the first and last tokens.
# - A step or a burst in the signal needs many coefficients.
# - Noise cannot be compressed: N of 1,024 coefficients keep about N / 1,024 of its power, like any other N numbers.
#
# Now we reproduce the paper's Table 12.

# %%
PUBLISHED = {
    ("1 sine wave", 32): 1.2e-5,
    ("5 sine waves", 32): 9.8e-4,
    ("random noise", 32): 0.97,
    ("random noise", 512): 0.72,
}
print(f"{'':14s} {'N':>4s}  published   as published   token at its place")
for (name, order), published in PUBLISHED.items():
    # The paper's code numbers time from 1 with an empty state, and reads tokens at their edges.
    n = {"1 sine wave": 1, "5 sine waves": 5}.get(name)
    signal = noise if n is None else sum(np.sin(2 * np.pi * w * np.arange(TOKENS) / TOKENS) for w in range(1, n + 1))
    legacy = hippo.kernel(order, 0, TOKENS, legacy_hippo=True) @ signal
    theirs = np.mean((hippo.reconstruction(order, np.linspace(0, 1, TOKENS)) @ legacy - signal) ** 2)
    ours = np.mean(
        (hippo.reconstruction(order, middle, TOKENS) @ (hippo.kernel(order, 0, TOKENS) @ signal) - signal) ** 2
    )
    print(f"{name:14s} {order:4d}  {published:9.1e}   {theirs:12.1e}   {ours:18.1e}")

# %% [markdown]
# The sine waves agree with the paper in all printed digits. The paper's code numbers time from 1, with an empty token before the
# signal, and reads tokens at their edges. Most of the published error comes from this offset of half a token. With every token in
# its place, as is the library's default, the errors are four orders of magnitude smaller. The values for noise depend on the random
# numbers.
#
# ## How the memory is read
#
# Elastic Memory does not read the whole past. It evaluates the polynomials at a few positions (its samples), and attention
# chooses among them. The samples of keys and values come from the same coefficients. `exponential` places them densely at the
# recent end, `uniform_mid` places them evenly.

# %%
N, BLOCK, BLOCKS = 64, 256, 4
PAST = BLOCK * BLOCKS
figure, axes = plt.subplots(2, 1, figsize=(9, 3.8), sharex=True, layout="constrained")
past = hippo.compress(jnp.asarray(mixed, jnp.float32)[:, None], N)
for axis, name in zip(axes, ("uniform_mid", "exponential"), strict=True):
    at = sampling.positions(name, N, TOKENS)
    axis.plot(middle, mixed, color="0.8", linewidth=3)
    axis.plot(at, hippo.reconstruct(past, at, length=TOKENS)[:, 0], "o", color="#d6701c", markersize=3.5)
    axis.set_title(f"{N} samples, {name}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[-1].set_xlabel("token")
plt.show()

# %% [markdown]
# Can attention find a past token through these samples? The past has 1,024 tokens in blocks of 256. Their random keys and values
# change on a time scale of w tokens: w = 0 is a new direction at every token, and a large w is a slow drift. The next block asks
# for past tokens by their keys. We compare the answer with the value that belongs to the key (cosine), and with a simple
# alternative of the same size: keeping every 16th token unchanged, 64 in all.

# %%
DIM, SHARP = 32, 30.0
WIDTHS = (0, 2, 4, 8, 16, 32, 64, 128)
rng = np.random.default_rng(1)
bank = banks.Bank(*(np.stack(m) for m in zip(*(hippo.block(N, b * BLOCK, (b + 1) * BLOCK) for b in range(BLOCKS)))))


def drift(width):
    """Unit keys and unit values [2, PAST, DIM] that change over `width` tokens."""
    raw = rng.standard_normal((2, PAST + 8 * width, DIM))
    if width:
        bump = np.exp(-0.5 * (np.arange(-4 * width, 4 * width + 1) / width) ** 2)
        raw = np.apply_along_axis(lambda channel: np.convolve(channel, bump, mode="valid"), 1, raw)
    return raw / np.linalg.norm(raw, axis=-1, keepdims=True)


def ask(k, v, asked, name):
    """What elastic attention answers in the block after the past, to the keys `asked`: [BLOCK, DIM]."""
    empty = np.zeros((BLOCK, DIM))  # the block itself says nothing
    q, k, v = (
        jnp.asarray(np.concatenate(x), jnp.float32)[None, :, None]
        for x in ((np.zeros((PAST, DIM)), SHARP * DIM**0.5 * asked), (k, empty), (v, empty))
    )
    R = sampling.sampled_reconstruction(N, name, length=PAST)
    return np.asarray(attention.attention(q, k, v, bank, R, rope_theta=None))[0, PAST:, 0]


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def cosine(a, b):
    return float(np.mean(np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1) + 1e-9)))


def cosines(width, noise):
    """How well each memory answers: cosine of its answer and the value without noise."""
    clean = drift(width)
    k, v = clean + noise * rng.standard_normal(clean.shape) / DIM**0.5
    asked = rng.permutation(PAST)[:BLOCK]
    kept = slice(PAST // N // 2, None, PAST // N)
    answers = {
        "Elastic Memory, uniform_mid": ask(k, v, clean[0][asked], "uniform_mid"),
        "Elastic Memory, exponential": ask(k, v, clean[0][asked], "exponential"),
        "every 16th token, kept": softmax(SHARP * clean[0][asked] @ k[kept].T) @ v[kept],
    }
    return {name: cosine(answer, clean[1][asked]) for name, answer in answers.items()}


by_width = [cosines(width, 0.0) for width in WIDTHS]
NOISES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
by_noise = [cosines(32, noise) for noise in NOISES]

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
for axis, places, rows in zip(axes, (range(len(WIDTHS)), NOISES), (by_width, by_noise), strict=True):
    for name, color in zip(rows[0], ("#1f77b4", "#d6701c", "#8c8c8c"), strict=True):
        axis.plot(places, [row[name] for row in rows], "o-", color=color, linewidth=2, label=name)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_xticks(range(len(WIDTHS)), WIDTHS)
axes[0].set(
    xlabel="tokens over which keys and values change",
    ylabel="cosine of answer and value",
    ylim=(-0.05, 1.05),
    title="no noise",
)
axes[1].set(xlabel="noise on every key and value (1: as large as they are)", title="they change over 32 tokens")
axes[0].legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# - **Smooth keys and values are found**, but those that change from token to token are not: the memory knows the drift of the past,
#   not its individual tokens. The paper's App. C argues that the keys and values of deep layers are smooth. Its own Table 13
#   reports that 540 coefficients leave an error of 45%, so they are only partly smooth.
# - **Without noise, compression is no better than keeping every 16th token** at the same size. App. D expects an advantage because
#   sampling suffers from aliasing. Here the polynomials lose the same details.
# - **With noise, compression is better**, as App. D says: a coefficient averages over many tokens, whereas a token that is kept
#   keeps its noise.
# - **Exponential sampling** gives worse answers about the whole past, because its samples are concentrated at the recent end. It is
#   meant for text, where recent tokens are needed more often.

# %% [markdown]
# ## Things to try
#
# - Use `discretization="forward"` in `hippo.kernel`. It is simpler to explain, but unstable at large N (there is a warning).
# - `python -m experiments.elastic.probe` trains a small language model with this memory and then changes its sampling.

# %%
assert by_width[-1]["Elastic Memory, uniform_mid"] > 0.95 > 0.3 > by_width[0]["Elastic Memory, uniform_mid"]
assert by_noise[-1]["Elastic Memory, uniform_mid"] > by_noise[-1]["every 16th token, kept"]
