"""Trains one model with several seeds and learning rates at once, in one compiled program."""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atlasjax import storage
from atlasjax.data.associative_recall import IGNORE, RecallConfig, recall_accuracy, recall_sequences
from atlasjax.nn import LanguageModel, ModelConfig, logical_axes
from atlasjax.train import state as state_lib
from atlasjax.train.loss import cross_entropy_sum
from atlasjax.train.optimizer import decay_mask
from experiments.rows import at_least_one

# Fused sums of these versions end the process with a segmentation fault where a sum of products has seven axes or more, which a
# model has that is trained for several seeds at once: https://github.com/jax-ml/jax/issues/39257. Fused products do not.
_FAULTY = ("0.10.2", "0.11.0")
_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}

PIECE = 50  # steps per call of the compiled program
KEEP_SECONDS = 300  # between two copies of an unfinished training's state
LOGITS = 2**19  # that exist at a time: 2 MB, half a core's share of the caches
Sequences = tuple[np.ndarray, np.ndarray]
Measure = Callable[[Any, Sequence[Sequences]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      vocab_size, length, num_pairs: the setting of MQAR (`RecallConfig`), padded with zeros.
      steps: number of optimizer steps. No sequence is seen twice.
      batch_size: sequences per step.
      test_sequences: number of sequences for the accuracy.
    """

    vocab_size: int = 256
    length: int = 64
    num_pairs: int = 16
    steps: int = 600
    batch_size: int = 64
    test_sequences: int = 1000

    def __post_init__(self) -> None:
        at_least_one(self, "Recipe", ("steps", "batch_size", "test_sequences"))
        self.task()

    def task(self) -> RecallConfig:
        return RecallConfig(vocab_size=self.vocab_size, length=self.length, num_pairs=self.num_pairs)

    def training(self, seed: int) -> "Training":
        count = self.steps * self.batch_size
        return one_length(recall_sequences(self.task(), count, seed), np.arange(count), self.batch_size)

    def tests(self, seed: int) -> dict[int, Sequences]:
        """Test sequences by number of pairs."""
        return {self.num_pairs: recall_sequences(self.task(), self.test_sequences, seed, split="test")}


@dataclasses.dataclass(frozen=True)
class Network:
    """A model that is trained.

    Attributes:
      init: key → parameters.
      hidden: (parameters, tokens [batch, time]) → the head's input [batch, time, dim].
      head: (parameters, the head's input [..., dim]) → logits [..., vocab_size].
      mask: which parameters decay, a tree of bools.
      bind: parameters → the language model with them.
    """

    init: Callable[[jax.Array], Any]
    hidden: Callable[[Any, jax.Array], jax.Array]
    head: Callable[[Any, jax.Array], jax.Array]
    mask: Any
    bind: Callable[[Any], LanguageModel]

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """The logits of all positions: [batch, time] → [batch, time, vocab_size]."""
        return self.head(params, self.hidden(params, tokens))


def language_model(config: ModelConfig) -> Network:
    """The model of a config."""
    graphdef, _ = state_lib.model_shapes(config)
    bind = lambda params: state_lib.merge(graphdef, params)
    mask = decay_mask(state_lib.pure(logical_axes(config)))
    return Network(
        lambda key: state_lib.init_params(config, key),
        lambda params, tokens: bind(params).hidden(tokens),
        lambda params, hidden: bind(params).logits(hidden),
        mask,
        bind,
    )


class Training(NamedTuple):
    """The batches of a seed.

    Attributes:
      parts: sequences, each part with a length of its own.
      part: int [steps], the part of each batch.
      rows: int [steps, batch_size], its sequences there.
    """

    parts: list[Sequences]
    part: np.ndarray
    rows: np.ndarray


def one_length(sequences: Sequences, order: np.ndarray, batch_size: int) -> Training:
    """Batches of sequences of one length, in the order [steps * batch_size]."""
    rows = order.reshape(-1, batch_size)
    return Training([sequences], np.zeros(len(rows), int), rows)


class Trainable(Protocol):
    """The part of a recipe that `train` needs; `Recipe` has it."""

    steps: int
    batch_size: int

    def training(self, seed: int) -> Training: ...

    def tests(self, seed: int) -> dict[int, Sequences]: ...


def epochs(shown: int, count: int, seed: int) -> np.ndarray:
    """[shown] indices of `count` sequences: a new permutation in each epoch."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(count) for _ in range(-(-shown // count))])[:shown]


def train(
    model: ModelConfig | Network,
    recipe: Trainable,
    runs: Sequence[tuple[int, float]],
    say: Callable[[int, float], None],
    *,
    decay: float = 0.1,
    score: Callable[[jax.Array, jax.Array], jax.Array] = recall_accuracy,
    partial: pathlib.Path | None = None,
) -> list[dict[str, Any]]:
    """Trains `model` once for each of `runs`, all in parallel, and measures each.

    Args:
      model: its config, or a network.
      recipe: all other settings.
      runs, say, decay, partial: see `fit`.
      score: (logits, labels) of all test sequences → accuracy.

    Returns:
      For each run: accuracy on test sequences from a separate stream of its seed, the mean over the numbers of pairs if there are
      several, then also by_pairs; loss of its last steps in nats per query, None if it is not finite; seconds_of_all, the time of
      all runs together since this call.
    """
    network = model if isinstance(model, Network) else language_model(model)
    started = time.perf_counter()
    params, losses = fit(network, recipe, runs, say, decay=decay, partial=partial)
    tests = {seed: recipe.tests(seed) for seed in {seed for seed, _ in runs}}
    measure = measurement(network, score)
    # Number of pairs → accuracy of each run.
    found = {n: measure(params, [tests[seed][n] for seed, _ in runs]) for n in tests[runs[0][0]]}
    seconds = round(time.perf_counter() - started, 1)
    return [
        {
            "accuracy": round(float(np.mean([values[i] for values in found.values()])), 4),
            **({"by_pairs": {str(n): round(float(v[i]), 4) for n, v in found.items()}} if len(found) > 1 else {}),
            "loss": last_loss(losses[i]),
            "seconds_of_all": seconds,
        }
        for i in range(len(runs))
    ]


def fit(
    network: Network,
    recipe: Trainable,
    runs: Sequence[tuple[int, float]],
    say: Callable[[int, float], None],
    *,
    decay: float = 0.1,
    partial: pathlib.Path | None = None,
) -> tuple[Any, np.ndarray]:
    """Trains a network once for each of `runs`, all in parallel.

    AdamW with weight decay on matrices, a learning rate that falls from its peak to zero as half a cosine, no warm-up and no
    clipping. The loss is the cross entropy at the queries; the head is applied to no other position. A seed determines the initial
    parameters and the sequences, so runs of the same seed differ only in the rate.

    Args:
      network: what is trained.
      recipe: all other settings.
      runs: (seed, learning rate) of each run.
      say: called with the step and the lowest loss of the runs, every `PIECE` steps.
      decay: the weight decay.
      partial: a file for the state of an unfinished training, written every `KEEP_SECONDS`. If it exists, training goes on from it;
        the caller names it by everything that the runs depend on, and deletes it once it has their rows.

    Returns:
      The parameters, each array with the runs as its first axis, and the losses [runs, steps] in nats per query.
    """
    seeds, rates = zip(*runs, strict=True)
    trainings = {seed: recipe.training(seed) for seed in set(seeds)}
    peaks, parts = jnp.asarray(rates), len(trainings[seeds[0]].parts)
    places = [max(_most_queries(training, part) for training in trainings.values()) for part in range(parts)]
    start, advance = _programs(network, recipe, decay)
    carry = jax.jit(jax.vmap(start))(jnp.asarray(seeds), peaks)
    losses = np.full((len(runs), recipe.steps), np.nan, np.float32)
    begin = 0
    if partial is not None and partial.exists():
        before, carry = _load(partial, carry)
        begin = before.shape[1]
        losses[:, :begin] = before
    compiled = jax.jit(jax.vmap(advance), donate_argnums=0, compiler_options=_compiler_options())
    kept = time.perf_counter()
    while begin < recipe.steps:
        # Neighboring batches may differ in length, and a scan over steps has one length.
        end = min(begin + PIECE, recipe.steps) if parts == 1 else begin + 1
        batches = {seed: _batches(training, begin, end, places) for seed, training in trainings.items()}
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(batches[seed] for seed in seeds))
        carry, losses[:, begin:end] = compiled(carry, peaks, stacked)  # [runs, steps, …]
        begin = end
        if begin % PIECE == 0 or begin == recipe.steps:
            say(begin, float(np.min(losses[:, max(begin - PIECE, 0) : begin].mean(1))))
            if partial is not None and begin < recipe.steps and time.perf_counter() - kept > KEEP_SECONDS:
                _save(partial, losses[:, :begin], carry)
                kept = time.perf_counter()
    return carry[0], losses


def _programs(network: Network, recipe: Trainable, decay: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One run's beginning, from its seed and rate, and some of its steps, from the carry, the rate and their batches."""

    def optimizer(rate: jax.Array) -> optax.GradientTransformation:
        schedule = lambda step: rate * 0.5 * (1 + jnp.cos(jnp.pi * step / recipe.steps))
        return optax.adamw(schedule, weight_decay=decay, mask=network.mask)

    def start(seed: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
        params = network.init(jax.random.key(seed))
        return params, optimizer(rate).init(params)

    def loss(params: Any, batch: _Batch) -> jax.Array:
        hidden = network.hidden(params, batch.tokens)
        asked = batch.labels != IGNORE
        total = cross_entropy_sum(
            lambda x: network.head(params, x),
            hidden.reshape(1, -1, hidden.shape[-1])[:, batch.queries],
            jnp.where(asked, batch.labels, 0)[None],
            asked[None],
            chunk=_queries_at_once(network, params, hidden),
        )
        return total / jnp.sum(asked)

    def advance(carry: Any, rate: jax.Array, batches: _Batch) -> tuple[Any, jax.Array]:
        def step(carry: Any, batch: _Batch) -> tuple[Any, jax.Array]:
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, state = optimizer(rate).update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, carry, batches)

    return start, advance


def partial_path(out: pathlib.Path, name: str, recipe: Any, runs: Sequence[tuple[int, float]]) -> pathlib.Path:
    """Where `fit` keeps an unfinished training of these runs: a name for what they depend on. `recipe` is a dataclass."""
    what = json.dumps([name, dataclasses.asdict(recipe), list(runs)])
    return out / "partial" / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}.npz"


class _Batch(NamedTuple):
    """Sequences of one step; of several with a leading axis.

    Attributes:
      tokens: [batch, length].
      queries: places of the queries in the flattened batch [n], then zeros.
      labels: of the queries [n], then `IGNORE`.
    """

    tokens: Any
    queries: Any
    labels: Any


def _batches(training: Training, begin: int, end: int, places: Sequence[int]) -> _Batch:
    """The batches of the steps from `begin` to `end`, all of one part; places: part → n."""
    part = training.part[begin]
    tokens, labels = (array[training.rows[begin:end]] for array in training.parts[part])
    queries = np.zeros((end - begin, places[part]), np.int32)
    answers = np.full_like(queries, IGNORE)
    for i, mine in enumerate(labels.reshape(end - begin, -1)):
        asked = np.flatnonzero(mine != IGNORE)
        queries[i, : len(asked)], answers[i, : len(asked)] = asked, mine[asked]
    return _Batch(tokens, queries, answers)


def _most_queries(training: Training, part: int) -> int:
    """The largest number of queries in a batch of a part; 0 if it has no batch."""
    asked = (training.parts[part][1] != IGNORE).sum(1)
    return int(asked[training.rows[training.part == part]].sum(1).max(initial=0))


def _queries_at_once(network: Network, params: Any, hidden: jax.Array) -> int:
    """How many logits exist at a time: as many as fit into a core's cache."""
    vocab_size = jax.eval_shape(network.head, params, hidden).shape[-1]
    return max(1, LOGITS // vocab_size)


def _save(path: pathlib.Path, losses: np.ndarray, carry: Any) -> None:
    """Writes the state of a training. A kill leaves the file before or the file after, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        np.savez(file, losses, *map(np.asarray, jax.tree.leaves(carry)))


def _load(path: pathlib.Path, like: Any) -> tuple[np.ndarray, Any]:
    """Reads what `_save` wrote, for a carry like `like`."""
    with np.load(path) as file:
        losses, *leaves = (file[name] for name in file.files)
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    if [leaf.shape for leaf in leaves] != shapes:
        raise ValueError(f"{path} is the state of another training: its arrays have other shapes. Delete it.")
    return losses, jax.tree.unflatten(jax.tree.structure(like), leaves)


def last_loss(losses: np.ndarray) -> float | None:
    """The mean of a run's last losses, None if it is not finite."""
    last = float(losses[-PIECE:].mean())
    return round(last, 4) if np.isfinite(last) else None


def measurement(network: Network, score: Callable[[jax.Array, jax.Array], jax.Array]) -> Measure:
    """A compiled function: the parameters of all runs, and the test sequences of each → the score of each run [runs].

    Args:
      network: the parameters' arrays have the runs as their first axis.
      score: (logits, labels) of all sequences of a run → score.
    """

    def one(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        logits = lambda rows: network.logits(params, rows[None])[0]
        return score(jax.lax.map(logits, tokens, batch_size=50), labels)

    # One run after another, because the logits of all runs at once are large.
    program = jax.jit(lambda *xs: jax.lax.map(lambda x: one(*x), xs), compiler_options=_compiler_options())

    def measure(params: Any, tests: Sequence[Sequences]) -> np.ndarray:
        tokens, labels = (np.stack([test[part] for test in tests]) for part in (0, 1))
        return np.asarray(program(params, tokens, labels), float)

    return measure


def _compiler_options() -> dict[str, Any] | None:
    faulty = jax.default_backend() == "cpu" and importlib.metadata.version("jaxlib") in _FAULTY
    return _OPTIONS if faulty else None
