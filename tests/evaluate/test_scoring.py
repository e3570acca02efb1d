"""Scores and continuations of prompts of unequal length, against the plain forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.evaluate import pieces
from atlasjax.evaluate.pieces import shared_beginnings
from atlasjax.evaluate.scoring import Scorer
from atlasjax.generate import streams
from atlasjax.nn import AttentionConfig, LanguageModel
from tests.tiny_model import CONFIG

pytestmark = pytest.mark.usefixtures("compile_fast")

LONGEST = 64
TEXT = np.random.default_rng(0).integers(32, 127, LONGEST).astype(np.int32)  # whole characters


@functools.cache
def scorer() -> Scorer:
    return Scorer(LanguageModel(CONFIG, rngs=nnx.Rngs(0)), batch_size=3, pieces=(8, 4))


@functools.cache
def forward():
    model = scorer().model
    return jax.jit(lambda tokens: model(tokens))


def logits(tokens: np.ndarray) -> np.ndarray:
    """Of every position, in float64, from one parallel call; what is behind the tokens changes nothing before it."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(forward()(jnp.asarray(row)), np.float64)[0, : len(tokens)]


def expected(context: np.ndarray, continuation: np.ndarray) -> tuple[np.ndarray, bool]:
    of = logits(np.concatenate([context, continuation]))[len(context) - 1 : -1]
    likelihoods = of - np.log(np.exp(of).sum(-1, keepdims=True))
    return likelihoods[np.arange(len(continuation)), continuation], bool((of.argmax(-1) == continuation).all())


def greedy(context: np.ndarray, number: int) -> np.ndarray:
    tokens = context
    for _ in range(number):
        tokens = np.append(tokens, logits(tokens)[-1].argmax()).astype(np.int32)
    return tokens[len(context) :]


def test_scores_of_the_plain_forward_pass():
    """Contexts from one token to more than two pieces; some shared; continuations from one token to several pieces."""
    rng = np.random.default_rng(1)
    pairs = [(TEXT[:n], rng.integers(0, 256, m)) for n, m in [(1, 1), (3, 20), (8, 4), (9, 5), (30, 2), (17, 17)]]
    pairs += [(TEXT[:n], rng.integers(0, 256, m)) for n in (21, 5) for m in (1, 2, 7, 12)]
    pairs += [(TEXT[:21], greedy(TEXT[:21], 3)), (TEXT[:44], TEXT[44:])]
    known = {}
    scores = scorer().score(pairs, on_result=known.__setitem__)
    for i, (score, (context, continuation)) in enumerate(zip(scores, pairs, strict=True)):
        likelihoods, is_greedy = expected(context, continuation)
        np.testing.assert_allclose(score.token_log_likelihoods, likelihoods, rtol=2e-5, atol=2e-5)
        assert score.log_likelihood == pytest.approx(likelihoods.sum(), rel=1e-5)
        assert score.is_greedy == is_greedy
        assert known[i] is score
    assert scores[-2].is_greedy
    assert not all(score.is_greedy for score in scores)


@pytest.fixture
def calls(monkeypatch):
    """What is called on the device, with its numbers of rows and tokens."""
    calls = []
    for name in ("_read_piece", "_score_piece"):
        original = getattr(pieces, name)
        monkeypatch.setattr(pieces, name, lambda *a, name=name, f=original: calls.append((name, *a[2].shape)) or f(*a))
    return calls


def test_a_context_is_read_once_for_all_its_continuations(calls):
    scorer().score([(TEXT[:30], TEXT[i : i + 3]) for i in range(6)])
    # 28 tokens once, then six continuations with the last two tokens of the context, in two batches of three rows.
    assert calls == [("_read_piece", 3, 8)] * 3 + [("_read_piece", 3, 4)] + [("_score_piece", 3, 4)] * 2


def test_a_single_pair_is_read_alone(calls):
    (score,) = scorer().score([(TEXT[:3], TEXT[:2])])
    assert calls == [("_score_piece", 1, 4)]
    np.testing.assert_allclose(score.token_log_likelihoods, expected(TEXT[:3], TEXT[:2])[0], rtol=2e-5, atol=2e-5)


def test_a_beginning_of_many_contexts_is_read_once(calls):
    pairs = [(np.concatenate([TEXT[:19], TEXT[i : i + 5]]), TEXT[:2]) for i in range(20, 27)]
    scores = scorer().score(pairs)
    # 16 tokens once, then what is left of seven contexts, eight tokens with their continuations, in three batches.
    assert calls == [("_read_piece", 3, 8)] * 2 + [("_score_piece", 3, 8), ("_score_piece", 3, 4)] * 3
    for score, pair in zip(scores, pairs, strict=True):
        np.testing.assert_allclose(score.token_log_likelihoods, expected(*pair)[0], rtol=2e-5, atol=2e-5)


def test_shared_beginnings():
    rows = [
        np.array(row) for row in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4], [9, 2, 3, 4, 5], [1, 2], [1, 2, 7])
    ]
    groups = {length: members for length, members in shared_beginnings(rows, 2, 2)}
    assert groups == {4: [0, 1], 2: [2, 5], 0: [3, 4]}
    assert shared_beginnings(rows, 2, 3) == [(2, [0, 1, 2, 5]), (0, [3, 4])]
    assert shared_beginnings(rows, 2, 5) == [(0, [0, 1, 2, 3, 4, 5])]


def num_programs() -> int:
    return sum(f._cache_size() for f in (pieces._score_piece, pieces._read_piece, pieces._read_rest))


