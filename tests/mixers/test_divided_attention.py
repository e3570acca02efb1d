"""Attention whose tokens are divided over devices: values and gradients of one device, and memory that does not grow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from atlasjax.memory import Partition
from atlasjax.mixers import ring_attention
from atlasjax.mixers.attention import Persistent, attention
from tests.marks import some_slow

pytestmark = pytest.mark.usefixtures("compile_fast")

BATCH, HEADS, KEY, VALUE = 2, 4, 8, 6


def partition_of(**sizes):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    named = lambda name: (name,) if name in sizes else ()
    return Partition(mesh, named("data"), named("tensor"), named("sequence"))


def inputs(time, kv_heads, dtype, packed, persistent):
    """((q, k, v, persistent keys and values), segment ids, weights of the outputs in a loss)."""
    rng = np.random.default_rng(time)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    q, k, v = (
        2 * normal(BATCH, time, HEADS, KEY),
        normal(BATCH, time, kv_heads, KEY),
        normal(BATCH, time, kv_heads, VALUE),
    )
    learned = Persistent(normal(3, kv_heads, KEY), normal(3, kv_heads, VALUE)) if persistent else None
    # Documents of all lengths, some longer than a part, and an id that comes again.
    ids = jnp.asarray(np.cumsum(rng.random((BATCH, time)) < 0.1, axis=1) % 3) if packed else None
    return (q, k, v, learned), ids, jnp.asarray(rng.standard_normal((BATCH, time, HEADS, VALUE)), jnp.float32)


def with_gradients(arrays, ids, weights, window, partition):
    def loss(arrays):
        q, k, v, persistent = arrays
        y = attention(q, k, v, window=window, persistent=persistent, segment_ids=ids, partition=partition)
        return jnp.sum(y.astype(jnp.float32) * weights), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return y, gradients


OVER_8 = {"sequence": 8}
OVER_ALL = {"data": 2, "tensor": 2, "sequence": 2}
CASES = [  # tokens, heads of keys, packed documents and persistent keys, window, mesh, dtype
    (96, 4, False, None, OVER_8, jnp.float32),
    (101, 2, True, None, OVER_8, jnp.float32),
    (101, 2, True, None, OVER_8, jnp.bfloat16),
    (45, 2, True, None, OVER_ALL, jnp.float32),
    (9, 1, True, None, OVER_8, jnp.float32),  # some devices have only padding
    (101, 2, True, 20, OVER_8, jnp.float32),  # longer than a part
]


# The others compile the same programs with other sizes.
@pytest.mark.parametrize("case", some_slow(CASES, (CASES[0], CASES[4])), ids=lambda case: "-".join(map(str, case[:4])))
def test_values_and_gradients_of_one_device(case, monkeypatch):
    time, kv_heads, extras, window, sizes, dtype = case
    # Several blocks in each part, the last ones with padding, and blocks across the pieces of a part.
    monkeypatch.setattr(ring_attention, "_QUERIES", 3)
    monkeypatch.setattr(ring_attention, "_KEYS", 5)
    arrays, ids, weights = inputs(time, kv_heads, dtype, extras, extras)
    expected = with_gradients(arrays, ids, weights, window, None)
    found = with_gradients(arrays, ids, weights, window, partition_of(**sizes))
    tolerance = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}[dtype]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * abs(b).max())


def test_heads_that_the_mesh_does_not_divide_are_refused():
    (q, k, v, _), _, _ = inputs(16, 1, jnp.float32, False, False)
    with pytest.raises(ValueError, match="heads=1 must be divisible by 2, the size of the mesh axes"):
        attention(q, k, v, partition=partition_of(**OVER_ALL))


@pytest.mark.parametrize("devices", [1, 4, 7])
def test_tokens_are_dealt_out_and_collected(devices):
    """Of 2n pieces device i has i and 2n − 1 − i."""
    mesh = jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])
    axes, spec = ("sequence",), PartitionSpec(None, "sequence")
    run = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    pieces = jnp.arange(2 * devices)[None]
    dealt = run(lambda x: ring_attention.deal(x, axes))(pieces)
    assert dealt.reshape(-1, 2).tolist() == [[i, 2 * devices - 1 - i] for i in range(devices)]
    np.testing.assert_array_equal(run(lambda x: ring_attention.collect(x, axes))(dealt), pieces)
    np.testing.assert_array_equal(run(lambda x: ring_attention._places(x.shape[1], axes)[None])(pieces), dealt)


def test_memory_is_flat_when_length_and_devices_grow_together():
    """Forward and backward through two layers of a scan, packed: no device has keys or values of the whole sequence, of which it
    only knows the segments' numbers, nor logits of more than a block."""
    part = 1100  # more than one block of queries and one of keys

    def compiled(devices):
        mesh = jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])
        partition, over = Partition(mesh, time=("sequence",)), NamedSharding(mesh, PartitionSpec(None, "sequence"))
        tokens = jax.ShapeDtypeStruct((1, devices * part, 1, KEY), jnp.float32, sharding=over)
        ids = jax.ShapeDtypeStruct(tokens.shape[:2], jnp.int32, sharding=over)

        def loss(scales, x, ids):
            layer = lambda x, scale: (attention(x, scale * x, x, segment_ids=ids, partition=partition), None)
            return jnp.sum(jax.lax.scan(layer, x, scales)[0] ** 2)

        return jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct((2,), jnp.float32), tokens, ids).compile()

    small, large = compiled(2), compiled(8)
    assert large.memory_analysis().temp_size_in_bytes < 1.02 * small.memory_analysis().temp_size_in_bytes
    sizes = [[int(x) for x in shape.split(",")] for shape in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", large.as_text())]
    assert [1, part, 1, KEY] in sizes
    assert not [size for size in sizes if 8 * part in size and len(size) > 2]
    assert max(map(np.prod, sizes)) <= 2 * 275 * 550
