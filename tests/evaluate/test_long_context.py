"""Long-context tasks: their definitions, their scores with readers whose answers are known, and a model that reads in pieces."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import cli
from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer
from atlasjax.evaluate import long_context
from atlasjax.evaluate.long_context import TASKS, Haystack, Plan, Prompt, Result, Run, Setting, figures, joined, scoring
from atlasjax.evaluate.long_context.babilong import PLACES
from atlasjax.evaluate.long_context.task import Value
from atlasjax.evaluate.scoring import Score, Scorer
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.train import TrainConfig
from atlasjax.train.load import LoadedRun

pytestmark = pytest.mark.usefixtures("compile_fast")

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. Call me Ishmael! " + " ".join(
    f"Sentence number {i} is about the weather, which was {word} all day."
    for i, word in enumerate(["fine", "wet"] * 40)
)
HAYSTACK = Haystack(TEXT)
BYTES = ByteTokenizer()
WITH_PROMPTS = [name for name, task in TASKS.items() if not task.needs_text]
LENGTHS = (2048, 8192)  # common words has one definition below 4,096 tokens and another from there on


@functools.cache
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train([TEXT], 400)


def make(task: str, length: int, seed: int = 0, depth: float | None = 0.5, tokenizer=BYTES) -> Prompt:
    return TASKS[task].make(Setting(seed, length, tokenizer, HAYSTACK, depth))


@pytest.mark.parametrize("task", WITH_PROMPTS)
def test_prompts(task):
    """Lengths are counted in tokens and answers are in the prompt; equal settings give equal prompts, others do not."""
    for length in LENGTHS:
        prompt = make(task, length)
        np.testing.assert_array_equal(prompt.tokens, BYTES.encode(prompt.text))
        left = length - TASKS[task].num_tokens - len(prompt.tokens)
        assert 0 <= left < 250, "one more unit of haystack would have fitted"
        assert all(answer in prompt.text for answer in prompt.answers)
        assert len(set(prompt.answers)) == len(prompt.answers)
        again, other = make(task, length), make(task, length, seed=1)
        assert (again.text, again.answers) == (prompt.text, prompt.answers)
        assert other.answers != prompt.answers or other.text != prompt.text
    merged = make(task, 8192, tokenizer=bpe())
    np.testing.assert_array_equal(merged.tokens, bpe().encode(merged.text))
    assert 0 <= 8192 - TASKS[task].num_tokens - len(merged.tokens) < 250
    assert len(merged.text) > len(make(task, 8192).text)


@pytest.mark.parametrize("task", [name for name in WITH_PROMPTS if TASKS[name].has_depth])
def test_depth_is_where_the_answer_is(task):
    """And length and depth do not change the question."""
    questions = set()
    for length in LENGTHS:
        places = []
        for depth in (0, 0.25, 0.5, 0.75, 1):
            prompt = make(task, length, depth=depth)
            (answer,) = prompt.answers
            assert prompt.text.count(answer) == 1
            places.append(prompt.text.index(answer) / len(prompt.text))
            questions.add((answer, prompt.text.splitlines()[-1][-40:]))
        # Around the text there are an instruction and a question.
        assert places == sorted(places)
        assert places[0] < 0.15
        assert places[-1] > 0.75
        np.testing.assert_allclose(places, [0, 0.25, 0.5, 0.75, 1], atol=0.25)
    assert len(questions) == 1
    assert make(task, 2048, depth=None).text == make(task, 2048, depth=None).text


def test_a_length_that_is_too_short_is_refused():
    """Nothing is cut off a prompt."""
    for task in WITH_PROMPTS:
        with pytest.raises(ValueError, match=f"task '{task}': a length of 150 tokens is too short; .* needs at least"):
            make(task, 150)
    with pytest.raises(ValueError, match="a length of 4,096 tokens is too short"):
        TASKS["common_words"].check(Plan(lengths=(2048, 4096), samples=1), BYTES, HAYSTACK, np.zeros(0))
    least = int(re.search(r"at least ([\d,]+)", _error(lambda: make("niah_1", 150)))[1].replace(",", ""))
    assert len(make("niah_1", least).tokens) == least - 128
    with pytest.raises(ValueError, match="too short"):
        make("niah_1", least - 1)


def _error(function) -> str:
    with pytest.raises(ValueError) as raised:
        function()
    return str(raised.value)


def test_needles():
    """RULER's sentences: the pass key among repetitions of one, numbers of seven digits, UUIDs of version 4, distractors."""
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    begin, *lines, end = make("niah_1", 2048).text.split("\n")
    assert set(lines) - {noise} == {
        line for line in lines if re.fullmatch(r"One of the special magic numbers for \S+-\S+ is: \d{7}\.", line)
    }
    assert lines.count(noise) == len(lines) - 1
    assert begin.startswith("A special magic number is hidden within the following text.")
    key = re.search(r"for (\S+) is", "\n".join(lines))[1]
    assert end.endswith(f"The special magic number for {key} mentioned in the provided text is")
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", make("niah_3", 2048).answers[0]
    )
    for task, needles, answers in [
        ("niah_2", 1, 1),
        ("niah_multi_key_1", 4, 1),
        ("niah_multi_value", 4, 4),
        ("niah_multi_query", 4, 4),
    ]:
        prompt = make(task, 4096)
        assert len(re.findall(r"One of the special magic numbers for (\S+) is", prompt.text)) == needles
        assert len(prompt.answers) == answers
    assert len(set(re.findall(r"magic numbers for (\S+) is", make("niah_multi_value", 4096).text))) == 1
    haystack = make("niah_multi_key_3", 8192)
    pairs = dict(re.findall(r"magic uuids for (\S+) is: (\S+)\.", haystack.text))
    assert len(pairs) > 40
    assert haystack.answers == (pairs[re.search(r"uuid for (\S+) mentioned", haystack.text)[1]],)


