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


def _nemotron_h(dim=12, wide=20, vocab=260, experts=0):
    """Blocks of Mamba-2, an MLP, Mamba-2, attention and an MLP. experts: the number of those that the last one has."""
    mamba, attention = _mamba2_parts(dim, 3, 4, 3, 3), _attention_parts(dim, 4, 2, 5)
    network = {"up_proj.weight": (wide, dim), "down_proj.weight": (dim, wide)}
    last = network
    if experts:
        last = {"gate.weight": (experts, dim), "gate.e_score_correction_bias": (experts,)}
        last |= _within("shared_experts.", {"up_proj.weight": (9, dim), "down_proj.weight": (dim, 9)})
        one = {"up_proj.weight": (8, dim), "down_proj.weight": (dim, 8)}
        last |= {k: v for e in range(experts) for k, v in _within(f"experts.{e}.", one).items()}
    blocks = [_within("mixer.", x) | {"norm.weight": (dim,)} for x in (mamba, network, mamba, attention, last)]
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


def _kimi_linear(joined, dim=12, wide=20, vocab=260, rank=None):
    """Kimi Delta Attention and a dense network; latent attention and experts; the same as first with experts.

    joined: the tensors of transformers' module, which has one for three convolutions, and one for the projections of all experts.
    rank: of the queries in latent attention.
    """
    heads, size, own, shared, value, latent, experts, width = 3, 4, 3, 2, 4, 5, 4, 8
    inner = heads * size
    gate = "forget_gate." if joined else ""
    kda = _attention_parts(dim, heads, heads, size) | {
        f"{gate}f_a_proj.weight": (size, dim), f"{gate}f_b_proj.weight": (inner, size), f"{gate}A_log": (1, 1, heads, 1),
        f"{gate}dt_bias": (inner,), "b_proj.weight": (heads, dim), "g_a_proj.weight": (size, dim), "g_b_proj.weight": (inner, size),
        "o_norm.weight": (size,),
    }  # fmt: skip
    kda |= {"conv1d.weight": (3 * inner, 1, 4)} if joined else {f"{x}_conv1d.weight": (inner, 1, 4) for x in "qkv"}
    queries = 2 * (own + shared)
    mla = {
        "kv_a_proj_with_mqa.weight": (latent + shared, dim), "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (2 * (own + value), latent), "o_proj.weight": (dim, 2 * value),
    }  # fmt: skip
    mla |= {"q_proj.weight": (queries, dim)} if rank is None else {
        "q_a_proj.weight": (rank, dim), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (queries, rank)
    }  # fmt: skip
    network = lambda width: {
        f"{x}_proj.weight": (dim, width) if x == "down" else (width, dim) for x in ("gate", "up", "down")
    }
    moe = {"gate.weight": (experts, dim), "gate.e_score_correction_bias": (experts,)}
    moe |= _within("shared_experts.", network(width))
    if joined:
        moe |= {"experts.gate_up_proj": (experts, 2 * width, dim), "experts.down_proj": (experts, dim, width)}
    else:
        one = {"w1.weight": (width, dim), "w3.weight": (width, dim), "w2.weight": (dim, width)}
        moe |= {k: v for e in range(experts) for k, v in _within(f"experts.{e}.", one).items()}
    sparse = _within("mlp." if joined else "block_sparse_moe.", moe)
    norms = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    layers = [(kda, _within("mlp.", network(wide))), (mla, sparse), (kda, sparse)]
    found = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    for n, (mixer, rest) in enumerate(layers):
        found |= _within(f"model.layers.{n}.", norms | _within("self_attn.", mixer) | rest)
    return found


_ATTENTION = {"hidden_size": 12, "vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA_PART = {"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_state": 3, "mamba_n_groups": 2}

_KIMI = {
    "model_type": "kimi_linear", "hidden_size": 12, "num_hidden_layers": 3, "vocab_size": 260, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 20, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 8,
}  # fmt: skip
_NEMOTRON = {
    "model_type": "nemotron_h", **_ATTENTION, "head_dim": 5, "mamba_num_heads": 3, "mamba_head_dim": 4, "ssm_state_size": 3,
    "n_groups": 3, "intermediate_size": 20, "num_hidden_layers": 5,
}  # fmt: skip

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
    "nemotron_h": ({**_NEMOTRON, "hybrid_override_pattern": "M-M*-"}, _nemotron_h()),
    "nemotron_h with experts": (
        {**_NEMOTRON, "hybrid_override_pattern": "M-M*E", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 9, "routed_scaling_factor": 2.5, "n_group": 2},
        _nemotron_h(experts=4),
    ),
    "kimi_linear": (
        {**_KIMI, "head_dim": 72, "q_lora_rank": None, "mla_use_nope": True, "rope_scaling": None, "rope_theta": 10000.0,
         "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 4, "num_heads": 3,
                                "short_conv_kernel_size": 4},
         "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
         "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 2.446,
         "num_shared_experts": 1, "num_nextn_predict_layers": 0, "model_max_length": 1048576},
        _kimi_linear(False),
    ),
    "kimi_linear with joined tensors": (
        {**_KIMI, "q_lora_rank": 6, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "linear_head_dim": 4, "linear_num_heads": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        _kimi_linear(True, rank=6),
    ),
    "lfm2": (
        {"model_type": "lfm2", **_ATTENTION, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "block_ff_dim": 21, "block_multiple_of": 8, "full_attn_idxs": [1]},
        _lfm2(),
    ),
}  # fmt: skip
