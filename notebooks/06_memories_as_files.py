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
# # Memories as files
#
# A model that learns as it reads holds all that it has read in a memory of fixed size. This memory is a value: it can be saved and
# loaded, kept and gone back to, copied for two readers who go on with different texts, and mixed with the memory of somebody else.
#
# Here a tiny language model learns, in about a minute on a CPU, to read who lives where. Then it reads a diary once, and we do all
# of this with what it remembers.

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
import os
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from atlasjax import memory
from atlasjax.generate import load_context, read, save_context
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig

plt.rcParams["figure.dpi"] = 80
STEPS = int(os.environ.get("NOTEBOOK_STEPS", 400))  # the tests of the repository take fewer

# %% [markdown]
# ## A world of 24 people
#
# Every sentence says where somebody lives. Some of them move. Each word is a token, so a sentence has four.

# %%
PEOPLE = """
Ada Bela Carl Dora Emil Fay Gus Hana Ivan Jane Karl Lea Max Nora Otto Pia Quin Rosa Sam Tina Udo Vera Wim Zoe
""".split()  # noqa: SIM905
CITIES = """
Accra Bern Cairo Delhi Essen Faro Graz Hanoi Ibiza Jena Kyoto Lima Milan Nice Oslo Paris Quito Riga Sofia Tokyo Ulm Vaduz Wien York
""".split()  # noqa: SIM905
WORDS = [*PEOPLE, *CITIES, "lives in", "."]
NUMBER = {word: number for number, word in enumerate(WORDS)}
LIVES_IN, STOP = NUMBER["lives in"], NUMBER["."]


def write(rng, sentences, batch=1, people=range(len(PEOPLE)), moving=0.15):
    """Texts of random sentences.

    Returns tokens [batch, 4 · sentences], whether the reader can know each sentence's city [batch, sentences], and where people
    live at the end [batch, people], −1 if the text does not say.
    """
    rows = np.arange(batch)
    home = np.full((batch, len(PEOPLE)), -1)
    who, new = rng.choice(people, (batch, sentences)), rng.integers(len(CITIES), size=(batch, sentences))
    moves = rng.random((batch, sentences)) < moving
    city, known = np.zeros_like(who), np.zeros(who.shape, bool)
    for t in range(sentences):
        before = home[rows, who[:, t]]
        known[:, t] = (before >= 0) & ~moves[:, t]
        city[:, t] = home[rows, who[:, t]] = np.where(known[:, t], before, new[:, t])
    tokens = np.stack([who, np.full_like(who, LIVES_IN), city + len(PEOPLE), np.full_like(who, STOP)], axis=-1)
    return tokens.reshape(batch, -1).astype(np.int32), known, home


def text(tokens):
    return " ".join(WORDS[token] for token in tokens).replace(" .", ".")


print(text(write(np.random.default_rng(0), 6)[0][0]))

# %% [markdown]
# ## A minute of training
#
# The model has one layer, with one memory: a matrix of 64 × 64, written by the delta rule. It is trained to predict the city
# wherever the text has said it before. The worlds are new in every step, so nothing can be learned by heart: what it learns is to
# *use* its memory.

# %%
config = ModelConfig(
    vocab_size=len(WORDS), dim=64, num_layers=1, num_heads=1, mlp_dim=128, dtype="float32", remat=False,
    memory=MemoryConfig(rule="delta_rule"),
)  # fmt: skip
model = LanguageModel(config, rngs=nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, min(20, STEPS // 2), STEPS)
optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, tokens, known):
    def loss(model):
        logits = model(tokens[:, :-1])[:, 1::4]  # after "Ada lives in"
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 2::4]).mean(where=known)

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


rng = np.random.default_rng(0)
losses = []
for _ in range(STEPS):
    tokens, known, _ = write(rng, 64, batch=16)
    losses.append(float(step(model, optimizer, tokens, known)))
