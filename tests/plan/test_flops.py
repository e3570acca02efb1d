"""FLOPs counted in the jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from atlasjax.plan import count_flops

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
MATMUL = 2 * 4 * 8 * 8


def test_matmul_and_einsum():
    assert count_flops(jnp.matmul, X, W) == MATMUL
    batched = jax.ShapeDtypeStruct((3, 4, 8), jnp.float32)
    assert count_flops(lambda x, w: jnp.einsum("bij,jk->bik", x, w), batched, W) == 3 * MATMUL


def test_a_scan_counts_every_iteration():
    def scanned(x, w):
        return jax.lax.scan(lambda carry, _: (carry @ w, None), x, None, length=5)[0]

    assert count_flops(scanned, X, W) == 5 * MATMUL
    assert count_flops(jax.jit(scanned), X, W) == 5 * MATMUL


def test_gradient_and_recomputation():
    loss = lambda x, w: jnp.sum(jnp.sin(x @ w))
    assert count_flops(jax.grad(loss, argnums=(0, 1)), X, W) == 3 * MATMUL
    assert count_flops(jax.grad(jax.checkpoint(loss), argnums=(0, 1)), X, W) == 4 * MATMUL


def test_convolution():
    x, kernel = jnp.zeros((2, 10, 3)), jnp.zeros((4, 3, 5))  # depth 3 → 5, width 4
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))
    assert count_flops(convolve, x, kernel) == 2 * (2 * 7 * 5) * (4 * 3)


def test_a_branch_counts_the_dearest():
    f = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x)
    assert count_flops(f, X, W) == 2 * MATMUL


def test_a_shard_map_counts_all_devices():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    rows = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")))
    assert count_flops(rows, X, W) == MATMUL
    half = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
    assert count_flops(half, X, W) == MATMUL
    # Every device computes all of what is not divided.
    whole = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    assert count_flops(whole, X, W) == 4 * MATMUL
