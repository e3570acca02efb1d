"""The device programs of a server: a fixed number of slots, one text in each, and one step for those that are in use."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from atlasjax.generate import Context, RowSampling, sample_rows
from atlasjax.generate.context import copied, prefill
from atlasjax.generate.definition import Definition, decoder, split
from atlasjax.generate.room import check_room
from atlasjax.nn import LanguageModel, state_bytes
from atlasjax.nn.unrolled import CacheForm


class SlotState(NamedTuple):
    """The content of the slots.

    Attributes:
      logits: of each slot's next token, float32 [slots, vocabulary].
      cache: of all slots, in the form in which the model decodes fastest.
      seen: tokens that each text has, bool [slots, vocabulary].
    """

    logits: jax.Array
    cache: PyTree
    seen: jax.Array


class StepInputs(NamedTuple):
    """One step of slots, the first ones. All take it, also those that are not in use, for to leave the state of some as it is would
    cost a copy of all.

    Attributes:
      forced: the token to read, or -1 to sample one. int32 [slots].
      position: number of tokens that were sampled before, int32 [slots]. With the key it decides what is drawn, as in `generate`.
      keys: data of each slot's PRNG key, uint32 [slots, …].
      sampling: how each slot samples.
    """

    forced: np.ndarray
    position: np.ndarray
    keys: np.ndarray
    sampling: RowSampling


class Slots:
    """The slots of a model. Every method runs programs whose number does not depend on the texts.

    Args:
      model: a `LanguageModel`.
      number: number of slots.
      max_length: number of tokens for which a slot has room. It matters only if a mixer keeps every token.
      vocab_size: tokens of the tokenizer; others are never sampled.

    Attributes:
      no_text: the context before the first token.

    Raises:
      ValueError: the texts of all slots do not fit in memory.
    """

    def __init__(self, model: LanguageModel, number: int, max_length: int, vocab_size: int):
        self.model, self.number, self.max_length, self._vocab_size = model, number, max_length, vocab_size
        self._definition, self._params = split(model)
        # All texts lie in one way on the devices, or what a program returns would be compiled for again when it is read.
        self._where = _where(self._params)
        self._decoder = decoder(model, number * state_bytes(model, length=max_length))
        if not isinstance(self._where, NamedSharding):
            self._params = jax.device_put(self._params, self._where)
            self._decoder = self._decoder._replace(params=jax.device_put(self._decoder.params, self._where))
        # A step takes the first 1, 4, 16, … slots or all, so that few texts cost less, with few programs.
        self._sizes = [*(size for size in (4**i for i in range(16)) if size < number), number]
        check_room(model, ("slots", number), ("room", max_length))
        width = model.config.vocab_size
        shapes = lambda length: jax.eval_shape(lambda: model.init_cache(1, length))
        # Not twice as long: a cache of segments has the same shapes for all lengths up to a segment.
        self.keeps_tokens = shapes(max_length) != shapes(max_length + 2**30)
        self._row = shapes(max_length)
        cache, logits = jax.device_put(
            (model.init_cache(1, max_length), jnp.zeros((1, width), jnp.float32)), self._where
        )
        self.no_text = Context(cache, logits, np.zeros((1, width), bool), np.zeros(1, np.int32), max_length)
        state = SlotState(
            jnp.zeros((number, width), jnp.float32),
            self._decoder.form.of(model.init_cache(number, max_length)),
            jnp.zeros((number, width), bool),
        )
        self._state = jax.device_put(state, self._where)

    def fitted(self, context: Context) -> Context:
        """A context with the room of a slot.

        Raises:
          ValueError: it has several rows, or more room than a slot.
        """
        if len(context.num_tokens) != 1:
            raise ValueError(f"the memory has {len(context.num_tokens)} texts; it should have one.")
        context = context.with_room(self.model, self.max_length)
        if [x.shape for x in jax.tree.leaves(context.cache)] != [x.shape for x in jax.tree.leaves(self._row)]:
            raise ValueError(
                f"the memory has room for {context.max_length} tokens; the server's texts have {self.max_length}."
            )
        cache, logits = jax.device_put((context.cache, context.logits), self._where)
        return dataclasses.replace(context, cache=cache, logits=logits)

    def read(self, tokens: np.ndarray, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Reads a piece of one text, int32 [time]. Returns the logits of the next token [1, vocabulary], and the cache."""
        return self._placed(prefill(self._definition, self._params, tokens[None], copied(cache)))

    def put(self, slot: int, context: Context) -> None:
        """Puts a text into a slot."""
        self._state = self._placed(
            _put(self._decoder.form, self._state, slot, context.logits, context.cache, context.seen)
        )

    def take(self, slot: int, num_tokens: int) -> Context:
        """The text of a slot. num_tokens: how many tokens it has."""
        # A copy: the state is donated to the next step.
        row = self._placed(_take(self._decoder.form, self._state, slot))
        return Context(row.cache, row.logits, np.array(row.seen), np.array([num_tokens], np.int32), self.max_length)

    def step(self, inputs: StepInputs) -> np.ndarray:
        """Samples a token in the first slots, as many as the inputs have, or takes the forced one, and reads it.

        Returns the tokens, int32 [slots]. The number must be one of `size_for`, for each is a program.
        """
        tokens, state = _step(*self._decoder, self._state, inputs, vocab_size=self._vocab_size)
        self._state = self._placed(state)
        return np.asarray(tokens)

    def size_for(self, number: int) -> int:
        """Number of slots, the first ones, that a step takes if only the first `number` are active."""
        return next(size for size in self._sizes if size >= number)

    def move(self, slot: int, to: int) -> None:
        """Puts the text of a slot into another one."""
        self.put(to, self.take(slot, 0))

    def compile(self, inputs: StepInputs, report: Callable[[str], None] = lambda doing: None) -> None:
        """Compiles the steps of all sizes. No slot may be in use, for each reads a few tokens.

        inputs: of all slots. report: is told what is compiled.
        """
        for number, size in enumerate(self._sizes, 1):
            report(f"compiling a step of {size} texts ({number} of {len(self._sizes)})")
            self.step(jax.tree.map(lambda x, size=size: x[:size], inputs))

    def _placed(self, results: PyTree) -> PyTree:
        """The results of a program, placed as the texts are. With several devices XLA would choose another place."""
        return jax.device_put(results, self._where) if isinstance(self._where, NamedSharding) else results


