"""Import and export of public weights without PyTorch: exact round trips, refusals, and what a run of them can do."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from atlasjax import cli
from atlasjax.distributed import make_mesh
from atlasjax.interop import FAMILIES, convert, export_weights, import_weights, layout, tensors
from atlasjax.nn import AttentionConfig, HeadNormConfig, ModelConfig, SSMConfig
from atlasjax.presets import get_preset
from atlasjax.train import Checkpoints
from atlasjax.train.errors import CheckpointError, ConfigError
from atlasjax.train.load import load_run
from atlasjax.train.runs import run_config
from tests.interop import peers
from tests.marks import some_slow
from tests.train.tiny import TEXT


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("mamba2", "F32", 3), pytest.param("mamba2 tied", "BF16", 1, marks=pytest.mark.slow),
        ("mamba2 of mamba_ssm", "F16", 1), ("mamba", "BF16", 2),
        ("mamba of mamba_ssm", "F32", 1), ("gated_deltanet", "BF16", 2), ("delta_net", "F32", 1), ("gla", "F32", 1),
        ("gated_deltanet with attention", "F32", 1),
        ("olmo_hybrid", "F16", 1),
        ("qwen3_5 with images", "BF16", 2), pytest.param("qwen3_5", "F32", 1, marks=pytest.mark.slow), ("rwkv7", "BF16", 2),
    ],
)  # fmt: skip
def test_round_trip_is_exact(tmp_path, name, dtype, count):
    """Every file is the imported one, byte for byte: tensors in the dtype and order that they had, index, config.json."""
    source = peers.write(tmp_path / "source", name, dtype=dtype, files=count)
    others = "generation_config processor_config preprocessor_config video_preprocessor_config chat_template"
    for beside in others.split():
        (source / f"{beside}.json").write_text("{}")
    done = import_weights(source, tmp_path / "run", tokenizer="byte")
    assert (done.family, done.tensors) == (
        name.removesuffix(" tied").partition(" with ")[0],
        len(peers.PEERS[name][1]),
    )
    assert done.kept == (4 if "images" in name else 0)
    assert run_config(tmp_path / "run").model.dtype == ("bfloat16" if dtype == "BF16" else "float32")
    export_weights(tmp_path / "run", tmp_path / "out")
    assert files(tmp_path / "out") == files(source)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("name", "dtype", "said", "expected"),
    [
        ("gla", "BF16", {}, "bfloat16"),
        ("gla", "F16", {"dtype": None}, "float32"),
        ("gla", "BF16", {"dtype": "float32"}, "float32"),
        ("gla", "F32", {"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ("qwen3_5 with images", "F32", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("qwen3_5 with images", "BF16", {}, "bfloat16"),
    ],
)
def test_the_dtype_of_activations(tmp_path, name, dtype, said, expected):
    """That which config.json has; else that of the weights."""
    source = peers.write(tmp_path / "source", name, dtype=dtype)
    given = json.loads((source / "config.json").read_bytes())
    del given["dtype"]
    with tensors.Folder(source) as folder:
        assert convert._model(convert._family(given), given | said, folder).dtype == expected


@pytest.mark.parametrize("value", [{"a": "bfloat16"}, "bfloat17", ["bfloat16"]])
def test_refuses_an_unknown_dtype(value):
    family = next(family for family in FAMILIES if family.name == "mamba2")
    with pytest.raises(ConfigError, match=r"torch_dtype is .*; it should be 'float32' or 'float16' or 'bfloat16'"):
        family.to_ours({**peers.PEERS["mamba2"][0], "torch_dtype": value})


# Every family is exported in the test above.
@pytest.mark.parametrize(
    "name",
    some_slow(
        [
            "mamba2",
            "mamba tied",
            "gated_deltanet",
            "delta_net",
            "gla",
            "gated_deltanet with attention",
            "qwen3_5",
            "olmo_hybrid",
            "rwkv7",
        ],
        ["mamba2", "gated_deltanet", "delta_net", "gla", "qwen3_5", "rwkv7", "olmo_hybrid"],
    ),
)
def test_a_run_of_our_own_can_be_exported(tmp_path, name):
    """Without what was imported beside it a run is like one that was trained here: its form follows from its config."""
    source = peers.write(tmp_path / "source", name)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    for path in (tmp_path / "run/peer").iterdir():
        path.unlink()
    export_weights(tmp_path / "run", tmp_path / "out")
    exported, given = load_file(tmp_path / "out/model.safetensors"), peers.tensors(name)
    assert exported.keys() == given.keys()
    assert all(np.array_equal(exported[x], given[x]) for x in given)
    import_weights(tmp_path / "out", tmp_path / "again", tokenizer="byte")
    assert run_config(tmp_path / "run").model == run_config(tmp_path / "again").model


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_both_forms_of_mamba_are_the_same_model(tmp_path, kind):
    """`test_peers.py` compares that of transformers with PyTorch; mamba_ssm has no forward pass without a GPU."""
    models = []
    for name in (f"{kind} tied", f"{kind} of mamba_ssm"):
        import_weights(peers.write(tmp_path / name, name), tmp_path / f"run {name}", tokenizer="byte")
        loaded = load_run(tmp_path / f"run {name}")
        models.append((loaded.config.model, jax.device_get(nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param)))))
    (config, params), (other_config, other_params) = models
    assert config == other_config
    jax.tree.map(np.testing.assert_array_equal, params, other_params)


def damaged(folder, name, change):
    made = peers.tensors(name)
    change(made)
    return peers.write(folder, name, made)


def without(*names):
    return lambda made: [made.pop(name) for name in names]


CONV, HEAD = "backbone.layers.1.mixer.conv1d.weight", "lm_head.weight"
QWEN = "model.language_model.layers."
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
    ("delta_net", lambda x: x.update({LAYERS[0]: x[LAYERS[0]].T.copy()}), [LAYERS[0], "(12, 6), should be (6, 12)"]),
    ("rwkv7", without("model.layers.0.pre_norm.bias"), ["'model.layers.0.pre_norm.bias'", "missing"]),
    (
        "rwkv7",
        lambda x: x.update({"model.layers.0.attn.v_lora.lora.2.bias": x["model.norm.bias"]}),
        ["no tensors 'model.layers.0.attn.v_lora.lora.2.bias'"],
    ),
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
        ["linear_attn.conv1d.weight", "(35, 1, 4), should be (36, 1, 4)"],
    ),
    ("olmo_hybrid", without("model.layers.1.self_attn.q_norm.weight"), ["self_attn.q_norm.weight'", "missing"]),
    (
        "olmo_hybrid",
        lambda x: x.update({"model.layers.0.linear_attn.conv1d.weight": x["model.norm.weight"]}),
        ["no tensors 'model.layers.0.linear_attn.conv1d.weight'"],
    ),
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
    ("mamba2", {"num_heads": 5}, ["num_heads is 5; it should be 4"]),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, ["time_step_limit is [0.0, 0.1]"]),
    ("mamba2", {"new_gate": 3}, ["'new_gate'", "not known"]),
    ("mamba2", {"state_size": "3"}, ["state_size is '3'", "an integer ≥ 1"]),
    ("mamba2", {"hidden_size": None}, ["hidden_size is missing"]),
    ("mamba2", {"n_groups": 3}, ["ssm.groups=3 must divide the 4 heads"]),
    ("mamba2", {"layer_norm_epsilon": 0}, ["layer_norm_epsilon is 0", "positive"]),
    ("mamba2", {"tie_word_embeddings": 1}, ["tie_word_embeddings is 1", "true or false"]),
    ("mamba2 of mamba_ssm", {"attn_layer_idx": [1]}, ["attn_layer_idx is [1]"]),
    ("mamba2 of mamba_ssm", {"ssm_cfg": {"layer": "Mamba3"}}, ["model_type None", "mamba2 of mamba_ssm"]),
    ("mamba", {"use_conv_bias": False}, ["use_conv_bias is False", "True"]),
    ("mamba", {"intermediate_size": 24}, ["intermediate_size is 24; it should be 16"]),
    ("mamba", {"time_step_rank": "automatic"}, ["time_step_rank is 'automatic'", "an integer ≥ 1"]),
    ("mamba", {"ssm_cfg": {"d_state": 4}}, ["ssm_cfg is {'d_state': 4}"]),
    ("mamba", {"mixer_rms_eps": 1e-6}, ["'mixer_rms_eps'", "not known"]),  # of Falcon Mamba
    ("mamba of mamba_ssm", {"ssm_cfg": {"bias": True}}, ["ssm_cfg: bias is True"]),
    ("mamba of mamba_ssm", {"ssm_cfg": {"headdim": 4}}, ["'headdim'", "not known"]),
    ("mamba of mamba_ssm", {"rms_norm": False}, ["rms_norm is False"]),
    ("gated_deltanet", {"allow_neg_eigval": 1}, ["allow_neg_eigval is 1", "true or false"]),
    ("gated_deltanet", {"num_v_heads": 3}, ["value_heads=3 must be a multiple of num_heads=2"]),
    ("gated_deltanet", {"expand_v": 1.5}, ["expand_v gives 1.5", "whole number"]),
    ("gated_deltanet", {"attn": 3}, ["attn is 3; it should be an object, a list of objects or null"]),
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
    ("qwen3_5", {"model_type": "qwen3_5_moe_text"}, ["model_type 'qwen3_5_moe_text'"]),
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
    ("rwkv7", {"value_dim": [12, 24]}, ["value_dim is [12, 24]; it should be 12 or [12, 12]"]),
    ("rwkv7", {"num_heads": 4}, ["num_heads is 4; it should be 3"]),
    ("rwkv7", {"head_dim": 5, "num_heads": None}, ["head_dim is 5; it should divide hidden_size, 12"]),
    ("rwkv7", {"attn": {"layers": [1]}}, ["attn is {'layers': [1]}"]),
]


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
        ["eos token is 264; it should be an integer from 0 to 263"],
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
        with pytest.raises(ConfigError, match=r"'gs://bucket/\w+' is in a store; it should be on a disk"):
            call()
    with pytest.raises(ConfigError, match=r"there is no run in it"):
        export_weights(run_dir, tmp_path / "out")


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


def shared_norm(eps, **fields):
    """A model whose heads' norm has an eps of `eps` millionths, as a decimal."""
    sizes = {"dim": 24, "num_layers": 2, "num_heads": 2, **fields}
    return ModelConfig(**sizes, head_norm=HeadNormConfig(shared=True, eps=float(f"{eps}e-6")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            ModelConfig(),
            r"mixer 'memory'; those that can be exported are deltanet \(or with attention and swa\), .*, mamba, mamba2,",
        ),
        (ModelConfig(mixer=("mamba2", "swa")), "no public family has mixer"),
        (ModelConfig(mixer="gla"), "head_norm.shared is False; in this form it is True"),
        (
            ModelConfig(mixer="deltanet", head_dim=16, head_norm=HeadNormConfig(shared=True)),
            "head_norm.eps is None; in this form it is 1.6e-05",
        ),
        (ModelConfig(mixer="mamba2", ssm=SSMConfig(head_dim=32)), "ffn is 'swiglu'; in this form it is 'none'"),
        (ModelConfig(mixer="gla", head_norm=HeadNormConfig(shared=True), norm="layer"), "norm is 'layer'"),
        (
            ModelConfig(mixer="mamba", ffn="none", embedding_norm=True),
            "embedding_norm is True; in this form it is False",
        ),
        (
            dataclasses.replace(get_preset("qwen3.5-0.8b"), conv_width=2, positions="learned", max_positions=8),
            "qwen3_5 cannot have this model: positions is 'learned'",  # of three families the one with the fewest differences
        ),
    ],
)
def test_refuses_to_export_what_no_form_has(config, words):
    def check():
        convert._form_of(config)

    with pytest.raises(ConfigError, match=words):
        check()


