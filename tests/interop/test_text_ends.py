"""The tokens for the beginning and the end of texts, as the files beside public weights name them."""

import io
import json
import types

import pytest
import sentencepiece

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.interop.text_ends import described, find, text_ends
from atlasjax.nn import ModelConfig
from atlasjax.train import TrainConfig
from atlasjax.train.setup import write_run_files

ADDED = {
    "added_tokens": [{"id": 0, "content": "<|endoftext|>"}, {"id": 5, "content": "<s>"}, {"id": 9, "content": "<pad>"}]
}
NAMED = {"bos_token": "<s>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"}
WITH_IDS = {"bos_token": None, "eos_token": "<e>", "added_tokens_decoder": {"7": {"content": "<e>"}}}
CONFIG = {"bos_token_id": 1, "eos_token_id": 2}
SPECIAL = {"added_tokens": [{**token, "special": True} for token in ADDED["added_tokens"]]}
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "A"}}, {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "B"}}],
    "special_tokens": {"A": {"id": "A", "ids": [3]}, "B": {"id": "B", "ids": [4]}},
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, (), None)),
        ({"tokenizer_config.json": NAMED, "tokenizer.json": ADDED}, (5, (0,), 9)),
        ({"special_tokens_map.json": NAMED, "tokenizer.json": ADDED}, (5, (0,), 9)),
        ({"special_tokens_map.json": NAMED, "added_tokens.json": {"<s>": 3}}, (3, (), None)),
        ({"tokenizer_config.json": {"eos_token": "x"}, "tokenizer.json": {"model": {"vocab": {"x": 8}}}}, (None, (8,), None)),
        ({"tokenizer_config.json": WITH_IDS}, (None, (7,), None)),
        (
            {"tokenizer_config.json": WITH_IDS, "special_tokens_map.json": NAMED, "tokenizer.json": ADDED},
            (5, (7, 0), 9),
        ),
        ({"config.json": CONFIG}, (1, (2,), None)),
        ({"config.json": CONFIG, "generation_config.json": {"eos_token_id": [4, 2]}}, (1, (4, 2), None)),
        ({"config.json": CONFIG, "tokenizer_config.json": NAMED, "tokenizer.json": ADDED}, (5, (0, 2), 9)),
        ({"config.json": {"eos_token_id": None, "text_config": CONFIG}}, (1, (2,), None)),
        ({"config.json": {"text_config": CONFIG}, "tokenizer_config.json": WITH_IDS}, (1, (7, 2), None)),
        ({"config.json": {"pad_token_id": -1}, "generation_config.json": {"pad_token_id": 3}}, (None, (), 3)),
        ({"config.json": [1]}, (None, (), None)),
    ],
)  # fmt: skip
def test_text_ends(tmp_path, files, expected):
    (tmp_path / "peer").mkdir()
    for name, content in files.items():
        (tmp_path / "peer" / name).write_text(json.dumps(content))
    assert text_ends(tmp_path) == expected


@pytest.mark.parametrize(
    ("definition", "beside", "expected"),
    [
        (ADDED, {}, (None, (), None)),  # no special tokens
        (SPECIAL, {}, (5, (0,), 9)),  # their usual names
        ({**SPECIAL, "post_processor": AROUND}, {}, (3, (4,), 9)),
        ({**ADDED, "post_processor": {"type": "RobertaProcessing", "cls": ["<s>", 5], "sep": ["e", 6]}}, {}, (5, (6,), None)),
        (SPECIAL, {"config.json": {"eos_token_id": 2}}, (5, (2,), 9)),
        (SPECIAL, {"config.json": {"bos_token_id": None}}, (None, (0,), 9)),  # null says that there is none
        (SPECIAL, {"tokenizer/tokenizer_config.json": {"eos_token": "<s>"}}, (5, (5,), 9)),
        (SPECIAL, {"tokenizer_config.json": {"eos_token": "e", "added_tokens_decoder": {"6": {"content": "e"}}},
                   "tokenizer/tokenizer_config.json": {"eos_token": "<s>"}}, (5, (5, 6), 9)),
    ],
)  # fmt: skip
def test_a_tokenizer_given_elsewhere(tmp_path, definition, beside, expected):
    (tmp_path / "peer").mkdir()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/bpe.json").write_text(json.dumps(definition))
    for name, content in beside.items():
        (tmp_path / (name if "/" in name else f"peer/{name}")).write_text(json.dumps(content))
    assert text_ends(tmp_path) == expected


def test_the_ids_of_a_sentencepiece_model(tmp_path):
    model = io.BytesIO()
    sizes = {"vocab_size": 30, "pad_id": 3, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e"]), model_writer=model, **sizes, hard_vocab_limit=False
    )
    (tmp_path / "peer").mkdir()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/sentencepiece.model").write_bytes(model.getvalue())
    assert text_ends(tmp_path) == (None, (2,), 3)
    (tmp_path / "peer/special_tokens_map.json").write_text('{"bos_token": "b", "eos_token": "<unk>"}')
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    (tmp_path / "peer/tokenizer.model").write_bytes(model.getvalue())
    assert text_ends(tmp_path) == (processor.piece_to_id("b"), (0,), 3)


def test_a_run_that_was_trained_here_alone_has_none(tmp_path):
    """Its texts had no such tokens, whatever the tokenizer calls its own."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/bpe.json").write_text(json.dumps(SPECIAL))
    assert text_ends(tmp_path) == (None, (), None)


def test_what_was_found_is_said_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    said = described(find(tmp_path))
    assert said == (
        f"tokens of texts: begin 1 ({tmp_path.name}/config.json); end 4 ({tmp_path.name}/generation_config.json), "
        f"2 ({tmp_path.name}/generation_config.json); padding none"
    )


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
    (tmp_path / "imported/tokenizer").mkdir()
    (tmp_path / "imported/tokenizer/special_tokens_map.json").write_text("{}")
    config = TrainConfig(ModelConfig(), run_dir=str(tmp_path / "new"), init_from=str(tmp_path / "imported"))
    write_run_files(types.SimpleNamespace(config=config, tokenizer=ByteTokenizer()))
    assert text_ends(tmp_path / "new") == (None, (5, 6), None)
    assert {path.name for path in (tmp_path / "new/peer").iterdir()} == {
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates",
    }
    assert (tmp_path / "new/peer/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
    assert (tmp_path / "new/tokenizer/special_tokens_map.json").is_file()
    (peer / "chat_template.jinja").unlink()
    write_run_files(types.SimpleNamespace(config=config, tokenizer=ByteTokenizer()))  # resumed
    assert (tmp_path / "new/peer/chat_template.jinja").read_text() == "{{ messages }}"
