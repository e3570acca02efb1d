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
# # A language model in ten minutes
#
# We train a small language model on bytes. Only its memories, which learn as they read, let it look back further than a few
# bytes. Each head has a matrix that is updated by the gated delta rule: a decay, then a gradient step on the error of the newest
# pair. Then we let the model write, and watch its memories while it reads unseen text.
#
# This takes a few minutes on a CPU. The text is the language reference that ships with Python, about 400 kB.

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
import functools
import itertools
import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from matplotlib.colors import Normalize

from atlasjax.data import DataConfig, load_text
from atlasjax.distributed import MeshConfig
from atlasjax.evaluate.ngram import fit_ngram
from atlasjax.generate import SamplingConfig, generate
from atlasjax.nn import MemoryConfig, ModelConfig, count_parameters
from atlasjax.train import OptimizerConfig, TrainConfig, load_run, train

plt.rcParams["figure.dpi"] = 80
print("running on", jax.devices()[0].device_kind)
STEPS = int(os.environ.get("NOTEBOOK_STEPS", 400))  # the tests of the repository take fewer

# %% [markdown]
# ## The model and its training
#
# The model has two layers of width 128 with four heads each. Apart from the memories, only a convolution over four bytes before
# each memory mixes neighbouring bytes.

# %%
run_dir = pathlib.Path(tempfile.mkdtemp()) / "run"
data = DataConfig(sequence_length=256, batch_size=4)
config = TrainConfig(
    model=ModelConfig(
        dim=128,
        num_layers=2,
        num_heads=4,
        memory=MemoryConfig(rule="gated_delta_rule"),
        dtype="float32",
        remat=False,
    ),
    data=data,
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=min(20, STEPS // 4)),
    mesh=MeshConfig(data=1),  # one device is enough
    steps=STEPS,
    run_dir=str(run_dir),
    eval_every=50,
    eval_batches=8,
    checkpoint_every=0,
    log_every=max(1, STEPS // 8),
    tensorboard=False,
)
print(f"{count_parameters(config.model):,} parameters")
result = train(config)

# %% [markdown]
# ## Loss
#
# All losses are in bits per byte. The horizontal lines are n-gram models. They count how often each byte occurs in the training
# text, or follows the last one, two or three bytes, and are evaluated on the same held-out 8 kB.

# %%
records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
training = np.array([(r["step"], r["loss"] / np.log(2)) for r in records if r["kind"] == "train"])
held_out = np.array([(r["step"], r["bits_per_byte"]) for r in records if r["kind"] == "evaluation"])
train_bytes, unseen = (load_text(data, split).encode() for split in ("train", "validation"))
counted = {
    name: fit_ngram(train_bytes, order).bits_per_byte(unseen[1:8193])
    for order, name in enumerate(("unigram", "bigram", "trigram", "4-gram"), start=1)
}
print({name: round(bits, 2) for name, bits in counted.items()}, "this model:", round(held_out[-1, 1], 2))

figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
axis.plot(*training.T, color="#9ecae1", linewidth=1, label="training, every step")
axis.plot(*held_out.T, "o-", color="#08519c", label="held-out text")
for name, bits in counted.items():
    axis.axhline(bits, color="0.55", linewidth=0.9, linestyle=":")
    axis.annotate(name, (STEPS, bits), xytext=(0, 3), textcoords="offset points", ha="right", color="0.35", fontsize=9)
axis.set(xlabel="step of 1,024 bytes", ylabel="bits per byte", xlim=(0, STEPS), ylim=(1.5, 8.2))
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# ## Generating text
#
# `load_run` loads the model from the folder of the run, as another program would.

# %%
run = load_run(run_dir)
prompt = "The statement "
tokens = generate(run.model, run.tokenizer.encode(prompt)[None], 240, config=SamplingConfig(temperature=0.7), seed=1)
print(prompt + run.tokenizer.decode(np.asarray(tokens[0])))

# %% [markdown]
# ## Reading, byte by byte
#
# `model.extend` reads the next bytes of a stream. Its cache is the entire state: the last inputs of the convolutions, and the
# memory of each head in each layer. We read 16 passages of held-out text, 256 bytes each, twice in a row, and also after
# *another* passage. For every byte we record the surprise (−log2 of its probability, in bits), the size of each memory, ‖M_t‖,
# and how far the byte moved it, ‖M_t − M_{t−1}‖.

# %%
LENGTH, PASSAGES, SHOWN = 256, 16, 5
graphdef, params = nnx.split(run.model, nnx.Param)


@functools.partial(jax.jit, static_argnums=0)
def read(graphdef, params, tokens):
    """Reads int32 [batch, time].

    Returns surprise [batch, time − 1], size and movement of the memories [batch, time − 1, layers, heads], and the memories of one
    row [time − 1, layers, heads, value_dim, key_dim].
    """
    model = nnx.merge(graphdef, params)
    matrices = lambda cache: cache.memory.memory["W"]  # [layers, batch, heads, value_dim, key_dim]
    norm = lambda W: jnp.sqrt(jnp.sum(W**2, axis=(-2, -1)))

    def one(cache, pair):
        token, following = pair
        logits, after = model.extend(token[:, None], cache)
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits[:, 0], following) / jnp.log(2)
        W, before = matrices(after), matrices(cache)
        return after, (surprise, norm(W), norm(W - before), W[:, SHOWN])

    _, out = jax.lax.scan(one, model.init_cache(tokens.shape[0]), (tokens.T[:-1], tokens.T[1:]))
    surprise, size, movement, shown = out
    return surprise.T, jnp.moveaxis(size, 2, 0), jnp.moveaxis(movement, 2, 0), shown


starts = np.linspace(0, len(unseen) - LENGTH - 1, PASSAGES).astype(int)
passages = np.stack([np.frombuffer(unseen[i : i + LENGTH], np.uint8) for i in starts]).astype(np.int32)
twice = np.concatenate([passages, passages], axis=1)
after_another = np.concatenate([np.roll(passages, 1, axis=0), passages], axis=1)
out = read(graphdef, params, np.concatenate([twice, after_another]))
surprise, size, movement, shown = (np.asarray(x) for x in out)
first, second, other = surprise[:PASSAGES, : LENGTH - 1], surprise[:PASSAGES, LENGTH:], surprise[PASSAGES:, LENGTH:]
print(f"bits per byte: fresh {first.mean():.3f}, after another passage {other.mean():.3f}, again {second.mean():.3f}")

# %% [markdown]
# ## A memory is a matrix
#
# These are the memories of one head in each layer, at several points in a passage.

# %%
MOMENTS = (0, 3, 15, 63, 255, 510)
figure, axes = plt.subplots(2, len(MOMENTS), figsize=(10.5, 4), layout="constrained")
for layer, row in enumerate(axes):
    limit = np.abs(shown[-1, layer, 0]).max()
    for axis, moment in zip(row, MOMENTS, strict=True):
        image = axis.imshow(shown[moment, layer, 0], cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{moment + 1} byte{'s' * bool(moment)}", fontsize=9)
    row[0].set_ylabel(f"layer {layer}")
    figure.colorbar(image, ax=row, shrink=0.8)
plt.show()

# %% [markdown]
# ## Where the model is surprised
#
# This is one passage, read twice. Dark red bytes were surprising. If the memory remembers the passage, the second reading is paler.

# %%
COLUMNS = 64


def paint(axis, text, bits, title):
    norm, cmap = Normalize(0, 8), plt.get_cmap("Reds")
    for place, (byte, bit) in enumerate(zip(text, bits, strict=True)):
        row, column = divmod(place, COLUMNS)
        axis.add_patch(plt.Rectangle((column, -row - 1), 1, 1, color=cmap(0.85 * norm(bit)), linewidth=0))
        character = {10: "↵", 32: "·"}.get(byte, chr(byte))
        axis.text(column + 0.5, -row - 0.55, character, family="monospace", fontsize=8, ha="center", va="center")
    axis.set(
        xlim=(0, COLUMNS),
        ylim=(-(len(text) - 1) // COLUMNS - 0.1, 0.1),
        title=f"{title}: {bits.mean():.2f} bits per byte",
    )
    axis.axis("off")


figure, axes = plt.subplots(2, 1, figsize=(10, 3.8), layout="constrained")
paint(axes[0], passages[SHOWN, 1:], first[SHOWN], "first reading")
paint(axes[1], passages[SHOWN, 1:], second[SHOWN], "second reading")
plt.show()

# %% [markdown]
# ## Does a repetition help?
#
# The plot shows the mean over all passages against the position in the passage. In both of the last two curves there is text
# before the passage, but only in one of them is it the same text.

# %%
smooth = lambda x, n=24: np.convolve(x, np.ones(n) / n, mode="valid")
figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
lines = {
    "fresh memory": (first, "#8c8c8c"),
    "after another passage": (other, "#d6701c"),
    "second time": (second, "#08519c"),
}
for name, (bits, color) in lines.items():
    curve = smooth(bits.mean(axis=0))
    axis.plot(
        np.arange(len(curve)) + 24, curve, color=color, linewidth=2, label=f"{name}: {bits.mean():.2f} bits per byte"
    )
axis.set(xlabel="byte of the passage (mean of the last 24)", ylabel="surprise, bits")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plt.show()
gain = (other - second).mean(axis=1)
error = gain.std(ddof=1) / PASSAGES**0.5
print(f"the same text before, instead of another: {gain.mean():.3f} ± {error:.3f} bits per byte less")

# %% [markdown]
# ## How far back does it look?
#
# The first bytes of a passage have little text before them. The curve shows how many bytes of context the model uses (bars:
# standard error over the passages).

# %%
EDGES = [1, 2, 3, 5, 9, 17, 33, 65, 129, LENGTH]
by_context = [first[:, a - 1 : b - 1].mean() for a, b in itertools.pairwise(EDGES)]
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
spread = [first[:, a - 1 : b - 1].mean(axis=1).std(ddof=1) / PASSAGES**0.5 for a, b in itertools.pairwise(EDGES)]
axis.errorbar(range(len(by_context)), by_context, spread, fmt="o-", color="#08519c", capsize=3)
axis.set_xticks(
    range(len(by_context)), [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in itertools.pairwise(EDGES)]
)
axis.set(xlabel="bytes read before", ylabel="surprise, bits")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# About ten bytes help, more than the n-gram models can use. Beyond that there is no visible effect. Up to noise, text that was
# read before is as surprising as new text (a negative number above means more surprising). So in a few minutes of training, this
# model has learned to keep the recent past in its memories (a word, an indentation, an open bracket), but not whole passages.
# Models of this size learn to copy from far back late in training, if at all; the papers train on billions of tokens. Notebooks 01
# and 04 show that a memory *can* store and recall pairs if the keys suit it.

# %% [markdown]
# ## What the memories hold
#
# The plot shows the size of each head's memory while it reads a passage twice (mean over the passages).

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for layer, axis in enumerate(axes):
    for head in range(size.shape[-1]):
        color = plt.get_cmap("viridis")(head / 3.6)
        axis.plot(size[:PASSAGES, :, layer, head].mean(axis=0), color=color, label=f"head {head}")
    axis.axvline(LENGTH, color="0.7", linewidth=0.8)
    axis.set(xlabel="bytes read (grey line: the passage starts over)", title=f"layer {layer}", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("‖M‖")
axes[1].legend(frameon=False, ncols=2, fontsize=9)
plt.show()

# %%
relative = (movement / size)[:PASSAGES].mean(axis=3)  # [passage, byte, layer]
for layer in range(relative.shape[-1]):
    once, again = relative[:, 1 : LENGTH - 1, layer], relative[:, LENGTH + 1 :, layer]
    r = np.corrcoef(first[:, :-1].ravel(), once.ravel())[0, 1]  # first[:, t − 1] is the surprise of byte t
    print(
        f"layer {layer}: a byte moves a memory by {once.mean():.0%} of its size, by {again.mean():.0%} in the second reading; "
        f"correlation with the byte's surprise {r:+.2f}"
    )

# %% [markdown]
# Some memories fill within tens of bytes, others only after hundreds. Then their size stays the same, because new content replaces
# old content or decays. The second reading writes slightly less than the first, because a pair that is still stored needs no
# correction. How much a byte writes has little to do with how surprising it is to the model: the memory minimizes its own error in
# predicting values from keys, not the error of the model.
#
# ## Things to try
#
# - Use `MemoryConfig(rule="titans", chunk_size=32, expansion=2)` for deep memories with momentum. (The plot of the matrices needs a
#   matrix memory.)
# - Use `NOTEBOOK_STEPS=4000` for more training, or `DataConfig(source="text", paths=("your.txt",))` for your own text.
# - On the command line, use `atlasjax train` and `atlasjax generate`.
