"""What an import or an export refuses, in one line, with nothing written: tensors, forms, folders, places and tokenizers."""

import json

import numpy as np
import pytest

from atlasjax import cli
from atlasjax.data.tokenizers import BpeTokenizer
from atlasjax.interop import FAMILIES, export_weights, import_weights
from atlasjax.interop.family import Sizes
from atlasjax.train import Checkpoints
from atlasjax.train.errors import CheckpointError, ConfigError
from tests.interop import peers


def damaged(folder, name, change):
    made = peers.tensors(name)
    change(made)
    return peers.write(folder, name, made)


def without(*names):
    return lambda made: [made.pop(name) for name in names]


CONV, HEAD = "backbone.layers.1.mixer.conv1d.weight", "lm_head.weight"
QWEN = "model.language_model.layers."
KIMI = "model.layers.1.block_sparse_moe"
LAYERS = [f"model.layers.{n}.attn.q_proj.weight" for n in range(2)]
TENSORS = [
    ("mamba2", without(CONV), ["mamba2", repr(CONV), "missing"]),
    ("gated_deltanet", without(*LAYERS, HEAD, "model.norm.weight"), [repr(LAYERS[0]), "and 1 more are missing"]),
    ("mamba2", lambda x: x.update(extra=x[HEAD]), ["no tensors 'extra'"]),
    (
        "mamba2 tied",
        lambda x: x.update({HEAD: x["backbone.embedding.weight"] + 1}),
        [HEAD, "should repeat", "embedding"],
    ),
    ("delta_net", lambda x: x.update({LAYERS[0]: x[LAYERS[0]].T.copy()}), [LAYERS[0], "(12, 6), must be (6, 12)"]),
    ("rwkv7", without("model.layers.0.pre_norm.bias"), ["'model.layers.0.pre_norm.bias'", "missing"]),
    ("qwen3_5 with images", without(f"{QWEN}1.self_attn.q_norm.weight"), ["self_attn.q_norm.weight'", "missing"]),
    ("qwen3_5 with images", lambda x: x.update({"visual.x": x["mtp.norm.weight"]}), ["no tensors 'visual.x'"]),
    (
        "qwen3_5 with images",
        lambda x: x.update({f"{QWEN}0.self_attn.q_norm.weight": x["mtp.norm.weight"]}),
        ["no tensors", "0.self_attn.q_norm.weight'"],
    ),
    (
        "qwen3_5 with images",
        lambda x: x.update({f"{QWEN}0.linear_attn.conv1d.weight": x[f"{QWEN}0.linear_attn.conv1d.weight"][:-1].copy()}),
        ["linear_attn.conv1d.weight", "(35, 1, 4), must be (36, 1, 4)"],
    ),
    ("olmo_hybrid", without("model.layers.1.self_attn.q_norm.weight"), ["self_attn.q_norm.weight'", "missing"]),
    (
        "olmo_hybrid",
        lambda x: x.update({"model.layers.0.linear_attn.conv1d.weight": x["model.norm.weight"]}),
        ["no tensors 'model.layers.0.linear_attn.conv1d.weight'"],
    ),
    ("kimi_linear", without(f"{KIMI}.experts.2.w3.weight"), [f"{KIMI}.experts.2.w3.weight'", "missing"]),
    ("kimi_linear", without("model.layers.1.self_attn.kv_a_layernorm.weight"), ["kv_a_layernorm.weight'", "missing"]),
    (
        "kimi_linear",
        lambda x: x.update({"model.layers.0.self_attn.A_log": x["model.layers.0.self_attn.A_log"].reshape(3)}),
        ["A_log", "(3,), must be (1, 1, 3, 1)"],
    ),
    ("nemotron_h with experts", without("backbone.layers.4.mixer.gate.weight"), ["mixer.gate.weight'", "missing"]),
    ("gla", lambda x: x.update({HEAD: x[HEAD].astype(np.int32)}), [HEAD, "is I32", "F32, F16, BF16"]),
    ("gla", lambda x: x.update({HEAD: x[HEAD].astype(np.float64)}), [HEAD, "is F64"]),
    ("mamba2", lambda x: np.put(x[CONV], 5, np.nan), [repr(CONV), "source/model.safetensors' has NaN or infinite"]),
    (
        "gla",
        lambda x: x.update({HEAD: np.full_like(x[HEAD], np.inf, peers.DTYPES["BF16"])}),
        [repr(HEAD), "has NaN or infinite"],
    ),
    (
        "gla",
        lambda x: x.update({"model.layers.0.attn.g_norm.weight": x["model.norm.weight"]}),
        ["no tensors 'model.layers.0.attn.g_norm.weight'"],
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), TENSORS)
def test_refuses_tensors(tmp_path, name, change, words):
    refused(damaged(tmp_path / "source", name, change), tmp_path / "run", words)


