"""The tokens for the beginning and the end of texts, as the files beside public weights name them."""

import json

import pytest

from atlasjax.interop.text_ends import text_ends

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
    ],
)
def test_text_ends(tmp_path, files, expected):
    (tmp_path / "peer").mkdir()
    for name, content in files.items():
        (tmp_path / "peer" / name).write_text(json.dumps(content))
    assert text_ends(tmp_path) == expected
