"""Folders of public weights without PyTorch: each family's tensor names and shapes as its own sources have them, random values."""

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tests.interop.fla_peers import FLA
from tests.interop.hybrid_peers import HYBRIDS

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


def _mamba2(embedding, tied, dim=8, heads=4, head_dim=4, groups=2, state=3):
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    mixer = {
        "in_proj.weight": (inner + channels + heads, dim),
        "conv1d.weight": (channels, 1, 4),
        "conv1d.bias": (channels,),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (dim, inner),
    }
    return _backbone(embedding, tied, mixer, dim)


def _mamba(embedding, tied, dim=8, inner=16, rank=3, state=3):
    mixer = {
        "in_proj.weight": (2 * inner, dim),
        "conv1d.weight": (inner, 1, 4),
        "conv1d.bias": (inner,),
        "x_proj.weight": (rank + 2 * state, inner),
        "dt_proj.weight": (inner, rank),
        "dt_proj.bias": (inner,),
        "A_log": (inner, state),
        "D": (inner,),
        "out_proj.weight": (dim, inner),
    }
    return _backbone(embedding, tied, mixer, dim)


def _backbone(embedding, tied, mixer, dim, vocab=264, layers=2):
    shapes = {f"backbone.{embedding}.weight": (vocab, dim), "backbone.norm_f.weight": (dim,)}
    for n in range(layers):
        shapes |= {
            f"backbone.layers.{n}.{name}": shape
            for name, shape in {
                "norm.weight": (dim,),
                **{f"mixer.{name}": shape for name, shape in mixer.items()},
            }.items()
        }
    return shapes if tied else shapes | {"lm_head.weight": (vocab, dim)}


def _fla(attn, tied, vocab=260, dim=12, layers=2, wide=20, last=None):
    """attn: tensors of the mixer; last: those of the last layer, if they differ."""
    shapes = {"model.embeddings.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for n in range(layers):
        shapes |= {
            f"model.layers.{n}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (dim,),
                **{f"attn.{name}": shape for name, shape in (last if last and n == layers - 1 else attn).items()},
                "mlp_norm.weight": (dim,),
                "mlp.gate_proj.weight": (wide, dim),
                "mlp.up_proj.weight": (wide, dim),
                "mlp.down_proj.weight": (dim, wide),
            }.items()
        }
    return shapes if tied else shapes | {"lm_head.weight": (vocab, dim)}


def _projections(dim, key, value, gate):
    inputs = {"q_proj.weight": (key, dim), "k_proj.weight": (key, dim), "v_proj.weight": (value, dim)}
    return inputs | ({"g_proj.weight": (value, dim)} if gate else {}) | {"o_proj.weight": (dim, value)}


def _convolutions(key, value):
    return {"q_conv1d.weight": (key, 1, 4), "k_conv1d.weight": (key, 1, 4), "v_conv1d.weight": (value, 1, 4)}


