"""Hybrids of public weights without PyTorch: tensor names and shapes as transformers saves them, for `peers`."""


def _mamba2_parts(dim, heads, size, groups, state, norm=True):
    inner = heads * size
    channels = inner + 2 * groups * state
    parts = {
        "in_proj.weight": (inner + channels + heads, dim), "conv1d.weight": (channels, 1, 4), "conv1d.bias": (channels,),
        "dt_bias": (heads,), "A_log": (heads,), "D": (heads,), "out_proj.weight": (dim, inner),
    }  # fmt: skip
    return parts | ({"norm.weight": (inner,)} if norm else {})


def _attention_parts(dim, heads, kv_heads, size):
    widths = {
        "q": (heads * size, dim),
        "k": (kv_heads * size, dim),
        "v": (kv_heads * size, dim),
        "o": (dim, heads * size),
    }
    return {f"{x}_proj.weight": shape for x, shape in widths.items()}


def _within(beginning, shapes):
    return {f"{beginning}{name}": shape for name, shape in shapes.items()}


def _granite(dim=12, wide=20, vocab=260):
    """Mamba-2 in the first layer, attention in the second one."""
    mixers = _within("mamba.", _mamba2_parts(dim, 4, 6, 2, 3)), _within("self_attn.", _attention_parts(dim, 4, 2, 3))
    around = {
        "input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,),
        "shared_mlp.input_linear.weight": (2 * wide, dim), "shared_mlp.output_linear.weight": (dim, wide),
    }  # fmt: skip
    layers = {k: v for n in range(2) for k, v in _within(f"model.layers.{n}.", mixers[n] | around).items()}
    return layers | {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}


def _bamba(mixers, dim=12, wide=20, vocab=260):
    """mixers: the tensors of the mixers of each layer."""
    network = {
        f"feed_forward.{x}_proj.weight": (dim, wide) if x == "down" else (wide, dim) for x in ("gate", "up", "down")
    }
    around = {"input_layernorm.weight": (dim,), "pre_ff_layernorm.weight": (dim,), **network}
    layers = {k: v for n, own in enumerate(mixers) for k, v in _within(f"model.layers.{n}.", own | around).items()}
    ends = {
        "model.embed_tokens.weight": (vocab, dim),
        "lm_head.weight": (vocab, dim),
        "model.final_layernorm.weight": (dim,),
    }
    return layers | ends


def _nemotron_h(dim=12, wide=20, vocab=260):
    """Blocks of Mamba-2, an MLP, Mamba-2, attention and an MLP."""
    mamba, attention = _mamba2_parts(dim, 3, 4, 3, 3), _attention_parts(dim, 4, 2, 5)
    network = {"up_proj.weight": (wide, dim), "down_proj.weight": (dim, wide)}
    blocks = [_within("mixer.", x) | {"norm.weight": (dim,)} for x in (mamba, network, mamba, attention, network)]
    layers = {k: v for n, block in enumerate(blocks) for k, v in _within(f"backbone.layers.{n}.", block).items()}
    return layers | {
        "backbone.embeddings.weight": (vocab, dim),
        "backbone.norm_f.weight": (dim,),
        "lm_head.weight": (vocab, dim),
    }


def _lfm2(dim=12, wide=16, vocab=260):
    """A convolution and attention."""
    conv = {"conv.in_proj.weight": (3 * dim, dim), "conv.conv.weight": (dim, 1, 3), "conv.out_proj.weight": (dim, dim)}
    attention = {name.replace("o_proj", "out_proj"): shape for name, shape in _attention_parts(dim, 3, 1, 4).items()}
    attention = _within("self_attn.", attention | {"q_layernorm.weight": (4,), "k_layernorm.weight": (4,)})
    around = {
        "operator_norm.weight": (dim,), "ffn_norm.weight": (dim,), "feed_forward.w1.weight": (wide, dim),
        "feed_forward.w2.weight": (dim, wide), "feed_forward.w3.weight": (wide, dim),
    }  # fmt: skip
    layers = {
        k: v for n, x in enumerate((conv, attention)) for k, v in _within(f"model.layers.{n}.", x | around).items()
    }
    return layers | {"model.embed_tokens.weight": (vocab, dim), "model.embedding_norm.weight": (dim,)}


def _granite_experts(number=3, width=8, dim=12):
    """`_granite` with experts."""
    own = {
        "router.layer.weight": (number, dim), "input_linear.weight": (number, 2 * width, dim),
        "output_linear.weight": (number, dim, width),
    }  # fmt: skip
    return _granite() | {k: v for n in range(2) for k, v in _within(f"model.layers.{n}.block_sparse_moe.", own).items()}


