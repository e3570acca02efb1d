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
from atlasjax.interop import FAMILIES, convert, export, export_weights, families, import_weights, layout, tensors
from atlasjax.interop.family import Sizes
from atlasjax.nn import AttentionConfig, HeadNormConfig, ModelConfig
from atlasjax.presets import get_preset
from atlasjax.train.errors import ConfigError
from atlasjax.train.load import load_run
from atlasjax.train.saving.runs import run_config
from tests.interop import peers
from tests.marks import if_slow, some_slow
from tests.train.tiny import TEXT


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("mamba2", "F32", 3), if_slow("mamba2 tied", "BF16", 1), ("mamba2 of mamba_ssm", "F16", 1), if_slow("mamba", "BF16", 2),
        ("mamba of mamba_ssm", "F32", 1), if_slow("gated_deltanet", "BF16", 2), ("delta_net", "F32", 1), ("gla", "F32", 1),
        ("gated_deltanet with attention", "F32", 1), ("olmo_hybrid", "F16", 1), ("qwen3_5 with images", "BF16", 2),
        if_slow("qwen3_5", "F32", 1), ("rwkv7", "BF16", 2), ("granitemoehybrid", "BF16", 2), ("bamba", "F32", 1),
        ("falcon_h1", "F16", 1), ("nemotron_h", "BF16", 2), ("lfm2", "F32", 1),
        ("kimi_linear", "BF16", 2), ("kimi_linear with joined tensors", "F32", 1), ("nemotron_h with experts", "F32", 1),
        ("kda", "BF16", 2), ("gated_deltaproduct", "F16", 1), if_slow("comba", "F32", 1), ("mesa_net", "BF16", 2),
        ("falcon_mamba", "F32", 1), ("mamba3", "BF16", 2), ("granitemoehybrid with experts", "BF16", 2), ("qwen3_next", "F32", 2),
        ("qwen3_5_moe with joined experts", "BF16", 1),
    ],
)  # fmt: skip
def test_round_trip_is_exact(tmp_path, name, dtype, count):
    """Every file is the imported one, byte for byte: tensors in the dtype and order that they had, index, config.json."""
    source = peers.write(tmp_path / "source", name, dtype=dtype, files=count)
    others = "generation_config processor_config preprocessor_config video_preprocessor_config chat_template"
    for beside in others.split():
        (source / f"{beside}.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
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
        assert convert._model(families.family_of(given), given | said, folder).dtype == expected


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
            "granitemoehybrid",
            "granitemoehybrid with experts",
            "qwen3_next",
            "bamba",
            "falcon_h1",
            "nemotron_h",
            "nemotron_h with experts",
            "kimi_linear",
            "lfm2",
            "kda",
            "gated_deltaproduct",
            "comba",
            "mesa_net",
            "falcon_mamba",
            "mamba3",
        ],
        ["mamba2", "gated_deltanet", "delta_net", "gla", "qwen3_5", "rwkv7", "olmo_hybrid", "comba", "mesa_net"],
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


@pytest.mark.parametrize("kind", some_slow(["mamba", "mamba2"], ["mamba"]))
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


def shared_norm(eps, **fields):
    """A model whose heads' norm has an eps of `eps` millionths, as a decimal."""
    sizes = {"dim": 24, "num_layers": 2, "num_heads": 2, **fields}
    return ModelConfig(**sizes, head_norm=HeadNormConfig(shared=True, eps=float(f"{eps}e-6")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            ModelConfig(),
            r"mixer 'memory'; families have comba \(or with attention and swa\), .*, mamba, mamba2 \(or",
        ),
        (ModelConfig(mixer=("mamba2", "swa")), "no public family has mixer"),
        (ModelConfig(mixer="gla"), "head_norm.shared is False; in this form it is True"),
        (
            ModelConfig(mixer="deltanet", head_dim=16, head_norm=HeadNormConfig(shared=True)),
            "head_norm.eps is None; in this form it is 1.6e-05",
        ),
        (ModelConfig(mixer="mamba"), "mamba cannot have this model: ffn is 'swiglu'; in this form it is 'none'"),
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
        export._form_of(config)

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
    family, given = export._form_of(config)
    assert family.name == name
    given |= given.get("rope_parameters", {})
    assert {field: (whole, int(whole * given[field])) for field, (whole, _) in sizes.items()} == sizes


def test_the_preset_of_a_family_is_what_would_be_imported():
    family = next(family for family in FAMILIES if family.name == "qwen3_5")
    model = get_preset("qwen3.5-0.8b")
    assert family.to_ours({**family.to_peer(model), "dtype": "bfloat16"}, Sizes()) == model


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
