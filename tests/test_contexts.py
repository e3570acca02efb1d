"""What a model holds of a text: several samples from it, prompts after it, and files of it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import cli, memory
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.generate import SamplingConfig, context, generate, load_context, read, save_context, stream
from atlasjax.nn import AttentionConfig, LanguageModel, MemoryConfig, state_bytes
from atlasjax.nn.caching import CachingConfig
from atlasjax.train import TrainConfig
from atlasjax.train.load import LoadedRun
from tests.tiny_model import CONFIG, model

pytestmark = pytest.mark.usefixtures("compile_fast")

PIECE = 4
TEXT = b"the book a question?"
BOOK, QUESTION = TEXT[:12], TEXT[12:]
SAMPLING = SamplingConfig(1.0, min_p=0.01, repetition_penalty=1.3)
LENGTH = 16


@pytest.fixture(autouse=True)
def _pieces(monkeypatch):
    """All prompts are read in pieces of one length, which is compiled once for each size of the cache."""
    monkeypatch.setattr(context, "_PREFILL_PIECE", PIECE)


def ids(*texts: bytes) -> np.ndarray:
    return np.array([list(text) for text in texts], np.int32)


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    """Two samples after the whole text."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "_PREFILL_PIECE", PIECE)
        return np.asarray(generate(model(), ids(TEXT), LENGTH, config=SAMPLING, seed=3, num_samples=2))


def test_samples_are_what_the_definition_draws(whole):
    """Each token, from the logits of the parallel model: the penalty of the tokens before it, min-p, and the position's key."""
    assert whole.shape == (2, LENGTH)
    assert (whole[0] != whole[1]).any()
    text = np.concatenate([np.repeat(ids(TEXT), 2, axis=0), whole], axis=1)
    logits = np.asarray(jax.jit(lambda tokens: model()(tokens))(text), np.float64)
    for i in range(LENGTH):
        end = len(TEXT) + i
        scores = logits[:, end - 1].copy()
        for row, before in zip(scores, text[:, :end], strict=True):
            for token in set(before.tolist()):
                row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
            row[np.exp(row - row.max()) < 0.01] = -np.inf
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(3), i), scores.shape)
        np.testing.assert_array_equal((scores + noise).argmax(-1), text[:, end])


def test_a_prompt_after_a_context(whole):
    book = read(model(), ids(BOOK))
    assert (book.num_tokens.tolist(), book.max_length) == ([len(BOOK)], len(BOOK))
    go_on = functools.partial(generate, model(), num_tokens=LENGTH, config=SAMPLING, seed=3, context=book)
    np.testing.assert_array_equal(go_on(ids(QUESTION), num_samples=2), whole)
    # One context for both rows; a context is a value, which is as it was.
    np.testing.assert_array_equal(go_on(ids(QUESTION, QUESTION)), whole)
    # Nothing after it.
    all_read = read(model(), ids(QUESTION), context=book, max_length=len(TEXT) + LENGTH)
    np.testing.assert_array_equal(go_on(None, context=all_read, num_samples=2), whole)


def test_saved_and_loaded(whole, tmp_path):
    book = read(model(), ids(BOOK))
    save_context(model(), dataclasses.replace(book, note="chapter 1"), tmp_path / "book.memory")
    loaded = load_context(model(), str(tmp_path / "book.memory"))
    for have, want in zip(jax.tree.leaves(loaded.cache), jax.tree.leaves(book.cache), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)
    assert (loaded.num_tokens.tolist(), loaded.max_length, loaded.note) == ([len(BOOK)], len(BOOK), "chapter 1")
    found = generate(model(), ids(QUESTION), LENGTH, config=SAMPLING, seed=3, context=loaded, num_samples=2)
    np.testing.assert_array_equal(found, whole)
    save_context(model(), loaded, "memory://bucket/book.memory")
    np.testing.assert_array_equal(load_context(model(), "memory://bucket/book.memory").logits, book.logits)


