"""The real lm-eval on tasks whose data is local, against the same numbers from the model's plain forward pass."""

import contextlib
import functools
import importlib
import io
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import cli
from atlasjax.cli.kept import KeptResults
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.nn import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from atlasjax.serve.chat import TemplateChat
from atlasjax.train import TrainConfig
from atlasjax.train.load import LoadedRun

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

import datasets
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from atlasjax.evaluate.harness import HarnessModel, generation
from atlasjax.evaluate.scoring import Scorer
from atlasjax.generate import SamplingConfig

pytestmark = pytest.mark.usefixtures("compile_fast")

CONFIG = ModelConfig(
    vocab_size=256, dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32", mixer=("memory", "attention"),
    memory=MemoryConfig(rule="linear_attention", chunk_size=4), attention=AttentionConfig(), tie_embeddings=False,
)  # fmt: skip
LONGEST = 160
WINDOW = 16
LINE_END = 10
DOCUMENTS = ["\nIt was a bright cold day in April.", "Call me Ishmael. Some years ago – never mind how long", "x", "\n"]
QUESTIONS = [
    {"question": "Two and two", "choices": ["four", "three or so", "blue"], "answer": 0},
    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1},
    {"question": "A cat says", "choices": ["woof", "quack", "meow", "moo"], "answer": 2},
]
PROMPTS = [
    {"prompt": "abc", "until": "x"},
    {"prompt": "A longer prompt, by far", "until": "x"},
    {"prompt": "", "until": ""},
]
TASKS = {
    "local_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "local_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_generation": {
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n", "Q:"], "max_gen_toks": 9}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def forward():
    here = model()
    return jax.jit(lambda tokens: here(tokens))


def logits(tokens: list[int]) -> np.ndarray:
    """Of every position, in float64, from one parallel call; what is behind the tokens changes nothing before it."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(forward()(jnp.asarray(row)), np.float64)[0, : len(tokens)]


def log_likelihood(context: list[int], continuation: list[int]) -> float:
    of = logits(context + continuation)[len(context) - 1 : -1]
    return float((of - np.log(np.exp(of).sum(-1, keepdims=True)))[np.arange(len(continuation)), continuation].sum())


def greedy(text: str, number: int) -> list[int]:
    tokens = list(text.encode()) or [LINE_END]
    start = len(tokens)
    for _ in range(number):
        tokens.append(int(logits(tokens)[-1].argmax()))
    return tokens[start:]


def in_windows(tokens: list[int]) -> float:
    """Each token, given those before it in its window: the last WINDOW before the window's end, and one more."""
    total = 0.0
    for t in range(len(tokens)):
        end = min((t // WINDOW + 1) * WINDOW, len(tokens))
        context = [LINE_END, *tokens[:t]] if t < WINDOW else tokens[end - WINDOW - 1 : t]
        total += log_likelihood(context, [tokens[t]])
    return total


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    after = [ByteTokenizer().decode(greedy(row["prompt"], 9)) for row in PROMPTS]
    data = {
        "local_rolling": [{"text": text} for text in DOCUMENTS],
        "local_choice": QUESTIONS,
        "local_generation": [{"prompt": row["prompt"], "answer": text} for row, text in zip(PROMPTS, after)],
    }
    data["local_generation"][1]["answer"] = "not this"
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data[name]))
        kwargs = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return folder


@pytest.fixture
def command(place, monkeypatch, tmp_path):
    """Runs the command on the tasks: (results, samples by task, what it printed)."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    # What it says of the environment takes seconds: it imports torch and runs `pip list`.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    loaded = LoadedRun(model(), ByteTokenizer(), TrainConfig(model=CONFIG), 7, [])
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda run_dir, step, **_: loaded)

    def run(*arguments: str, names: tuple[str, ...] = tuple(TASKS)):
        # Every test has the same size of batches, and so the same programs.
        place_of = ("--run-dir", str(tmp_path), "--include-path", str(place), "--log-samples", "--batch-size", "3")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["evaluate", *place_of, "--tasks", *names, *arguments]) == 0
        (file,) = (tmp_path / "evaluations").glob("results_*.json")
        samples = {
            name: [json.loads(line) for line in one.read_text().splitlines()]
            for name in names
            for one in (tmp_path / "evaluations").glob(f"samples_{name}_*.jsonl")
        }
        return json.loads(file.read_text()), samples, out.getvalue()

    return run


def byte_counts() -> tuple[int, int]:
    return sum(len(text.encode()) for text in DOCUMENTS), sum(len(text.split()) or 2 for text in DOCUMENTS)


def test_all_numbers_of_three_tasks(command):
    results, samples, out = command("--window", str(WINDOW))
    by_task = results["results"]

    documents = [in_windows(list(text.encode())) for text in DOCUMENTS]
    for sample, expected in zip(samples["local_rolling"], documents, strict=True):
        assert float(sample["resps"][0][0]) == pytest.approx(expected, rel=1e-5)
    bits = -sum(documents) / math.log(2) / sum(len(text.encode()) for text in DOCUMENTS)
    assert by_task["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert by_task["local_rolling"]["byte_perplexity,none"] == pytest.approx(2**bits, rel=1e-5)

    right = right_by_length = 0
    for sample, row in zip(samples["local_choice"], QUESTIONS, strict=True):
        scores = [log_likelihood(list(row["question"].encode()), list(f" {c}".encode())) for c in row["choices"]]
        np.testing.assert_allclose([float(answer[0][0]) for answer in sample["resps"]], scores, rtol=1e-5)
        lengths = [len(choice) for choice in row["choices"]]
        right += int(np.argmax(scores)) == row["answer"]
        right_by_length += int(np.argmax(np.array(scores) / lengths)) == row["answer"]
    assert by_task["local_choice"]["acc,none"] == pytest.approx(right / 3)
    assert by_task["local_choice"]["acc_norm,none"] == pytest.approx(right_by_length / 3)

    for sample, row in zip(samples["local_generation"], PROMPTS, strict=True):
        assert sample["resps"][0][0] == ByteTokenizer().decode(greedy(row["prompt"], 9))
    assert by_task["local_generation"]["exact_match,none"] == pytest.approx(2 / 3)

    assert results["config"]["model_args"] == {"run_dir": results["config"]["model_args"]["run_dir"], "step": 7}
    info = {name: results["config"][name] for name in ("window", "prefix_token", "truncated_contexts", "batch_size")}
    assert info == {"window": WINDOW, "prefix_token": LINE_END, "truncated_contexts": 0, "batch_size": 3}
    assert "bits_per_byte" in out
    assert "|local_choice" in out


def test_a_document_as_one_stream(command):
    results, samples, _ = command("--stream", names=("local_rolling",))
    expected = [log_likelihood([LINE_END], list(text.encode())) for text in DOCUMENTS]
    got = [float(sample["resps"][0][0]) for sample in samples["local_rolling"]]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert results["config"]["window"] == "whole documents"


def test_limit_and_examples(command):
    results, samples, _ = command("--limit", "2", "--num-fewshot", "1", names=("local_choice",))
    assert len(samples["local_choice"]) == 2
    assert results["n-shot"]["local_choice"] == 1
    for sample in samples["local_choice"]:
        for (context, continuation), answer in zip(sample["arguments"], sample["resps"], strict=True):
            assert context.count("\n\n") == 1
            expected = log_likelihood(list(context.encode()), list(continuation.encode()))
            assert float(answer[0][0]) == pytest.approx(expected, rel=1e-5)


def test_both_kinds_of_tasks_with_one_model(command, monkeypatch, tmp_path):
    """The model is loaded once, and what is wrong with a long-context task is said before lm-eval runs."""
    loaded, load = [], importlib.import_module("atlasjax.cli.evaluate").load_run
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda *given, **_: loaded.append(given) or load(*given))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 9)
    ours = ("--lengths", "700", "--depths", "50", "--samples", "1", "--text", str(tmp_path / "book.txt"))
    _, samples, out = command(*ours, "--stream", names=("local_choice", "niah_2"))
    assert len(loaded) == 1
    assert len(samples["local_choice"]) == 3
    assert "|local_choice" in out
    assert "niah_2: a number in a text" in out
    (file,) = (tmp_path / "evaluations").glob("long_context_*.json")
    assert [one["task"] for one in json.loads(file.read_text())["results"]] == ["niah_2"]
    monkeypatch.setattr("atlasjax.cli.evaluate.run_tasks", lambda *_, **__: pytest.fail("lm-eval ran"))
    with pytest.raises(AssertionError):  # the code is 2
        command("--lengths", "100", names=("local_choice", "niah_1"))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat_templates(command, tmp_path, capsys):
    """Examples are earlier turns of a conversation, and the beginning of an answer is not closed."""
    with pytest.raises(AssertionError):  # the code is 2
        command("--apply-chat-template", names=("local_choice",))
    assert "has no chat template. It comes with the tokenizer of imported weights" in capsys.readouterr().err
    peer = tmp_path / "peer"
    peer.mkdir()
    (peer / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "^"}))
    results, samples, _ = command("--apply-chat-template", "--num-fewshot", "1", names=("local_choice",))
    assert results["config"]["apply_chat_template"]
    for sample, row in zip(samples["local_choice"], QUESTIONS, strict=True):
        for (context, continuation), choice, answer in zip(
            sample["arguments"], row["choices"], sample["resps"], strict=True
        ):
            example = next(x for x in QUESTIONS if context.startswith(f"^<user>{x['question']}\n"))
            turns = f"^<user>{example['question']}\n<assistant>{example['choices'][example['answer']]}\n"
            assert context == f"{turns}<user>{row['question']}\n<assistant>"
            assert continuation == choice
            expected = log_likelihood(list(context.encode()), list(choice.encode()))
            assert float(answer[0][0]) == pytest.approx(expected, rel=1e-5)
    chat = TemplateChat(TEMPLATE, {"bos_token": "^"})
    lm = HarnessModel(model(), ByteTokenizer(), prefix_token=LINE_END, chat=chat.rendered)
    begun = [{"role": "user", "content": "Two and two"}, {"role": "assistant", "content": "It is "}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == "^<user>Two and two\n<assistant>It is"


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_empty_contexts_spaces_and_the_token_before_texts():
    ask = lambda lm, *pairs: [score for score, _ in lm.loglikelihood(requests("loglikelihood", *pairs), True)]
    make = functools.partial(HarnessModel, model(), ByteTokenizer(), prefix_token=LINE_END, batch_size=3)
    pairs = [("", "\nab"), ("  ", "ab"), ("ab ", "c")]
    tokens = [list("".join(pair).encode()) for pair in pairs]
    given = [
        log_likelihood([LINE_END], tokens[0]),
        log_likelihood([LINE_END], tokens[1]),
        log_likelihood(tokens[2][:2], tokens[2][2:]),
    ]
    np.testing.assert_allclose(ask(make(), *pairs), given, rtol=1e-5)
    # A token of its own for the beginning is not repeated.
    given[0] = log_likelihood([LINE_END], tokens[0][1:])
    np.testing.assert_allclose(ask(make(begins_text=True), *pairs), given, rtol=1e-5)
    with pytest.raises(ValueError, match="has no token of its own"):
        ask(make(), ("", ""))


def test_an_end_token_and_sampling():
    lm = functools.partial(HarnessModel, model(), ByteTokenizer(), prefix_token=LINE_END, batch_size=3)
    tokens = greedy("abc", 9)
    ask = lambda lm, **options: lm.generate_until(requests("generate_until", ("abc", options)), True)[0]
    assert ask(lm(end_tokens=[tokens[4]]), max_gen_toks=9) == ByteTokenizer().decode(tokens[: tokens.index(tokens[4])])
    one, same, other = (ask(lm(seed=seed), max_gen_toks=9, do_sample=True, temperature=2.0) for seed in (1, 1, 2))
    assert one == same != other
    with pytest.raises(ValueError, match="generation_kwargs has num_beams: 3; known are until, max_gen_toks"):
        ask(lm(), num_beams=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 4}, "generation_kwargs has num_beams: 4; known are until, max_gen_toks"),
        ({"do_sample": True, "top_p": 2}, "top_p is 2; it must be in"),
        ({"do_sample": True, "top_p": 0}, "top_p is 0; it must be in"),
        ({"max_gen_toks": 0}, "generation_kwargs: max_gen_toks must be an integer ≥ 1, got 0"),
        ({"until": ["x", ""]}, "until is ''; it must be a string that is not empty"),
        ({"temperature": "hot", "do_sample": True}, "could not convert string to float: 'hot'"),
        ({"temperature": -1, "do_sample": True}, "temperature is -1.0; it must be 0"),
    ],
)
def test_an_option_that_is_not_served_is_named_before_the_model_loads(
    place, tmp_path, monkeypatch, capsys, options, words
):
    """And before the requests of other tasks."""
    task = json.loads((place / "local_generation.yaml").read_text()) | {"task": "odd", "generation_kwargs": options}
    (tmp_path / "odd.yaml").write_text(json.dumps(task))
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda *_, **__: pytest.fail("the model was loaded"))
    given = ("--include-path", str(place), str(tmp_path), "--tasks", "local_choice", "odd")
    assert cli.main(["evaluate", "--run-dir", str(tmp_path), *given]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("atlasjax: the task 'odd'")
    assert words in error


def test_more_tokens_than_the_model_has_positions_for_are_named_before_any_request():
    config = ModelConfig(**{**CONFIG.__dict__, "positions": "learned", "max_positions": 32})
    lm = HarnessModel(LanguageModel(config, rngs=nnx.Rngs(0)), ByteTokenizer(), prefix_token=LINE_END)
    lm.check_generation({"max_gen_toks": 31})
    with pytest.raises(ValueError, match="max_gen_toks is 32; a model with max_positions=32 has room for 31"):
        lm.check_generation({"max_gen_toks": 32})


def test_options_that_change_nothing_are_accepted():
    plain = (SamplingConfig(0.0), 9, ["x"])
    same = {"num_beams": 1, "use_cache": True, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "do_sample": False}
    assert (
        generation({"until": "x", "max_gen_toks": 9})
        == generation({"until": ["x"], "max_new_tokens": 9} | same)
        == plain
    )
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": -1, "top_p": 0.9, "min_p": 0}
    assert generation({"until": [], "max_gen_toks": 9} | sampled) == (SamplingConfig(0.7, top_p=0.9), 9, [])
    assert generation({"repetition_penalty": 1.5})[0] == SamplingConfig(0.0, repetition_penalty=1.5)


def test_results_of_finished_requests_are_kept(command, tmp_path, monkeypatch):
    """A later request fails: the next command computes only what was not finished, and removes the file."""
    expected, samples, _ = command()
    for file in (tmp_path / "evaluations").iterdir():
        file.unlink()
    scored, generate, score = [], Scorer.generate, Scorer.score

    def fails(self, *given, on_result, **options):
        def one_and_no_more(index, text):
            on_result(index, text)
            raise RuntimeError("stopped")

        return generate(self, *given, on_result=one_and_no_more, **options)

    monkeypatch.setattr(Scorer, "generate", fails)
    with pytest.raises(AssertionError):  # the code is 70
        command()
    (file,) = (tmp_path / "evaluations").iterdir()
    assert file.name.startswith("lm_eval_unfinished_")
    assert len(file.read_text().splitlines()) == 4 + 9 + 1  # documents, choices, and one text
    file.write_text(file.read_text() + '["half a li')

    monkeypatch.setattr(
        Scorer, "score", lambda self, pairs, **options: scored.extend(pairs) or score(self, pairs, **options)
    )
    monkeypatch.setattr(
        Scorer,
        "generate",
        lambda self, prompts, *rest, **options: scored.extend(prompts) or generate(self, prompts, *rest, **options),
    )
    results, again, out = command()
    assert f"going on after 14 requests of an interrupted command, in {file}" in out
    assert len(scored) == 2  # of three texts
    assert results["results"] == expected["results"]
    assert [one["resps"] for one in again["local_choice"]] == [one["resps"] for one in samples["local_choice"]]
    assert not file.exists()


def test_kept_results_are_of_one_request(tmp_path):
    """Sampled texts are not kept: of several of one context, those that are left would be the same as those that were finished."""
    kept = KeptResults(tmp_path / "in/file")
    assert not (tmp_path / "in").exists()
    kept.remove()  # there is nothing yet
    lm = HarnessModel(model(), ByteTokenizer(), prefix_token=LINE_END, batch_size=3, kept=kept)
    greedy_ones = requests("generate_until", ("abc", {"max_gen_toks": 3}), ("abc", {"max_gen_toks": 4}))
    texts = lm.generate_until(
        [*greedy_ones, *requests("generate_until", ("abc", {"max_gen_toks": 3, "do_sample": True}))], True
    )
    score = lm.loglikelihood(requests("loglikelihood", ("abc", "d")), True)
    empty = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("",)), True)
    kept.close()
    again = KeptResults(tmp_path / "in/file")
    assert again.found == 3
    lm = HarnessModel(model(), ByteTokenizer(), prefix_token=LINE_END, kept=again)
    lm._scorer = types.SimpleNamespace(score=lambda pairs, **_: pairs and pytest.fail("this was computed"))
    assert lm.generate_until(greedy_ones, True) == texts[:2]
    assert lm.loglikelihood(requests("loglikelihood", ("abc", "d")), True) == score
    assert empty == [0.0]
    with pytest.raises(pytest.fail.Exception, match="this was computed"):
        lm.loglikelihood(requests("loglikelihood", ("ab", "cd")), True)
    again.remove()
    assert not (tmp_path / "in/file").exists()


def test_truncation_is_told_and_counted(caplog):
    config = ModelConfig(**{**CONFIG.__dict__, "positions": "learned", "max_positions": 32})
    learned = LanguageModel(config, rngs=nnx.Rngs(0))
    lm = HarnessModel(learned, ByteTokenizer(), prefix_token=LINE_END, batch_size=2, pieces=(8, 4))
    text = "The beginning of this is lost. This is what stays."
    scores = lm.loglikelihood(requests("loglikelihood", (text, " end"), ("short", " end")), True)
    assert lm.truncated == 1
    assert "1 of 2 contexts were longer than the model's 32 positions" in caplog.text
    tokens = list((text + " end").encode())[-33:]
    of = np.asarray(learned(jnp.asarray([tokens[:-1]])), np.float64)[0, -4:]
    expected = (of - np.log(np.exp(of).sum(-1, keepdims=True)))[np.arange(4), tokens[-4:]].sum()
    assert scores[0][0] == pytest.approx(expected, rel=1e-5)
    generated = lm.generate_until(requests("generate_until", (text, {"max_gen_toks": 6})), True)
    assert generated == lm.generate_until(requests("generate_until", (text[-26:], {"max_gen_toks": 6})), True)
    assert lm.get_model_info()["truncated_contexts"] == 2
    with pytest.raises(ValueError, match="tokens after a context do not fit a model with max_positions=32"):
        lm.generate_until(requests("generate_until", (text, {"max_gen_toks": 32})), True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "local_chioce"], "Unknown task 'local_chioce'. Did you mean 'local_choice'?"),
        (["--tasks", "nothing.yaml"], "tasks has 'nothing.yaml', which is not a file."),
        (["--tasks", "broken"], "the task 'broken' cannot be loaded"),
    ],
)
def test_unknown_tasks_before_the_model_loads(place, tmp_path, monkeypatch, capsys, arguments, words):
    # Those of lm-eval are 13,000 files, which take it more than ten seconds.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    (tmp_path / "broken.yaml").write_text(json.dumps({
        "task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/no/such/file"}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "a", "doc_to_target": "b",
    }))  # fmt: skip
    monkeypatch.setattr("atlasjax.cli.evaluate.load_run", lambda *_, **__: pytest.fail("the model was loaded"))
    code = cli.main(["evaluate", "--include-path", str(place), str(tmp_path), *arguments])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert words in error
