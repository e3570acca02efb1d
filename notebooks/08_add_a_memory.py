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
# # Add a memory to public weights
#
# A trained model gets a memory that it was not trained with: a deep memory ([Titans](https://arxiv.org/abs/2501.00663))
# beside each of its mixers, a cache of its own states ([Memory Caching](https://arxiv.org/abs/2602.24281)), or a window of
# attention. It starts as exactly the old model, and trains on from there.
#
# We make small public weights first: a Granite-4.0-H (Mamba-2, and attention without positions), in the files that
# transformers reads and writes. With a model of your own, `import_weights` takes its folder or its name on the Hub.

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

from atlasjax.data import DataConfig, load_text
from atlasjax.distributed import MeshConfig
from atlasjax.interop import export_weights, import_weights
from atlasjax.nn import (
    AttentionConfig,
    BranchConfig,
    CachingConfig,
    LanguageModel,
    MemoryConfig,
    count_parameters,
)
from atlasjax.presets import get_preset
from atlasjax.train import OptimizerConfig, TrainConfig, load_run, train

plt.rcParams["figure.dpi"] = 80
print("running on", jax.devices()[0].device_kind)
STEPS = int(os.environ.get("NOTEBOOK_STEPS", 400))  # the tests of the repository take fewer
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Public weights
#
# Three layers of Mamba-2 and one of attention, of width 64, trained on bytes of the Python language reference. The export is
# the layout of transformers' `granitemoehybrid`: `GraniteMoeHybridForCausalLM.from_pretrained` reads it.

# %%
data = DataConfig(sequence_length=128, batch_size=8)


def config(name, model, steps, **more):
    """A run of so many steps in the folder of this name."""
    return TrainConfig(
        model=model, data=data, optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=max(1, steps // 10)),
        mesh=MeshConfig(data=1), steps=steps, run_dir=str(folder / name), eval_every=0, eval_batches=2, checkpoint_every=0,
        log_every=max(1, steps // 4), tensorboard=False, **more,
    )  # fmt: skip


first = dataclasses.replace(get_preset("granite-h-tiny"), dim=64, mlp_dim=160, remat=False)
train(config("first", first, STEPS))
written = export_weights(folder / "first", folder / "public")
fields = json.loads((folder / "public/config.json").read_text())
print(written.family, f"{written.parameters:,} parameters,", fields["layer_types"])

# %% [markdown]
# ## What is added
#
# The imported run has the config of the model, with the parameters in its checkpoint. Caching and a branch are fields of that
# config. On the command line they are `atlasjax train --init-from RUN --add-caching grm`, `--add-memory titans` and
# `--add-window 32`.

# %%
import_weights(folder / "public", folder / "imported", tokenizer="byte")
old = load_run(folder / "imported").model
plain = dataclasses.replace(old.config, remat=False)
beside = lambda branch: dataclasses.replace(plain, branch=branch)
MODELS = {
    "nothing": plain,
    "window": beside(BranchConfig("swa", attention=AttentionConfig(32))),
    "cached states": dataclasses.replace(plain, caching=CachingConfig.added("grm", 32)),
    "Titans": beside(BranchConfig("memory", memory=MemoryConfig("titans", chunk_size=32))),
}
for name, model in MODELS.items():
    print(f"{name:15s}{count_parameters(model):9,} parameters")

# %% [markdown]
# With the old parameters in their places, every new model has the same logits: what is added begins with a weight of zero.

# %%
tokens = np.frombuffer(load_text(data, "validation").encode()[:512], np.uint8).astype(np.int32)[None]
expected = old(tokens)
given = dict(nnx.to_flat_state(nnx.state(old, nnx.Param)))
for name, model in MODELS.items():
    new = LanguageModel(model, rngs=nnx.Rngs(0))
    state = nnx.state(new, nnx.Param)
    nnx.update(new, nnx.from_flat_state([(path, given.get(path, value)) for path, value in nnx.to_flat_state(state)]))
    print(f"{name:15s} largest difference of a logit: {float(jnp.abs(new(tokens) - expected).max()):.1e}")

# %% [markdown]
# ## Training on
#
# `init_from` starts a run from the parameters of another one. All models read the same batches in the same order. The control
# has nothing added: training on helps by itself.

# %%
results = {
    name: train(config(name.replace(" ", "-"), model, STEPS // 4, init_from=str(folder / "imported")))
    for name, model in MODELS.items()
}

# %% [markdown]
# ## Does it help, and further on?
#
# The texts of the test are eight times as long as a training sequence. What counts is the difference from the control at each
# position, because later positions have other text.

# %%
LENGTH, WINDOWS = 8 * data.sequence_length, 12
unseen = np.frombuffer(load_text(data, "validation").encode(), np.uint8).astype(np.int32)
starts = np.linspace(0, len(unseen) - LENGTH - 1, WINDOWS).astype(int)
windows = np.stack([unseen[i : i + LENGTH + 1] for i in starts])


@nnx.jit
def bits(model, tokens):
    """Bits of each next byte [batch, time]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]) / jnp.log(2)


EDGES = [0, 32, 64, 128, 256, 512, LENGTH]
found = {}
for name in MODELS:
    each = np.asarray(bits(load_run(folder / name.replace(" ", "-")).model, windows))
    found[name] = np.stack([each[:, a:b].mean(axis=1) for a, b in itertools.pairwise(EDGES)])  # [bucket, window]
    print(f"{name:15s}", "  ".join(f"{x:.3f}" for x in found[name].mean(axis=1)))

# %%
COLORS = {"window": "#d62728", "cached states": "#2ca02c", "Titans": "#1f77b4"}
figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
for name, color in COLORS.items():
    saved = found["nothing"] - found[name]
    error = saved.std(axis=1, ddof=1) / WINDOWS**0.5
    axis.errorbar(range(len(saved)), saved.mean(axis=1), error, fmt="o-", color=color, capsize=3, label=name)
axis.axhline(0, color="black", linewidth=1)
axis.annotate("nothing added", (0, 0), xytext=(0, -12), textcoords="offset points", fontsize=9)
axis.axvspan(2.5, len(EDGES) - 1.6, color="0.95", zorder=0)
axis.annotate(
    "longer than a training sequence", (2.6, axis.get_ylim()[0]), xytext=(0, 5), textcoords="offset points", fontsize=9
)
axis.set_xticks(range(len(EDGES) - 1), [f"{a}–{b}" for a, b in itertools.pairwise(EDGES)])
axis.set(xlabel="position in the text, bytes", ylabel="bits per byte saved")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The bars are standard errors over pieces of text, of one run each; another seed can turn a small difference around.
# `experiments/added_memory` asks the same with a model of a million parameters, several seeds and intervals, and a control of as
# many parameters, and [Public weights](../docs/weights.md) has what came out.
#
# ## Things to try
#
# - Train only what was added: `OptimizerConfig(trainable=r"\.branch\.|cache")`.
# - Another memory: `MemoryConfig("atlas")`, or any name of `atlasjax info --rules`.
# - Real weights: `import_weights("ibm-granite/granite-4.0-h-350m", folder)`, and a GPU or TPU.
