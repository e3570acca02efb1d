"""Saves by other versions and in wrappers: what changes nothing is read and said, what changes something is refused."""

import json
import math

import numpy as np
import pytest

from atlasjax.interop import convert, export_weights, import_weights, tensors
from atlasjax.interop.convert import peer_config
from atlasjax.interop.family import INERT
from atlasjax.storage.tensors import named
from tests.interop import peers
from tests.interop.test_refused import refused


def read(source):
    """The config, the arrays and the notes of an import, without a run."""
    with tensors.Folder(source) as folder:
        found = convert._of_family(peer_config(source), folder, lambda model: model)
        arrays = {path: found.make(path, x.shape) for path, x in named(found.shapes).items()}
    return found.model, arrays, found.notes


def renamed(change, name="gla"):
    return {change(tensor): x for tensor, x in peers.tensors(name).items()}


def in_layers(wrapper):
    return lambda name: name.replace(".layers.1.", f".layers.1.{wrapper}.")


WRAPPED = [
    ("gla", lambda name: f"module.{name}", "have 'module.'"),
    ("gla", lambda name: f"_orig_mod.module.{name}", "have '_orig_mod.', 'module.'"),
    ("gla", in_layers("_orig_mod"), "have '_orig_mod.'"),
    ("gla", in_layers("_fsdp_wrapped_module._checkpoint_wrapped_module"), "have '_checkpoint_wrapped_module.', '_fsdp_wrapped_"),
    ("gla", lambda name: f"model.{name}", "have 'model.'"),
    ("mamba2", lambda name: f"model.{name}", "have 'model.'"),
    ("mamba2", lambda name: f"net.{name}", "have 'net.'"),
    ("mamba2 tied", lambda name: name.removeprefix("backbone."), "lack 'backbone.'"),
    ("delta_net", lambda name: name.removeprefix("model."), "lack 'model.'"),
    ("qwen3_5 with images", lambda name: f"module.{name}", "have 'module.'"),
    ("qwen3_5", lambda name: f"_orig_mod.{name}", "have '_orig_mod.'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), WRAPPED)
def test_names_of_wrapped_saves(tmp_path, name, change, words):
    config, arrays, _ = read(peers.write(tmp_path / "plain", name))
    source = peers.write(tmp_path / "wrapped", name, renamed(change, name))
    wrapped_config, wrapped, notes = read(source)
    assert wrapped_config == config
    assert all(np.array_equal(arrays[path], wrapped[path]) for path in arrays)
    assert any(words in note for note in notes), notes


def test_a_wrapped_save_is_exported_as_it_was(tmp_path):
    """With a tensor and numbered files of an older version."""
    made = renamed(lambda name: f"module.{name}", "gated_deltanet")
    made |= {f"module.model.layers.{n}.attn.D": np.ones(2, np.float32) for n in range(2)}
    source = peers.write(tmp_path / "source", "gated_deltanet", made, files=2, return_dict=True)
    (source / "model.safetensors.index.json").unlink()
    done = import_weights(source, tmp_path / "run", tokenizer="byte")
    assert done.kept == 2
    said = "\n".join(done.notes)
    for words in ("no model.safetensors.index.json; the 2 numbered files", "'module.'", "attn.D'", "'return_dict'"):
        assert words in said
    export_weights(tmp_path / "run", tmp_path / "out")
    assert {x.name: x.read_bytes() for x in (tmp_path / "out").iterdir()} == {
        x.name: x.read_bytes() for x in source.iterdir()
    }


def rotary(theta, size):
    return (theta ** -(np.arange(0, size, 2) / size)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("gated_deltanet", {"model.layers.0.attn.D": np.ones(2)}, "attn.D"),
        ("gated_deltanet with attention", {"model.layers.1.attn.rotary.inv_freq": rotary(100, 4)}, "rotary.inv_freq"),
        ("qwen3_5", {"model.rotary_emb.inv_freq": rotary(1e7, 2)}, "rotary_emb.inv_freq"),
        ("olmo_hybrid", {"model.layers.1.self_attn.rotary_emb.inv_freq": rotary(1e4, 4)}, "inv_freq"),  # not rotated
        ("rwkv7", {"model.layers.0.attn.v_lora.lora.2.bias": np.ones(12)}, "v_lora"),
    ],
)
def test_tensors_that_change_nothing(tmp_path, name, extra, words):
    extra = {tensor: x.astype(np.float32) for tensor, x in extra.items()}
    _, arrays, _ = read(peers.write(tmp_path / "plain", name))
    _, others, notes = read(peers.write(tmp_path / "older", name, peers.tensors(name) | extra))
    assert all(np.array_equal(arrays[path], others[path]) for path in arrays)
    assert any("change nothing" in note and words in note for note in notes), notes


def test_shifts_in_one_tensor(tmp_path):
    """Of an older RWKV-7, which has six of a layer; exported as they were."""
    _, arrays, _ = read(peers.write(tmp_path / "plain", "rwkv7"))
    made = peers.tensors("rwkv7")
    for n in range(2):
        parts = [made.pop(f"model.layers.{n}.attn.x_{x}") for x in "rwkvag"]
        made[f"model.layers.{n}.attn.x_x"] = np.concatenate(parts).reshape(6, 12)
    source = peers.write(tmp_path / "older", "rwkv7", made)
    _, others, _ = read(source)
    assert all(np.array_equal(arrays[path], others[path]) for path in arrays)
    import_weights(source, tmp_path / "run", tokenizer="byte")
    export_weights(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gated_deltanet with attention", lambda made: made | {"model.layers.1.attn.rotary.inv_freq": rotary(5000, 4)},
         ["rope_theta 100 for 4 channels", "of about 5000"]),
        ("gated_deltanet", lambda made: {name: x for name, x in made.items() if name != "lm_head.weight"},
         ["'lm_head.weight' are missing", "tie_word_embeddings must be true"]),
        ("delta_net", lambda made: made | {"lm_head.weight": made["model.embeddings.weight"] + 1},
         ["should repeat", "tie_word_embeddings must be false"]),
        ("gla", lambda made: {f"{name}.x": x for name, x in made.items()}, ["are missing. The files have 'lm_head.weight.x', '"]),
    ],
)  # fmt: skip
def test_refuses_tensors_that_change_something(tmp_path, name, change, words):
    refused(peers.write(tmp_path / "source", name, change(peers.tensors(name))), tmp_path / "run", words)


