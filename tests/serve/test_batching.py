"""Continuous batching: each text is what `generate` makes of it alone, whatever else is in the slots."""

import collections
import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from atlasjax.distributed.mesh import MeshConfig, make_mesh
from atlasjax.distributed.sharding import parameter_shardings
from atlasjax.generate import SamplingConfig, context, generate
from atlasjax.nn import LanguageModel, MemoryConfig, logical_axes
from atlasjax.nn.caching import CachingConfig
from atlasjax.serve import BatchConfig, Batcher, ClosedError, Done, Failed, Piece, QueueFullError, Request
from atlasjax.serve.prefixes import Prefixes
from atlasjax.train import state as state_lib
from tests.tiny_model import CONFIG, Ascii, model

pytestmark = pytest.mark.usefixtures("compile_fast")

SIZES = BatchConfig(slots=3, queue=4, room=64, pieces=(8, 2))
LENGTH = 8


@functools.cache
def batcher() -> Batcher:
    return Batcher(model(), Ascii(), SIZES, end_tokens=())


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def serve(*requests, each_step=lambda number: None):
    """The events of requests that are submitted at once."""
    events = [[] for _ in requests]
    for request, said in zip(requests, events, strict=True):
        batcher().submit(request, said.append)
    number = 0
    while batcher().step():
        number += 1
        each_step(number)
    return events


def done(events) -> Done:
    assert all(isinstance(event, Piece) for event in events[:-1])
    assert isinstance(events[-1], Done), events[-1]
    return events[-1]


def text_of(events) -> str:
    return "".join(event.text for event in events[:-1])


CASES = [  # a prompt shorter than a piece, one of whole pieces, and a longer one; every option of sampling
    ("a", SamplingConfig(0.0), 0),
    ("the book", SamplingConfig(0.7, top_k=100, top_p=0.8), 1),
    ("the book, question", SamplingConfig(1.0, min_p=0.01, repetition_penalty=1.3), 2**32 - 1),
]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What `generate` makes of each case."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "_PREFILL_PIECE", SIZES.pieces[0])  # fewer lengths to compile
        return [
            np.asarray(generate(model(), ids(text)[None], LENGTH, config=config, seed=seed))[0].tolist()
            for text, config, seed in CASES
        ]


def test_tokens_are_those_of_generate(alone):
    """Five texts in three slots, each with different neighbours."""
    requests = [Request(ids(text), LENGTH, config, seed) for text, config, seed in CASES]
    for order in ((0, 1, 2, 1, 0), (2, 2, 0, 1, 2)):
        for index, events in zip(order, serve(*(requests[i] for i in order)), strict=True):
            result = done(events)
            assert (list(result.tokens), result.reason, result.context) == (alone[index], "length", None)
            assert text_of(events) == Ascii().decode(alone[index])


def test_texts_move_to_the_first_slots(alone):
    """When the first text ends, the second one takes its slot, and steps of one slot follow; its tokens are the same."""
    second, slots = CASES[1], []
    look = lambda _: slots.append([ticket and len(ticket.request.tokens) for ticket in batcher()._in_slot])
    requests = Request(ids("a"), 2), Request(ids(second[0]), LENGTH, *second[1:])
    assert list(done(serve(*requests, each_step=look)[1]).tokens) == alone[1]
    assert [1, 8, None] in slots
    assert slots[-2] == [8, None, None]


