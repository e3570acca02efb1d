"""Trains one model with several seeds and learning rates at once, in one compiled program."""

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atlasjax.data.associative_recall import IGNORE, RecallConfig, recall_accuracy, recall_sequences
from atlasjax.nn import LanguageModel, ModelConfig, logical_axes
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask

# Fused sums of these versions end the process with a segmentation fault where a sum of products has seven axes or more, which a
# model has that is trained for several seeds at once: https://github.com/jax-ml/jax/issues/39257. Fused products do not.
_FAULTY = ("0.10.2", "0.11.0")
_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}

PIECE = 50  # steps per call of the compiled program
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
        for name in ("steps", "batch_size", "test_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"Recipe: {name} must be at least 1, got {getattr(self, name)}.")
        self.task()

    def task(self) -> RecallConfig:
        return RecallConfig(vocab_size=self.vocab_size, length=self.length, num_pairs=self.num_pairs)

    def training(self, seed: int) -> Sequences:
        """All sequences of a seed in the order of training, tokens and labels."""
        return recall_sequences(self.task(), self.steps * self.batch_size, seed)

    def tests(self, seed: int) -> dict[int, Sequences]:
        """Test sequences by number of pairs."""
        return {self.num_pairs: recall_sequences(self.task(), self.test_sequences, seed, split="test")}


@dataclasses.dataclass(frozen=True)
class Network:
    """What is trained.

    Attributes:
      init: key → parameters.
      logits: (parameters, tokens [batch, time]) → [batch, time, vocab_size].
      mask: which parameters decay, a tree of bools.
      bind: parameters → the language model with them.
    """

    init: Callable[[jax.Array], Any]
    logits: Callable[[Any, jax.Array], jax.Array]
    mask: Any
    bind: Callable[[Any], LanguageModel]


def language_model(config: ModelConfig) -> Network:
    """The model of a config."""
    graphdef, _ = state_lib.model_shapes(config)
    bind = lambda params: state_lib.merge(graphdef, params)
    mask = decay_mask(state_lib.pure(logical_axes(config)))
    return Network(
        lambda key: state_lib.init_params(config, key), lambda params, tokens: bind(params)(tokens), mask, bind
    )


class Trainable(Protocol):
    """What `train` needs of a recipe; `Recipe` has it."""

    length: int
    steps: int
    batch_size: int

    def training(self, seed: int) -> Sequences: ...

    def tests(self, seed: int) -> dict[int, Sequences]: ...


def train(
    model: ModelConfig | Network,
    recipe: Trainable,
    runs: Sequence[tuple[int, float]],
    say: Callable[[int, float], None],
    *,
    decay: float = 0.1,
    score: Callable[[jax.Array, jax.Array], jax.Array] = recall_accuracy,
) -> list[dict[str, Any]]:
    """Trains `model` once for each of `runs`, all in parallel, and measures each.

    Args:
      model: its config, or a network.
      recipe: all other settings.
      runs, say, decay: see `fit`.
      score: (logits, labels) of all test sequences → accuracy.

    Returns:
      For each run: accuracy on test sequences from a separate stream of its seed, the mean over the numbers of pairs if there are
      several, then also by_pairs; loss of its last steps in nats per query, None if it is not finite; seconds_of_all, the time of
      all runs together.
    """
    network = model if isinstance(model, Network) else language_model(model)
    started = time.perf_counter()
    params, losses = fit(network, recipe, runs, say, decay=decay)
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
) -> tuple[Any, np.ndarray]:
    """Trains a network once for each of `runs`, all in parallel.

    AdamW with weight decay on matrices, a learning rate that falls from its peak to zero as half a cosine, no warm-up and no
    clipping. The loss is the cross entropy at the queries. A seed determines the initial parameters and the sequences, so runs of
    the same seed differ only in the rate.

    Args:
      network: what is trained.
      recipe: all other settings.
      runs: (seed, learning rate) of each run.
      say: called with the step and the lowest loss of the runs, every `PIECE` steps.
      decay: the weight decay.

    Returns:
      The parameters, each array with the runs as its first axis, and the losses [runs, steps] in nats per query.
    """

    def optimizer(rate: jax.Array) -> optax.GradientTransformation:
        schedule = lambda step: rate * 0.5 * (1 + jnp.cos(jnp.pi * step / recipe.steps))
        return optax.adamw(schedule, weight_decay=decay, mask=network.mask)

    def start(seed: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
        params = network.init(jax.random.key(seed))
        return params, optimizer(rate).init(params)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        logits = network.logits(params, tokens)
        asked = labels != IGNORE
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(asked, labels, 0))
        return jnp.mean(entropy, where=asked)

    def advance(carry: Any, rate: jax.Array, tokens: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        def step(carry: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            updates, state = optimizer(rate).update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, carry, (tokens, labels))

    seeds, rates = zip(*runs, strict=True)
    shape = (recipe.steps, recipe.batch_size, recipe.length)
    sequences = {seed: [part.reshape(shape) for part in recipe.training(seed)] for seed in set(seeds)}
    peaks = jnp.asarray(rates)
    carry = jax.jit(jax.vmap(start))(jnp.asarray(seeds), peaks)
    compiled = jax.jit(jax.vmap(advance), donate_argnums=0, compiler_options=_compiler_options())
    losses = []
    for begin in range(0, recipe.steps, PIECE):
        steps = slice(begin, begin + PIECE)
        tokens, labels = (np.stack([sequences[seed][part][steps] for seed in seeds]) for part in (0, 1))
        carry, found = compiled(carry, peaks, tokens, labels)  # [runs, steps, batch, length]
        losses.append(np.asarray(found))
        say(min(begin + PIECE, recipe.steps), float(np.min(found.mean(1))))
    return carry[0], np.concatenate(losses, axis=1)


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