@pytest.mark.parametrize(
    ("name", "config", "sizes"),
    [
        ("delta_net", shared_norm(5, mixer="deltanet", head_dim=5), {"expand_k": (24, 10)}),
        ("gla", ModelConfig(mixer="gla", dim=720, num_heads=8, head_dim=104, head_norm=HeadNormConfig(True)),
         {"expand_k": (720, 832), "expand_v": (720, 832)}),
        ("delta_net", shared_norm(10, mixer="deltanet", dim=7, num_heads=1, head_dim=10), {"expand_k": (7, 10)}),
        ("olmo_hybrid", shared_norm(960, mixer=("gated_deltanet", "attention"), block=("pre_norm", "post_norm"), head_dim=96,
                               attention=AttentionConfig(qk_norm="all", head_dim=12, value_dim=12)), {}),
        ("qwen3_5", shared_norm(96, mixer=("gated_deltanet", "attention"), norm="rms_plus_one", head_dim=96,
                           attention=AttentionConfig(rope_dim=60, head_dim=88, value_dim=88, qk_norm="head", gate=True)),
         {"partial_rotary_factor": (88, 60)}),
    ],
)  # fmt: skip
def test_rounding_is_no_difference(name, config, sizes):
    """The eps of a form is a product that a config may not have been computed by; peers compute int(whole · fraction)."""
    family, given = convert._form_of(config)
    assert family.name == name
    given |= given.get("rope_parameters", {})
    assert {field: (whole, int(whole * given[field])) for field, (whole, _) in sizes.items()} == sizes