def _qwen_experts(delta, prefix="model.", joined=False, dense=(), number=3, width=8, shared=5, dim=12, wide=20):
    """Gated DeltaNet and attention, with experts except in the layers `dense`. delta: shapes of the projections of the former."""
    channels = 2 * 2 * 3 + 4 * 6
    mixers = (
        _within(
            "linear_attn.",
            delta | {"conv1d.weight": (channels, 1, 4), "A_log": (4,), "dt_bias": (4,), "norm.weight": (6,)},
        )
        | {"linear_attn.out_proj.weight": (dim, 24)},
        _within("self_attn.", _attention_parts(dim, 4, 2, 6) | {"q_norm.weight": (6,), "k_norm.weight": (6,)})
        | {"self_attn.q_proj.weight": (48, dim)},
    )
    network = lambda wide: {
        f"{x}_proj.weight": (dim, wide) if x == "down" else (wide, dim) for x in ("gate", "up", "down")
    }
    if joined:
        experts = {"gate_up_proj": (number, 2 * width, dim), "down_proj": (number, dim, width)}
    else:
        experts = {f"{e}.{name}": shape for e in range(number) for name, shape in network(width).items()}
    sparse = _within("experts.", experts) | _within("shared_expert.", network(shared))
    sparse |= {"gate.weight": (number, dim), "shared_expert_gate.weight": (1, dim)}
    shapes = {f"{prefix}embed_tokens.weight": (260, dim), f"{prefix}norm.weight": (dim,), "lm_head.weight": (260, dim)}
    for n, mixer in enumerate(mixers):
        around = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
        mlp = _within("mlp.", network(wide) if n in dense else sparse)
        shapes |= _within(f"{prefix}layers.{n}.", mixer | around | mlp)
    return shapes


_EXPERTS = {
    "hidden_size": 12, "vocab_size": 260, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 3, "linear_value_head_dim": 6, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.34},
}  # fmt: skip
_ATTENTION = {"hidden_size": 12, "vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA_PART = {"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_state": 3, "mamba_n_groups": 2}

# name → (config.json, tensor → shape)
HYBRIDS = {
    "granitemoehybrid": (
        {"model_type": "granitemoehybrid", **_ATTENTION, **_MAMBA_PART, "num_hidden_layers": 2, "tie_word_embeddings": True,
         "layers_block_type": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 20,
         "position_embedding_type": "nope", "embedding_multiplier": 12, "logits_scaling": 3, "residual_multiplier": 0.22,
         "attention_multiplier": 0.3},
        _granite(),
    ),
    "granitemoehybrid with experts": (
        {"model_type": "granitemoehybrid", **_ATTENTION, **_MAMBA_PART, "num_hidden_layers": 2, "tie_word_embeddings": True,
         "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 3, "num_experts_per_tok": 2,
         "intermediate_size": 8, "shared_intermediate_size": 20, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        _granite_experts(),
    ),
    "qwen3_next": (
        {"model_type": "qwen3_next", **_EXPERTS, "intermediate_size": 20, "mlp_only_layers": [0], "decoder_sparse_step": 1,
         "norm_topk_prob": True},
        _qwen_experts({"in_proj_qkvz.weight": (60, 12), "in_proj_ba.weight": (8, 12)}, dense=(0,)),
    ),
    "qwen3_5_moe with joined experts": (
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", **_EXPERTS}, "tie_word_embeddings": False},
        _qwen_experts(
            {"in_proj_qkv.weight": (36, 12), "in_proj_z.weight": (24, 12), "in_proj_b.weight": (4, 12),
             "in_proj_a.weight": (4, 12)},
            "model.language_model.", joined=True,
        ),
    ),
    "bamba": (
        {"model_type": "bamba", **_ATTENTION, "num_attention_heads": 3, "num_key_value_heads": 1, **_MAMBA_PART,
         "num_hidden_layers": 2, "attn_layer_indices": [1], "intermediate_size": 20, "attn_rotary_emb": 2},
        _bamba([_within("mamba.", _mamba2_parts(12, 4, 6, 2, 3)), _within("self_attn.", _attention_parts(12, 3, 1, 4))]),
    ),
    "falcon_h1": (
        {"model_type": "falcon_h1", **_ATTENTION, "head_dim": 4, **_MAMBA_PART, "mamba_n_heads": 3, "mamba_d_ssm": 18,
         "mamba_n_groups": 1, "num_hidden_layers": 2, "intermediate_size": 20, "key_multiplier": 0.39, "lm_head_multiplier": 0.04,
         "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.2,
         "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.3], "mlp_multipliers": [0.9, 0.2], "embedding_multiplier": 5.6},
        _bamba(
            2 * [_within("mamba.", _mamba2_parts(12, 3, 6, 1, 3, False)) | _within("self_attn.", _attention_parts(12, 4, 2, 4))]
        ),
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h", **_ATTENTION, "head_dim": 5, "mamba_num_heads": 3, "mamba_head_dim": 4, "ssm_state_size": 3,
         "n_groups": 3, "intermediate_size": 20, "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
        _nemotron_h(),
    ),
    "lfm2": (
        {"model_type": "lfm2", **_ATTENTION, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "block_ff_dim": 21, "block_multiple_of": 8, "full_attn_idxs": [1]},
        _lfm2(),
    ),
}  # fmt: skip
