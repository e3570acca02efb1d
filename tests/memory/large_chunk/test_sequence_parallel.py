"""Large chunks whose tokens are divided over devices: values, state and gradients of one device."""

import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import Partition
from atlasjax.memory.large_chunk.sequence_parallel import shares_of
from tests.memory.large_chunk.cases import make_inputs
from tests.memory.test_sequence_parallel import assert_parts_equal_the_whole, mesh_of

CASES = {
    "chunks of several devices": (rules.lact(12, schedule=None), 28),  # and a last one that is not complete
    "parts of several chunks": (rules.in_place_ttt(3), 24),
    "longer than the sequence": (rules.lact(40, schedule=None), 16),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case, x64):
    rule, time = CASES[case]
    params, *inputs = make_inputs(rule, time=time, batch=1)
    assert_parts_equal_the_whole(rule, params, inputs, 4)


@pytest.mark.parametrize(("parts", "part", "chunk"), [(4, 7, 12), (2, 8, 4), (8, 4, 16), (3, 5, 99), (1, 5, 2)])
def test_every_token_has_one_place_in_its_chunk(parts, part, chunk):
    """And the devices have equal shares of a chunk, up to one token of a device."""
    found = shares_of(parts, part, chunk)
    chunks = [[[] for _ in range(parts)] for _ in range(-(-parts * part // chunk))]
    for source, device, n in np.argwhere(found.sent < part):
        chunks[found.received[source, device, n] // found.length][device].append(
            source * part + found.sent[source, device, n]
        )
    tokens = list(range(parts * part))
    laid = [sorted(token for share in shares for token in share) for shares in chunks]
    assert laid == [tokens[i : i + chunk] for i in tokens[::chunk]]
    assert found.length == -(-min(chunk, parts * part) // parts)


@pytest.mark.parametrize(
    ("time", "given", "message"),
    [
        (9, {}, "9 tokens in 2 parts; the tokens of each must be a multiple of 1"),
        (8, {"state": True}, "only from a fresh memory; state must be None"),
        (
            8,
            {"segment_ids": np.zeros((1, 8), int)},
            "cannot divide packed documents for LargeChunkRule: chunks begin with",
        ),
    ],
)
def test_refused(time, given, message):
    rule = rules.in_place_ttt(4)
    params, *inputs = make_inputs(rule, time=time, batch=1, dtype=jnp.float32)
    state = memory.init_state(rule, params, batch_size=1) if given.pop("state", None) else None
    partition = Partition(mesh_of(sequence=2), time=("sequence",))
    with pytest.raises(ValueError, match=message) as refused:
        memory.scan(rule, params, state, *inputs, **given, partition=partition)
    assert "\n" not in str(refused.value)
