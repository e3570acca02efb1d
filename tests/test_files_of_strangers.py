"""Files that somebody else wrote, or that are damaged: one line that names the file, and nothing is imported, built or lost."""

import dataclasses
import functools
import json
import pathlib
import struct
import sys
import warnings

import jax
import numpy as np
import pytest
from flax import nnx

from atlasjax import cli, json_text, memory, rules, storage
from atlasjax.config_json import completed, from_dict, to_dict
from atlasjax.data.manifest import read_manifest
from atlasjax.data.text import json_documents
from atlasjax.data.tokenizers import BpeTokenizer, load_tokenizer
from atlasjax.generate import ContextFiles, read
from atlasjax.interop import files as interop_files
from atlasjax.interop import manifest as interop_manifest
from atlasjax.interop.text_ends import text_ends
from atlasjax.mixers.elastic import banks
from atlasjax.mixers.elastic.config import ElasticConfig
from atlasjax.nn import CachingConfig, LanguageModel, MemoryConfig, ModelConfig
from atlasjax.serve.memories import Memories
from atlasjax.storage import tensors
from atlasjax.train.config import TrainConfig
from atlasjax.train.reports.metrics import read as read_metrics
from atlasjax.train.saving.runs import run_config

DEEP = "[" * 50_000 + "]" * 50_000
DEEPER_THAN_WE_READ = "[" * 150 + "]" * 150  # the parser itself reads this
KIND = "the memory of a language model"
CONFIG = ModelConfig(
    vocab_size=8, dim=4, num_layers=1, num_heads=1, mlp_dim=4, dtype="float32", mixer="memory", conv_width=1,
    memory=MemoryConfig(rule="linear_attention", chunk_size=4, caching=CachingConfig("grm", segment_size=8)),
)  # fmt: skip


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    assert len(text) < 1000, text
    for word in words:
        assert word in text, text