GROWING = {
    "elastic": {"mixer": "elastic"},
    "log_linear": {"mixer": "log_linear"},
    "softmax memory": {"memory": MemoryConfig(rule="deep_transformer", chunk_size=4)},
    "cached memories": {
        "memory": MemoryConfig(rule="linear_attention", chunk_size=4, caching=CachingConfig(segment_size=4))
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_room_for_more_tokens(name):
    """States whose size grows with the text go on as if they had been made for the whole text."""
    plain = dataclasses.replace(CONFIG, mixer="memory", num_layers=1, positions="none", max_positions=None)
    one = LanguageModel(dataclasses.replace(plain, **GROWING[name]), rngs=nnx.Rngs(0))
    small = read(one, ids(BOOK))
    large = small.with_room(one, len(TEXT) + LENGTH)
    assert large.num_bytes > small.num_bytes or name == "elastic"
    found = generate(one, ids(QUESTION), LENGTH, config=SAMPLING, context=small)
    np.testing.assert_array_equal(found, generate(one, ids(TEXT), LENGTH, config=SAMPLING))


@pytest.fixture(scope="module")
def empty() -> context.Context:
    """A context without a text, which needs no compilation."""
    shape = (1, CONFIG.vocab_size)
    return context.Context(model().init_cache(1, 8), jnp.zeros(shape), np.zeros(shape, bool), np.zeros(1, np.int32), 8)


def changed(**fields) -> LanguageModel:
    other = nnx.clone(model())
    other.config = dataclasses.replace(CONFIG, **fields)
    return other


def test_files_of_another_model(empty, tmp_path):
    file = tmp_path / "a.memory"
    save_context(model(), empty, file)
    load_context(changed(remat=False, dropout=0.1), file)  # they have no effect on what is read
    for fields, words in {
        "norm_eps": (dict(norm_eps=1e-5), "model.norm_eps is 1e-06 in the file and 1e-05 here"),
        "dtype": (dict(dtype="bfloat16"), "model.dtype is 'float32' in the file and 'bfloat16' here"),
        "window": (dict(attention=AttentionConfig(window=9)), "model.attention.window is None in the file and 9 here"),
    }.values():
        with pytest.raises(ValueError, match=f"'.*a.memory' was saved with another model: {words}"):
            load_context(changed(**fields), file)
    other = nnx.clone(model())
    other.embedding[...] = other.embedding[...].at[0, 0].add(1e-3)
    with pytest.raises(ValueError, match=r"a.memory' was saved with other parameters of this model"):
        load_context(other, file)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"a.memory' is damaged or not a file of the memory of a language model"):
        load_context(model(), file)
    rule = memory.MemoryRule()
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    memory.save(rule, params, memory.init_state(rule, params, batch_size=1), file)
    with pytest.raises(
        ValueError, match="is a file of the state of a memory; it must be one of the memory of a language"
    ):
        load_context(model(), file)


def test_refused(empty):
    with pytest.raises(ValueError, match="context has 2 rows; the prompt has 3, so it should have 1 or 3"):
        stream(model(), ids(b"a", b"b", b"c"), 1, context=empty.rows([0, 0]))
    with pytest.raises(ValueError, match="num_samples is 0; it must be at least 1"):
        stream(model(), ids(b"a"), 1, num_samples=0)
    full = dataclasses.replace(empty, num_tokens=np.array([60], np.int32))
    with pytest.raises(ValueError, match=r"65 tokens, but the model has learned positions for max_positions=64"):
        stream(model(), ids(b"abc"), 2, context=full)
    with pytest.raises(ValueError, match=r"prompt is object \[\]; it must be an integer array"):
        stream(model(), None, 1)


# The command.


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `atlasjax generate` with the model: its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)
    run = LoadedRun(model(), ByteTokenizer(), TrainConfig(model=CONFIG), 0, [])
    monkeypatch.setattr("atlasjax.cli.generate.load_run", lambda *_, **__: run)
    (tmp_path / "runs/atlas-tiny/checkpoints").mkdir(parents=True)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["generate", *arguments])
        return code, *capsys.readouterr()

    return run_command