CONFIGS = [
    ("mamba2", {"model_type": "llama"}, ["model_type 'llama'", "mamba2", "gated_deltanet", "gla"]),
    ("mamba2", {"num_hidden_layers": 300000}, ["are missing", "has 300,000 layers, the files have "]),
    ("mamba2", {"use_bias": True}, ["use_bias is True", "False"]),
    ("mamba2", {"num_heads": 5}, ["num_heads is 5; it must be 4"]),
    ("mamba2", {"time_step_limit": [0.2, 0.1]}, ["time_step_limit is [0.2, 0.1]", "a number ≥ 0 and a larger one"]),
    ("mamba2", {"new_gate": 3}, ["'new_gate'", "not known"]),
    ("mamba2", {"state_size": "3"}, ["state_size is '3'", "an integer ≥ 1"]),
    ("mamba2", {"hidden_size": None}, ["hidden_size is missing"]),
    ("mamba2", {"n_groups": 3}, ["config.json of mamba2: ", "ssm.groups=3 must divide the 4 heads"]),
    ("mamba2", {"layer_norm_epsilon": 0}, ["layer_norm_epsilon is 0", "positive"]),
    ("mamba2", {"tie_word_embeddings": 1}, ["tie_word_embeddings is 1", "true or false"]),
    ("mamba2 of mamba_ssm", {"attn_layer_idx": [1]}, ["attn_layer_idx is [1]"]),
    ("mamba2 of mamba_ssm", {"ssm_cfg": {"layer": "Mamba3"}}, ["model_type None", "mamba2 of mamba_ssm"]),
    ("mamba", {"use_conv_bias": False}, ["use_conv_bias is False", "True"]),
    ("mamba", {"intermediate_size": 24}, ["intermediate_size is 24; it must be 16"]),
    ("mamba", {"time_step_rank": "automatic"}, ["time_step_rank is 'automatic'", "an integer ≥ 1"]),
    ("mamba", {"ssm_cfg": {"d_state": 4}}, ["ssm_cfg is {'d_state': 4}"]),
    ("mamba", {"mixer_rms_eps": 1e-6}, ["'mixer_rms_eps'", "not known"]),  # of Falcon Mamba
    ("mamba of mamba_ssm", {"ssm_cfg": {"bias": True}}, ["ssm_cfg: bias is True"]),
    ("mamba of mamba_ssm", {"ssm_cfg": {"headdim": 4}}, ["'headdim'", "not known"]),
    ("mamba of mamba_ssm", {"rms_norm": False}, ["rms_norm is False"]),
    ("gated_deltanet", {"allow_neg_eigval": 1}, ["allow_neg_eigval is 1", "true or false"]),
    ("gated_deltanet", {"num_v_heads": 3}, ["value_heads=3 must be a multiple of num_heads=2"]),
    ("gated_deltanet", {"expand_v": 1.5}, ["expand_v gives 1.5", "whole number"]),
    ("gated_deltanet", {"attn": 3}, ["attn is 3; it must be an object, a list of objects or null"]),
    ("gated_deltanet", {"attn": {"layers": [2], "num_heads": 2}}, ["attn: layers is [2]", "from 0 to 1"]),
    ("gated_deltanet", {"attn": {"layers": [0, 0], "num_heads": 2}}, ["attn: layers is [0, 0]", "different"]),
    ("gated_deltanet", {"attn": {"layers": [0]}}, ["attn: num_heads is missing"]),
    ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 5}}, ["attn.num_heads gives 2.4 channels of a head"]),
    ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2, "sinks": 1}}, ["attn: the meaning of 'sinks'"]),
    ("delta_net", {"attn": [{"layers": [0], "num_heads": 2}] * 2}, ["attn has layer 0 twice"]),
    (
        "gla",
        {"attn": [{"layers": [0], "num_heads": 2}, {"layers": [1], "num_heads": 3}]},
        ["may only differ in their layers"],
    ),
    ("delta_net", {"qk_norm": "sum"}, ["qk_norm is 'sum'", "'l2'"]),
    ("gla", {"expand_k": 0.3}, ["expand_k gives 1.8"]),
    ("gla", {"clamp_min": -1.0}, ["clamp_min is -1.0"]),
    ("qwen3_5", {"model_type": "qwen3_5_moe_text"}, ["moe_intermediate_size is 512", "the longest axis of the tensors"]),
    ("qwen3_next", {"num_experts_per_tok": 4}, ["per_token=4 is more than the 3 experts"]),
    ("qwen3_next", {"num_experts": 4}, ["experts.3.", "missing"]),
    ("qwen3_next", {"num_experts": 10**9}, ["num_experts is 1000000000", "the longest axis of the tensors"]),
    ("qwen3_next", {"mlp_only_layers": [2]}, ["mlp_only_layers is [2]", "from 0 to 1"]),
    ("qwen3_next", {"mlp_only_layers": []}, ["layers.0.mlp.", "missing"]),
    ("qwen3_next", {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0", "an integer ≥ 1"]),
    ("qwen3_next", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    ("qwen3_5_moe with joined experts", {"text_config": 3}, ["text_config is 3", "an object"]),
    ("qwen3_5", {"attn_output_gate": False}, ["attn_output_gate is False"]),
    ("qwen3_5", {"layer_types": ["full_attention"] * 3}, ["layer_types is", "a list of 4 strings"]),
    ("qwen3_5", {"layer_types": ["linear_attention"] * 3 + ["chunked"]}, ["layer_types is", "'linear_attention' or"]),
    ("qwen3_5", {"linear_value_head_dim": 7}, ["linear_value_head_dim is 7", "a multiple of linear_key_head_dim, 3"]),
    ("qwen3_5", {"linear_num_value_heads": 3}, ["value_heads=3 must be a multiple of num_heads=2"]),
    ("qwen3_5", {"num_key_value_heads": 3}, ["kv_heads=3 must divide the 4 heads of queries"]),
    ("qwen3_5", {"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters: rope_type is 'yarn'", "'default'"]),
    ("qwen3_5", {"rope_parameters": {"type": "yarn"}}, ["rope_parameters: type is 'yarn'", "'default' or 'mrope'"]),
    (
        "qwen3_5",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        ["rope_dim=3 must be even and at most head_dim=6"],
    ),
    ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor is 1.5", "at most 1"]),
    ("qwen3_5", {"num_experts": 8}, ["'num_experts'", "not known"]),
    ("qwen3_5 with images", {"text_config": 3}, ["text_config is 3", "an object"]),
    ("olmo_hybrid", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    ("olmo_hybrid", {"num_attention_heads": 5}, ["num_attention_heads is 5", "a divisor of hidden_size, 12"]),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type is 'yarn'"]),
    ("olmo_hybrid", {"sliding_window": 8}, ["'sliding_window'", "not known"]),
    ("rwkv7", {"norm_bias": False}, ["norm_bias is False"]),
    ("rwkv7", {"hidden_act": "relu"}, ["hidden_act is 'relu'", "'sqrelu'"]),
    ("rwkv7", {"value_dim": [12, 24]}, ["value_dim is [12, 24]; it must be 12 or [12, 12]"]),
    ("rwkv7", {"num_heads": 4}, ["num_heads is 4; it must be 3"]),
    ("rwkv7", {"head_dim": 5, "num_heads": None}, ["head_dim is 5; it should divide hidden_size, 12"]),
    ("rwkv7", {"attn": {"layers": [1]}}, ["attn is {'layers': [1]}"]),
    ("granitemoehybrid", {"num_local_experts": 8, "intermediate_size": 8}, ["block_sparse_moe", "missing"]),
    ("granitemoehybrid with experts", {"num_local_experts": 2}, ["block_sparse_moe", "(3, 16, 12), must be (2, 16, 12)"]),
    ("granitemoehybrid with experts", {"num_local_experts": 0}, ["block_sparse_moe"]),
    ("granitemoehybrid with experts", {"num_experts_per_tok": 4}, ["per_token=4 is more than the 3 experts"]),
    ("granitemoehybrid", {"attention_bias": True}, ["attention_bias is True"]),
    ("granitemoehybrid", {"mamba_d_head": 4}, ["mamba_d_head is 4; it must be 6 or 'auto'"]),
    ("granitemoehybrid", {"layers_block_type": ["mamba", "mlp"]}, ["layers_block_type is", "'mamba' or"]),
    ("granitemoehybrid", {"residual_multiplier": 0}, ["residual_multiplier is 0", "positive"]),
    ("bamba", {"attn_layer_indices": [2]}, ["attn_layer_indices is [2]", "from 0 to 1"]),
    ("bamba", {"attn_rotary_emb": 4}, ["attn_rotary_emb is 4; it must be 2"]),
    ("falcon_h1", {"ssm_multipliers": [1.0, 1.0]}, ["ssm_multipliers is [1.0, 1.0]", "a list of 5 positive numbers"]),
    ("falcon_h1", {"projectors_bias": True}, ["projectors_bias is True"]),
    ("falcon_h1", {"mamba_d_ssm": 16}, ["mamba_n_heads is 3", "a divisor of mamba_d_ssm, 16"]),
    ("nemotron_h", {"hybrid_override_pattern": "M-MXM"}, ["hybrid_override_pattern is 'M-MXM'", "the letters M, *, -, E"]),
    ("nemotron_h", {"hybrid_override_pattern": "-MM*-"}, ["an MLP that does not follow a mixer"]),
    ("nemotron_h", {"hybrid_override_pattern": None, "layers_block_type": ["moe"] * 5}, ["an MLP that does not follow"]),
    ("nemotron_h with experts", {"moe_latent_size": 4}, ["moe_latent_size is 4"]),
    ("nemotron_h with experts", {"n_group": 3}, ["groups=3 does not divide number=4"]),
    ("kimi_linear", {"mla_use_nope": False}, ["mla_use_nope is False"]),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, ["moe_router_activation_func is 'softmax'"]),
    ("kimi_linear", {"qk_head_dim": 7}, ["qk_head_dim is 7; it must be 5"]),
    ("kimi_linear", {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1, 2]}}, ["each layer from 1 to 3 once"]),
    ("kimi_linear", {"linear_attn_config": {"kda_layers": [0]}}, ["each layer from 1 to 3 once"]),
    ("kimi_linear", {"linear_attn_config": {"gate": "full"}}, ["linear_attn_config: the meaning of 'gate'"]),
    ("kimi_linear", {"first_k_dense_replace": 3}, ["block_sparse_moe", "which it has not"]),
    ("nemotron_h", {"num_hidden_layers": 6}, ["num_hidden_layers is 6; it must be 5"]),
    ("nemotron_h", {"sliding_window": 64}, ["sliding_window is 64"]),
    ("nemotron_h", {"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers is 1"]),
    ("lfm2", {"conv_bias": True}, ["conv_bias is True"]),
    ("kda", {"lower_bound": -6}, ["lower_bound is -6", "from -5 to below 0"]),
    ("kda", {"lower_bound": 1.0, "safe_gate": False}, ["lower_bound is 1.0", "negative"]),
    ("gated_deltaproduct", {"use_output_gate": False}, ["use_output_gate is False"]),
    ("comba", {"use_inner_decay": False}, ["use_inner_decay is False"]),
    ("mesa_net", {"max_cg_step_decoding": 5}, ["max_cg_step_decoding is 5; it must be 30"]),
    ("falcon_mamba", {"intermediate_size": 20}, ["intermediate_size is 20"]),
    ("mamba3", {"mimo_rank": 1}, ["mimo_rank is 1; it must be larger"]),
    ("lfm2", {"layer_types": ["conv", "conv1d"]}, ["layer_types is", "'conv' or 'full_attention'"]),
    ("lfm2", {"model_type": "lfm2_moe"}, ["model_type 'lfm2_moe'"]),
    *(
        (name, {field: 10**9}, [f"{field} of config.json has 1,000,000,000 layers", "the files have"])
        for name, field in (
            ("mamba", "num_hidden_layers"), ("mamba2 of mamba_ssm", "n_layer"), ("gated_deltanet", "num_hidden_layers"),
            ("delta_net", "num_hidden_layers"), ("gla", "num_hidden_layers"), ("qwen3_5", "num_hidden_layers"),
            ("olmo_hybrid", "num_hidden_layers"), ("rwkv7", "num_hidden_layers"),
        )
    ),
    *(
        (name, {field: size}, [f"{field} is {size}", "the longest axis of the tensors in the files"])
        for name, field, size in (
            ("mamba2", "vocab_size", 10**9), ("mamba2", "hidden_size", 10**21), ("mamba2", "state_size", 10**9),
            ("mamba", "time_step_rank", 10**9), ("gated_deltanet", "num_heads", 10**9), ("gla", "intermediate_size", 10**20),
            ("qwen3_5", "linear_num_value_heads", 10**9), ("olmo_hybrid", "linear_conv_kernel_dim", 10**9),
            ("rwkv7", "gate_low_rank_dim", 10**9),
        )
    ),
    ("qwen3_5", {"full_attention_interval": 10**21}, ["full_attention_interval is 1000000000000000000000", "at most 2,147,4"]),
    ("gla", {"expand_k": 1e308}, ["expand_k is 1e+308", "positive number below 1e+30"]),
    ("gla", {"expand_k": 1e20}, ["expand_k gives", "at most"]),
    ("mamba2", {"layer_norm_epsilon": 10**400}, ["layer_norm_epsilon is an integer of more than 300 digits"]),
    ("qwen3_5", {"layer_types": ["full_attention"] * 100_000}, ["layer_types is ['full_attention'", "a list of 4 strings"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), CONFIGS)
def test_refuses_forms_that_the_layers_lack(tmp_path, name, changes, words):
    refused(peers.write(tmp_path / "source", name, **changes), tmp_path / "run", words)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def pointer(name):
    return lambda source: (source / name).write_bytes(LFS)


def text(name, content):
    return lambda source: (source / name).write_text(content)


def broken_link(name):
    def change(source):
        (source / name).unlink()
        (source / name).symlink_to("../blobs/4d7a")

    return change


def repeat_key(source):
    file = source / "config.json"
    file.write_text(file.read_text().replace("{", '{"state_size": 5,', 1))


def truncate(source):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def only_pickle(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def edit_index(change):
    def edit(source):
        file = source / "model.safetensors.index.json"
        index = json.loads(file.read_bytes())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return edit


FOLDERS = [
    (1, truncate, ["model.safetensors", "damaged"]),
    (1, only_pickle, ["neither model.safetensors nor", "'pytorch_model.bin' is a pickle"]),
    (1, lambda source: (source / "config.json").unlink(), ["has no config.json"]),
    (1, lambda source: (source / "config.json").write_text("{"), ["config.json", "is not JSON"]),
    (1, lambda source: (source / "config.json").write_text("[]"), ["is not an object"]),
    (2, lambda source: (source / "model-00002-of-00002.safetensors").unlink(), ["00002-of-00002", "is missing"]),
    (2, edit_index(lambda names: names.pop(CONV)), [repr(CONV), "is not in model.safetensors.index.json"]),
    (2, edit_index(lambda names: names.update(x=names[CONV])), ["tensor 'x' is not in"]),
    (2, edit_index(lambda names: names.update({CONV: "../model.safetensors"})), ["is not an index"]),
    (2, lambda source: (source / "model.safetensors.index.json").write_text("{}"), ["is not an index"]),
    *[
        (2, pointer(name), [f"{name}' is a Git LFS pointer; run `git lfs pull`"])
        for name in (
            "config.json",
            "model.safetensors.index.json",
            "model-00002-of-00002.safetensors",
            "tokenizer_config.json",
        )
    ],
    (1, pointer("model.safetensors"), ["model.safetensors' is a Git LFS pointer"]),
    *[
        (1, broken_link(name), [f"{name}' is a link to '../blobs/4d7a', which is missing"])
        for name in ("config.json", "model.safetensors")
    ],
    (2, broken_link("model-00002-of-00002.safetensors"), ["is a link to '../blobs/4d7a', which is missing"]),
    (1, repeat_key, ["config.json' has the key 'state_size' twice"]),
    (1, text("tokenizer_config.json", "{"), ["tokenizer_config.json' is not JSON"]),
    (1, text("generation_config.json", "{"), ["generation_config.json' is not JSON"]),
    (
        1,
        text("generation_config.json", '{"eos_token_id": 264}'),
        ["eos token is 264; it must be an integer from 0 to 263"],
    ),
    (
        1,
        text("generation_config.json", '{"bos_token_id": -1}'),
        ["generation_config.json': the id of the bos token is -1"],
    ),
    (1, text("generation_config.json", '{"eos_token_id": [3, "x"]}'), ["the id of the eos token is 'x'"]),
    (1, text("tokenizer_config.json", '{"added_tokens_decoder": [1]}'), ["added_tokens_decoder is [1]"]),
    (1, text("tokenizer.json", '{"added_tokens": 3}'), ["tokenizer.json': added_tokens is 3"]),
]


@pytest.mark.parametrize(("count", "change", "words"), FOLDERS)
def test_refuses_folders(tmp_path, count, change, words):
    source = peers.write(tmp_path / "source", "mamba2", files=count)
    change(source)
    refused(source, tmp_path / "run", words)


def refused(source, run_dir, words, **options):
    """A message of one line with all the words, and nothing written."""
    with pytest.raises(ConfigError) as error:
        import_weights(source, run_dir, **{"tokenizer": "byte", **options})
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert [path.name for path in run_dir.parent.iterdir()] == [source.name]


def test_refuses_places_and_tokenizers(tmp_path):
    source, run_dir = peers.write(tmp_path / "source", "mamba2"), tmp_path / "run"
    refused(source, run_dir, ["neither tokenizer.json nor tokenizer.model", "--tokenizer"], tokenizer=None)
    refused(source, run_dir, ["'bpe:300'", "trained"], tokenizer="bpe:300")
    refused(source, run_dir, ["nowhere.json", "does not exist"], tokenizer="bpe:nowhere.json")
    refused(source, run_dir, ["'float16'", "bfloat16"], dtype="float16")
    (source / "tokenizer.json").write_text("{}")
    refused(source, run_dir, ["is not a tokenizers JSON file"], tokenizer=None)
    run_dir.mkdir()
    with pytest.raises(ConfigError, match=r"run_dir is .*, which exists"):
        import_weights(source, run_dir, tokenizer="byte")
    for path, words in [
        (source / "model.safetensors", "is a file; give the folder"),
        (tmp_path / "x", "does not exist"),
    ]:
        with pytest.raises(ConfigError, match=words):
            import_weights(path, tmp_path / "other")
    with pytest.raises(ConfigError, match="should have no brackets"):
        import_weights(source, tmp_path / "lr[1e-3]", tokenizer="byte")
    with pytest.raises(ConfigError, match=r"path is .*, which exists"):
        export_weights(run_dir, source)
    for call in (
        lambda: import_weights(source, "gs://bucket/run", tokenizer="byte"),
        lambda: export_weights(run_dir, "gs://bucket/out"),
    ):
        with pytest.raises(ConfigError, match=r"'gs://bucket/\w+' is in a store; it must be on a disk"):
            call()
    with pytest.raises(ConfigError, match=r"there is no run in it"):
        export_weights(run_dir, tmp_path / "out")


def test_refuses_another_tokenizer_of_the_same_size(tmp_path):
    import_weights(peers.write(tmp_path / "source", "mamba2"), tmp_path / "run", tokenizer="byte")
    BpeTokenizer.train(["x"], 256).save(tmp_path / "run/tokenizer")
    with pytest.raises(
        ConfigError, match=r"run/tokenizer' is not the tokenizer of the run in .*run': its fingerprint is"
    ):
        export_weights(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_a_small_vocabulary(tmp_path):
    made = peers.tensors("mamba2")
    cut = {name: x[:200] if name in ("backbone.embeddings.weight", HEAD) else x for name, x in made.items()}
    source = peers.write(tmp_path / "source", "mamba2", cut, vocab_size=200)
    refused(source, tmp_path / "run", ["'byte' has 256 tokens; the model has 200"])


def test_nothing_is_left_of_a_failed_import(tmp_path, monkeypatch):
    def fail(*_):
        raise CheckpointError("the disk is full")

    source = peers.write(tmp_path / "source", "mamba2")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fail)
        with pytest.raises(CheckpointError):
            import_weights(source, tmp_path / "deep/run", tokenizer="byte")
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("value", [{"a": "bfloat16"}, "bfloat17", ["bfloat16"]])
def test_refuses_an_unknown_dtype(value):
    family = next(family for family in FAMILIES if family.name == "mamba2")
    with pytest.raises(ConfigError, match=r"torch_dtype is .*; it must be 'float32' or 'float16' or 'bfloat16'"):
        family.to_ours({**peers.PEERS["mamba2"][0], "torch_dtype": value}, Sizes())


def test_refuses_a_config_of_another_size_than_a_description(tmp_path):
    source = peers.write(tmp_path / "source", "mamba2")
    (source / "config.json").write_text("[" + "0," * 2**25 + "0]")
    refused(source, tmp_path / "run", ["config.json' has 67,108,867 bytes", "at most 67,108,864"])


def test_an_export_refuses_a_config_of_other_sizes(tmp_path):
    import_weights(peers.write(tmp_path / "source", "mamba2"), tmp_path / "run", tokenizer="byte")
    file = tmp_path / "run/peer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**9}))
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers of config\.json has 1,000,000,000 layers, the files have"
    ):
        export_weights(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    source = peers.write(tmp_path / "source", "mamba2", model_type="gpt2")
    assert cli.main(["import", str(source), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("atlasjax: config.json has model_type 'gpt2'")
    assert said.count("\n") == 1