@functools.cache
def files() -> ContextFiles:
    return ContextFiles(LanguageModel(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The arrays of a saved context, and what the file says about them."""
    file = tmp_path_factory.mktemp("kept") / "a.memory"
    files().save(read(files()._model, np.ones((1, 3), np.int32), max_length=16), file)
    return tensors.load(file, KIND)


def with_field(about: dict, path: str, value: object) -> dict:
    """A copy in which a dotted field has another value; `...` takes it out."""
    copy = json.loads(json.dumps(about))
    *parents, last = path.split(".")
    inner = functools.reduce(lambda one, name: one[name], parents, copy)
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model.memory.rule", "antigravity:fly", "model.memory.rule is 'antigravity:fly' in the file and 'linear_attention' here"),
        ("model.mixer", "antigravity:fly", "model.mixer is 'antigravity:fly'"),
        ("model.memory.implementation", "antigravity:fly", "model.memory.implementation is"),
        ("model.memory.caching", ["antigravity:fly"], "model.memory.caching is"),
        ("model", ..., "model is None in the file"),
        ("model", [], "model is [] in the file"),
        ("model", "x" * 10_000, "model is 'xxx"),
        ("model.no_such_field", 3, "model.no_such_field is 3 in the file and None here"),
        ("params_sha256", ..., "other parameters"),
        ("params_sha256", [1], "other parameters"),
        *(("num_tokens", wrong, "num_tokens is") for wrong in
          (..., None, [], "3", 3, [3.0], [True], [-1], [10**21], [[3]], {"0": 3}, [None], [2**31])),
        *(("max_length", wrong, "max_length is") for wrong in (..., None, 0, -4, "16", 16.0, True, 10**21, [16], 2**31)),
        *(("note", wrong, "note is") for wrong in (None, 3, ["a"])),
        ("num_tokens", [3, 3], "has 'cache"),
    ],
)  # fmt: skip
def test_what_a_memory_says_of_itself(field, value, words, kept, tmp_path, monkeypatch):
    """The digest is right, as anybody can make it. No config is built of what the file says."""
    monkeypatch.setattr(ModelConfig, "__post_init__", lambda self: pytest.fail("a config was built"))
    arrays, about = kept
    file = tmp_path / "a.memory"
    tensors.save(file, KIND, arrays, with_field(about, field, value))
    refused(lambda: files().load(file), repr(str(file)), words)
    assert "antigravity" not in sys.modules
    (tmp_path / "served").mkdir()
    file.rename(tmp_path / "served" / "a.memory")
    refused(lambda: Memories(files(), tmp_path / "served").load("a"), "memory 'a'", words)


def test_an_older_memory_lacks_newer_fields(kept, tmp_path):
    """They count as their defaults, at any depth; another value is another model."""
    arrays, about = kept
    file = tmp_path / "a.memory"
    for field in ("model.branch", "model.elastic", "model.memory.window", "model.memory.caching.start"):
        tensors.save(file, KIND, arrays, with_field(about, field, ...))
        assert files().load(file).num_tokens.tolist() == [3]
    tensors.save(file, KIND, arrays, with_field(about, "model.memory.caching.segment_size", ...))
    refused(lambda: files().load(file), "model.memory.caching.segment_size is")
    assert completed({"order": 3}, ElasticConfig()) == to_dict(ElasticConfig()) | {"order": 3}
    assert completed(None, ElasticConfig()) is None


def raw(file: pathlib.Path, about: str, arrays: dict[str, np.ndarray]) -> None:
    """A file whose description is any text, with the right digest."""
    kinds = {dtype: name for name, dtype in tensors.DTYPES.items()}
    described = {name: (kinds[x.dtype], x.shape) for name, x in arrays.items()}
    metadata = {"kind": KIND, "format": "1", "atlasjax": "0", "about": about, "sha256": tensors.digest(arrays, about)}
    file.write_bytes(b"".join(tensors.encoded(described, arrays.__getitem__, metadata)))


def test_other_damage_to_a_memory(kept, tmp_path):
    arrays, about = kept
    file = tmp_path / "a.memory"
    for text, words in (("{", "is not JSON"), ("[]", "must be an object"), ("3", "must be an object"), ("", "is not JSON"),
                        (DEEP, "levels deep"), (DEEPER_THAN_WE_READ, "levels deep")):  # fmt: skip
        raw(file, text, arrays)
        refused(lambda: files().load(file), repr(str(file)), words)
    del arrays["logits"]
    raw(file, json.dumps(about), arrays)
    refused(lambda: files().load(file), repr(str(file)), "lacks 'logits'")
    header = json.dumps({"__metadata__": {"kind": "one\ntwo\x1b[2J"}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    refused(lambda: files().load(file), repr(str(file)), "is a file of 'one")
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    refused(lambda: files().load(file), "is a file of other tensors")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("batch_size", wrong, "batch_size is") for wrong in (..., None, 0, -1, "1", True, 10**21)),
        *(("max_length", wrong, "max_length is") for wrong in (0, -1, "1", 1.5, 10**21)),
        ("rule", ..., "rule is None in the file"),
        ("rule.class", "antigravity:fly", "rule.class is 'antigravity:fly'"),
        ("sizes", 3, "sizes is 3"),
        ("params_sha256", ..., "other parameters"),
    ],
)  # fmt: skip
def test_what_the_state_of_a_memory_says_of_itself(field, value, words, tmp_path):
    rule = rules.delta_rule()
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    file = tmp_path / "a.memory"
    memory.save(rule, params, memory.init_state(rule, params, batch_size=1), file)
    kind = "the state of a memory"
    arrays, about = tensors.load(file, kind)
    tensors.save(file, kind, arrays, with_field(about, field, value))
    refused(lambda: memory.load(rule, params, file), repr(str(file)), words)


def written(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


READERS = {
    "config of a run": ("config.json", lambda folder: run_config(folder)),
    "kind of a tokenizer": ("tokenizer.json", lambda folder: load_tokenizer(folder)),
    "definition of a tokenizer": (
        "bpe.json",
        lambda folder: BpeTokenizer((folder / "bpe.json").read_text(), str(folder)),
    ),
    "manifest": ("manifest.json", lambda folder: read_manifest(folder)),
    "imported tensors": ("tensors.json", lambda folder: interop_manifest.read(folder, ["mamba"])),
    "config of weights": ("config.json", lambda folder: interop_files.read_json(folder / "config.json")),
    "tokens of weights": ("peer/tokenizer_config.json", lambda folder: text_ends(folder)),
    "lines of data": ("a.jsonl", lambda folder: list(json_documents(folder / "a.jsonl", "text"))),
    "any JSON": ("a.json", lambda folder: storage.read_json(folder / "a.json")),
    "any object": ("a.json", lambda folder: storage.read_object(folder / "a.json")),
}


@pytest.mark.parametrize(
    "text", [DEEP, DEEPER_THAN_WE_READ, '{"a": ' * 50_000 + "1" + "}" * 50_000, "{", "\x00", "1" * 5000]
)
@pytest.mark.parametrize("what", READERS)
def test_json_that_cannot_be_read(what, text, tmp_path):
    name, call = READERS[what]
    written(tmp_path / name, text)
    refused(lambda: call(tmp_path), str(tmp_path))


def test_json():
    """One way to read it: as deep as anything here, and no deeper."""
    assert json_text.parse("[" * 100 + "]" * 100, "it")
    refused(lambda: json_text.parse("[" * 102 + "]" * 102, "it"), "it is not JSON that can be read")
    assert json_text.parse(b'{"a": 1, "a": 2}', "it") == {"a": 2}
    refused(lambda: json_text.parse(b'{"b": {"a": 1, "a": 2}}', "it", once=True), "it has the key 'a' twice")
    refused(lambda: json_text.parse(b"\xff\xfe\xfd", "it"), "it is not JSON")
    refused(lambda: MemoryConfig(rule_options=DEEP[:400]), "rule_options must be a JSON object")


def test_lines_of_metrics_that_cannot_be_read(tmp_path):
    file = written(tmp_path / "metrics.jsonl", f'{DEEP}\n{{"step": 1, "kind": "train"}}\n')
    with pytest.warns(UserWarning, match="1 lines are not records"):
        assert len(read_metrics(file)) == 1


def test_odd_fields_of_a_config(tmp_path, capsys):
    """Any value in any field: a config, or one line that names the run."""
    values = json.loads(json.dumps(to_dict(TrainConfig(CONFIG))))
    odd = (None, 10**21, "a\nb\ud800", {"a": 1})
    paths = [*values, *(f"model.{name}" for name in values["model"]), *(f"data.{name}" for name in values["data"])]
    paths += [f"{inner}.{name}" for inner in ("optimizer", "loss", "mesh", "processes") for name in values[inner]]
    paths += [f"model.memory.{name}" for name in values["model"]["memory"]]
    for path in paths:
        for value in odd:
            said = ""
            try:
                from_dict(TrainConfig, with_field(values, path, value))
            except ValueError as error:
                said = str(error)
            assert len(said.splitlines()) <= 1, (path, value, said)
    written(tmp_path / "run" / "config.json", json.dumps(with_field(values, "steps", "three")))
    assert cli.main(["train", "--run-dir", str(tmp_path / "run")]) == 2
    assert f"the config of the run in {tmp_path / 'run'}: TrainConfig.steps" in capsys.readouterr().err


def test_the_manifest_of_prepared_data_names_no_dtype_of_addresses(tmp_path):
    fields = {"format": 1, "fingerprint": "", "vocab_size": 8, "dtype": "O", "packing": "documents", "separator": "", "splits": {},
              "source": {}, "versions": {}}  # fmt: skip
    written(tmp_path / "manifest.json", json.dumps(fields))
    refused(lambda: read_manifest(tmp_path), "is damaged")
    written(tmp_path / "manifest.json", json.dumps(fields | {"dtype": "uint8"}))
    assert read_manifest(tmp_path).token_dtype == np.uint8


def damages(content: bytes):
    """The file cut, and with one or many other bytes at places all over it."""
    yield from (content[:n] for n in range(0, len(content), max(1, len(content) // 10)))
    for place in range(0, len(content), max(1, len(content) // 60)):
        for value in (0, 0xFF, 0x7F):
            yield content[:place] + bytes([value]) + content[place + 1 :]
            yield content[:place] + bytes([value]) * 8 + content[place + 8 :]


def test_damaged_elastic_banks_are_rebuilt(tmp_path):
    """With one warning that names the file; never another bank."""
    size, order = 4, 3
    blocks = banks.blocks_of_a_file(order, size)
    load = lambda: banks._load.__wrapped__(order, size, blocks, "zoh", False, tmp_path, None)
    right = load()
    (file,) = tmp_path.rglob("*.npz")
    content = file.read_bytes()
    for damaged in damages(content):
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = banks._read(file, (blocks, order, size))
        if found is None:
            assert [str(file) in str(one.message) for one in said] == [True]
            assert len(str(said[0].message).splitlines()) == 1
        else:
            for x, y in zip(found, right, strict=True):
                np.testing.assert_array_equal(x, y)
    file.write_bytes(content[:100])
    with pytest.warns(UserWarning, match="rebuilding it"):
        np.testing.assert_array_equal(load().kernels, right.kernels)
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", ["os:getcwd", "os:environ", "json:JSONDecoder", "builtins:print", "threading:Lock"])
def test_what_is_no_backend_is_not_called(name):
    refused(lambda: MemoryConfig(implementation=name), f"implementation='{name}'")
    refused(lambda: dataclasses.replace(CONFIG.memory, implementation=name), f"implementation='{name}'")
    refused(lambda: from_dict(MemoryConfig, {"implementation": "sched:scheduler"}), "nothing was imported")