def test_contexts_are_those_of_reading(alone):
    """A text that goes on from a kept one is as if it had been one text; what is kept is a value."""
    text, config, seed = CASES[2]
    first, rest = text[:10], text[10:]
    (events,) = serve(Request(ids(first), 0, keep=True))
    kept = done(events)
    assert (kept.tokens, kept.context.num_tokens.tolist()) == ((), [10])
    request = Request(ids(rest), LENGTH, config, seed, context=kept.context)
    for events in serve(request, request):
        assert list(done(events).tokens) == alone[2]
    (events,) = serve(Request(ids(rest), 0, context=kept.context, keep=True))
    everything = done(events).context
    assert everything.num_tokens.tolist() == [18]
    (events,) = serve(Request(ids(""), LENGTH, config, seed, context=everything, keep=True))
    assert list(done(events).tokens) == alone[2]
    assert done(events).context.num_tokens.tolist() == [18 + LENGTH]


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_is_compiled_after_the_warm_up(devices, compiled):
    """Of a model whose parameters lie as `load_run` puts them."""
    graphdef, shapes = state_lib.model_shapes(CONFIG)
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1), jax.devices()[:devices])
    where, _ = parameter_shardings(state_lib.pure(logical_axes(CONFIG)), shapes, mesh)
    params = jax.device_put(state_lib.init_params(CONFIG, jax.random.key(0)), where)
    batcher = Batcher(state_lib.merge(graphdef, params), Ascii(), SIZES, end_tokens=())
    batcher.warm_up()
    programs, kept = len(compiled), []
    assert programs
    say = lambda event: kept.append(event.context) if isinstance(event, Done) else None
    for length in (1, 2, 3, 8, 11, 20):
        batcher.submit(Request(np.arange(length, dtype=np.int32), 2, stop=("never found",), keep=length == 3), say)
        if length % 2:
            while batcher.step():
                pass
    while batcher.step():
        pass
    batcher.submit(Request(np.arange(4, dtype=np.int32), 2, context=next(filter(None, kept))), say)
    while batcher.step():
        pass
    assert (len(kept), len(compiled)) == (7, programs)


def test_a_stop_string_is_not_kept(alone):
    text, config, seed = CASES[1]
    whole = Ascii().decode(alone[1])
    stop = whole[5:7]
    assert whole.index(stop) == 5
    (events,) = serve(Request(ids(text), LENGTH, config, seed, stop=(stop,), keep=True))
    result = done(events)
    assert (text_of(events), result.reason, list(result.tokens)) == (whole[:5], "stop", alone[1][:7])
    (events,) = serve(Request(np.concatenate([ids(text), alone[1][:5]]), 0, keep=True))
    want = done(events).context
    assert result.context.num_tokens.tolist() == want.num_tokens.tolist() == [len(text) + 5]
    np.testing.assert_array_equal(result.context.seen, want.seen)
    for have, leaf in zip(jax.tree.leaves(result.context.cache), jax.tree.leaves(want.cache), strict=True):
        np.testing.assert_allclose(have, leaf, atol=1e-5 * max(1.0, np.abs(np.asarray(leaf)).max()))


def test_an_end_token_ends_a_text(alone, monkeypatch):
    text, config, seed = CASES[1]
    monkeypatch.setattr(batcher(), "end_tokens", frozenset([alone[1][3]]))
    first = alone[1].index(alone[1][3])
    (events,) = serve(Request(ids(text), LENGTH, config, seed))
    assert (done(events).reason, text_of(events)) == ("stop", Ascii().decode(alone[1][:first]))


def test_a_long_prompt_does_not_stop_the_others():
    """Between two pieces of the long prompt the short text gets a token."""
    short, long = [], []
    batcher().submit(Request(ids("a"), 6, SamplingConfig(0.0)), short.append)
    batcher().submit(Request(ids("x" * 56), 1), long.append)
    for step in range(6):  # the first token of each text is of its prompt
        batcher().step()
        assert (len(short), long) == (step, [])
    while batcher().step():
        pass
    done(long)


def test_prompts_go_on_from_their_common_beginning(alone, monkeypatch):
    """The second prompt with a beginning keeps the state after it, the third one goes on from there. Tokens are the same."""
    text, config, seed = CASES[2]
    served = Batcher(model(), Ascii(), SIZES)
    read, lengths = served.slots.read, []
    monkeypatch.setattr(served.slots, "read", lambda tokens, cache: lengths.append(len(tokens)) or read(tokens, cache))

    def ask(prompt, *more):
        events = []
        lengths.clear()
        served.submit(Request(ids(prompt), LENGTH, *more), events.append)
        while served.step():
            pass
        return list(done(events).tokens), sum(lengths)

    assert ask(text[:10] + "and the answer", config, seed)[1] == 24
    assert ask(text, config, seed) == (alone[2], 18)
    assert ask(text[:11] + "!?!?!?", config, seed)[1] == 6  # 10 of the 11 equal tokens: whole pieces
    assert ask(text, config, seed) == (alone[2], 0)
    assert ask(text[:10] + "and the answers", config, seed)[1] == 0  # and one by steps
    served._prefixes = Prefixes(0)
    assert ask(text, config, seed) == (alone[2], 18)