def test_command(whole, command, tmp_path):
    (tmp_path / "book.txt").write_bytes(BOOK)
    (tmp_path / "both.txt").write_bytes(BOOK + QUESTION)
    options = ["--temperature", "1", "--min-p", "0.01", "--repetition-penalty", "1.3", "--seed", "3", "--samples", "2"]
    length = ["--max-tokens", str(LENGTH), "--prompt", QUESTION.decode()]
    code, printed, _ = command("--prompt-file", "both.txt", *options, *length[:2])
    texts = [bytes(row.tolist()).decode(errors="replace") for row in whole]
    expected = "".join(f"--- sample {i} of 2\n{QUESTION.decode()}{text}\n" for i, text in enumerate(texts, 1))
    assert (code, printed) == (0, expected.replace(QUESTION.decode(), ""))  # what is in a file is not printed

    code, printed, _ = command("--prompt-file", "book.txt", "--save-memory", "book.memory")
    book = read(model(), ids(BOOK))
    twin = dataclasses.replace(CONFIG, mixer="attention", positions="none", max_positions=None)
    keys_and_values = state_bytes(twin, length=len(BOOK)) - 2 * 4  # without each layer's number of tokens
    sizes = (
        f"12 tokens in {book.num_bytes:,} bytes; keys and values of attention of this shape: {keys_and_values:,} bytes"
    )
    assert (code, printed) == (0, f"book.memory: {sizes}\n")
    (tmp_path / "book.txt").unlink()
    code, printed, said = command("--memory", "book.memory", *options, *length)
    assert (code, printed, said) == (0, expected, f"atlasjax: book.memory: {sizes}\n")

    stop = next(text for text in (texts[0][n : n + 3] for n in range(3, LENGTH)) if "\ufffd" not in text)
    code, printed, _ = command("--memory", "book.memory", *options, *length, "--stop", stop)
    cut = [text.partition(stop)[0] for text in texts]
    assert printed == "".join(f"--- sample {i} of 2\n{QUESTION.decode()}{text}\n" for i, text in enumerate(cut, 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min-p", "2"], "min_p is 2.0; it must be in (0, 1]"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be positive"),
        (["--samples", "0"], "samples is 0; it must be at least 1"),
        (["--stop", ""], "stop is ''; a stop string should have at least one character"),
        (["--prompt-file", "latin.txt", "--prompt", "a"], "--prompt and --prompt-file latin.txt both give the text"),
        (["--prompt-file", "latin.txt", "--prompt", ""], "--prompt and --prompt-file latin.txt both give the text"),
        (["--prompt-file", "none.txt"], "prompt_file is 'none.txt', which is not a file"),
        (["--prompt-file", "latin.txt"], "prompt_file is 'latin.txt', which is not UTF-8 at byte 1"),
        (["--prompt-file", "empty.txt"], "prompt_file is 'empty.txt', which is empty"),
        (["--memory", "none.memory"], "memory is 'none.memory', which is not a file"),
        (["--memory", "latin.txt"], "'latin.txt' is damaged or not a file of the memory of a language model"),
        (["--save-memory", "."], "save_memory is '.', which is a folder"),
        (["--save-memory", "none/a.memory"], "save_memory is 'none/a.memory'; its folder does not exist"),
        (["--max-tokens", "62"], "prompt and max_tokens: 66 tokens, but the model has learned positions"),
    ],
)
def test_refused_by_the_command(arguments, words, command, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"a\xe9b")
    pathlib.Path("empty.txt").touch()
    code, printed, error = command(*arguments)
    assert (code, printed) == (2, "")
    assert words in error
    assert len(error.splitlines()) == 1
