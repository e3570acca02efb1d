"""Memory Caching whose tokens are divided over devices: values, state and gradients of one device."""

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.memory import CachedRule, Partition
from tests.marks import some_slow
from tests.memory.caching.test_caching import CASES, make_inputs
from tests.memory.cases import assert_close
from tests.memory.test_sequence_parallel import assert_parts_equal_the_whole, mesh_of

FRESH = {name: rule for name, rule in CASES.items() if rule.start == "fresh"}
# All memories at a time, one of each device at a time, and a soup's engine; scores from keys and by age; bounded and not.
DEFAULT = ("grm", "ssc_ones_age", "soup_small")


@pytest.mark.parametrize("name", some_slow(FRESH, set(FRESH) - set(DEFAULT)))
def test_equals_one_device(name, x64):
    """Two segments on each of four devices; with all gradients."""
    rule = FRESH[name]
    params, *inputs = make_inputs(rule, time=8 * rule.segment_size)
    assert_parts_equal_the_whole(rule, params, inputs, 4)


def test_beside_batch_and_heads(x64):
    rule = FRESH["grm"]
    params, *inputs = make_inputs(rule, time=4 * rule.segment_size)
    partition = Partition(mesh_of(data=2, tensor=2, sequence=2), ("data",), ("tensor",), ("sequence",))
    run = lambda **options: jax.jit(lambda: memory.scan(rule, params, None, *inputs, **options))()
    assert_close(run(partition=partition), run(), 1e-9)


def test_a_device_holds_few_memories():
    """As many at a time as there are devices, and not all of the sequence, forward and backward."""
    rule = CachedRule(rules.titans(chunk_size=8), "grm", 16, connector="query")

    def temporary(devices, segments):
        params, *inputs = make_inputs(rule, time=devices * segments * 16, dim=32, batch=1, dtype=jnp.float32)
        partition = Partition(mesh_of(sequence=devices), time=("sequence",))
        loss = lambda params, *x: jnp.sum(memory.scan(rule, params, None, *x, partition=partition)[0] ** 2)
        compiled = jax.jit(jax.grad(loss)).lower(params, *inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(x.nbytes for x in params.weights.values())

    (two, size), (eight, _) = temporary(2, 16), temporary(8, 16)
    held = 8 * 16 * size  # all memories of the longer sequence
    assert eight - two < held / 3


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (
            CachedRule(rules.delta_rule(), "grm", 4, start="carry"),
            {},
            'its segments continue from each other .start="carry"',
        ),
        (
            CachedRule(rules.delta_rule(), "grm", 8),
            {},
            "24 tokens in 2 parts; the tokens of each must be a multiple of 8",
        ),
        (
            CachedRule(rules.delta_rule(), "grm", 4),
            {"segment_ids": jnp.zeros((2, 24), jnp.int32), "max_segments": 2},
            "cannot divide packed documents for CachedRule: segments begin with their documents",
        ),
    ],
)
def test_refused(rule, options, message):
    params, *inputs = make_inputs(rule, time=24, dtype=jnp.float32)
    partition = Partition(mesh_of(sequence=2), time=("sequence",))
    with pytest.raises(ValueError, match=message):
        memory.scan(rule, params, None, *inputs, **options, partition=partition)


def test_a_state_is_refused():
    rule = CachedRule(rules.delta_rule(), "grm", 4)
    params, *inputs = make_inputs(rule, time=8, dtype=jnp.float32)
    state = memory.init_state(rule, params, batch_size=2, max_length=16)
    with pytest.raises(ValueError, match="only from a fresh memory; state must be None"):
        memory.scan(rule, params, state, *inputs, partition=Partition(mesh_of(sequence=2), time=("sequence",)))