def _rwkv7(dim=12, heads=3, vocab=260, layers=2, wide=20, ranks=None):
    ranks = ranks or {"w": 5, "a": 4, "g": 6, "v": 3}
    norm = lambda name, size=dim: {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    shapes = {"model.embeddings.weight": (vocab, dim)} | norm("model.norm") | norm("model.layers.0.pre_norm")
    for n in range(layers):
        low = {
            f"attn.{x}_lora.lora.{part}": shape
            for x, rank in ranks.items()
            for part, shape in (("0.weight", (rank, dim)), ("2.weight", (dim, rank)), ("2.bias", (dim,)))
            if (n > 0 or x != "v") and (x != "g" or part != "2.bias")
        }
        shapes |= {
            f"model.layers.{n}.{name}": shape
            for name, shape in {
                **norm("attn_norm"), **norm("ffn_norm"), **norm("attn.g_norm"), **low,
                **{f"attn.x_{x}": (1, 1, dim) for x in "rwkvag"},
                **{f"attn.{x}_proj.weight": (dim, dim) for x in "rkvo"},
                "attn.k_k": (dim,), "attn.k_a": (dim,), "attn.r_k": (heads, dim // heads),
                "ffn.x_k": (dim,), "ffn.key.weight": (wide, dim), "ffn.value.weight": (dim, wide),
            }.items()
        }  # fmt: skip
    return shapes | {"lm_head.weight": (vocab, dim)}


def _qwen3_5(
    prefix, tied, layers, dim=12, wide=20, heads=4, kv_heads=2, size=6, key_heads=2, value_heads=4, key=3, value=6
):
    """The last layer has attention, with biases."""
    channels = 2 * key_heads * key + value_heads * value
    delta = {
        "in_proj_qkv.weight": (channels, dim), "in_proj_z.weight": (value_heads * value, dim),
        "in_proj_b.weight": (value_heads, dim), "in_proj_a.weight": (value_heads, dim), "conv1d.weight": (channels, 1, 4),
        "A_log": (value_heads,), "dt_bias": (value_heads,), "norm.weight": (value,), "out_proj.weight": (dim, value_heads * value),
    }  # fmt: skip
    widths = {
        "q": (2 * heads * size, dim),
        "k": (kv_heads * size, dim),
        "v": (kv_heads * size, dim),
        "o": (dim, heads * size),
    }
    attention = {f"{x}_proj.weight": shape for x, shape in widths.items()}
    attention |= {f"{x}_proj.bias": shape[:1] for x, shape in widths.items()}
    attention |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    shapes = {f"{prefix}embed_tokens.weight": (260, dim), f"{prefix}norm.weight": (dim,)}
    for n in range(layers):
        mixer, inside = ("self_attn", attention) if n == layers - 1 else ("linear_attn", delta)
        shapes |= {
            f"{prefix}layers.{n}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,),
                "mlp.gate_proj.weight": (wide, dim), "mlp.up_proj.weight": (wide, dim), "mlp.down_proj.weight": (dim, wide),
                **{f"{mixer}.{name}": shape for name, shape in inside.items()},
            }.items()
        }  # fmt: skip
    return shapes if tied else shapes | {"lm_head.weight": (260, dim)}


def _olmo_hybrid(dim=12, vocab=260, wide=20, heads=3, kv_heads=1, key_heads=2, value_heads=4, key=3, value=6):
    """A layer of Gated DeltaNet and one of attention."""
    size, inner = dim // heads, value_heads * value
    first = {
        "attention_layer_norm.weight": (dim,), "feedforward_layer_norm.weight": (dim,),
        **{f"linear_attn.{x}": shape for x, shape in _projections(dim, key_heads * key, inner, True).items()},
        **{f"linear_attn.{x}": shape for x, shape in _convolutions(key_heads * key, inner).items()},
        **{f"linear_attn.{x}_proj.weight": (value_heads, dim) for x in "ab"},
        "linear_attn.A_log": (value_heads,), "linear_attn.dt_bias": (value_heads,), "linear_attn.o_norm.weight": (value,),
    }  # fmt: skip
    second = {
        "post_attention_layernorm.weight": (dim,), "post_feedforward_layernorm.weight": (dim,),
        **{f"self_attn.{x}_proj.weight": (dim, dim) for x in "qo"},
        **{f"self_attn.{x}_proj.weight": (kv_heads * size, dim) for x in "kv"},
        "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (kv_heads * size,),
    }  # fmt: skip
    mlp = {"mlp.gate_proj.weight": (wide, dim), "mlp.up_proj.weight": (wide, dim), "mlp.down_proj.weight": (dim, wide)}
    layers = {
        f"model.layers.{n}.{x}": shape for n, y in enumerate((first, second)) for x, shape in {**y, **mlp}.items()
    }
    ends = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    return layers | ends


_FLA = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 260,
    "attn": None,
}
_MAMBA2 = {"model_type": "mamba2", "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 4, "state_size": 3,
           "expand": 2, "n_groups": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}]}  # fmt: skip
_MAMBA = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2, "state_size": 3, "expand": 2,
          "intermediate_size": 16, "time_step_rank": 3, "time_step_init_scheme": "random"}  # fmt: skip
_MAMBA_SSM = {
    "d_model": 8, "n_layer": 2, "vocab_size": 257, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": True,
}  # fmt: skip

