"""`memory.scan` whose tokens are divided over devices: values, state and gradients of one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from atlasjax import memory, rules
from atlasjax.memory import Partition
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close, make_inputs
from tests.memory.test_meshes import graded, total

GATED = rules.gated_delta_rule()
CASES = {
    **{
        name: RULES[name]
        for name in ("linear_attention", "retnet", "gla", "delta_rule", "delta_rule_decay", "rwkv7_one_key", "gdn2")
    },
    "gated_delta_rule": GATED,
    "rwkv7": rules.rwkv7(),
    "longhorn": rules.longhorn(),
    "polysketch": rules.polysketch(4),
}
DEFAULT = ("gla", "gated_delta_rule", "rwkv7")


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def state_of(rule, params, inputs):
    """A state in the middle of a stream."""
    return memory.scan(rule, params, None, *jax.tree.map(lambda x: x[:, :5], inputs))[1]


def assert_parts_equal_the_whole(rule, params, inputs, devices, state=None, **segments):
    """A call with its tokens divided over devices has the values, final state and all gradients of one device."""

    def summed(partition):
        def run(params, *arguments):
            found = memory.scan(rule, params, state, *arguments, **segments, partition=partition)
            return total(rule, found), found

        return run

    divided = Partition(mesh_of(sequence=devices), time=("sequence",))
    assert_close(graded(summed(divided), params, *inputs), graded(summed(None), params, *inputs), 1e-9)


@pytest.mark.parametrize("name", some_slow(CASES, set(CASES) - set(DEFAULT[:2])))
def test_equals_one_device(name, x64):
    """37 tokens on 8 devices, the last ones of which have padding or nothing else; from a state, with all gradients."""
    rule = CASES[name]
    params, *inputs = make_inputs(rule, time=37, dtype=jnp.float64)
    assert_parts_equal_the_whole(rule, params, inputs, 8, state_of(rule, params, inputs))


def test_beside_batch_and_heads(x64):
    """Every axis of the call divided, a fresh memory, the block-parallel form that `implementation` names."""
    rule = GATED
    params, *inputs = make_inputs(rule, time=21, dtype=jnp.float64)
    partition = Partition(mesh_of(data=2, tensor=2, sequence=2), ("data",), ("tensor",), ("sequence",))
    run = lambda **options: jax.jit(lambda: memory.scan(rule, params, None, *inputs, **options))()
    assert_close(run(partition=partition, implementation="xla"), run(), 1e-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precision(dtype):
    """A part's outputs are rounded once more than those of one device."""
    rule = GATED
    params, q, k, v, gates = make_inputs(rule, time=64, dtype=jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    run = lambda **options: jax.jit(lambda: memory.scan(rule, params, None, q, k, v, gates, **options))()
    y, _ = run(partition=Partition(mesh_of(sequence=4), time=("sequence",)))
    assert y.dtype == dtype
    expected = run()[0].astype(jnp.float32)
    error = jnp.abs(y.astype(jnp.float32) - expected).max() / jnp.abs(expected).max()
    assert error < {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("titans", "its memory after a part of the sequence is not a linear function of the memory before it"),
        ("delta_rule_channel_steps", "its step sizes per channel give each row of the memory another transition"),
    ],
)
def test_refused(name, message):
    rule = RULES[name]
    params, *inputs = make_inputs(rule, time=8)
    with pytest.raises(ValueError, match=message):
        memory.scan(rule, params, None, *inputs, partition=Partition(mesh_of(sequence=2), time=("sequence",)))


@pytest.mark.parametrize("name", some_slow(DEFAULT, DEFAULT[1:]))
@pytest.mark.parametrize("continued", some_slow([False, True], [False]))
def test_segments(name, continued, x64):
    """Some are longer than a device's part, some start with it, and some parts have several. The learned start is not zero."""
    rule = CASES[name]
    params, *inputs = make_inputs(rule, time=37, dtype=jnp.float64)
    state = None if not continued else state_of(rule, params, inputs)._replace(segment=jnp.asarray([0, 9], jnp.int32))
    starts = [[3, 4, 5, 20, 36], [10, 15]]
    ids = jnp.stack([jnp.zeros(37, jnp.int32).at[jnp.asarray(at)].set(1).cumsum() for at in starts])
    assert_parts_equal_the_whole(rule, params, inputs, 8, state, segment_ids=ids, max_segments=6)
