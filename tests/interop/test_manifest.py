"""What a run remembers of the files that it was imported from."""

import json

import pytest

from atlasjax.interop import export_weights, import_weights
from atlasjax.train.errors import ConfigError
from tests.interop import peers


@pytest.fixture(scope="module")
def run_with_kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    import_weights(peers.write(folder / "source", "qwen3_5 with images"), folder / "run", tokenizer="byte")
    return folder / "run"


def edit_tensors(change):
    def edit(manifest):
        for content in manifest["files"].values():
            change(content["tensors"])

    return edit


EMBEDDING, KEPT_TENSORS = "model.language_model.embed_tokens.weight", ("model.visual.", "mtp.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest.update(files=[1]), "it is not what the import wrote"),
        (
            lambda manifest: manifest["files"].update({"../x": {"metadata": {}, "tensors": {}}}),
            "not what the import wrote",
        ),
        (lambda manifest: manifest.update(family="llama"), "its family is 'llama'; it must be one of mamba2"),
        (edit_tensors(lambda names: names.update(extra="F32")), "tensor 'extra' is none of the model's"),
        (
            edit_tensors(lambda names: names.update({EMBEDDING: "F9"})),
            f"the dtype of '{EMBEDDING}' is 'F9'; it must be F32",
        ),
        (
            edit_tensors(lambda names: names.update({"mtp.norm.weight": "F16"})),
            "'mtp.norm.weight' is 'F16'; it must be F32",
        ),
        (edit_tensors(lambda names: names.pop(EMBEDDING)), "it has 0 of the names .*; it should have one"),
        (edit_tensors(lambda names: names.pop("mtp.norm.weight")), "it lacks tensor 'mtp.norm.weight'"),
        (
            edit_tensors(lambda names: [names.pop(x) for x in [*names] if x.startswith(KEPT_TENSORS)]),
            "it lacks tensor 'model.visual",
        ),
    ],
)
def test_refuses_a_damaged_manifest(run_with_kept, tmp_path, change, words):
    file = run_with_kept / "peer/tensors.json"
    whole = file.read_bytes()
    manifest = json.loads(whole)
    change(manifest)
    file.write_text(json.dumps(manifest))
    try:
        with pytest.raises(ConfigError, match=words):
            export_weights(run_with_kept, tmp_path / "out")
    finally:
        file.write_bytes(whole)
    assert [*tmp_path.iterdir()] == []