def test_the_preset_of_a_family_is_what_would_be_imported():
    family = next(family for family in FAMILIES if family.name == "qwen3_5")
    model = get_preset("qwen3.5-0.8b")
    assert family.to_ours({**family.to_peer(model), "dtype": "bfloat16"}) == model


def test_layouts_forwards_and_backwards():
    array = np.arange(2 * 3 * 4).reshape(3, 2, 4)
    tensor = layout.to_peer("(h k) (1) w -> w h k", array)
    assert tensor.shape == layout.peer_shape("(h k) (1) w -> w h k", array.shape) == (8, 1, 3)
    assert tensor[1 * 4 + 3, 0, 2] == array[2, 1, 3]
    assert np.array_equal(layout.to_ours("(h k) (1) w -> w h k", tensor, array.shape), array)


def test_families_have_names_of_their_own():
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinary")
    source = peers.write(folder / "source", "gated_deltanet")
    assert cli.main(["import", str(source), "--run-dir", str(folder / "run"), "--tokenizer", "byte"]) == 0
    (folder / "text.txt").write_text(TEXT)
    return folder / "run"


def test_an_imported_model_is_an_ordinary_run(run_dir, capsys):
    """Evaluated, sampled, trained on any data and exported by the same commands as any other run."""
    place, text = ["--run-dir", str(run_dir)], str(run_dir.parent / "text.txt")
    assert cli.main(["evaluate", *place, "--text", text, "--max-batches", "1"]) == 0
    assert "step 0" in capsys.readouterr().out
    assert cli.main(["generate", *place, "--prompt", "the", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the")
    data = ["--data.source", "text", "--data.paths", text, "--data.sequence-length", "16", "--data.batch-size", "2"]
    options = [*data, "--optimizer.name", "optax:sgd", "--mesh.data", "1", "--eval-batches", "1", "--no-tensorboard"]
    assert cli.main(["train", *place, *options, "--steps", "2"]) == 0
    assert "Starting from the parameters in" in capsys.readouterr().out
    out = run_dir.parent / "out"
    assert cli.main(["export", str(out), *place]) == 0
    assert "gated_deltanet" in capsys.readouterr().out
    exported, given = load_file(out / "model.safetensors"), peers.tensors("gated_deltanet")
    assert {x: (y.shape, y.dtype) for x, y in exported.items()} == {x: (y.shape, y.dtype) for x, y in given.items()}
    assert all(0 < np.abs(exported[x] - given[x]).max() < 1 for x in given)
    assert cli.main(["export", str(run_dir.parent / "old"), *place, "--step", "0"]) == 0
    old = load_file(run_dir.parent / "old/model.safetensors")
    assert all(np.array_equal(old[x], given[x]) for x in given)
    # If the only checkpoint since then is damaged, it is set aside, and training begins with the imported parameters again.
    saved = run_dir / "checkpoints/2"
    largest = max((path for path in saved.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert cli.main(["train", *place, *options, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "The checkpoint of step 2 is unusable: damaged" in said
    assert "Starting from the parameters in" in said
    assert (run_dir / "damaged/2").is_dir()


@pytest.mark.parametrize(  # what divides sizes of the model
    ("name", "devices"), [("mamba2", 8), pytest.param("qwen3_5", 2, marks=pytest.mark.slow)]
)
def test_several_devices_give_the_logits_of_one(tmp_path, monkeypatch, name, devices):
    """An import reads each parameter into its place on the mesh; a run of one device loads the same numbers."""
    source, tokens = peers.write(tmp_path / "source", name), jax.random.randint(jax.random.key(0), (2, 9), 0, 200)
    logits, params = [], []
    for count in (devices, 1):
        made = lambda config, count=count: make_mesh(config, jax.devices()[:count])
        monkeypatch.setattr("atlasjax.interop.convert.make_mesh", made)
        monkeypatch.setattr("atlasjax.train.load.make_mesh", made)
        import_weights(source, tmp_path / f"run {count}", tokenizer="byte")
        model = load_run(tmp_path / f"run {count}").model
        leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        assert {len(leaf.sharding.device_set) for leaf in leaves} == {count}
        assert any(not leaf.is_fully_replicated for leaf in leaves) == (count > 1)
        params.append([np.asarray(leaf) for leaf in leaves])
        logits.append(np.asarray(model(tokens)))
    assert all(np.array_equal(a, b) for a, b in zip(*params, strict=True))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5 * np.abs(logits[1]).max())


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    source = peers.write(tmp_path / "source", "mamba2", model_type="gpt2")
    assert cli.main(["import", str(source), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("atlasjax: config.json has model_type 'gpt2'")
    assert said.count("\n") == 1
