"""A user's own file: a mixer, a data source, a learning-rate schedule, an optimizer and a rule, by public classes only."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from atlasjax import memory
from atlasjax.memory import objectives, structures
from atlasjax.nn import Linear, param
from tests.memory.own_ideas import LogCosh


class MovingAverage(nnx.Module):
    """s_t = a ⊙ s_{t−1} + (1 − a) ⊙ (W_in x_t), y_t = W_out (s_t ⊙ silu(W_gate x_t)); a is learned, one for each channel."""

    def __init__(self, config, *, rngs, longest=64.0):
        self.dim = config.dim
        self.into = Linear((self.dim, 2, self.dim), ("embed", None, "heads"), rngs=rngs)
        self.out = Linear((self.dim, self.dim), ("heads", "embed"), scale=config.output_scale, rngs=rngs)
        self.scale = param(jnp.log(jnp.linspace(2.0, longest, self.dim)), "heads")  # log of the time scale, in tokens

    def _mix(self, x, state, new):
        """new: [batch, time], where a segment starts."""
        value, gate = jnp.moveaxis(self.into(x).astype(jnp.float32), -2, 0)
        a = jnp.exp(-jnp.exp(-self.scale[...]))
        decay = jnp.where(new[..., None], 0.0, a)

        def then(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        decays, sums = jax.lax.associative_scan(then, (decay, (1.0 - a) * value), axis=1)
        s = decays * state[:, None] + sums
        return self.out((s * jax.nn.silu(gate)).astype(x.dtype)), s[:, -1]

    def __call__(self, x, segment_ids=None, max_segments=None):
        new = jnp.zeros(x.shape[:2], bool)
        if segment_ids is not None:
            new = new.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])
        return self._mix(x, self.init_state(x.shape[0]), new)[0]

    def init_state(self, batch_size, max_length=None):
        return jnp.zeros((batch_size, self.dim))

    def extend(self, x, state):
        return self._mix(x, state, jnp.zeros(x.shape[:2], bool))


class NotDecoded(MovingAverage):
    def extend(self, x, state):
        raise NotImplementedError("whole sequences only")


def plateau(rate):
    """Adam, slowed down when the loss stays: it takes the loss, and keeps the least one, infinite at first."""
    return optax.chain(optax.adam(rate), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=4))


class Counting:
    """Documents that count: "1 2 3 …", "2 4 6 …", …; a sequence of strings."""

    def __init__(self, documents=64, numbers=200):
        self.documents, self.numbers = documents, numbers

    def __len__(self):
        return self.documents

    def __getitem__(self, index):
        return " ".join(str((index + 1) * n) for n in range(1, self.numbers + 1))


def split_counting(split, documents=8):
    """A source with its own validation text: nothing is held out of the training text."""
    return Counting(documents, 150 if split == "train" else 40)


def inverse_square_root(config, steps):
    """Learning rate like 1/√step after the warm-up."""
    return lambda step: config.learning_rate / jnp.sqrt(1.0 + step / max(1, config.warmup_steps))


def sgd(learning_rate, momentum=0.9):
    """Any optax transformation."""
    return optax.sgd(learning_rate, momentum)


def log_cosh_memory(chunk_size=16, expansion=1):
    """A memory rule of one's own."""
    return memory.MemoryRule(structures.MLP(expansion=expansion), LogCosh(), chunk_size=chunk_size)


def not_a_rule():
    return objectives.L2()
