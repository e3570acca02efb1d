"""The platforms' fused attention: same numbers as XLA's form where they can run here, and compiled for TPUs where they cannot."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.mixers import attention as A
from atlasjax.mixers import fused_attention as F
from atlasjax.nn import ModelConfig
from atlasjax.nn.attention_config import AttentionConfig
from atlasjax.nn.partition import mesh_partition
from tests.comparisons import close


def heads(time, number=2, kv_heads=2, dim=64, batch=2, segments=False, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(time), 3)
    shapes = ((batch, time, number, dim), (batch, time, kv_heads, dim), (batch, time, kv_heads, dim))
    q, k, v = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes))
    ends = jnp.array([[time // 3, time // 2], [1, time - 1]])
    segment = jnp.sum(jnp.arange(time) >= ends[..., None], axis=1) if segments else None
    return F.Heads(q, k, v, segment)


def xla(x, window):
    """The form of `attention` in XLA's operations, of the same rotated arrays."""
    return A.attention(*x[:3], window=window, rope_theta=None, segment_ids=x.segment, fused=False)


def with_gradients(function, x):
    """The output, and the derivatives of a sum with different weights."""

    def loss(arrays):
        y = function(F.Heads(*arrays, x.segment)).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(x[:3])
    return y, *gradients


@pytest.mark.parametrize(
    ("time", "window", "kv_heads", "segments"),
    [(128, None, 2, False), (200, None, 1, True), (256, 70, 2, True), (256, 1000, 2, False)],
)
def test_splash_gives_the_same_numbers(time, window, kv_heads, segments):
    """Interpreted, in float32: also for lengths that need padding, windows, segments and shared keys."""
    x = heads(time, kv_heads=kv_heads, segments=segments)
    found = with_gradients(lambda x: F.splash(x, window, interpret=True), x)
    close(found, with_gradients(lambda x: xla(x, window), x), 2e-5)


def test_splash_on_a_mesh():
    """Each device has its batch elements and heads; a group of queries stays with its keys."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    x = heads(128, number=4, kv_heads=2, segments=True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        partition = mesh_partition(2, 2, 128)
    assert (partition.batch, partition.heads) == (("data", "fsdp"), ("tensor",))
    partition = dataclasses.replace(partition, mesh=mesh)
    found = with_gradients(lambda x: F.partitioned_splash(x, None, partition, interpret=True), x)
    close(found, with_gradients(lambda x: xla(x, None), x), 2e-5)


@pytest.mark.parametrize(("window", "kv_heads"), [(None, 2), (70, 1)])
def test_dot_product_attention_gives_the_same_numbers(window, kv_heads):
    """The arguments that cuDNN gets, in XLA's form of the same function."""
    x = heads(100, kv_heads=kv_heads)
    found = with_gradients(lambda x: F.dot_product(x, window, "xla"), x)
    close(found, with_gradients(lambda x: xla(x, window), x), 2e-5)


def test_what_the_kernels_serve():
    bf16 = jnp.bfloat16
    assert F.serves_splash(heads(300, segments=True, dtype=bf16))
    assert F.serves_cudnn(heads(300, dtype=bf16))
    assert F.serves_cudnn(heads(300, dim=40, dtype=bf16))
    assert not F.serves_cudnn(heads(300, segments=True, dtype=bf16))
    for x in (heads(300), heads(300, dim=36, dtype=bf16), heads(100, dtype=bf16)):
        assert not F.serves_splash(x)
        assert not F.serves_cudnn(x)
    x = heads(300, dtype=bf16)
    assert not F.serves_splash(x._replace(v=x.v[..., :32]))
    assert not F.serves_cudnn(x._replace(v=x.v[..., :32]))


def test_on_a_cpu_xla_is_used():
    """Bit for bit, whether or not a kernel may be used."""
    x = heads(300, segments=True, dtype=jnp.bfloat16)
    y = jax.jit(lambda x: A.attention(*x[:3], segment_ids=x.segment, fused=True))(x)
    np.testing.assert_array_equal(y, jax.jit(lambda x: A.attention(*x[:3], segment_ids=x.segment, fused=False))(x))


def test_the_option():
    from flax import nnx

    from atlasjax.nn.attention import AttentionHeads

    for option, window, fused in ((True, 8, True), (True, None, True), (False, 8, False), (False, None, False)):
        config = ModelConfig(dim=64, num_heads=1, attention=AttentionConfig(fused=option))
        layer = AttentionHeads(config, window, rngs=nnx.Rngs(0))
        text = str(jax.make_jaxpr(lambda x, layer=layer: layer(x))(jnp.zeros((1, 256, 64), jnp.bfloat16)))
        assert ("splash" in text) == fused
    with pytest.raises(ValueError, match="fused"):
        AttentionConfig(fused=1)


@pytest.mark.slow  # libtpu compiles forward and backward in a child process
@pytest.mark.parametrize(("chip", "head_dim"), [("v5e:2x2", 64), ("v5p:2x2x1", 128), ("v6e:2x2", 256)])
def test_splash_compiles_for_tpus(chip, head_dim):
    """Three kernels: forward, and the derivatives of queries and of keys and values. With segments, and a length to pad."""
    pytest.importorskip("libtpu")
    script = pathlib.Path(__file__).parents[2] / "experiments/benchmarks/fused_attention_tpu.py"
    options = ["--chips", chip, "--time", "1000", "--dim", "512", "--head-dim", str(head_dim), "--segments"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["window"], row["fused"], row["kernels"]) for row in rows] == [
        (None, False, 0), (None, True, 3), (1024, False, 0), (1024, True, 3),
    ]  # fmt: skip
