"""The tokens for the beginning and the end of texts, as the files beside public weights name them."""

import json
import types

import pytest

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.interop.text_ends import text_ends
from atlasjax.nn import ModelConfig
from atlasjax.train import TrainConfig
from atlasjax.train.setup import write_run_files

ADDED = {"added_tokens": [{"id": 0, "content": "<|endoftext|>"}, {"id": 5, "content": "<s>"}]}
NAMED = {"bos_token": "<s>", "eos_token": {"content": "<|endoftext|>"}}
WITH_IDS = {"bos_token": None, "eos_token": "<e>", "added_tokens_decoder": {"7": {"content": "<e>"}}}
CONFIG = {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, ())),
        ({"tokenizer_config.json": NAMED, "tokenizer.json": ADDED}, (5, (0,))),
        ({"tokenizer_config.json": WITH_IDS}, (None, (7,))),
        ({"config.json": CONFIG}, (1, (2,))),
        ({"config.json": CONFIG, "generation_config.json": {"eos_token_id": [4, 2]}}, (1, (4, 2))),
        ({"config.json": CONFIG, "tokenizer_config.json": NAMED, "tokenizer.json": ADDED}, (5, (0, 2))),
        ({"config.json": {"eos_token_id": None, "text_config": CONFIG}}, (1, (2,))),
        ({"config.json": {"text_config": CONFIG}, "tokenizer_config.json": WITH_IDS}, (1, (7, 2))),
        ({"config.json": [1]}, (None, ())),
    ],
)
def test_text_ends(tmp_path, files, expected):
    (tmp_path / "peer").mkdir()
    for name, content in files.items():
        (tmp_path / "peer" / name).write_text(json.dumps(content))
    assert text_ends(tmp_path) == expected


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer/generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json' is not JSON"):
        text_ends(tmp_path)


def test_a_run_that_starts_from_an_imported_one_has_them_too(tmp_path):
    """With its chat template; what belongs to the imported weights themselves stays with them."""
    peer = tmp_path / "imported/peer"
    peer.mkdir(parents=True)
    (peer / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (peer / "chat_template.jinja").write_text("{{ messages }}")
    (peer / "additional_chat_templates").mkdir()
    (peer / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (peer / "manifest.json").write_text("{}")
    config = TrainConfig(ModelConfig(), run_dir=str(tmp_path / "new"), init_from=str(tmp_path / "imported"))
    write_run_files(types.SimpleNamespace(config=config, tokenizer=ByteTokenizer()))
    assert text_ends(tmp_path / "new") == (None, (5, 6))
    assert {path.name for path in (tmp_path / "new/peer").iterdir()} == {
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates",
    }
    assert (tmp_path / "new/peer/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
    (peer / "chat_template.jinja").unlink()
    write_run_files(types.SimpleNamespace(config=config, tokenizer=ByteTokenizer()))  # resumed
    assert (tmp_path / "new/peer/chat_template.jinja").read_text() == "{{ messages }}"
