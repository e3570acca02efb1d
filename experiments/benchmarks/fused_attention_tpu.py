"""Attention layers compiled ahead of time for TPUs, forward and backward, with and without splash attention. Needs no TPU.

    python experiments/benchmarks/fused_attention_tpu.py            # a layer of a 340M model, 8,192 tokens, three chips
    python experiments/benchmarks/fused_attention_tpu.py --time 1000 --chips v5e:2x2 --head-dim 128

Prints the temporary bytes and the number of kernels of each program. Nothing is run, so nothing here is a speed.
"""

import argparse
import json
import pathlib
import sys

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from atlasjax.plan.topology import Topology

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
WINDOWS = (None, 1024)


def measure(chip: str, *, time: int, dim: int, head_dim: int, window: int | None, segments: bool, fused: bool) -> dict:
    """The row of one layer, on one device of a topology."""
    devices = Topology.parse(chip).devices()
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from atlasjax.nn import ModelConfig
    from atlasjax.nn.attention import AttentionMixer, SlidingWindowMixer
    from atlasjax.nn.attention_config import AttentionConfig

    config = ModelConfig(
        dim=dim, num_heads=dim // head_dim, dtype="bfloat16", attention=AttentionConfig(window=window, fused=fused)
    )
    mixer = AttentionMixer if window is None else SlidingWindowMixer
    graph, params = nnx.split(nnx.eval_shape(lambda: mixer(config, rngs=nnx.Rngs(0))))

    def loss(params, x, ids):
        return jnp.sum(nnx.merge(graph, params)(x, ids).astype(jnp.float32) ** 2)

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    x = jax.ShapeDtypeStruct((1, time, dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, time), jnp.int32) if segments else None
    arguments = jax.tree.map(place, (params, x, ids))
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    return {
        "chip": chip.partition(":")[0], "time": time, "dim": dim, "head_dim": head_dim, "window": window, "segments": segments,
        "fused": fused, "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS, help="topologies, of which one device is used")
    parser.add_argument("--time", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--segments", action="store_true", help="packed documents")
    options = parser.parse_args()
    for chip in options.chips:
        for window in WINDOWS:
            for fused in (False, True):
                row = measure(
                    chip, time=options.time, dim=options.dim, head_dim=options.head_dim, window=window,
                    segments=options.segments, fused=fused,
                )  # fmt: skip
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
