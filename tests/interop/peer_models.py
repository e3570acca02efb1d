"""Makes the peers' own PyTorch models with random weights, saves them, and records what they compute: `python -m … FOLDER NAME…`.

A process of its own. The forward passes of flash-linear-attention are Triton kernels: without a GPU they run in Triton's
interpreter, which has to be chosen before Triton is imported, and which cannot measure the kernels' variants, so the first one of
each is taken. It does not run the kernels that work in chunks, so sequences have at most 64 tokens, and they are few, since it
needs seconds for each.
"""

import inspect
import os
import pathlib
import sys

import numpy as np

_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# name → (module of the classes, prefix of their names, config, batch, tokens to read, tokens to generate)
MODELS = {
    "mamba2": (
        "transformers", "Mamba2",
        {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 32,
         "num_hidden_layers": 3, "vocab_size": 300, "tie_word_embeddings": True},
        2, 131, 16,
    ),
    "mamba2, four groups": (
        "transformers", "Mamba2",
        {"num_heads": 12, "head_dim": 4, "hidden_size": 24, "state_size": 7, "n_groups": 4, "expand": 2, "chunk_size": 16,
         "num_hidden_layers": 2, "vocab_size": 257, "layer_norm_epsilon": 1e-3, "conv_kernel": 3},
        3, 7, 16,
    ),
    "mamba": (
        "transformers", "Mamba",
        {"hidden_size": 32, "state_size": 16, "num_hidden_layers": 3, "vocab_size": 300},
        2, 131, 16,
    ),
    "mamba, untied": (
        "transformers", "Mamba",
        {"hidden_size": 24, "state_size": 7, "expand": 3, "num_hidden_layers": 2, "vocab_size": 257, "time_step_rank": 5,
         "layer_norm_epsilon": 1e-3, "conv_kernel": 3, "tie_word_embeddings": False},
        3, 7, 16,
    ),
    "falcon_mamba": (
        "transformers", "FalconMamba",
        {"hidden_size": 32, "state_size": 16, "num_hidden_layers": 3, "vocab_size": 300},
        2, 131, 16,
    ),
    "falcon_mamba, untied, eps 0.01": (
        "transformers", "FalconMamba",
        {"hidden_size": 24, "state_size": 7, "expand": 3, "num_hidden_layers": 2, "vocab_size": 257, "time_step_rank": 5,
         "layer_norm_epsilon": 1e-3, "mixer_rms_eps": 0.01, "conv_kernel": 3, "tie_word_embeddings": False},
        3, 7, 16,
    ),
    "gated_deltanet": (
        "fla.models", "GatedDeltaNet",
        {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "expand_v": 2.0, "num_hidden_layers": 2, "vocab_size": 300,
         "intermediate_size": 48},
        2, 13, 4,
    ),
    "gated_deltanet, large eps": (
        "fla.models", "GatedDeltaNet",
        {"hidden_size": 24, "num_heads": 3, "head_dim": 8, "expand_v": 1.0, "num_hidden_layers": 1, "vocab_size": 257,
         "hidden_ratio": 2, "norm_eps": 0.01, "conv_size": 3, "tie_word_embeddings": True},
        1, 6, 3,
    ),
    "delta_net": (
        "fla.models", "DeltaNet",
        {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 48,
         "norm_eps": 0.001},
        2, 13, 4,
    ),
    "delta_net, wide values": (
        "fla.models", "DeltaNet",
        {"hidden_size": 32, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "num_hidden_layers": 1, "vocab_size": 257},
        1, 6, 3,
    ),
    "gla": (
        "fla.models", "GLA",
        {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 48},
        2, 13, 4,
    ),
    "gla, unfused norm": (
        "fla.models", "GLA",
        {"hidden_size": 32, "num_heads": 2, "expand_k": 1.0, "num_hidden_layers": 1, "vocab_size": 257, "fuse_norm": False,
         "norm_eps": 0.01},
        1, 6, 3,
    ),
    "gated_deltanet, attention in a layer": (
        "fla.models", "GatedDeltaNet",
        {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.0, "num_hidden_layers": 2,
         "allow_neg_eigval": True,
         "vocab_size": 300, "intermediate_size": 48,
         "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 100.0}},
        2, 13, 4,
    ),
    "delta_net, attention with a window and without": (
        "fla.models", "DeltaNet",
        {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 3, "vocab_size": 257, "intermediate_size": 48, "norm_eps": 0.001,
         "attn": [{"layers": [0], "num_heads": 2}, {"layers": [2], "num_heads": 2, "window_size": 5}]},
        1, 13, 3,
    ),
    "gla, attention with a window": (
        "fla.models", "GLA",
        {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 48,
         "attn": {"layers": [0], "num_heads": 2, "num_kv_heads": 1, "window_size": 3}},
        2, 11, 4,
    ),
    "kda": (
        "fla.models", "KDA",
        {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 2.0, "num_hidden_layers": 2,
         "allow_neg_eigval": True, "vocab_size": 300, "intermediate_size": 48},
        2, 13, 4,
    ),
    "kda, bounded gate, eps 0.01": (
        "fla.models", "KDA",
        {"hidden_size": 24, "num_heads": 3, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 257, "hidden_ratio": 2,
         "norm_eps": 0.01, "conv_size": 3, "safe_gate": True, "lower_bound": -4.0, "tie_word_embeddings": True},
        1, 6, 3,
    ),
    "gated_deltaproduct": (
        "fla.models", "GatedDeltaProduct",
        {"hidden_size": 32, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "num_householder": 3, "use_forget_gate": True,
         "allow_neg_eigval": True, "vocab_size": 300, "intermediate_size": 48, "norm_eps": 0.001},
        2, 13, 4,
    ),
    "gated_deltaproduct, without a forget gate": (
        "fla.models", "GatedDeltaProduct",
        {"hidden_size": 24, "num_heads": 3, "head_dim": 8, "expand_v": 1.0, "num_hidden_layers": 1, "num_householder": 2,
         "vocab_size": 257, "intermediate_size": 40, "norm_eps": 0.01},
        1, 6, 3,
    ),
    "comba": (
        "fla.models", "Comba",
        {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 2.0, "num_hidden_layers": 2,
         "vocab_size": 300, "intermediate_size": 48, "norm_eps": 0.001},
        2, 13, 4,
    ),
    "qwen3_5": (
        "transformers", "Qwen3_5",
        {"hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 300, "intermediate_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        2, 131, 16,
    ),
    "qwen3_5, wide values, eps 0.001": (
        "transformers", "Qwen3_5",
        {"hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 257, "intermediate_size": 40, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 12, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
         "linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "rms_norm_eps": 0.001,
         "layer_types": ["full_attention", "linear_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        3, 67, 16,
    ),
    "qwen3_5, with its vision tower": (
        "transformers", "Qwen3_5",
        {"text_config": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 40, "head_dim": 8,
                         "num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_key_heads": 1,
                         "linear_num_value_heads": 3, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
                         "layer_types": ["linear_attention", "full_attention"], "attention_bias": True},
         "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                           "num_position_embeddings": 16, "patch_size": 4}},
        1, 7, 16,
    ),
    "olmo_hybrid": (
        "transformers", "OlmoHybrid",
        {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1},
        2, 131, 16,
    ),
    "olmo_hybrid, rotated, other heads": (
        "transformers", "OlmoHybrid",
        {"hidden_size": 36, "num_hidden_layers": 3, "vocab_size": 257, "intermediate_size": 40, "num_attention_heads": 3,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 6,
         "linear_allow_neg_eigval": False, "attention_bias": True, "rms_norm_eps": 0.001, "pad_token_id": 0, "eos_token_id": 1,
         "layer_types": ["full_attention", "linear_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        3, 7, 16,
    ),
    "rwkv7": (
        "fla.models", "RWKV7",
        {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 300, "decay_low_rank_dim": 8,
         "a_low_rank_dim": 6, "gate_low_rank_dim": 10, "v_low_rank_dim": 4},
        2, 13, 4,
    ),
    "rwkv7, unfused norms": (
        "fla.models", "RWKV7",
        {"hidden_size": 24, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 257, "decay_low_rank_dim": None,
         "fuse_norm": False, "norm_eps": 0.01, "intermediate_size": 40, "tie_word_embeddings": True},
        1, 6, 3,
    ),
    "granitemoehybrid": (
        "transformers", "GraniteMoeHybrid",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
         "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 16,
         "mamba_n_groups": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3},
        2, 131, 16,
    ),
    "granitemoehybrid, rotated": (
        "transformers", "GraniteMoeHybrid",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 257, "num_local_experts": 0,
         "num_experts_per_tok": 0, "shared_intermediate_size": 40, "mamba_n_heads": 6, "mamba_d_state": 5, "mamba_d_conv": 3,
         "layer_types": ["full_attention", "linear_attention"], "position_embedding_type": "rope", "tie_word_embeddings": True,
         "rms_norm_eps": 0.001, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        3, 7, 16,
    ),
    "granitemoehybrid, experts": (
        "transformers", "GraniteMoeHybrid",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
         "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40,
         "mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": ["linear_attention", "full_attention"],
         "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3},
        2, 67, 16,
    ),
    "qwen3_next": (
        "transformers", "Qwen3Next",
        {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 300, "intermediate_size": 40, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0],
         "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        2, 67, 16,
    ),
    "qwen3_5_moe": (
        "transformers", "Qwen3_5Moe",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 257, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 16, "tie_word_embeddings": True,
         "layer_types": ["linear_attention", "full_attention"]},
        1, 13, 16,
    ),
    "bamba": (
        "transformers", "Bamba",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
         "intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "attn_layer_indices": [1]},
        2, 131, 16,
    ),
    "falcon_h1": (
        "transformers", "FalconH1",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 300, "intermediate_size": 40, "mamba_d_ssm": 24, "mamba_n_heads": 3, "mamba_d_head": 8, "mamba_d_state": 16,
         "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9, "key_multiplier": 0.7, "ssm_in_multiplier": 1.3,
         "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 1.2], "ssm_out_multiplier": 0.4, "mlp_multipliers": [0.8, 0.3],
         "embedding_multiplier": 5.0, "lm_head_multiplier": 0.04},
        2, 131, 16,
    ),
    "falcon_h1, norm before the gate, groups": (
        "transformers", "FalconH1",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6,
         "vocab_size": 257, "intermediate_size": 40, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 5,
         "mamba_n_groups": 2, "mamba_rms_norm": True, "rms_norm_eps": 0.001, "tie_word_embeddings": True},
        3, 7, 16,
    ),
    "nemotron_h": (
        "transformers", "NemotronH",
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 300,
         "intermediate_size": 40, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
         "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"], "time_step_min": 1e-6},
        2, 131, 16,
    ),
    "nemotron_h, experts": (
        "transformers", "NemotronH",
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 300,
         "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "n_group": 2,
         "topk_group": 1, "routed_scaling_factor": 2.5, "time_step_min": 1e-6, "intermediate_size": 40,
         "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "linear_attention", "mlp"]},
        2, 67, 16,
    ),
    "kimi_linear, dense": (
        "transformers", "KimiLinear",
        {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 10,
         "q_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 3, "v_head_dim": 5, "linear_head_dim": 8,
         "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "vocab_size": 257, "intermediate_size": 40, "rms_norm_eps": 0.001,
         "layer_types": ["full_attention", "linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 3,
         **_ENDS},
        3, 7, 16,
    ),
    "kimi_linear": (
        "transformers", "KimiLinear",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 3,
         "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2, "n_group": 4,
         "topk_group": 2, "vocab_size": 300, "intermediate_size": 40,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], **_ENDS},
        2, 67, 16,
    ),
    "lfm2": (
        "transformers", "Lfm2",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
         "intermediate_size": 96, "block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"]},
        2, 131, 16,
    ),
}  # fmt: skip


