"""What a user's own mixer may be, and mistakes in one: each is one line that names the mixer, before anything is compiled."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from atlasjax.memory.layerwise import put_layer
from atlasjax.nn import (
    AttentionConfig,
    BranchConfig,
    LanguageModel,
    ModelConfig,
    SSMConfig,
    abstract_model,
    param,
)
from atlasjax.nn.config import MIXER_NAMES
from atlasjax.nn.mixer_check import check_own_calls, why_not_decoded
from atlasjax.nn.mixers import MIXERS
from tests.streams import streamed

DIM = 8


class Average(nnx.Module):
    """A moving average with its number of tokens: a correct mixer, from which the others differ by one mistake."""

    def __init__(self, config, *, rngs):
        self.dim = config.dim
        self.logit = param(jax.random.normal(rngs.params(), (config.dim,)), "embed")

    def _mix(self, x, mean):
        a = jax.nn.sigmoid(self.logit[...])

        def step(mean, x):
            mean = a * mean + (1 - a) * x
            return mean, mean

        mean, y = jax.lax.scan(step, mean, jnp.swapaxes(x.astype(jnp.float32), 0, 1))
        return jnp.swapaxes(y, 0, 1).astype(x.dtype), mean

    def __call__(self, x, segment_ids=None, max_segments=None):
        return self._mix(x, jnp.zeros((x.shape[0], self.dim)))[0]

    def init_state(self, batch_size, max_length=None):
        return {"mean": jnp.zeros((batch_size, self.dim)), "read": (jnp.zeros((batch_size,), jnp.int32), None)}

    def extend(self, x, state):
        y, mean = self._mix(x, state["mean"])
        return y, {"mean": mean, "read": (state["read"][0] + x.shape[1], None)}


class FlaxParam(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(config.dim))


class FlaxLinear(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.inside = nnx.List([nnx.Linear(config.dim, config.dim, use_bias=False, rngs=rngs)])


class TooFewAxes(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((config.dim, 2)), logical_axes=("embed",))


class Dropout(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Noise(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.noise = param(jax.random.normal(rngs.noise(), (config.dim,)), "embed")


class Table(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.table = jnp.arange(config.dim)


class NumpyTable(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.table = np.arange(config.dim)


class Statistics(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(config.dim))


class Fails(Average):
    def __init__(self, config, *, rngs):
        raise TypeError("seven heads\nare too many")


class OtherArguments(Average):
    def __call__(self, x):
        return x


class Narrow(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return x[..., :-1]


class Wider(Average):
    """float32 from a model in bfloat16."""

    def __call__(self, x, segment_ids=None, max_segments=None):
        return x.astype(jnp.float32)


class Pair(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return x, x


class Broken(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return x @ jnp.ones((self.dim + 1, self.dim))


class Unsized(Average):
    def init_state(self, batch_size):
        return super().init_state(batch_size)


class NoBatch(Average):
    def init_state(self, batch_size, max_length=None):
        return super().init_state(batch_size) | {"read": (jnp.zeros((), jnp.int32), None)}


class TwoFirst(Average):
    """Two rows of something: as many as sequences of the check, but not for any other number of sequences."""

    def init_state(self, batch_size, max_length=None):
        return super().init_state(batch_size) | {"read": (jnp.zeros((2,), jnp.int32), None)}


class OnlyOutput(Average):
    def extend(self, x, state):
        return x


class NarrowPiece(Average):
    def extend(self, x, state):
        return x[..., :-1], state


class Integers(Average):
    """Decoded wrongly by a cast of each next state to the dtype of the first."""

    def init_state(self, batch_size, max_length=None):
        return jax.tree.map(lambda one: one.astype(jnp.int32), super().init_state(batch_size))

    def extend(self, x, state):
        return super().extend(x, jax.tree.map(lambda one: one.astype(jnp.float32), state))


class OneRow(Average):
    """Decoded wrongly by a write of one row of two."""

    def extend(self, x, state):
        y, state = super().extend(x, state)
        return y, state | {"mean": state["mean"][:1]}


class HalfPrecision(Average):
    def extend(self, x, state):
        y, state = super().extend(x, state)
        return y, state | {"mean": state["mean"].astype(jnp.bfloat16)}


class LastPiece(Average):
    """A state as long as the last piece."""

    def extend(self, x, state):
        return x, state | {"mean": x.astype(jnp.float32)[:, -1] if x.shape[1] == 1 else x.astype(jnp.float32)}


class Forgets(Average):
    def extend(self, x, state):
        return x, {"mean": state["mean"]}


class OtherTree(Average):
    def extend(self, x, state):
        return x, state | {"read": list(state["read"])}


class OddPiece(Average):
    def extend(self, x, state):
        if x.shape[1] > 1:
            raise NameError("one token at a time")
        return super().extend(x, state)


class Grows(Average):
    def observe(self, x, segment_ids=None, max_segments=None):
        return self(x, segment_ids, max_segments), jnp.zeros(())


class OnlyObserved(Average):
    def observe(self, x, segment_ids=None, max_segments=None):
        return self(x, segment_ids, max_segments)


class InPlace(Average):
    def extend_layer(self, x, states, layer):
        return x, jax.tree.map(lambda one: one[0], states)


def small(mixer, **fields):
    return ModelConfig(vocab_size=16, dim=DIM, num_layers=2, num_heads=2, mixer=mixer, **fields)


class Count(Average):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.count = param(jnp.zeros(config.dim, jnp.int32), "embed")


class Refuses(Average):
    def __init__(self, config, *, rngs):
        raise ValueError("heads must\ndivide dim")


class Exits(Average):
    def __init__(self, config, *, rngs):
        raise SystemExit(3)


class NoFile(Average):
    def __init__(self, config, *, rngs):
        pathlib.Path("no such file").read_text()


MISTAKES = [
    (Count, r"parameter count \[8\] is int32; it must be float32"),
    (Refuses, r"__init__ raised ValueError: heads must \(line \d+ of tests.nn.test_own_mixers\)"),
    (Exits, r"__init__ raised SystemExit: 3 \(line"),
    (NoFile, r"__init__ raised FileNotFoundError: \[Errno 2\] No such file"),
    (
        FlaxParam,
        r"parameter scale \[8\] has the logical axes None; create it with atlasjax.nn.param or atlasjax.nn.Linear",
    ),
    (FlaxLinear, r"parameter inside.0.kernel \[8, 8\] has the logical axes None"),
    (TooFewAxes, r"parameter scale \[8, 2\] has the logical axes \('embed',\)"),
    (Dropout, "drop.rngs.count is an nnx.RngCount; .* Dropout is ModelConfig.dropout"),
    (Noise, "should take random numbers from rngs.params.*No RngStream named 'noise'"),
    (Table, "table is an array; the arrays of a mixer should all be parameters"),
    (NumpyTable, "table is an array; the arrays of a mixer should all be parameters"),
    (Statistics, "seen is an nnx.BatchStat; the arrays"),
    (Fails, r"__init__ raised TypeError: seven heads \(line \d+ of tests.nn.test_own_mixers\)"),
    (OtherArguments, r"__call__ has the arguments \(x\), should have \(x, segment_ids, max_segments\)"),
    (
        Narrow,
        r"__call__ for x bfloat16 \[2, 5, 8\] returned the output bfloat16 \[2, 5, 7\], must be of the shape and dtype",
    ),
    (
        Wider,
        r"__call__ for x bfloat16 \[2, 5, 8\] returned the output float32 \[2, 5, 8\], must be of the shape and dtype",
    ),
    (Pair, r"__call__ for x bfloat16 \[2, 5, 8\] returned the output a tuple, must be of the shape and dtype of x"),
    (
        Broken,
        r"__call__ for x bfloat16 \[2, 5, 8\] raised TypeError: dot_general .* \(line \d+ of tests.nn.test_own_mixers\)",
    ),
    (Unsized, r"init_state has the arguments \(batch_size\), should have \(batch_size, max_length\)"),
    (NoBatch, r"init_state\(3, 128\) has int32 \[\] at \['read'\]\[0\], should have the batch axis first: \[3, …\]"),
    (TwoFirst, r"init_state\(3, 128\) has int32 \[2\] at \['read'\]\[0\], should have the batch axis first: \[3, …\]"),
    (
        OnlyOutput,
        r"extend for x bfloat16 \[2, 1, 8\] returned bfloat16 \[2, 1, 8\], should return \(output, next state\)",
    ),
    (NarrowPiece, r"extend for x bfloat16 \[2, 1, 8\] returned the output bfloat16 \[2, 1, 7\], must be"),
    (Integers, r"returned a state with float32 \[2, 8\] at \['mean'\], should have int32 \[2, 8\] as before"),
    (OneRow, r"returned a state with float32 \[1, 8\] at \['mean'\], should have float32 \[2, 8\] as before"),
    (HalfPrecision, r"returned a state with bfloat16 \[2, 8\] at \['mean'\], should have float32 \[2, 8\] as before"),
    (
        LastPiece,
        r"\[2, 3, 8\] returned a state with float32 \[2, 3, 8\] at \['mean'\], should have float32 \[2, 8\] as before",
    ),
    (Forgets, r"returned a state with nothing at \['read'\]\[0\], should have int32 \[2\] as before"),
    (OtherTree, r"returned a state with the tree structure .*\[\*, None\].*, should have .*\(\*, None\).* as before"),
    (OddPiece, r"extend for x bfloat16 \[2, 3, 8\] raised NameError: one token at a time \(line"),
    (Grows, r"observe for x .* returned the size float32 \[\], must be None or float32 \[2, heads\]"),
    (
        OnlyObserved,
        r"observe for x .* returned bfloat16 \[2, 5, 8\], should return \(output, size of the memory or None\)",
    ),
    (
        InPlace,
        r"extend_layer for x .* returned a state with float32 \[2, 8\] at \['mean'\], should have float32 \[2, 2, 8\]",
    ),
]


@pytest.mark.parametrize(("mixer", "message"), MISTAKES, ids=[kind.__name__ for kind, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_mixer(mixer, message):
    with pytest.raises(ValueError, match=f"^mixer 'tests.nn.test_own_mixers:{mixer.__name__}': .*{message}") as caught:
        abstract_model(small(mixer))
    assert "\n" not in str(caught.value)


def test_every_mixer_of_a_pattern_and_the_branch_are_checked():
    for config in (small(("attention", Narrow)), small("attention", branch=BranchConfig(Narrow))):
        with pytest.raises(ValueError, match="Narrow': __call__"):
            abstract_model(config)


class OnlyChunks(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        if x.shape[1] % 1024:
            raise ValueError("time must be a multiple of 1,024")
        return super().__call__(x)


class OnlyShort(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return super().__call__(x + jnp.zeros((8, 1), x.dtype)[: x.shape[1]])


class OnlyPacked(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return super().__call__(x) * (segment_ids[..., None] < max_segments)


class NoDecoding(Average):
    def extend(self, x, state):
        raise NotImplementedError


class OnMesh(Average):
    def __call__(self, x, segment_ids=None, max_segments=None):
        return jax.lax.with_sharding_constraint(super().__call__(x), PartitionSpec(("data", "fsdp"), "sequence"))


class NeedsLength(Average):
    def init_state(self, batch_size, max_length=None):
        if max_length is None:
            raise ValueError("max_length is None")
        return super().init_state(batch_size)


class FirstValues(Average):
    """Requires the first layer's values."""

    def first_values(self, x, state, segment_ids):
        return x[..., :2]

    def __call__(self, x, segment_ids=None, max_segments=None, *, first):
        return super().__call__(x) + first[..., :1]

    def extend(self, x, state, *, first):
        y, state = super().extend(x, state)
        return y + first[..., :1], state


