"""Later models of flash-linear-attention without PyTorch: tensor names and shapes as it saves them, for `peers`."""

_SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 260,
    "attn": None,
}


def _model(mixer, vocab=260, dim=12, wide=20, layers=2):
    """mixer: tensors of the mixer of each layer."""
    inside = {
        "attn_norm.weight": (dim,), **{f"attn.{name}": shape for name, shape in mixer.items()}, "mlp_norm.weight": (dim,),
        "mlp.gate_proj.weight": (wide, dim), "mlp.up_proj.weight": (wide, dim), "mlp.down_proj.weight": (dim, wide),
    }  # fmt: skip
    found = {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in inside.items()}
    ends = {"model.embeddings.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    return found | ends


def _mixer(widths, taps, value, out, dim=12):
    """Projections of these widths, convolutions of those in `taps`, the norm of a head of `value` channels, W_out."""
    projections = {f"{name}_proj.weight": (width, dim) for name, width in widths.items()}
    convolutions = {f"{name}_conv1d.weight": (widths[name], 1, 4) for name in taps}
    return projections | convolutions | {"o_norm.weight": (value,), "o_proj.weight": (dim, out)}


def _kda(key=3, value=6, heads=2, value_heads=4, dim=12):
    inner = value_heads * value
    more = {
        "f_proj.0.weight": (value, dim), "f_proj.1.weight": (value_heads * key, value), "A_log": (value_heads,),
        "dt_bias": (value_heads * key,), "g_proj.0.weight": (value, dim), "g_proj.1.weight": (inner, value),
        "g_proj.1.bias": (inner,),
    }  # fmt: skip
    return _mixer({"q": heads * key, "k": heads * key, "v": inner, "b": value_heads}, "qkv", value, inner) | more


def _mamba3(dim=12, heads=6, size=4, rank=2, groups=2, state=6, angles=1, vocab=260, layers=2):
    inner = heads * size
    mixer = {
        "in_proj.weight": (2 * inner + 2 * rank * groups * state + 3 * heads + angles, dim), "dt_bias": (heads,), "D": (heads,),
        "B_norm.weight": (state,), "C_norm.weight": (state,), "B_bias": (heads, rank, state), "C_bias": (heads, rank, state),
        **{f"mimo_{x}": (heads, rank, size) for x in "xzo"}, "norm.weight": (inner,), "out_proj.weight": (dim, inner),
    }  # fmt: skip
    inside = {"norm.weight": (dim,), **{f"mixer.{name}": shape for name, shape in mixer.items()}}
    found = {f"backbone.layers.{n}.{name}": shape for n in range(layers) for name, shape in inside.items()}
    ends = {"embeddings.weight": (vocab, dim), "norm_f.weight": (dim,)}
    return found | {f"backbone.{x}": shape for x, shape in ends.items()} | {"lm_head.weight": (vocab, dim)}


# name → (config.json, tensor → shape)
FLA = {
    "kda": (
        {**_SIZES, "model_type": "kda", "head_dim": 3, "expand_v": 2.0, "num_v_heads": 4, "safe_gate": True, "lower_bound": -5.0},
        _model(_kda()),
    ),
    "gated_deltaproduct": (
        {**_SIZES, "model_type": "gated_deltaproduct", "head_dim": 3, "num_householder": 3, "use_forget_gate": True},
        _model(
            _mixer({"q": 6, "k": 18, "v": 36, "b": 6, "a": 2, "g": 12}, "qkv", 6, 12) | {"A_log": (2,), "dt_bias": (2,)}
        ),
    ),
    "comba": (
        {**_SIZES, "model_type": "comba", "head_dim": 3, "num_v_heads": 4, "correction_factor": 0.02},
        _model(
            _mixer({"q": 6, "k": 6, "v": 24, "b": 4, "a": 4, "g": 24}, "qkv", 6, 24)
            | {"A_log": (4,), "dt_bias": (4,), "decay": (2,), "D": (2,)}
        ),
    ),
    "mesa_net": (
        {**_SIZES, "model_type": "mesa_net", "head_dim": 4, "use_output_gate": True},
        _model(
            _mixer({**dict.fromkeys("qkvg", 8), "a": 2, "b": 2}, "qk", 4, 8)
            | {"a_proj.bias": (2,), "b_proj.bias": (2,), "lambda_params": (8,)}
        ),
    ),
    "mamba3": (
        {"model_type": "mamba3", "hidden_size": 12, "num_hidden_layers": 2, "vocab_size": 260, "head_dim": 4, "state_size": 6,
         "n_groups": 2, "num_heads": 6, "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "dt_min": 0.001},
        _mamba3(),
    ),
}  # fmt: skip