def make(folder: pathlib.Path, name: str) -> None:
    """Writes FOLDER/NAME with the model, and reference.npz: tokens, logits of one pass, of decoding, in bfloat16; greedy tokens.

    `documents` are the logits of two calls, for the tokens before `cut` and for those from there on.
    """
    import importlib

    import torch

    module, prefix, changes, batch, length, more = MODELS[name]
    classes = importlib.import_module(module)
    torch.manual_seed(0)
    text = changes.get("text_config")
    config = getattr(
        classes, prefix + ("TextConfig" if prefix in ("Qwen3_5", "Qwen3_5Moe") and text is None else "Config")
    )(**changes)
    model = getattr(classes, prefix + ("ForCausalLM" if text is None else "ForConditionalGeneration"))(config).eval()
    tokens = torch.randint(0, (text or changes)["vocab_size"], (batch, length))
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
        if prefix == "OlmoHybrid":
            save_olmo(model, folder / name)
        else:
            model.save_pretrained(folder / name, max_shard_size="60KB" if batch == 2 else "1GB")
        logits = model(tokens, use_cache=False).logits
        decoded, greedy = decode(model, tokens, more)
        check(decoded, logits)
        cut = 2 * length // 5
        documents = torch.cat([model(part, use_cache=False).logits for part in tokens.split([cut, length - cut], 1)], 1)
        half = model.to(torch.bfloat16)(tokens, use_cache=False).logits.float()
    arrays = {"tokens": tokens, "logits": logits, "decoded": decoded, "greedy": greedy, "bfloat16": half}
    np.savez(folder / name / "reference.npz", **arrays, documents=documents, cut=cut)


