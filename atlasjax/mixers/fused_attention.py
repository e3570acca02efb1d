"""Fused softmax attention of the platforms: Pallas splash attention on TPUs, cuDNN on GPUs.

Neither forms logits in memory, forward or backward. The platform is chosen when a program is lowered, so a program that is compiled
for a TPU on another machine has the TPU's kernel. What a kernel does not serve is left to the caller's own form.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from atlasjax.memory import Partition

_BLOCKS = (512, 256, 128)
_LEAST_TIME = 256  # below it there is little to save
_HEAD_DIMS = (64, 128, 256)  # for which splash attention is compiled in the tests
_CUDNN_LARGEST = 128  # on every GPU that has it


class Heads(NamedTuple):
    """The arrays of one call.

    Attributes:
      q: rotated queries, [batch, time, heads, key_dim].
      k: rotated keys, [batch, time, kv_heads, key_dim]. kv_heads divides heads.
      v: values, [batch, time, kv_heads, value_dim].
      segment: each token's segment index in the row, [batch, time], which never returns. None for one segment.
    """

    q: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "batch time kv_heads key_dim"]
    v: Float[Array, "batch time kv_heads value_dim"]
    segment: Int[Array, "batch time"] | None


Attended = Float[Array, "batch time heads value_dim"]


def attend(
    heads: Heads, window: int | None, otherwise: Callable[[Heads], Attended], partition: Partition | None = None
) -> Attended:
    """Causal attention, in a kernel where the platform has one that serves the call.

    Args:
      heads: the arrays.
      window: a token sees itself and the window − 1 tokens before it. None: all tokens before it.
      otherwise: the same in XLA's operations.
      partition: the mesh axes that split batch and heads, where XLA may not split a kernel. They divide kv_heads.
    """
    branches = {}
    if serves_splash(heads):
        branches["tpu"] = functools.partial(partitioned_splash, window=window, partition=partition)
    if serves_cudnn(heads) and jax.default_backend() == "gpu":  # JAX looks for cuDNN while it traces
        branches["cuda"] = functools.partial(dot_product, window=window, implementation="cudnn")
    return jax.lax.platform_dependent(heads, default=otherwise, **branches) if branches else otherwise(heads)


def serves_splash(heads: Heads) -> bool:
    """Whether splash attention serves a call: bfloat16, and the head sizes for which it is tested. Any time and window, segments
    too."""
    sizes = {heads.q.shape[-1], heads.v.shape[-1]}
    return heads.q.shape[1] >= _LEAST_TIME and _is(jnp.bfloat16, heads) and len(sizes) == 1 and sizes <= {*_HEAD_DIMS}


def serves_cudnn(heads: Heads) -> bool:
    """Whether cuDNN's flash attention serves a call: bfloat16 or float16, head sizes up to 128 in multiples of 8, no segments, for
    which it would need a mask of [time, time]."""
    dim, value_dim = heads.q.shape[-1], heads.v.shape[-1]
    fits = dim == value_dim and dim <= _CUDNN_LARGEST and dim % 8 == 0 and heads.q.shape[1] >= _LEAST_TIME
    return fits and heads.segment is None and (_is(jnp.bfloat16, heads) or _is(jnp.float16, heads))


def _is(dtype: jnp.dtype, heads: Heads) -> bool:
    return all(x.dtype == dtype for x in heads[:3])


def dot_product(heads: Heads, window: int | None, implementation: Literal["xla", "cudnn"]) -> Attended:
    """`jax.nn.dot_product_attention` of a call without segments."""
    local = None if window is None else (window - 1, 0)
    q, k, v, _ = heads
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation=implementation)


def partitioned_splash(
    heads: Heads, window: int | None, partition: Partition | None, *, interpret: bool = False
) -> Attended:
    """`splash` on each device's part of the batch and the heads."""
    run = functools.partial(splash, window=window, interpret=interpret)
    if partition is None:
        return run(heads)
    rows = PartitionSpec(partition.batch or None)
    split = PartitionSpec(partition.batch or None, None, partition.heads or None)
    specs = (split, split, split, None if heads.segment is None else rows)
    mapped = lambda *arrays: run(Heads(*arrays))
    return jax.shard_map(mapped, mesh=partition.mesh, in_specs=specs, out_specs=split, check_vma=False)(*heads)


def splash(heads: Heads, window: int | None, *, interpret: bool = False) -> Attended:
    """Pallas splash attention. Sequences are padded to a multiple of a block; no token sees the padding behind it.

    Args:
      heads, window: as in `attend`.
      interpret: whether to interpret the kernel, where there is no TPU.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    time, number, dim = heads.q.shape[1:]
    # The largest block that wastes at most an eighth on padding.
    block = next(block for block in _BLOCKS if -time % block <= time // 8 or block == _BLOCKS[-1])
    padded = time + -time % block
    pad = lambda x: jnp.pad(x, ((0, 0), (0, padded - time), *((0, 0),) * (x.ndim - 2)))
    q, k, v = (jnp.swapaxes(pad(x), 1, 2) for x in heads[:3])
    # The kernel has no scale. In float32, so that only the result is rounded.
    q = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
    mask: masks.Mask = masks.CausalMask((padded, padded))
    if window is not None and window < time:
        mask = masks.LocalMask((padded, padded), (window - 1, 0), 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    attention = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * number), block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )
    if heads.segment is None:
        y = jax.vmap(attention)(q, k, v)
    else:
        segment = pad(heads.segment)
        y = jax.vmap(attention)(q, k, v, kernel.SegmentIds(segment, segment))
    return jnp.swapaxes(y, 1, 2)[:, :time]