_QWEN3_5 = {
    "hidden_size": 12, "num_hidden_layers": 4, "vocab_size": 260, "intermediate_size": 20, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 3, "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.34,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip

# name → (config.json, tensor → shape)
PEERS = {
    "mamba2": ({**_MAMBA2, "vocab_size": 264}, _mamba2("embeddings", tied=False)),
    "mamba2 tied": ({**_MAMBA2, "vocab_size": 264, "tie_word_embeddings": True}, _mamba2("embedding", tied=True)),
    "mamba2 of mamba_ssm": (
        {
            **_MAMBA_SSM, "d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {},
            "ssm_cfg": {"layer": "Mamba2", "headdim": 4, "d_state": 3, "ngroups": 2},
        },
        {**_mamba2("embedding", tied=True), "lm_head.weight": (264, 8)},  # the tied head again, as PyTorch saves it
    ),
    "mamba": ({**_MAMBA, "vocab_size": 264, "tie_word_embeddings": False}, _mamba("embeddings", tied=False)),
    "falcon_mamba": (
        {**_MAMBA, "model_type": "falcon_mamba", "vocab_size": 264, "mixer_rms_eps": 1e-3, "expand": 16},
        _mamba("embeddings", tied=True),
    ),
    "mamba tied": (
        {**_MAMBA, "vocab_size": 264, "d_model": 8, "n_layer": 2, "d_inner": 16, "ssm_cfg": {}, "rms_norm": True},
        _mamba("embeddings", tied=True),
    ),
    "mamba of mamba_ssm": (
        {**_MAMBA_SSM, "ssm_cfg": {"d_state": 3, "dt_rank": 3}},
        {**_mamba("embedding", tied=True), "lm_head.weight": (264, 8)},
    ),
    "gated_deltanet": (
        {**_FLA, "model_type": "gated_deltanet", "head_dim": 3, "expand_v": 2.0},
        _fla(
            _projections(12, 6, 12, True) | _convolutions(6, 12) | {"o_norm.weight": (6,), "A_log": (2,), "dt_bias": (2,)}
            | {"a_proj.weight": (2, 12), "b_proj.weight": (2, 12)},
            tied=False,
        ),
    ),
    "gated_deltanet with attention": (
        {**_FLA, "model_type": "gated_deltanet", "head_dim": 3, "expand_v": 2.0, "num_v_heads": 4,
         "attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "qkv_bias": True, "window_size": 40, "rope_theta": 100.0}},
        _fla(
            _projections(12, 6, 24, True) | _convolutions(6, 24) | {"o_norm.weight": (6,), "A_log": (4,), "dt_bias": (4,)}
            | {"a_proj.weight": (4, 12), "b_proj.weight": (4, 12)},
            tied=False,
            last={
                "q_proj.weight": (12, 12), "k_proj.weight": (4, 12), "v_proj.weight": (4, 12), "o_proj.weight": (12, 12),
                "q_proj.bias": (12,), "k_proj.bias": (4,), "v_proj.bias": (4,),
            },
        ),
    ),
    "delta_net": (
        {**_FLA, "model_type": "delta_net", "expand_k": 0.5, "expand_v": 1, "tie_word_embeddings": True},
        _fla(
            _projections(12, 6, 12, False) | _convolutions(6, 12) | {"o_norm.weight": (6,), "b_proj.weight": (2, 12)},
            tied=True,
        ),
    ),
    "gla": (
        {**_FLA, "model_type": "gla", "rms_norm_eps": 1e-5},
        _fla(
            _projections(12, 6, 12, True) | {"g_norm_swish_gate.weight": (6,), "gk_proj.0.weight": (16, 12)}
            | {"gk_proj.1.weight": (6, 16), "gk_proj.1.bias": (6,)},
            tied=False,
        ),
    ),
    "qwen3_5": ({"model_type": "qwen3_5_text", **_QWEN3_5}, _qwen3_5("model.", tied=False, layers=4)),
    "qwen3_5 with images": (
        {"model_type": "qwen3_5", "text_config": {**_QWEN3_5, "model_type": "qwen3_5_text", "num_hidden_layers": 2,
         "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
         "mamba_ssm_dtype": "float32", "attn_output_gate": True, "full_attention_interval": 4, "mlp_only_layers": []},
         "vision_config": {"depth": 1}, "image_token_id": 250, "tie_word_embeddings": True},
        {
            **_qwen3_5("model.language_model.", tied=True, layers=2), "model.visual.patch_embed.proj.weight": (4, 3, 2, 2, 2),
            "model.visual.blocks.0.attn.qkv.bias": (12,), "mtp.fc.weight": (12, 24), "mtp.norm.weight": (12,),
        },
    ),
    "olmo_hybrid": (
        {"model_type": "olmo_hybrid", "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 260, "intermediate_size": 20,
         "num_attention_heads": 3, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 3, "linear_value_head_dim": 6, "rope_parameters": None},
        _olmo_hybrid(),
    ),
    "rwkv7": (
        {"model_type": "rwkv7", "hidden_size": 12, "num_hidden_layers": 2, "head_dim": 4, "num_heads": 3,
         "value_dim": [12, 12], "intermediate_size": 20, "vocab_size": 260, "decay_low_rank_dim": 5, "a_low_rank_dim": 4,
         "gate_low_rank_dim": 6, "v_low_rank_dim": 3, "norm_eps": 1e-5, "norm_first": True, "fuse_norm": True, "attn": None},
        _rwkv7(),
    ),
    **HYBRIDS,
    **FLA,
}  # fmt: skip


def tensors(name, dtype="F32", seed=0):
    """The family's tensors, every value another one; a copy of the embedding repeats it."""
    rng = np.random.default_rng(seed)
    made = {
        tensor: (0.3 * rng.normal(size=shape)).astype(DTYPES["F32" if tensor.endswith("A_log") else dtype])
        for tensor, shape in PEERS[name][1].items()
    }
    if name.endswith("of mamba_ssm"):
        made["lm_head.weight"] = made["backbone.embedding.weight"]
    return made


def write(folder: pathlib.Path, name: str, made=None, *, dtype="F32", files=1, **changes) -> pathlib.Path:
    """Writes a folder as transformers does: config.json and safetensors, with an index if there are several files."""
    folder.mkdir(parents=True)
    config = {**PEERS[name][0], **changes, "dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    made = tensors(name, dtype) if made is None else made
    if files == 1:
        save_file(made, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, index = sorted(made), {}
    size = math.ceil(len(names) / files)
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = names[i * size : (i + 1) * size]
        save_file({x: made[x] for x in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in made.values())
    described = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described, indent=2))
    return folder