def save_olmo(model, folder: pathlib.Path) -> None:
    """Saves with the names of the public weights. `save_pretrained` splits convolutions wrongly where keys and values differ."""
    from safetensors.torch import save_file

    saved, config = {}, model.config
    key, value = (
        getattr(config, f"linear_num_{x}_heads") * getattr(config, f"linear_{x}_head_dim") for x in ("key", "value")
    )
    for tensor, x in model.state_dict().items():
        if tensor.endswith("linear_attn.conv1d.weight"):
            parts = x.split((key, key, value))
            saved |= {tensor.replace("conv1d", f"{y}_conv1d"): part.contiguous() for y, part in zip("qkv", parts)}
        else:
            saved[tensor] = x
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(saved, folder / "model.safetensors", {"format": "pt"})


def decode(model, tokens, more):
    """Logits of reading the first half at once and the rest one by one, and the tokens that follow greedily."""
    import torch

    first = (tokens.shape[1] + 1) // 2
    out = model(tokens[:, :first], use_cache=True)
    pieces, greedy = [out.logits], []
    following = [tokens[:, t : t + 1] for t in range(first, tokens.shape[1])]
    for t in range(len(following) + more):
        if t >= len(following):
            greedy.append(out.logits[:, -1:].argmax(-1))
        token = greedy[-1] if greedy else following[t]
        # Bamba gives a token of a call with a cache the position 0, unless the call says which it is (findings/bamba_positions.sh).
        place = {"position_ids": torch.full(token.shape, first + t)} if model.config.model_type == "bamba" else {}
        out = model(token, use_cache=True, **place, **cache_of(model, out))
        if not greedy:
            pieces.append(out.logits)
    return torch.cat(pieces, 1), torch.cat(greedy, 1)


