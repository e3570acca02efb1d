"""Unclear input of the rules of 2026 is refused in one line, before anything is compiled."""

import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.mixers.curvature import preconditioned_keys
from atlasjax.mixers.delta_product import interleaved, last_reads


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def scan(rule, *, key_dim=4, **gates):
    weights = {name: ones(1, *shape) for name, shape in rule.structure.weight_shapes(4, 4).items()}
    given = memory.Gates(**gates, retention=0.9, step_size=0.1)
    return memory.scan(
        rule, memory.MemoryParams(weights, None, None), None, ones(1, 6, 1, 4), ones(1, 6, 1, key_dim), ones(1, 6, 1, 4), given
    )  # fmt: skip


def hierarchy(**choices):
    return memory.HierarchicalRule(rules.titans(chunk_size=8), **{"global_chunk": 8, "restart": 32} | choices)


WIDTH = r"removal_key has shape .*5\), must be \[1, 6, 1, 4\]"
CASES = {
    "gdn2, r wider than k": (lambda: scan(rules.gdn2(), removal_key=ones(1, 6, 1, 5)), WIDTH),
    "comba, r wider than k": (lambda: scan(rules.comba(), removal_key=ones(1, 6, 1, 5)), WIDTH),
    "pgdn, k wider than r": (lambda: scan(rules.pgdn(), key_dim=5, removal_key=ones(1, 6, 1, 4)), r"k has shape .*, must be"),
    "rows of no whole tokens": (lambda: last_reads(ones(1, 7, 1, 4), 2), "y has 7 rows, which must be a multiple of writes=2"),
    "step sizes of other writes": (
        lambda: interleaved(ones(1, 6, 1, 4), ones(1, 6, 2, 1, 4), ones(1, 6, 2, 1, 4), memory.Gates(step_size=ones(1, 6, 3, 1))),
        "step_size",
    ),
    "curvature of other heads": (lambda: preconditioned_keys(ones(1, 6, 2, 4), ones(1, 6, 2), ones(1, 6, 3)), "retention"),
    "no chunk": (lambda: rules.lact(0), "chunk_size"),
    "local chunk above the global one": (lambda: hierarchy(local_chunks=(16,)), "has 16, must be at most global_chunk=8"),
    "restart inside a local chunk": (lambda: hierarchy(local_chunks=(6,)), "restart=32 must be a multiple of each"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)