class NoState(Average):
    def init_state(self, batch_size, max_length=None):
        return ()

    def extend(self, x, state):
        return x, state


@pytest.mark.parametrize(
    "mixer", [Average, OnlyChunks, OnlyShort, OnlyPacked, NoDecoding, OnMesh, NeedsLength, FirstValues, NoState]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_mixer_may_be(mixer, dtype):
    assert abstract_model(small(mixer, dtype=dtype)).layers.mixer.logit.shape == (2, DIM)


def test_decoding_with_a_mixer_that_does_not():
    config = small(NoDecoding)
    assert why_not_decoded(small(Average)) is None
    assert why_not_decoded(small("attention", branch=BranchConfig(NoDecoding))) is not None
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    model(jnp.zeros((1, 4), jnp.int32))
    message = "^The model decodes no tokens: mixer '.*NoDecoding': extend for x .* raised NotImplementedError"
    with pytest.raises(ValueError, match=message):
        model.extend(jnp.zeros((1, 4), jnp.int32), model.init_cache(1))


@pytest.mark.parametrize(
    ("mixer", "time", "packed"), [(OnlyChunks, 5, False), (OnlyShort, 9, True), (OnlyPacked, 4, False)]
)
def test_the_sequences_of_a_run_are_checked(mixer, time, packed):
    words = " with segment_ids" if packed else ""
    with pytest.raises(ValueError, match=rf"__call__ for x bfloat16 \[2, {time}, 8\]{words} raised "):
        check_own_calls(small(mixer), time, packed=packed)
    check_own_calls(small(mixer), 4096 if mixer is OnlyChunks else 8, packed=True)


def test_on_a_mesh_that_does_not_divide_the_batch_of_the_check():
    mesh = jax.make_mesh((8, 1, 1), ("data", "fsdp", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        abstract_model(small(OnMesh))
        with pytest.raises(ValueError, match="Narrow': __call__"):
            abstract_model(small(Narrow))


ALWAYS = (
    "attention",
    "memory",
    "rwkv7",
    "gam",
    "elastic",
)  # in place, observed, first values, a convolution, max_length


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in MIXERS])
def test_the_librarys_mixers_pass_under_a_name_of_their_own(name):
    kind = f"{MIXERS[name].__module__}:{MIXERS[name].__qualname__}"
    assert kind == MIXER_NAMES[name]  # or a file could not name it so
    config = small(kind, attention=AttentionConfig(window=4), ssm=SSMConfig(head_dim=8))
    assert type(abstract_model(config).layers.mixer) is MIXERS[name]


def test_an_own_mixer_decodes():
    model = LanguageModel(small(Average, dtype="float32"), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, 16)
    logits, _ = streamed(model.extend, tokens, model.init_cache(2), (0, 3, 4, 6))
    np.testing.assert_allclose(logits, model(tokens), rtol=1e-5, atol=1e-5)


class IntegersWithoutLength(Integers):
    """A mistake for a state of no maximum, which the check of the model does not see."""

    def init_state(self, batch_size, max_length=None):
        state = super().init_state(batch_size)
        return state if max_length is None else jax.tree.map(lambda one: one.astype(jnp.float32), state)


def test_a_state_that_changes_its_dtype_is_not_cast():
    model = LanguageModel(small(IntegersWithoutLength), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((2, 3), jnp.int32)
    model.extend(tokens, model.init_cache(2, 8))
    with pytest.raises(
        ValueError, match=r"IntegersWithoutLength.extend: the next state has float32 .* should have int32"
    ):
        model.extend(tokens, model.init_cache(2))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": jnp.ones((1, 3))}, r"float32 \[1, 3\] at \['a'\], should have float32 \[2, 3\] as before"),
        (
            {"a": jnp.ones((2, 3), jnp.int32)},
            r"int32 \[2, 3\] at \['a'\], should have float32 \[2, 3\] as before",
        ),
        ({"b": jnp.ones((2, 3))}, r"nothing at \['a'\], should have float32 \[2, 3\] as before"),
    ],
)
def test_a_layers_next_state_is_like_the_one_before(state, message):
    with pytest.raises(ValueError, match=f"^Own.step: the next state has {message}"):
        put_layer({"a": jnp.zeros((4, 2, 3))}, state, jnp.int32(1), jnp.ones(2), "Own.step")