print("loss, nats per city:", " → ".join(f"{x:.3f}" for x in losses[:: max(1, STEPS // 6)] + losses[-1:]))

# %% [markdown]
# ## Reading once
#
# The diary has 256 sentences. `read` returns a `Context`: the state of the memory, of the convolution before it, and the number of
# tokens. We never show the model the diary again.
#
# To ask where everybody lives, all questions go on from the same context, which stays as it is.

# %%
diary, _, home = write(np.random.default_rng(1), 256)
book = read(model, diary)
print(f"{text(diary[0, :32])} …")


def ask(context):
    """What the model says of every person: probabilities of the cities [people, cities]."""
    questions = [[person, LIVES_IN] for person in range(len(PEOPLE))]
    logits = read(model, questions, context=context).logits
    return np.asarray(jax.nn.softmax(logits[:, len(PEOPLE) : len(PEOPLE) + len(CITIES)]))


def right(answers, home):
    """The share of right answers, of people whose home the text has said."""
    return (answers.argmax(-1) == home)[home >= 0].mean()


answers = ask(book)
print(f"right answers after {diary.size:,} tokens: {right(answers, home[0]):.0%}")

# %% [markdown]
# ## A memory is a file
#
# The file has the state, what it belongs to (the model's config and a digest of its parameters), and neither the text nor the
# parameters. A loaded memory answers with the same bits. Attention has no such state: it keeps the keys and values of every token.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
save_context(model, book, folder / "diary.memory")
loaded = load_context(model, folder / "diary.memory")
assert np.array_equal(ask(loaded), answers)

attention = LanguageModel(dataclasses.replace(config, mixer="attention"), rngs=nnx.Rngs(0))
print(f"the diary                        {len(text(diary[0])):>9,} bytes of text")
print(f"memory in the model              {book.num_bytes:>9,} bytes")
print(f"memory in a file                 {(folder / 'diary.memory').stat().st_size:>9,} bytes")
print(f"keys and values of attention     {read(attention, diary).num_bytes:>9,} bytes")

# %%
COUNTS = [4**n for n in range(2, 9)]


def num_bytes(model, count):
    """Of what a model holds after `count` tokens."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, count))))


figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, this, color in (("keys and values of attention", attention, "#d6701c"), ("this memory", model, "#08519c")):
    sizes = [num_bytes(this, count) for count in COUNTS]
    axis.loglog(COUNTS, sizes, "o-", color=color, linewidth=2)
    axis.annotate(name, (COUNTS[-1], sizes[-1]), xytext=(-6, 8), textcoords="offset points", ha="right", color=color)
axis.axvline(diary.size, color="0.8", zorder=0)
axis.annotate("the diary", (diary.size, 1e4), xytext=(4, -4), textcoords="offset points", color="0.45", va="top")
ticks = [10**3, 10**4, 10**5, 10**6, 10**7, 10**8]
axis.set_yticks(ticks, ["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB"])
axis.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
axis.minorticks_off()
axis.set(xlabel="tokens read", ylabel="what the model holds")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Snapshot, fork, roll back
#
# No call changes a state. So a snapshot is a name for it, and going on from it twice is a fork. One copy of the memory reads what
# happened in the summer, another one what happened in the winter. Each knows only its own story, and the snapshot knows neither.


# %%
def story(moves):
    words = [word for person, city in moves.items() for word in (person, "lives in", city, ".")]
    return np.array([[NUMBER[word] for word in words]])


def after(moves):
    places = home[0].copy()
    for person, city in moves.items():
        places[PEOPLE.index(person)] = CITIES.index(city)
    return places


SUMMER = {"Ada": "Nice", "Carl": "Ibiza", "Fay": "Faro", "Ivan": "Nice", "Lea": "Ibiza", "Otto": "Faro"}
WINTER = {"Ada": "Graz", "Bela": "Oslo", "Fay": "Bern", "Jane": "Graz", "Nora": "Riga", "Zoe": "Bern"}
snapshot = load_context(model, folder / "diary.memory")
summer = read(model, story(SUMMER), context=snapshot)
winter = read(model, story(WINTER), context=snapshot)
save_context(model, summer, folder / "summer.memory")
save_context(model, winter, folder / "winter.memory")
assert np.array_equal(ask(snapshot), answers)  # rolled back: nothing of both stories

columns = [
    ("the diary", ask(book), home[0], {}),
    ("… and summer", ask(summer), after(SUMMER), SUMMER),
    ("… and winter", ask(winter), after(WINTER), WINTER),
    ("rolled back", ask(snapshot), home[0], {}),
]
for name, found, places, _ in columns:
    print(f"{name:<14} {right(found, places):.0%} right")

# %% [markdown]
# Each cell is the answer to "… lives in": blue if it is right, orange if it is right and the story changed it, grey if it is wrong.
# The paler, the less certain.

# %%
figure, axis = plt.subplots(figsize=(8.6, 7.4), layout="constrained")
for x, (_, found, places, moved) in enumerate(columns):
    for y, person in enumerate(PEOPLE):
        answer = found[y].argmax()
        shades = "Greys" if answer != places[y] else "Oranges" if person in moved else "Blues"
        color = plt.get_cmap(shades)(0.05 + 0.35 * found[y, answer])
        axis.add_patch(plt.Rectangle((x, y), 0.96, 0.92, color=color, linewidth=0))
        axis.text(x + 0.48, y + 0.48, CITIES[answer], ha="center", va="center", fontsize=9)
axis.set(xlim=(0, len(columns)), ylim=(len(PEOPLE), 0))
axis.set_xticks(np.arange(len(columns)) + 0.48, [name for name, *_ in columns])
axis.set_yticks(np.arange(len(PEOPLE)) + 0.48, PEOPLE)
axis.xaxis.tick_top()
axis.tick_params(length=0)
axis.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# ## Two memories in one
#
# Two readers each read a diary about one half of the people. `memory.soup` adds their memories with weights, as one might mix two
# pots. Neither diary is read again. Does the mixture know both?

# %%
halves = [range(12), range(12, 24)]
diaries = [write(np.random.default_rng(2 + i), 96, people=half) for i, half in enumerate(halves)]
readers = [read(model, tokens) for tokens, _, _ in diaries]
mixer = model.layers.mixer
params = jax.tree.map(lambda x: x[0], nnx.as_pure(mixer.memory))


def mixed(weight):
    """The memory of both readers, with this weight for the second one."""
    states = [jax.tree.map(lambda x: x[0], reader.cache.memory) for reader in readers]  # of the only layer
    soup = memory.soup(mixer.rule, params, states, weights=[1 - weight, weight])
    cache = readers[0].cache._replace(memory=jax.tree.map(lambda x: x[None], soup))
    return dataclasses.replace(readers[0], cache=cache)


weights = np.linspace(0, 1, 21)
certain = np.array([
    [found[np.arange(24), place][place >= 0].mean() for place in (diaries[0][2][0], diaries[1][2][0])]
    for found in (ask(mixed(weight)) for weight in weights)
])  # fmt: skip
half = ask(mixed(0.5))
print(
    f"the first half of the people: {right(half, diaries[0][2][0]):.0%} right, the second: {right(half, diaries[1][2][0]):.0%}"
)

figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
axis.plot(weights, certain[:, 0], color="#08519c", linewidth=2, label="people of the first diary")
axis.plot(weights, certain[:, 1], color="#d6701c", linewidth=2, label="people of the second diary")
axis.axhline(1 / len(CITIES), color="0.6", linewidth=0.9, linestyle=":")
axis.annotate("a guess", (0.5, 1 / len(CITIES)), xytext=(0, 3), textcoords="offset points", ha="center", color="0.45")
axis.set(xlabel="weight of the second memory", ylabel="probability of the right city", xlim=(0, 1), ylim=(0, 1.03))
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="center")
plt.show()

# %% [markdown]
# The memory of the mixture is as large as that of each reader, and knows both diaries. The reason is simple: this memory is a
# matrix, so its reads are the sum of the reads, and a reader who never heard of a person adds little. With deeper memories, and
# with readers who disagree, a mixture is no more than an experiment.
#
# ## Things to try
#
# - Let both readers read about the same people. Whom does the mixture believe?
# - Read a diary of 4,096 sentences. When does the matrix forget people who are seldom mentioned?
# - Use `MemoryConfig(rule="linear_attention")`, which never corrects itself. What happens to people who move?
#
# The same on the command line, with a model of your own: `atlasjax generate --prompt-file book.txt --save-memory book.memory`, and
# a memory for each conversation with `atlasjax serve`.

# %%
if STEPS >= 400:
    assert all(right(found, places) > 0.9 for _, found, places, _ in columns)
    assert min(right(half, places) for _, _, (places,) in diaries) > 0.9