SAME = [
    ("mamba2", {name: True for name in INERT}),
    ("mamba2", {"intermediate_size": 16, "is_encoder_decoder": False, "pruned_heads": {}, "quantization_config": None}),
    ("gated_deltanet", {"expand_k": 0.5, "head_dim": None, "use_mamba_gate": True, "use_residual": False, "gate_fn": "swish"}),
    ("gated_deltanet", {"expand_k": 0.5}),
    ("delta_net", {"use_elu": False, "use_rope": False, "share_conv_kernel": False, "conv_bias": False}),
    ("gla", {"gate_logit_normalizer": 16, "gate_low_rank_dim": 16}),
    ("qwen3_5", {"rope_parameters": None, "rope_theta": 10000000, "partial_rotary_factor": 0.34}),
    ("qwen3_5", {"rope_parameters": None, "rope_theta": 10000000, "partial_rotary_factor": 0.34,
                 "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]}}),
    ("qwen3_5", {"rope_parameters": None, "partial_rotary_factor": 0.34,
                 "rope_scaling": {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000000}}),
    ("qwen3_5", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), SAME)
def test_fields_that_change_nothing(tmp_path, name, changes):
    config, _, _ = read(peers.write(tmp_path / "plain", name))
    assert read(peers.write(tmp_path / "older", name, **changes))[0] == config


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 300.0}, 300),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 300.0}, 300),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 7.0}}, 7),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0}, 5),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 7.0}, None),
    ],
)
def test_older_places_of_the_rotation(tmp_path, changes, theta):
    assert read(peers.write(tmp_path / "source", "olmo_hybrid", **changes))[0].attention.rope_theta == theta


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_5", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "'linear'"]),
        ("qwen3_5", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, ["type is 'yarn'", "'default' or 'mrope'"]),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "default"}}, ["other rope_parameters"]),
        ("gated_deltanet", {"expand_k": 1.0}, ["expand_k is 1; it must be 0.5 or missing"]),
        ("gated_deltanet", {"use_residual": True}, ["use_residual is True", "False"]),
        ("delta_net", {"use_elu": True}, ["use_elu is True; it must be False"]),
        ("gla", {"gate_logit_normalizer": 8}, ["gate_logit_normalizer is 8; it must be 16"]),
        ("mamba2", {"intermediate_size": 24}, ["intermediate_size is 24; it must be 16"]),
        ("mamba2", {"is_encoder_decoder": True}, ["is_encoder_decoder is True; it must be False"]),
        ("mamba2", {"quantization_config": {"bits": 4}}, ["quantization_config is {'bits': 4}; it must be None"]),
    ],
)  # fmt: skip
def test_refuses_fields_that_change_something(tmp_path, name, changes, words):
    refused(peers.write(tmp_path / "source", name, **changes), tmp_path / "run", words)


def test_says_which_files_were_found(tmp_path):
    source = peers.write(tmp_path / "source", "mamba2", files=3)
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00003.safetensors").unlink()
    words = [
        "neither model.safetensors nor",
        "2 of 3 numbered files",
        "'model-00002-of-00003.safetensors' must be there",
    ]
    refused(source, tmp_path / "run", words)
    (source / "model-00001-of-00003.safetensors").unlink()
    (source / "model-00003-of-00003.safetensors").rename(source / "consolidated.safetensors")
    refused(source, tmp_path / "run", ["It has 'consolidated.safetensors': rename"])


@pytest.mark.slow
def test_everything_that_the_peers_classes_write_is_read(tmp_path):
    """Whole configs, with every field of the class and of all configs."""
    transformers = pytest.importorskip("transformers")
    for name, kind in (
        ("mamba2", "Mamba2"),
        ("mamba", "Mamba"),
        ("qwen3_5", "Qwen3_5Text"),
        ("olmo_hybrid", "OlmoHybrid"),
    ):
        source = peers.write(tmp_path / name, name)
        given = json.loads((source / "config.json").read_text())
        if name == "mamba2":
            given["time_step_limit"] = [0.0, math.inf]
        whole = getattr(transformers, f"{kind}Config")(**given).to_dict()
        if name == "olmo_hybrid":
            assert whole["rope_parameters"]["rope_theta"] == 10000  # transformers 5.24 takes null for its default base
            whole["rope_parameters"]["rope_theta"] = None
        (source / "config.json").write_text(json.dumps(whole))
        assert read(source)[0] == read(peers.write(tmp_path / f"{name} plain", name))[0]
