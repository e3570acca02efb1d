"""Runs that were trained here, exported: the peers' own `generate` gives our tokens, and `AutoTokenizer` our ids."""

import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import sentencepiece

from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, SentencePieceTokenizer
from atlasjax.generate import SamplingConfig, generate
from atlasjax.interop import export_weights
from atlasjax.interop.export import _ids
from atlasjax.interop.text_ends import TextEnds, text_ends
from atlasjax.interop.tokenizer_files import tokenizer_of, write
from atlasjax.train.load import load_run
from tests.interop import own_runs
from tests.train.tiny import TEXT

ROOT = pathlib.Path(__file__).parents[2]
FLA = ("gated_deltanet", "delta_net", "gla", "rwkv7", "kda", "gated_deltaproduct", "comba")
TEXTS = ["the memory", "  two  spaces\n\nlines\t and ", "Ünïcödé – 漢字 🙂", "don't 1234", TEXT[:300]]
pytestmark = pytest.mark.usefixtures("compile_fast")


def ask(folder, names, prompts, more):
    """What the peers answer about the exported folders, by name."""
    missing = [x for x in ("torch", "transformers", "fla", "triton") if importlib.util.find_spec(x) is None]
    if missing:
        pytest.skip(f"needs the extra 'interop' ({', '.join(missing)})")
    (folder / "asked.json").write_text(json.dumps({"prompts": prompts.tolist(), "more": more, "texts": TEXTS}))
    command = [sys.executable, "-m", "tests.interop.peer_generate", str(folder), *names]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def check(tmp_path, names, *, more=16):
    prompts = np.random.default_rng(0).integers(0, 256, (2, 5))
    expected, logits = {}, {}
    for name in names:
        run = own_runs.make(tmp_path / f"run {name}", own_runs.MODELS[name])
        assert export_weights(run, tmp_path / name).family == name
        model = load_run(run).model
        logits[name] = np.asarray(model(prompts))
        got = generate(model, prompts, more, config=SamplingConfig(temperature=0))
        expected[name] = np.asarray(got).tolist()
        assert set(range(8)) & {*expected[name][0], *expected[name][1]}  # what some class takes for an end
    for name, answered in ask(tmp_path, names, prompts, more).items():
        assert np.abs(logits[name] - answered["logits"]).max() < 1e-5 * np.abs(logits[name]).max(), name
        assert answered["greedy"] == expected[name], name
        assert answered["ids"] == [[None, None, None]] * 2
        assert answered["size"] == 256
        assert answered["encoded"] == [ByteTokenizer().encode(text).tolist() for text in TEXTS]
        assert answered["decoded"] == TEXTS
        assert answered["named"] == [None, None, None]


def test_the_families_whose_ends_are_other_tokens(tmp_path):
    """Mamba-2's class ends a text at one of eight tokens here; that of OLMo-Hybrid pads with one that is none of the model's."""
    check(tmp_path, ["mamba2", "olmo_hybrid"])


@pytest.mark.slow
def test_the_other_families_of_transformers(tmp_path):
    check(tmp_path, ["mamba", "falcon_mamba", "qwen3_5"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FLA)
def test_families_of_flash_linear_attention(tmp_path, name):
    check(tmp_path, [name], more=8)


def trained(kind):
    """A tokenizer trained on a few lines, with control tokens of its own."""
    if kind == "bpe":
        definition = json.loads(own_definition(BpeTokenizer.train([TEXT], 270)))
        size = len(definition["model"]["vocab"])
        definition["added_tokens"] = [
            {"id": size + i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for i, name in enumerate(("<s>", "<|endoftext|>"))
        ]  # fmt: skip
        definition["post_processor"] = {
            "type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [size], "tokens": ["<s>"]}},
        }  # fmt: skip
        return BpeTokenizer(json.dumps(definition))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT]), model_writer=model, vocab_size=257, model_type=kind.partition(" ")[0], byte_fallback=False,
        hard_vocab_limit=False, minloglevel=2, max_sentence_length=10**6,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


def own_definition(tokenizer):
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return (pathlib.Path(folder) / BpeTokenizer.FILE).read_text()


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bpe pieces"])
@pytest.mark.parametrize("form", ["mamba2", "gated_deltanet", "atlasjax"])
def test_tokenizers(tmp_path, kind, form):
    """The same ids and the same size, in the forms that transformers knows and does not know; nothing is added to a text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(kind)
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    tokenizer.save(tmp_path / "run/tokenizer")
    write(tmp_path / "out", tmp_path / "run", tokenizer, TextEnds(tokenizer.control_tokens["<s>"].id, (0, 1)))
    (tmp_path / "out/config.json").write_text(json.dumps({"model_type": form}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.bos_token == "<s>"
    assert theirs.eos_token_id == 0
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == ids
        assert "⁇" in tokenizer.decode(ids) or theirs.decode(ids) == tokenizer.decode(ids)  # they write "<unk>"
    again = tokenizer_of(tmp_path / "out", None)
    assert again[1].fingerprint == tokenizer.fingerprint


def test_a_run_that_started_from_imported_weights(tmp_path):
    """Its ids are those of the weights, and its tokenizer's files are theirs; in whatever form the model is now."""
    tokenizer = trained("bpe")
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    (run / "peer").mkdir()
    (tmp_path / "out").mkdir()
    tokenizer.save(run / "tokenizer")
    whole = tokenizer._tokenizer.to_str()
    files = {
        "tokenizer.json": whole,
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<s>"}),
        "chat_template.jinja": "{{ messages }}",
    }
    for name, content in files.items():
        (run / "peer" / name).write_text(content)
    write(tmp_path / "out", run, tokenizer, text_ends(run))
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == files
    first = tokenizer.control_tokens["<s>"].id
    assert _ids(text_ends(run)) == {"bos_token_id": first, "eos_token_id": first + 1, "pad_token_id": None}
    assert _ids(TextEnds(None, (3, 4), 5)) == {"bos_token_id": None, "eos_token_id": [3, 4], "pad_token_id": 5}
