"""Runs as they are when they were trained here: one of each family's layers, and of none."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from atlasjax.config_json import to_dict
from atlasjax.data.config import DataConfig
from atlasjax.data.tokenizers import ByteTokenizer, Tokenizer
from atlasjax.nn import (
    AttentionConfig,
    HeadNormConfig,
    KDAConfig,
    MemoryConfig,
    ModelConfig,
    RWKV7Config,
    SSMConfig,
)
from atlasjax.storage.tensors import named
from atlasjax.train import TrainConfig
from atlasjax.train import state as state_lib
from atlasjax.train.saving.checkpoint import Checkpoints

_SIZES = {"vocab_size": 257, "dim": 32, "num_layers": 2, "mlp_dim": 48, "tie_embeddings": False, "dtype": "float32"}
_HEADS = {"num_heads": 2, "head_dim": 16, "head_norm": HeadNormConfig(shared=True, eps=16e-6), "norm_eps": 1e-6}
_ATTENTION = {"head_dim": 8, "value_dim": 8, "num_heads": 4, "kv_heads": 2}
MODELS = {
    "mamba2": ModelConfig(
        **_SIZES, mixer="mamba2", ffn="none", num_heads=1, ssm=SSMConfig(head_dim=8, state_dim=16, groups=2)
    ),
    "mamba": ModelConfig(
        **_SIZES, mixer="mamba", ffn="none", num_heads=1, ssm=SSMConfig(state_dim=4)
    ),
    "falcon_mamba": ModelConfig(
        **_SIZES, mixer="mamba", ffn="none", num_heads=1, ssm=SSMConfig(state_dim=4, selection_eps=1e-3)
    ),
    "kda": ModelConfig(**_SIZES, **_HEADS, mixer="kda", kda=KDAConfig(gate_bias=True, lower_bound=-5.0)),
    "gated_deltaproduct": ModelConfig(**_SIZES, **_HEADS, mixer="gated_deltaproduct"),
    "comba": ModelConfig(**_SIZES, **_HEADS, mixer="comba", value_expansion=2),
    "gated_deltanet": ModelConfig(**_SIZES, **_HEADS, mixer="gated_deltanet", value_expansion=2),
    "delta_net": ModelConfig(**_SIZES, **_HEADS, mixer="deltanet"),
    "gla": ModelConfig(**_SIZES, **{**_HEADS, "head_norm": HeadNormConfig(shared=True)}, mixer="gla"),
    "qwen3_5": ModelConfig(
        **_SIZES, **_HEADS, mixer=("gated_deltanet", "attention"), norm="rms_plus_one",
        attention=AttentionConfig(**_ATTENTION, qk_norm="head", gate=True, rope_dim=2),
    ),
    "olmo_hybrid": ModelConfig(
        **_SIZES, **{**_HEADS, "head_norm": HeadNormConfig(shared=True, eps=16e-5)}, mixer=("gated_deltanet", "attention"),
        block=("pre_norm", "post_norm"), attention=AttentionConfig(**_ATTENTION, qk_norm="all", rope_theta=None),
    ),
    "rwkv7": ModelConfig(
        **_SIZES, mixer="rwkv7", num_heads=2, head_dim=16, ffn="channel_mixing", norm="layer", norm_eps=1e-5, embedding_norm=True,
        rwkv7=RWKV7Config(value_residual=True, norm_eps=1e-5, decay_rank=8, rate_rank=6, gate_rank=10, value_rank=4),
    ),
    "atlasjax": ModelConfig(**_SIZES, num_heads=2, memory=MemoryConfig(rule="atlas", chunk_size=8)),
}  # fmt: skip


def make(folder: pathlib.Path, model: ModelConfig, tokenizer: Tokenizer | None = None) -> pathlib.Path:
    """A run of random parameters whose greedy text has the tokens 0 to 7 more often than others: those that classes of peers take
    for the beginning, the end and padding."""
    tokenizer = tokenizer or ByteTokenizer()
    config = TrainConfig(model=model, data=DataConfig(), run_dir=str(folder))
    rng, shapes = np.random.default_rng(0), named(state_lib.model_shapes(model)[1])
    draw = lambda path, shape: (path.endswith("scale") + 0.2 * rng.normal(size=shape)).astype(np.float32)
    params = unflatten_dict({path: draw(path, x.shape) for path, x in shapes.items()}, sep=".")
    params["head"]["kernel"][:, :8] *= 2
    tokenizer.save(folder / "tokenizer")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    params = jax.tree.map(jnp.asarray, params)
    state = state_lib.TrainState(params, None, jax.random.key(0), jnp.zeros((), jnp.int32))
    with Checkpoints(folder / "checkpoints", 1) as checkpoints:
        checkpoints.save(state, [None], to_dict(config), tokenizer.fingerprint)
    return folder