def test_prefixes_are_forgotten_when_they_take_too_much():
    one = context.read(model(), ids("ab")[None], max_length=64)
    size = one.num_bytes + one.logits.nbytes
    kept = Prefixes(2.5 * size)
    texts = [ids(text) for text in ("ab", "cd", "ef")]
    kept.keep(texts[0], one)
    kept.keep(texts[1], one)
    assert kept.longest(ids("abc"), 0) is one  # so the other one is the oldest
    kept.keep(texts[2], one)
    assert [kept.longest(text, 0) is not None for text in texts] == [True, False, True]
    assert kept.longest(texts[0], 2) is None
    assert [kept.shared(ids(text)) for text in ("abc", "abd", "abcd", "x")] == [0, 2, 3, 0]


def test_a_cancelled_request_frees_its_slot_at_once():
    requests = [Request(ids(text), 30) for text in "abcd"]
    events = [[] for _ in requests]
    tickets = [batcher().submit(*pair) for pair in zip(requests, [e.append for e in events], strict=True)]
    for _ in range(6):
        batcher().step()
    assert (batcher().num_active, batcher().num_waiting) == (3, 1)
    before = len(events[0])
    assert before
    tickets[0].cancel()
    batcher().step()
    assert (batcher().num_active, batcher().num_waiting) == (3, 0)
    tickets[2].cancel()
    while batcher().step():
        pass
    assert len(events[0]) == before
    assert [isinstance(e[-1], Done) for e in events] == [False, True, False, True]


def test_time_is_limited(monkeypatch):
    """A text ends when its time is over; without a token it fails."""
    now = [0.0]
    monkeypatch.setattr("atlasjax.serve.batching.time.monotonic", lambda: now[0])

    def later(number):
        now[0] += 10.0 * (number == 8)

    requests = [Request(ids(text), 30, seconds=5.0) for text in ("a", "b", "c", "waits")]
    *served, failed = serve(*requests, each_step=later)
    for events in served:
        assert done(events).reason == "length"
        assert 0 < len(done(events).tokens) < 30
    assert failed == [Failed(True, "the time of 5 s ended before the first token.")]


def test_refused():
    submit = lambda **fields: batcher().submit(Request(**{"tokens": ids("a"), "max_tokens": 1} | fields), print)
    for fields, words in [
        ({"tokens": ids("")}, "the prompt is empty"),
        ({"tokens": np.zeros(2)}, r"tokens is float64 \[2\]"),
        ({"tokens": [256]}, "tokens has the token 256; it should have tokens in"),
        ({"tokens": [3, -1]}, "tokens has the token -1"),
        ({"max_tokens": -1}, "max_tokens must be an integer ≥ 0, got -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"max_tokens": 64}, "the text has 65 tokens, 64 of them to be generated; it should have at most 64"),
        ({"context": read_twice()}, "the memory has 2 texts"),
    ]:
        with pytest.raises(ValueError, match=words):
            submit(**fields)
    for fields, words in [
        ({"slots": 0}, "slots is 0"),
        ({"pieces": (3, 8)}, r"pieces is \(3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            BatchConfig(**fields)
    tickets = [submit() for _ in range(SIZES.slots + SIZES.queue)]
    with pytest.raises(QueueFullError, match="7 requests are waiting"):
        submit()
    for ticket in tickets:
        ticket.cancel()
    assert not batcher().step()


@pytest.mark.parametrize("room", [8, 64])
def test_a_cache_of_segments_bounds_the_texts(room):
    """Also one with room for less than a segment, whose shapes are those of twice the room."""
    memory = MemoryConfig(rule="linear_attention", caching=CachingConfig("grm", segment_size=16))
    segments = dataclasses.replace(CONFIG, mixer="memory", memory=memory, positions="none", max_positions=None)
    assert Batcher(LanguageModel(segments, rngs=nnx.Rngs(0)), Ascii(), BatchConfig(slots=1, room=room)).longest == room


def test_closed():
    """Whoever waits is told, and nobody waits any more."""
    other = copy.copy(batcher())  # its slots are those of the other tests
    other._in_slot, other._waiting, other._reading = [None] * 3, collections.deque(), []
    events = [[] for _ in range(4)]
    for said in events:
        other.submit(Request(ids("a"), 9), said.append)
    other.step()
    other.close("the server was stopped.")
    assert [said[-1] for said in events] == [Failed(False, "the server was stopped.")] * 4
    assert not other.step()
    with pytest.raises(ClosedError, match="the server was stopped"):
        other.submit(Request(ids("a"), 9), print)


def read_twice():
    return batcher().slots.no_text.rows([0, 0])