def test_tracing_and_counting():
    """The answers follow from the text alone."""
    prompt = make("variable_tracking", 4096)
    text = prompt.text.rpartition("Memorize")[2]
    value, known = re.search(r"assigned the value (\d+)", text)[1], []
    for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        if of == value or of in known:
            known.append(name)
    assert tuple(known) == prompt.answers
    assert len(known) == 5
    for length, common, others in [(2048, 6, 1), (8192, 30, 3)]:
        prompt = make("common_words", length)
        listed = re.findall(r"\d+\. (\w+)", prompt.text.rpartition("Below is")[2])
        words, counts = np.unique(listed, return_counts=True)
        assert set(counts) == {common, others}
        assert set(words[counts == common]) == set(prompt.answers)
        assert len(prompt.answers) == 10
    for length in (1024, 8192):
        prompt = make("frequent_words", length)
        words, counts = np.unique(
            re.findall(r"\b[a-z]{6}\b", re.search(r"words\. (.*)\nQuestion", prompt.text)[1]), return_counts=True
        )
        assert set(words[np.argsort(-counts)][:3]) == set(prompt.answers)
        assert np.sort(counts)[-4] < np.sort(counts)[-3]


def _solved(facts: list[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Where people are, and where things have been, read from sentences."""
    places: dict[str, str] = {}
    holders: dict[str, str] = {}
    been: dict[str, list[str]] = {}
    for fact in facts:
        person, *_, last = fact.rstrip(".").split()
        if last in PLACES:
            places[person] = last
            for thing in (thing for thing, holder in holders.items() if holder == person):
                been[thing].append(last)
        elif re.search(r"took|got|grabbed|picked up", fact):
            assert last not in holders
            assert been.setdefault(last, [places[person]])[-1] == places[person]
            holders[last] = person
        else:
            assert holders.pop(last) == person
    return places, been


@pytest.mark.parametrize("seed", range(20))
def test_facts_give_the_answer(seed):
    names = "Daniel|John|Mary|Sandra"
    for task in ("babilong_1", "babilong_2", "babilong_3"):
        prompt = make(task, 3072, seed)
        context = re.search(r"<context>\n(.*)\n</context>", prompt.text, re.DOTALL)[1]
        facts = re.findall(rf"(?:{names}) [a-z ]+ the \w+\.", context)
        places, been = _solved(facts)
        thing = re.search(r"the (\w+)", prompt.question)
        if task == "babilong_1":
            expected = places[re.search(rf"{names}", prompt.question)[0]]
        elif task == "babilong_2":
            expected = been[thing[1]][-1]
        else:
            *_, expected, last = been[thing[1]]
            assert prompt.question.endswith(f"before the {last}?")
            assert been[thing[1]].count(last) == 1
        assert prompt.answers == (expected,)
        assert f"Question: {prompt.question}\nAnswer:" in prompt.text


@pytest.mark.parametrize(
    ("score", "text", "expected"),
    [
        (scoring.all_answers, "They are ABC and\x0512.", 1.0),
        (scoring.all_answers, "abc", 0.5),
        (scoring.all_answers, "", 0.0),
        (scoring.any_answer, "only 12", 1.0),
        (scoring.any_answer, "ab c", 0.0),
        (scoring.one_label, " Kitchen. The garden", 1.0),
        (scoring.one_label, "the kitchen or the garden", 0.0),
        (scoring.one_label, "the kitchen, not the office", 1.0),
        (scoring.one_label, "nowhere", 0.0),
        (scoring.one_label, "It was. The kitchen", 0.0),
    ],
)
def test_scores(score, text, expected):
    prompt = Prompt("", np.zeros(0), ("aBc", "12"))
    if score is scoring.one_label:
        prompt = Prompt("", np.zeros(0), ("kitchen",), PLACES, "Where was the milk before the office?")
    assert score(prompt, text) == expected


class Copier:
    """Copies what follows the last line of a prompt where it occurs first; its loss is 1/n after n tokens of context."""

    batch_size = 3

    def generate(self, prompts, num_tokens, tokenizer, *, stop, end_tokens, vocab_size):
        assert vocab_size == tokenizer.vocab_size
        assert end_tokens == (7,)
        texts = []
        for tokens, ends in zip(prompts, stop, strict=True):
            text = tokenizer.decode(tokens)
            words = text.splitlines()[-1]
            copied = text.partition(words)[2][:num_tokens]
            texts.append(min((copied.partition(end)[0] for end in ends), key=len, default=copied))
        return texts

    def score(self, pairs):
        return [Score(np.float32(-1.0 / (len(old) + np.arange(len(new)))), True) for old, new in pairs]


def _run(lengths: tuple[int, ...], **options) -> Run:
    plan = Plan(lengths, **{"depths": (0.0, 1.0), "samples": 2, **options})
    return Run(plan, Copier(), BYTES, HAYSTACK, BYTES.encode(TEXT), end_tokens=(7,))


def asked(task: str, run: Run, length: int) -> Result:
    """The result of all depths."""
    return joined([TASKS[task].result(run, length, depth) for depth in TASKS[task].depths(run.plan)])


@pytest.mark.parametrize(("task", "score"), [("phonebook", 1.0), ("in_context_recall", 1.0), ("niah_1", 0.0)])
def test_a_reader_that_copies(task, score):
    """It finds what follows a name; the sentence of a needle is not that of its question."""
    run = _run((1024, 2048))
    results = [asked(task, run, length) for length in run.plan.lengths]
    for result, length in zip(results, run.plan.lengths, strict=True):
        assert [value.depth for value in result.values] == [None, 0, 1]
        assert [value.count for value in result.values] == [4, 2, 2]
        assert all(value.metrics == {"score": score} for value in result.values)
        assert {(sample.seed, sample.depth) for sample in result.samples} == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert result.tokens == sum(sample.prompt_tokens for sample in result.samples) <= 4 * length
    assert figures.draw(results).startswith(b"\x89PNG")


def test_partial_scores():
    """The score of a task is the mean of its samples."""
    run = _run((1024,), samples=3)
    outputs = iter([True, False, False, True, True, False])
    run.reader.generate = lambda prompts, *_, **__: [BYTES.decode(p) if next(outputs) else "" for p in prompts]
    result = asked("niah_2", run, 1024)
    whole, first, last = result.values
    assert (whole.metrics["score"], first.metrics["score"], last.metrics["score"]) == (0.5, 1 / 3, 2 / 3)
    assert whole.standard_error == pytest.approx(np.std([1, 1, 0, 1, 0, 0], ddof=1) / math.sqrt(6))


CONFIG = ModelConfig(
    vocab_size=256, dim=16, num_layers=1, num_heads=2, mlp_dim=32, dtype="float32", mixer="memory",
    memory=MemoryConfig(rule="linear_attention", chunk_size=4), tie_embeddings=False,
)  # fmt: skip


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def losses(length: int):
    """Of the rows of one parallel call: cross entropy [batch, length - 1]."""
    here = model()

    def run(tokens: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(here(tokens[:, :-1]).astype(jnp.float32))
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]

    return jax.jit(run)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(model(), batch_size=2, pieces=(32,))


def test_perplexity_by_position(scorer):
    """Of a model that reads in pieces, as in one parallel call."""
    length, run = 200, _run((200,), samples=3)
    run = Run(run.plan, scorer, BYTES, HAYSTACK, run.tokens)
    whole, *parts = asked("perplexity_by_position", run, length).values
    starts = [0, (len(run.tokens) - length) // 2, len(run.tokens) - length]
    expected = np.asarray(losses(length)(jnp.stack([run.tokens[a : a + length] for a in starts])), np.float64)
    assert [part.positions for part in parts] == [(1, 64), (64, 128), (128, 200)]
    for value, (a, b) in zip([whole, *parts], [(1, 200), (1, 64), (64, 128), (128, 200)], strict=True):
        nats = expected[:, a - 1 : b - 1]
        assert value.count == nats.size
        assert value.metrics["loss"] == pytest.approx(nats.mean(), rel=1e-4)
        assert value.metrics["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
        assert value.metrics["bits_per_byte"] == pytest.approx(nats.mean() / math.log(2), rel=1e-4)
        assert value.standard_error == pytest.approx(nats.mean(1).std(ddof=1) / math.sqrt(3), rel=1e-2)


@pytest.mark.parametrize("length", [40, 41])
def test_sliding_window(scorer, length):
    """Each token once, in windows that begin every half length."""
    text = BYTES.encode(TEXT)[:151]
    run = Run(Plan((length,), samples=10), scorer, BYTES, HAYSTACK, text)
    (value,) = asked("sliding_window_perplexity", run, length).values
    stride, nats, position = length // 2, [], 1
    for begin in range(0, len(text), stride):
        window = text[begin : begin + length]
        new = begin + len(window) - position
        if new > 0:
            row = np.zeros(length, np.int32)
            row[: len(window)] = window
            nats += list(np.asarray(losses(length)(jnp.asarray(row)[None]))[0, len(window) - 1 - new : len(window) - 1])
            position += new
    assert value.count == len(nats) == 150
    assert value.metrics["loss"] == pytest.approx(np.mean(nats, dtype=np.float64), rel=1e-4)


def test_the_window_changes_which_context_is_seen():
    """A reader whose loss falls with the context: longer windows, smaller loss, of the same tokens."""
    run = _run((32, 64, 128))
    values = [asked("sliding_window_perplexity", run, length).values[0] for length in run.plan.lengths]
    assert {value.count for value in values} == {2 * 128 - 1}
    assert values[0].metrics["loss"] > values[1].metrics["loss"] > values[2].metrics["loss"]


def test_a_text_that_is_too_short_is_refused():
    for task in ("perplexity_by_position", "sliding_window_perplexity"):
        with pytest.raises(ValueError, match=f"task '{task}': the text has 9 tokens; a window has 1,024"):
            TASKS[task].check(Plan(), BYTES, HAYSTACK, np.zeros(9, np.int32))


def test_depths_that_are_no_whole_percent_have_rows_of_their_own():
    values = [Value({"score": 1.0}, math.nan, 1, depth) for depth in (None, 0.12, 0.125, 0.07)]
    table = long_context.report.table([Result("niah_1", 64, values, 64, 1.0, 0, [])])
    assert [row.split("|")[3].strip() for row in table.splitlines()[2:]] == [
        "all", "depth 12%", "depth 12.5%", "depth 7%"
    ]  # fmt: skip


def test_names():
    with pytest.raises(ValueError, match="Unknown task 'niah1'\\. Did you mean 'niah_1'"):
        long_context.find("niah1")
    assert long_context.find(f"{__name__}:OWN") is OWN
    with pytest.raises(ValueError, match="it must be a PromptTask"):
        long_context.find(f"{__name__}:TEXT")


OWN = long_context.PromptTask("own", lambda setting: Prompt("a", BYTES.encode("a"), ("b",)), 1, scoring.any_answer)


def test_the_command(tmp_path, monkeypatch, capsys):
    """Table, JSON, picture and samples of a task; the model reads the prompts themselves."""
    loaded = LoadedRun(model(), BYTES, TrainConfig(model=CONFIG), 7, [])
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda *_, **__: loaded)
    (tmp_path / "book.txt").write_text(TEXT)
    arguments = [
        "--run-dir",
        str(tmp_path),
        "--text",
        str(tmp_path / "book.txt"),
        "--samples",
        "1",
        "--depths",
        "0",
        "50",
    ]
    more = ["--tasks", "niah_2", "sliding_window_perplexity", "--lengths", "1k", "600", "--log-samples"]
    assert cli.main(["evaluate", *arguments, *more]) == 0
    printed = capsys.readouterr().out
    assert "niah_2: a number in a text (RULER)" in printed
    (file,) = (tmp_path / "evaluations").glob("*.json")
    saved = json.loads(file.read_text())
    assert (saved["step"], saved["lengths"], saved["depths"]) == (7, [1024, 600], [0, 0.5])
    assert [(one["task"], one["length"]) for one in saved["results"]] == [
        (task, length) for task in ("niah_2", "sliding_window_perplexity") for length in (1024, 600)
    ]
    assert len(list((tmp_path / "evaluations").glob("*.png"))) == 2
    (samples,) = (tmp_path / "evaluations").glob("*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    settings = [Setting(0, row["length"], BYTES, HAYSTACK, row["depth"]) for row in rows]
    expected = [TASKS["niah_2"].make(setting) for setting in settings]
    assert [row["prompt_tokens"] for row in rows] == [len(prompt.tokens) for prompt in expected]
    assert [tuple(row["answers"]) for row in rows] == [prompt.answers for prompt in expected]
    assert cli.main(["evaluate", *arguments, "--tasks", "niah_2", "--lengths", "200"]) == 2
    assert "task 'niah_2': a length of 200 tokens is too short" in capsys.readouterr().err


def test_an_interrupted_command_goes_on(tmp_path, monkeypatch, capsys):
    """Every cell is in a file as soon as it is finished; the same command asks only for the others, and gives the same results."""
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda *_, **__: LoadedRun(model(), BYTES, config, 7, []))
    config, cells, stop_at = TrainConfig(model=CONFIG), [], 4

    class Stopping(Copier):
        def __init__(self, model, *, batch_size):
            self.batch_size = batch_size

        def generate(self, prompts, num_tokens, tokenizer, *, stop, end_tokens, vocab_size):
            cells.append(len(prompts))
            if len(cells) == stop_at:
                raise RuntimeError("the machine went away")
            texts = super().generate(prompts, num_tokens, tokenizer, stop=stop, end_tokens=(7,), vocab_size=vocab_size)
            return [f"{text}\u2028\u2029\x85\r\x0c" for text in texts]  # which `splitlines` takes for ends of lines

    monkeypatch.setattr("atlasjax.cli.long_context.Scorer", Stopping)
    arguments = ["evaluate", "--tasks", "phonebook", "babilong_1", "--lengths", "1k", "2k", "--depths", "0", "100"]
    arguments += ["--samples", "3", "--batch-size", "2", "--log-samples", "--run-dir"]
    folder = tmp_path / "stopped/evaluations"
    assert cli.main([*arguments, str(folder.parent)]) == 70
    (file,) = folder.iterdir()
    rows = [json.loads(line) for line in file.read_text().removesuffix("\n").split("\n")]
    assert rows[0]["tasks"] == ["phonebook", "babilong_1"]
    assert [(name, depth, result["length"]) for name, depth, result in rows[1:]] == [("phonebook", 0.0, 1024)]
    assert rows[1][2]["values"][0]["metrics"] == {"score": 1.0}
    # Other questions do not go on from it.
    stop_at = 0
    assert cli.main([*arguments, str(folder.parent), "--seed", "1"]) == 0
    assert "going on" not in capsys.readouterr().out
    assert file.exists()
    cells.clear()
    assert cli.main([*arguments, str(folder.parent)]) == 0
    printed = capsys.readouterr().out
    assert f"going on after 1 cells of an interrupted command, in {file}" in printed
    assert cells == [2, 1] * 5  # 3 cells of phonebook are left, and 2 of babilong_1, which has no depths
    assert not file.exists()
    assert cli.main([*arguments, str(tmp_path / "whole")]) == 0
    found = [
        max(place.glob(f"{what}_*"), key=lambda path: path.stat().st_mtime_ns).read_text()
        for what in ("long_context", "samples_phonebook", "samples_babilong_1")
        for place in (folder, tmp_path / "whole/evaluations")
    ]
    timing = ("seconds", "tokens_per_second", "peak_memory")
    results = [
        [{key: value for key, value in result.items() if key not in timing} for result in json.loads(text)["results"]]
        for text in found[:2]
    ]
    assert results[0] == results[1]
    assert found[2] == found[3]
    assert found[4] == found[5]
    file.write_text("{}\n[")
    assert cli.main([*arguments, str(folder.parent)]) == 2
    assert f"{str(file)!r} is damaged; remove it to begin anew" in capsys.readouterr().err