def cache_of(model, out) -> dict:
    """The cache of an output under the name that the model's call has for it.

    An output may answer to more names than that, and a call ignores the names that it does not know, so that the model would go on
    without a past.
    """
    known = inspect.signature(model.forward).parameters
    name = next(name for name in ("cache", "past_key_values", "cache_params") if name in known)
    assert getattr(out, name) is not None
    return {name: getattr(out, name)}


def check(decoded, logits) -> None:
    """A peer whose decoding is not its own pass over the whole sequence is no reference."""
    difference = (decoded - logits).abs().max() / logits.abs().max()
    assert difference < 3e-5, f"the peer's decoding differs by {difference:.1e} from its own whole pass"


def replace_flash_attention() -> None:
    """Puts the function of the package flash_attn that is called, as it is documented, in its place: the package needs a GPU."""
    import torch
    from fla.layers import attn

    def flash_attn_func(q, k, v, causal, window_size):
        assert causal
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2) for x in (k, v))
        t = torch.arange(q.shape[1])[:, None] + k.shape[2] - q.shape[1]  # the last query is at the last key
        s = torch.arange(k.shape[2])
        visible = (s <= t) & ((window_size[0] < 0) | (s >= t - window_size[0]))
        y = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible)
        return y.transpose(1, 2)

    attn.flash_attn_func = flash_attn_func


def interpret_triton() -> None:
    """Runs Triton's kernels in its interpreter, with the first variant of each."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import autotuner

    init = autotuner.Autotuner.__init__

    def first_only(self, fn, arg_names, configs, *args, **kwargs):
        init(self, fn, arg_names, configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = first_only


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    if any(MODELS[name][0].startswith("fla") for name in names):
        interpret_triton()
        replace_flash_attention()
    else:
        sys.modules["fla"] = None  # transformers would call its kernels, which need a GPU
    for name in names:
        make(pathlib.Path(target), name)
