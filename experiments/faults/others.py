"""The other files that a run, a machine or a corpus has: the choices of kernels (tuned.json), files of memories, a tokenizer of the
same size in place of the run's, prepared shards damaged without a change of size, and banks of elastic memory.

What can be made again is made again; all else is refused in one line that names the file, or the tokenizer.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from atlasjax import memory, rules
from atlasjax.data import DataConfig
from atlasjax.data.pipeline import make_pipeline
from atlasjax.data.preparation import prepare
from atlasjax.data.tokenizers import BpeTokenizer, load_tokenizer
from atlasjax.generate import load_context, read, save_context
from atlasjax.memory import Gates, tuned
from atlasjax.mixers.elastic import banks
from atlasjax.train import load_run
from experiments.faults import damage, signed, small
from experiments.faults.run import Case, case, some

_JSON = (
    "null", "[]", "{}", "3", '"x"', "[null]", "[3]", "[{}]", '{"choices": 3}', "[[[]]]", '[{"device": 3}]', "NaN",
    "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "1" + "0" * 5000,
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, [], {}, "x", -1, 1.5, True, 10**21, [[1]], [10**21], "9" * 21)


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each of these files, damaged and changed in each way."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        small.trained(folder, folder / "run", 2)
        model = load_run(folder / "run").model
        every = [
            *_tuned(folder, rng), *_memories(folder, model, rng), *_tokenizers(folder, rng), *_shards(folder, rng),
            *_banks(folder, rng),
        ]  # fmt: skip
        with mock.patch.dict(os.environ, {"ATLASJAX_CACHE": str(folder / "cache")}):
            yield from some(every, most, rng)


# tuned.json


def _tuned(folder: pathlib.Path, rng: random.Random) -> Iterator[Case]:
    plain = functools.cache(_scanned)
    for kind in damage.FILE:
        yield case(f"tuned.json {kind.__name__}", _scan, folder, plain, damage.on("", kind, rng))
    for text in _JSON:
        yield case(f"tuned.json = {text[:20]}", _scan, folder, plain, lambda file, text=text: file.write_text(text))
    for name in ("tuned.json.partial", ".tuned.json.partial", "tuned.partial", "tuned.tmp", "tuned.json.tmp"):
        yield case(f"a link at {name}", _written, folder, name)


def _choice() -> tuned.Choice:
    rule = rules.linear_attention(chunk_size=4)
    key = tuned.key_of(rule, 4, 4, "float32")
    return tuned.Choice(*key, shape=(1, 8, 2), implementation="xla", backend="", ratio_to_xla=1.0)


def _scanned() -> np.ndarray:
    rule = rules.linear_attention(chunk_size=4)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    x = jax.random.normal(jax.random.key(1), (1, 8, 2, 4))
    return np.asarray(memory.scan(rule, params, None, x, x, x, Gates(step_size=jax.numpy.ones((1, 8, 2))))[0])


def _scan(folder: pathlib.Path, plain: Callable[[], np.ndarray], harm: Callable[[pathlib.Path], object]) -> str:
    """A damaged table of choices is no reason not to compute."""
    damage.gone(folder / "cache")
    (folder / "cache").mkdir()
    file = tuned.write(_choice())
    harm(pathlib.Path(file))
    jax.clear_caches()
    for cached in vars(tuned).values():
        getattr(cached, "cache_clear", small.nothing)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return "right" if np.array_equal(_scanned(), plain()) else "wrong"


def _written(folder: pathlib.Path, name: str) -> str:
    """The file that a link points to stays as it is."""
    damage.gone(folder / "cache")
    (folder / "cache").mkdir()
    precious = folder / "precious"
    precious.write_text("x")
    (folder / "cache" / name).symlink_to(precious)
    tuned.write(_choice())
    return "right" if precious.read_text() == "x" else "wrong"


# Files of memories


def _memories(folder: pathlib.Path, model: Any, rng: random.Random) -> Iterator[Case]:
    whole = folder / "whole.memory"
    context = read(model, [[1, 2, 3]])
    save_context(model, context, whole)

    def loaded(harm: Callable[[pathlib.Path], object]) -> str:
        file = folder / "copy.memory"
        damage.gone(file)
        shutil.copy(whole, file)
        harm(file)
        same = lambda found: (
            small.same(found.cache, context.cache) and np.array_equal(found.num_tokens, context.num_tokens)
        )
        return small.refused(lambda: load_context(model, file), ("copy.memory",), right=same)

    for kind in (*damage.FILE, *damage.FILE):
        yield case(f"memory {kind.__name__}", loaded, damage.on("", kind, rng))
    for field in ("model", "params_sha256", "num_tokens", "max_length", "note"):
        changes = {f"= {str(value)[:20]}": signed.with_field((field,), value) for value in _OTHERS}
        changes["missing"] = signed.without_field((field,))
        for name, change in changes.items():
            yield case(f"memory, {field} {name}", loaded, functools.partial(signed.change_about, change=change))
    others = {"a list": lambda about: [about], "nothing": lambda _: None, "one more": signed.with_field(("x",), 1)}
    for name, change in others.items():
        yield case(f"memory, {name}", loaded, functools.partial(signed.change_about, change=change))


# Tokenizers


def _tokenizers(folder: pathlib.Path, rng: random.Random) -> Iterator[Case]:
    commands = {
        "generate": ("generate", "--run-dir", "{}", "--max-tokens", "2", "--prompt", "a"),
        "evaluate": ("evaluate", "--run-dir", "{}", "--max-batches", "1"),
        "serve": ("serve", "--run-dir", "{}", "--port", "0"),
        "train": ("train", "--run-dir", "{}", "--steps", "4"),
        "train --init-from": ("train", "--init-from", "{}", "--run-dir", "{}-new", "--steps", "2"),
    }
    for kind, swap in {
        "trained on another text": _other_tokenizer,
        "two ids exchanged": functools.partial(_changed_model, _two_exchanged),
        "a merge less": functools.partial(_changed_model, lambda model: model["merges"].pop(0)),
    }.items():
        for name, line in commands.items():
            yield case(f"{name}: tokenizer {kind}", _swapped, folder, swap, line)


def _swapped(folder: pathlib.Path, swap: Callable[[pathlib.Path], None], line: tuple[str, ...]) -> str:
    copy = damage.copied(folder / "run", folder / "copy")
    damage.gone(folder / "copy-new")
    swap(copy / "tokenizer")
    patches = small.not_served() if line[0] == "serve" else []
    return small.asked([word.format(copy) for word in line], ("tokenizer",), patches, right=lambda _: False)


def _other_tokenizer(place: pathlib.Path) -> None:
    size = load_tokenizer(place).vocab_size
    BpeTokenizer.train(["quite another text: " + " ".join(map(str, range(3000)))], size).save(place)


def _changed_model(change: Callable[[dict[str, Any]], object], place: pathlib.Path) -> None:
    file = place / "bpe.json"
    definition = json.loads(file.read_text())
    change(definition["model"])
    file.write_text(json.dumps(definition))


def _two_exchanged(model: dict[str, Any]) -> None:
    one, other = sorted(model["vocab"])[20:22]
    model["vocab"] |= {one: model["vocab"][other], other: model["vocab"][one]}


# Prepared shards


def _shards(folder: pathlib.Path, rng: random.Random) -> Iterator[Case]:
    text = folder / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": small.TEXT[: 20 + n % 50]}) + "\n" for n in range(400)))
    data = DataConfig(source="jsonl", paths=(str(text),), packing="documents")
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(data, str(folder / "prepared"), workers=1, shard_tokens=4000)
    files = sorted(path.relative_to(folder / "prepared") for path in (folder / "prepared").rglob("*") if path.is_file())
    plain = functools.cache(functools.partial(_batches, folder / "prepared"))
    kinds: list[damage.Damage] = [damage.flipped, damage.zeroed, damage.garbled, _exchanged, *damage.FILE]
    for path in files:
        for kind in kinds:
            yield case(f"prepared {path} {kind.__name__}", _read_shards, folder, plain, damage.on(path, kind, rng))


def _exchanged(path: pathlib.Path, rng: random.Random) -> None:
    """Two halves change places: the same bytes in another order."""
    content = path.read_bytes()
    half = len(content) // 4 * 2
    path.write_bytes(content[half:] + content[:half])


def _batches(place: pathlib.Path) -> list[np.ndarray]:
    """All tokens and segments of an epoch."""
    data = DataConfig(
        source="prepared", paths=(str(place),), packing="documents", sequence_length=16, batch_size=4, max_segments=4
    )
    pipeline = make_pipeline(data, load_tokenizer(place / "tokenizer"), "train")
    batches = iter(pipeline)
    return [np.asarray(x) for _ in range(40) for x in jax.tree.leaves(tuple(next(batches)))]


def _read_shards(
    folder: pathlib.Path, plain: Callable[[], list[np.ndarray]], harm: Callable[[pathlib.Path], None]
) -> str:
    expected = plain()
    copy = damage.copied(folder / "prepared", folder / "copy")
    harm(copy)
    same = lambda found: len(found) == len(expected) and all(map(np.array_equal, found, expected))
    return small.refused(lambda: _batches(copy), (str(copy), "prepared", "tokenizer"), right=same)


# Banks of elastic memory


def _banks(folder: pathlib.Path, rng: random.Random) -> Iterator[Case]:
    def loaded(harm: Callable[[pathlib.Path], None]) -> str:
        place = folder / "banks"
        damage.gone(place)
        expected = _bank(place)
        for file in sorted(path for path in place.rglob("*") if path.is_file()):
            harm(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _bank(place)
        return "right" if all(map(np.array_equal, found, expected)) else "wrong"

    for kind in (*damage.FILE, *damage.FILE):
        yield case(f"bank {kind.__name__}", loaded, damage.on("", kind, rng))


def _bank(place: pathlib.Path) -> list[np.ndarray]:
    getattr(banks._load, "cache_clear", small.nothing)()
    return [np.array(x) for x in banks.load(4, 2, 3, cache_dir=place)]