def _where(params: PyTree) -> jax.sharding.Sharding:
    """How texts lie on the devices of the parameters: whole on each."""
    sharding: jax.sharding.Sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return NamedSharding(sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(next(iter(sharding.device_set)))


SlotRow = tuple[int, int, np.ndarray, RowSampling]  # forced, position, key and sampling of a slot


def key_data(seed: int) -> np.ndarray:
    """Data of the PRNG key that `generate` uses for this seed, if it is in [0, 2^32).

    Others are taken modulo 2^64, and have the keys that `jax.random.key` gives them with 64-bit types; without, it drops half of
    their bits.
    """
    words = np.array([seed % 2**64 >> 32, seed % 2**32], np.uint32)
    return np.resize(words, jax.random.key_data(jax.random.key(0)).shape)


def step_inputs(rows: Sequence[SlotRow]) -> StepInputs:
    """Stacks (forced, position, key, sampling row) of slots."""
    forced, position, keys, sampling = zip(*rows, strict=True)
    return StepInputs(
        np.array(forced, np.int32), np.array(position, np.int32), np.stack(keys),
        RowSampling(*(np.concatenate(x) for x in zip(*sampling, strict=True))),
    )  # fmt: skip


def _set_row(slot: jax.Array | int) -> Callable[[int, jax.Array, jax.Array], jax.Array]:
    """(axis of the slots, array of all slots, that of some) → the first with those from `slot` on replaced."""
    return lambda axis, all_, some: jax.lax.dynamic_update_slice_in_dim(all_, some, slot, axis)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put(
    form: CacheForm, state: SlotState, slot: jax.Array, logits: jax.Array, cache: PyTree, seen: jax.Array
) -> SlotState:
    put = _set_row(slot)
    cache = form.map_rows(put, state.cache, form.of(cache))
    return SlotState(put(0, state.logits, logits), cache, put(0, state.seen, seen))


@functools.partial(jax.jit, static_argnums=0)
def _take(form: CacheForm, state: SlotState, slot: jax.Array) -> SlotState:
    row = lambda axis, x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)
    return SlotState(row(0, state.logits), form.back(form.map_rows(row, state.cache)), row(0, state.seen))


@functools.partial(jax.jit, static_argnums=(0, 2), static_argnames="vocab_size", donate_argnums=3)
def _step(
    definition: Definition,
    params: list[jax.Array],
    form: CacheForm,
    everything: SlotState,
    inputs: StepInputs,
    *,
    vocab_size: int,
) -> tuple[jax.Array, SlotState]:
    """A step of the first slots: as many as `inputs` has."""
    size = len(inputs.forced)
    first = lambda axis, x: jax.lax.slice_in_dim(x, 0, size, axis=axis)
    cache = form.map_rows(first, everything.cache)
    state = SlotState(everything.logits[:size], cache, everything.seen[:size])
    # A model may have more rows in its table than the tokenizer has tokens.
    known = jnp.arange(state.logits.shape[-1]) < vocab_size
    # From the position in the text, not the step of the server: what is drawn does not depend on the other texts.
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jnp.asarray(inputs.keys)), inputs.position)
    drawn = sample_rows(jnp.where(known, state.logits, -jnp.inf), keys, inputs.sampling, state.seen)
    tokens = jnp.where(inputs.forced >= 0, inputs.forced, drawn)
    seen = state.seen.at[jnp.arange(size), tokens].set(True)
    logits, cache = definition.merge(params).extend(tokens[:, None], state.cache)

    put = _set_row(0)  # the new rows before the other slots
    return tokens, SlotState(
        put(0, everything.logits, logits[:, -1].astype(jnp.float32)),
        form.map_rows(put, everything.cache, cache),
        put(0, everything.seen, seen),
    )