def test_new_lengths_compile_nothing():
    before = num_programs()
    scorer().score([(TEXT[:n], TEXT[n : n + m]) for n in range(1, 50, 3) for m in (1, 2, 6, 11)])
    scorer().generate([TEXT[:7], TEXT[:18], TEXT[:30]], 16, ByteTokenizer())
    programs = num_programs(), streams._decode._cache_size()
    # Room for 8, 16, 32 and 64 keys and values; two pieces that are scored, two that are read, and what is left.
    assert programs[0] - before <= 4 * 5
    scorer().score([(TEXT[:n], TEXT[n : n + m]) for n in range(2, 50, 3) for m in (3, 5, 13)])
    scorer().generate([TEXT[:n] for n in range(17, 33, 5)], 5, ByteTokenizer())
    assert (num_programs(), streams._decode._cache_size()) == programs


@pytest.mark.parametrize(
    ("changes", "sizes", "many"),
    [
        # The one context of 57 tokens ends late; the other is read with a long padding.
        ({"positions": "none", "max_positions": None}, [(57, 2), (57, 3), (3, 10)], 1),
        ({"max_positions": 50}, [(46, 3), (46, 4), (3, 2), (3, 40), (50, 1)], 1),
        ({"max_positions": 5}, [(4, 2), (1, 1), (1, 5)], 1),
        ({"max_positions": 50}, [(46, 3), (44, 7), (17, 30), (17, 29)], 5),  # a beginning that is read once
    ],
)
def test_padding_stays_in_the_room_and_in_the_learned_positions(changes, sizes, many):
    """What is beyond is NaN, and attention of the next layer brings it to the tokens before it."""
    model = LanguageModel(
        dataclasses.replace(CONFIG, mixer=("attention", "swa"), attention=AttentionConfig(window=32), **changes),
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(2)
    pairs = [(TEXT[:n], rng.integers(0, 256, m)) for _ in range(many) for n, m in sizes]
    if many > 1:  # contexts that differ after the beginning
        pairs = [(np.append(context[:-1], i), continuation) for i, (context, continuation) in enumerate(pairs)]
    run = jax.jit(lambda tokens: model(tokens))
    for score, (context, continuation) in zip(Scorer(model, batch_size=4, pieces=(16, 8)).score(pairs), pairs):
        row = np.zeros((1, changes["max_positions"] or LONGEST + 16), np.int32)
        text = np.concatenate([context, continuation])[:-1]
        row[0, : len(text)] = text
        logp = jax.nn.log_softmax(run(row)[0, len(context) - 1 : len(text)])
        expected = np.asarray(logp)[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(score.token_log_likelihoods, expected, rtol=2e-5, atol=2e-5)


def test_greedy_continuations():
    prompts = [TEXT[:n] for n in (1, 6, 9, 23, 31)]
    decode = ByteTokenizer().decode
    want = [greedy(prompt, 9) for prompt in prompts]
    numbers = [9, 3, 9, 5, 1]
    known = {}
    texts = scorer().generate(prompts, numbers, ByteTokenizer(), on_result=known.__setitem__)
    assert texts == [decode(tokens[:n]) for tokens, n in zip(want, numbers, strict=True)]
    assert texts == [known[i] for i in range(len(prompts))]
    assert scorer().generate(prompts[:1], np.int64(3), ByteTokenizer()) == [decode(want[0][:3])]
    ended = scorer().generate(prompts, 9, ByteTokenizer(), end_tokens=[int(want[0][2]), int(want[3][4])])
    for text, tokens in zip(ended, want, strict=True):
        ends = np.flatnonzero(np.isin(tokens, [want[0][2], want[3][4]]))
        assert text == decode(tokens[: ends[0]] if len(ends) else tokens)


def test_stop_strings_end_each_text_for_itself():
    prompts = [TEXT[:6], TEXT[:9], TEXT[:4]]
    whole = scorer().generate(prompts, 20, ByteTokenizer())
    stops = [[whole[0][5:8]], [], []]
    texts = scorer().generate(prompts, 20, ByteTokenizer(), stop=stops)
    assert texts == [whole[0][: whole[0].index(stops[0][0])], *whole[1:]]


def test_rows_that_fit_only_apart_are_read_apart():
    """Learned positions: 60 + 4 and 10 + 50 tokens, but not 60 + 50."""
    prompts, numbers = [TEXT[:60], TEXT[:10], TEXT[:5]], [4, 50, 50]
    texts = scorer().generate(prompts, numbers, ByteTokenizer())
    assert texts[0] == ByteTokenizer().decode(greedy(prompts[0], 4))
    assert texts[1].startswith(ByteTokenizer().decode(greedy(prompts[1], 4))[:2])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Scorer(scorer().model, pieces=(4, 8)), "pieces must be positive integers in descending order"),
        (lambda: Scorer(scorer().model, batch_size=0), "batch_size must be an integer ≥ 1"),
        (lambda: scorer().score([([], [1])]), "context is float64"),
        (lambda: scorer().score([([1], [])]), "continuation is float64"),
        (lambda: scorer().score([(TEXT[:60], TEXT[:6])]), "65 tokens, but the model has learned positions"),
        (lambda: scorer().score([([1, 256], [1])]), "context has the token 256; it should have tokens in"),
        (lambda: scorer().score([([1], [-1])]), "continuation has the token -1"),
        (lambda: scorer().read([[256]]), "prompt has the token 256"),
        (lambda: scorer().read([[1]] * 4), "the number of prompts is 4"),
        (lambda: scorer().generate([TEXT[:60]], 5, ByteTokenizer()), "65 tokens, but the model has learned positions"),
        (lambda: scorer().generate([[1]], 0, ByteTokenizer()), "num_tokens must be an integer ≥ 1"),
        (lambda: scorer().generate([[1]], [1, 2], ByteTokenizer()), "the length of num_tokens is 2"),
        (lambda: scorer().generate([[1]], 1, ByteTokenizer(), stop=[[""]]), "stop is ''"),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
