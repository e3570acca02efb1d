"""The command `atlasjax`: output, errors of one line, exit codes."""

import contextlib
import dataclasses
import gc
import io
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock
from types import SimpleNamespace

import pytest
from flax import nnx

from atlasjax import cli
from atlasjax.cli import report
from atlasjax.config_json import to_dict
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.interop.text_ends import TextEnds
from atlasjax.nn import LanguageModel, ModelConfig
from atlasjax.train.errors import CheckpointError, Interrupted
from atlasjax.train.reports.plot import plot_loss
from tests.marks import some_slow
from tests.train.tiny import TEXT, config

MODEL = [
    *("--model.dim", "16", "--model.num-layers", "1", "--model.num-heads", "2", "--model.mlp-dim", "32"),
    *("--data.source", "text", "--data.sequence-length", "16", "--data.batch-size", "8", "--mesh.data", "1"),
    *("--eval-batches", "2", "--checkpoint-every", "2", "--log-every", "2", "--no-tensorboard"),
]
PRESET = ["--preset", "linear-attention-tiny"]
ALONG_SEQUENCES = ["mesh:mesh-config", "--mesh.data", "1", "--mesh.sequence", "4"]

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    (path / "text.txt").write_text(TEXT)
    return path


def train_arguments(folder, steps: int) -> list[str]:
    place = ["--run-dir", str(folder / "run"), "--data.paths", str(folder / "text.txt"), "--steps", str(steps)]
    return ["train", *PRESET, *MODEL, *place]


def printed_by(arguments: list[str]) -> str:
    """What a command prints, which succeeds."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def plotted():
    """What the command of `trained` plots last."""
    with unittest.mock.patch("atlasjax.cli.train.plot_loss", wraps=plot_loss) as mock:
        yield mock


@pytest.fixture(scope="module")
def trained(folder, plotted):
    """A run of four steps, trained by the command: (folder, what it printed)."""
    return folder, printed_by(train_arguments(folder, 4))


def test_what_training_prints(trained, plotted):
    folder, out = trained
    assert "step 4/4" in out
    for words in ("this model, 4 steps", "unigram of bytes", "interpolated trigram"):
        assert words in out
    assert f"checkpoint:   {folder / 'run/checkpoints/4'}" in out
    assert f"atlasjax train --run-dir {folder / 'run'} --steps 8" in out
    assert f"atlasjax evaluate --run-dir {folder / 'run'}\n" in out
    [line] = [line for line in out.splitlines() if line.startswith("sample more:")]
    *command, prompt = shlex.split(line)[2:]
    assert command == ["atlasjax", "generate", "--run-dir", str(folder / "run"), "--prompt"]
    assert prompt in TEXT
    assert f"sample:\n{prompt}" in out
    assert (folder / "run/loss_curve.png").exists()
    assert plotted.call_args.kwargs["title"] == f"{PRESET[1]}, 4 steps"


@pytest.mark.parametrize(("positions", "limit"), [(64, "51"), (15, "2"), (4, None)])
def test_what_is_sampled_fits_the_learned_positions(positions, limit, tmp_path, monkeypatch, capsys):
    from atlasjax.cli import train as command

    model = ModelConfig(
        dim=8, num_layers=1, num_heads=1, mlp_dim=8, mixer="attention", positions="learned", max_positions=positions
    )
    run = config(tmp_path, model=model, data_changes={"validation_fraction": 0.0, "sequence_length": 4})
    monkeypatch.setattr(command, "merge", lambda *_: LanguageModel(model, rngs=nnx.Rngs(0)))
    data = [{"inputs": ByteTokenizer().encode("Once. The statement is this. The statement is that.")[None]}]
    setup = SimpleNamespace(graphdef=None, tokenizer=ByteTokenizer(), train_data=data)
    state = SimpleNamespace(params=None)
    command._report(
        "a",
        run,
        SimpleNamespace(setup=setup, state=state, evaluation=None, step=4, resumed_from=0, checkpoint=tmp_path / "4"),
    )
    out = capsys.readouterr().out
    assert ("sample:\nThe statement" in out) == (limit is not None)
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("sample more")] == (
        [limit] if limit else []
    )
    assert out.splitlines()[-1].endswith(" --text FILE"), "nothing was held out"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("a cut Word. Der Hund, der bellt. Der Hund\n\n  x y\n", "Der Hund"),
        ("no line begins here", "line begins"),
        ("彼は本を読む。", "彼は本を読む"),
        ("ACGTACGTTACGTACGTACGTACGT", "ACGTACGTTACGTACGTACG"),
        ("…", "The "),
    ],
)
def test_a_prompt_to_try_is_of_the_text(text, prompt):
    rows = [{"inputs": ByteTokenizer().encode(text)[None]}]
    assert report.beginning(rows, ByteTokenizer()) == prompt


@pytest.mark.parametrize(
    ("preset", "options", "size"),
    [
        ("linear-attention-tiny", ["--data.tokenizer", "bpe:1000"], 1000),
        ("linear-attention-tiny", ["--data.tokenizer", "bpe:1000", "--model.vocab-size", "2048"], 2048),
        ("linear-attention-tiny", [], 256),
        ("linear-attention-170m", ["--data.tokenizer", "bpe:1000"], 32_000),
        ("linear-attention-170m", ["--data.tokenizer", "bpe:50000"], 50_000),
    ],
)
def test_a_models_vocabulary_has_room_for_the_tokenizers(preset, options, size, monkeypatch):
    from atlasjax.cli import train as command

    found = []
    monkeypatch.setattr(command, "offer", lambda config, preset: found.append(config))
    monkeypatch.setattr(command, "train", lambda config, **_: None)
    monkeypatch.setattr(command, "_report", lambda *_: None)
    assert cli.main(["train", "--preset", preset, *options]) == 0
    assert found[0].model.vocab_size == size


def test_evaluate(trained, capsys):
    folder, out = trained
    assert cli.main(["evaluate", "--run-dir", str(folder / "run"), "--max-batches", "2"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.split()[:3] == ["bits", "per", "byte"])
    trained_line = next(line for line in out.splitlines() if "this model" in line)
    assert float(line.split()[-1]) == pytest.approx(float(trained_line.split()[-1]), abs=2e-3)


def test_evaluate_a_stream(trained, capsys):
    folder, _ = trained
    assert cli.main(["evaluate", "--run-dir", str(folder / "run"), "--stream", "--piece", "32"]) == 0
    assert "bits per byte by position in the stream" in capsys.readouterr().out


def test_a_text_shorter_than_a_sequence_can_be_read_as_a_stream(trained, tmp_path, capsys):
    folder, _ = trained
    (tmp_path / "short.txt").write_text("A short text.")
    arguments = ["evaluate", "--run-dir", str(folder / "run"), "--text", str(tmp_path / "short.txt")]
    assert cli.main(arguments) == 2
    assert "--stream reads a text of any length" in capsys.readouterr().err
    assert cli.main([*arguments, "--stream"]) == 0
    (tmp_path / "short.txt").write_text("A")
    assert cli.main([*arguments, "--stream"]) == 2
    assert "short.txt'; it should have at least two tokens, and has 1." in capsys.readouterr().err


def test_evaluate_a_text_of_another_encoding(trained, tmp_path, capsys):
    folder, _ = trained
    (tmp_path / "text.txt").write_bytes("café ".encode("latin-1") * 20)
    arguments = ["evaluate", "--run-dir", str(folder / "run"), "--text", str(tmp_path / "text.txt"), "--stream"]
    assert cli.main(arguments) == 2
    assert "Set its encoding, e.g. --data.encoding latin-1" in capsys.readouterr().err
    assert cli.main([*arguments, "--data.encoding", "latin-1"]) == 0
    assert "119 tokens, 119 bytes" in capsys.readouterr().out
    assert cli.main([*arguments, "--data.errors", "skip"]) == 0
    assert "79 tokens, 79 bytes" in capsys.readouterr().out


def test_generate_is_determined_by_the_seed(trained, capsys):
    folder, _ = trained
    texts = []
    for seed in (1, 1, 2):
        arguments = [
            "generate",
            "--run-dir",
            str(folder / "run"),
            "--prompt",
            "the ",
            "--max-tokens",
            "40",
            "--seed",
            str(seed),
        ]
        assert cli.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("the ")
    assert texts[0] == texts[1] != texts[2]


def test_generate_ends_at_the_end_tokens_of_imported_weights(trained, monkeypatch):
    folder, _ = trained
    arguments = ["generate", "--run-dir", str(folder / "run"), "--prompt", "the ", "--max-tokens", "20"]
    whole = printed_by(arguments).removesuffix("\n")
    end = next(byte for byte in whole.encode()[4:] if byte < 128)
    monkeypatch.setattr("atlasjax.cli.generate.text_ends", lambda run_dir: TextEnds(None, (end,)))
    assert printed_by(arguments) == "the " + whole[4:].partition(chr(end))[0] + "\n"


def test_the_printed_command_goes_on(trained, monkeypatch):
    """Every option of the run was overridden, and none is in the command: what was saved gives them."""
    from atlasjax.cli import train as command

    folder, out = trained
    [line] = [line for line in out.splitlines() if line.startswith("continue:")]
    asked = []
    monkeypatch.setattr(command, "train", lambda config, **_: asked.append(config))
    monkeypatch.setattr(command, "_report", lambda *_: None)
    assert cli.main([*shlex.split(line)[2:], "--log-every", "3"]) == 0
    saved = json.loads((folder / "run/config.json").read_text())
    assert to_dict(asked[0]) == saved | {"steps": 8, "log_every": 3}
    shutil.copytree(folder / "run", folder / "early")
    shutil.rmtree(folder / "early/checkpoints")
    assert cli.main(["train", "--run_dir", str(folder / "early")]) == 0
    assert to_dict(asked[1]) == saved | {"run_dir": str(folder / "early")}
    (folder / "early/config.json").write_text("{")
    assert cli.main(["train", "--run-dir", str(folder / "early")]) == 2


@pytest.mark.slow  # test_a_failed_run_is_one_line has the line, tests/train/test_checkpoint.py a disk without room
def test_a_full_disk(trained):
    """The files of the process may not grow past 16 KiB, which only the new checkpoint would."""
    folder, _ = trained
    command = [sys.executable, "-m", "atlasjax", *train_arguments(folder, 6)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    before = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("atlasjax: ")]
    assert "Saving the checkpoint of step 6 failed" in line
    assert "checkpoints before it are intact" in line
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == before


@pytest.mark.parametrize("arguments", some_slow(["", "info"], ["info"]))
def test_a_pipe_that_ends_early(arguments):
    """`atlasjax info | head -1`: no traceback, and not the exit code of a success. (Rich, which prints tables, exits with 1.)"""
    command = f"{sys.executable} -u -m atlasjax {arguments}; echo code $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr in ("code 141\n", "code 1\n")


def test_nothing_is_announced_before_the_request_is_known_to_be_sound(tmp_path, capsys):
    arguments = ["train", "--preset", "titans-tiny", "--data.sequence-length", "10000000", "--run-dir", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert "Training" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--preset", "atlas-tyny"], "Did you mean 'atlas-tiny'?"),
        (["train", "--preset"], "--preset needs a value"),
        (["train", "--preset="], "--preset is empty"),
        (["tune", "--preset="], "--preset is empty"),
        (["tune", "--seconds", "-1"], "tune: seconds must be a number ≥ 0, got -1"),
        (["train", "--steps", "1e3"], "--steps is '1e3'; it must be an integer."),
        (["train", "--optimizer.learning-rate", "x"], "--optimizer.learning-rate is 'x'; it must be a number."),
        (["train", "--optimizer.clip-norm", "x"], "--optimizer.clip-norm is 'x'; it must be a number or None."),
        (["train", "--eval-batches", "1.5"], "--eval-batches is '1.5'; it must be an integer or None."),
        (["train", "--data.weights", "a", "b"], "--data.weights is 'a', 'b'; it must be [FLOAT [FLOAT ...]]."),
        (["train", "--segment-size", "64"], "--segment-size 64 is for --add-caching, which is not given"),
        (
            ["train", "--preset", "retnet-tiny", "--optimizer.name", "optax:clip"],
            "optimizer.name is 'optax:clip', whose update fails: TypeError",
        ),
        (["train", "--steps", "0"], "steps is 0; it must be at least 1"),
        (["train", "--model.dim", "100", "--model.num-heads", "3"], "num_heads=3 does not divide dim=100"),
        (
            ["train", "--data.source", "text", "--data.paths", "/nonexistent/x.txt", "--run-dir", "runs/never"],
            "/nonexistent/x.txt",
        ),
        (["train", "--data.sequence-length", "10000000", "--run-dir", "runs/never"], "too short for one sequence"),
        (["train", "--model.memory.rule", "atlass"], "Did you mean 'atlas'?"),
        (["evaluate", "--run-dir", "/nonexistent"], "there is no run in it"),
        (["generate", "--run-dir", "/nonexistent"], "there is no run in it"),
        (["generate", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "--seed", "-1"], "seed is -1"),
        (["generate", "--prompt", "a\udcff"], "prompt is not valid Unicode at character 1"),
        (["evaluate", "--samples", "3"], "--samples is for --tasks, which is not given"),
        (["evaluate", "--log-samples"], "--log-samples is for --tasks, which is not given"),
        (["evaluate", "--piece", "64"], "--piece is for --stream, which is not given"),
        (["evaluate", "--tasks"], "--tasks is empty"),
        (["evaluate", "--text"], "--text is empty; it needs at least one file or folder."),
        (["evaluate", "--data.encoding", "latin-1"], "--data.encoding is for --text, which is not given."),
        (["evaluate", "--max-batches", "-2"], "max_batches is -2; it must be at least 1"),
        (["evaluate", "--max-batches", "0"], "max_batches is 0; it must be at least 1"),
        (["train", "--seed", "-1"], "seed is -1; it must be in [0, 2^32)"),
        (["train", "--seed", str(2**32)], "seed is 4294967296; it must be in [0, 2^32)"),
        (["train", "--optimizer.eps", "inf"], "optimizer.eps is inf; it must be positive and finite"),
        (["train", "--steps", str(10**30)], "it must be below 2^31"),
        (["train", "--keep", "-" + "9" * 21], "keep is -999999999999999999999; it must be"),
        (
            ["generate", "--samples", str(10**20)],
            "--samples is 100000000000000000000; it must be an integer of 64 bits",
        ),
        (
            ["generate", "--top-k", "1" + "0" * 400],
            "top_k is an integer of more than 300 digits; it must be an integer, at least 1",
        ),
        (["evaluate", "--stream", "--piece", str(10**400)], "--piece is an integer of more than 300 digits"),
        (["serve", "--slots", str(10**21)], "slots is 1000000000000000000000; it must be"),
        (
            ["tune", "--model.value-expansion", str(10**29)],
            "value_expansion must be an integer ≥ 1 and below 2^63, got 1000",
        ),
        (
            ["info", "--preset", "gla-tiny", "--batch-size", str(10**21)],
            "--batch-size is 1000000000000000000000; it must be",
        ),
        (["train", "--data.num-threads", "100000"], "num_threads is 100000"),
        (
            ["train", "--data.sequence-length", "2147483648"],
            "sequence_length is 2147483648; it must be an integer of at most 1,073,7",
        ),
        (["train", "--data.batch-size", str(10**8)], "Use a data.batch_size of at most"),
        (["train", "--model.dim", str(10**9)], "Use a smaller model"),
        (["train", "--model.head-dim", str(10**9)], "Use a smaller model"),
        (["train", "--preset", "atlas-mag-tiny", "--model.head-dim", str(10**9)], "Use a smaller model"),
        (["train", "--model.attention.rope-theta", "inf"], "rope_theta must be a number > 0 or None, got inf"),
        (["train", "--model.num-layers", str(10**8)], "Use a smaller model"),
        (["train", "--model.vocab-size", str(10**12)], "Use a smaller model"),
        (["train", "--data.tokenizer", f"bpe:{10**12}"], "at most 1,048,576 tokens, not 1,000,000,000,000"),
        (["train", "--data.source", "text", "--data.paths", "/dev/zero"], "'/dev/zero' is neither a file nor a folder"),
        (["train", "--optimizer.lerning-rate", "1"], "Did you mean --optimizer.learning-rate?"),
        (["train", "3"], "Unrecognized options: 3."),
        (["generate", "--temperature"], "Missing value for argument '--temperature'."),
        (["train", "--processes.distributed", "--processes.coordinator", "nowhere"], 'it must be "host:port"'),
        (["info", "--preset"], "preset is empty"),
        (["info", "--preset", "atlas-tiny", "--batch-size", "0"], "batch_size is 0"),
        (["info", "--preset", "titan-340m"], "Did you mean 'titans-340m'?"),
        (["info", "--size", "tiny", "--preset", "retnet-tiny"], "both say which presets; leave one of them out"),
        (
            ["info", "--preset", "retnet-tiny", "--plan", "v5e:2x2", "mesh:mesh-config", "--mesh.data", "3"],
            "uses 3 devices; v5e:2x2 has 4. Set one size to -1.",
        ),
        (
            [
                "info",
                "--preset",
                "gla-tiny",
                "--plan",
                "v5e:2x2",
                "--batch-size",
                "3",
                "mesh:mesh-config",
                "--mesh.data",
                "4",
            ],
            "atlasjax: data.batch_size / accumulation is 3 / 1 = 3 sequences; it must be divisible by",
        ),
        (
            ["info", "--preset", "gla-tiny", "--plan", "v5e:2x2", "--sequence-length", "1001", *ALONG_SEQUENCES],
            "atlasjax: data.sequence_length is 1001; it must be divisible by mesh.sequence, which is 4.",
        ),
        (
            ["info", "--preset", "samba-tiny", "--plan", "v5e:2x2", *ALONG_SEQUENCES],
            "atlasjax: mesh.sequence is 4, but",
        ),
        (
            ["info", "--preset", "gla-tiny", "--plan", "2x v5e:1x2", *ALONG_SEQUENCES],
            "atlasjax: mesh.data is 1 and mesh.fsdp is 1; one of them must be a multiple of 2",
        ),
        (["info", "--size", "340"], "Did you mean '340m'?"),
        (["info", "--preset", "atlas-tiny", "--plan", "v5f:2x2"], "Unknown accelerator 'v5f'. Did you mean"),
        (["info", "--preset", "atlas-tiny", "--plan", "v5e"], "it must be like v5e:16x16"),
        (["info", "--preset", "atlas-tiny", "--plan", "v5e:0x2"], "it must be like v5e:16x16"),
        (["info", "--preset", "atlas-tiny", "--plan", ""], "Unknown accelerator ''"),
        (
            ["info", "--preset", "atlas-tiny", "--plan", "v5e:2x2", "--implementation", "pallas_gpu"],
            "memory.implementation is 'pallas_gpu', which runs on cuda only; v5e:2x2 is tpu.",
        ),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("atlasjax: ")
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_the_terminal_cannot_write_is_replaced(monkeypatch):
    from atlasjax.cli import train as command

    monkeypatch.setattr(command, "run", lambda arguments: print("Olé"))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert cli.main(["train"]) == 0
    assert sys.stdout.buffer.getvalue() == b"Ol?\n"


def test_a_signal_gives_its_exit_code(monkeypatch, capsys):
    from atlasjax.cli import train as command

    def stop(arguments):
        raise Interrupted(
            "Stopped by signal 15 after step 3, saved in x. Run the same command to resume.", signal.SIGTERM
        )

    monkeypatch.setattr(command, "run", stop)
    assert cli.main(["train"]) == 143
    assert "Run the same command to resume" in capsys.readouterr().err


def test_a_failed_run_is_one_line(monkeypatch, capsys):
    from atlasjax.cli import train as command

    def fail(arguments):
        raise CheckpointError("Saving the checkpoint of step 6 failed.")

    monkeypatch.setattr(command, "run", fail)
    assert cli.main(["train"]) == cli.RUN_ERROR
    assert capsys.readouterr().err == "atlasjax: Saving the checkpoint of step 6 failed.\n"


def test_a_bug_is_one_line_and_not_hidden(monkeypatch, capsys):
    from atlasjax.cli import train as command

    monkeypatch.setattr(command, "run", lambda arguments: (_ for _ in ()).throw(ValueError("a bug")))
    assert cli.main(["train"]) == 70
    assert capsys.readouterr().err == "atlasjax: ValueError: a bug (unexpected error; --debug shows the traceback)\n"
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["train", "--debug"])


def test_a_pipe_that_ended_does_not_hide_the_code(monkeypatch, capsys):
    from atlasjax.cli import train as command

    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    dropped = []
    monkeypatch.setattr(cli, "_drop_output", lambda: dropped.append(1))
    monkeypatch.setattr("sys.stdout", Closed())
    monkeypatch.setattr(
        command, "run", lambda arguments: (_ for _ in ()).throw(Interrupted("Stopped.", signal.SIGTERM))
    )
    assert (cli.main(["train"]), dropped) == (143, [1])
    monkeypatch.setattr(command, "run", lambda arguments: None)
    assert (cli.main(["train"]), dropped) == (141, [1, 1])


def test_sigterm_says_what_happened(monkeypatch, capsys):
    from atlasjax.cli import train as command

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "run", lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["train"]) == 143
    assert capsys.readouterr().err == "atlasjax: stopped by signal 15.\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_garbage_collection_is_not_lost(number, monkeypatch, capsys):
    """Python drops the exceptions of its callbacks, of which jax has one."""
    from atlasjax.cli import train as command

    sent = []

    def callback(phase, info):
        if not sent:
            sent.append(phase)
            os.kill(os.getpid(), number)

    def run(arguments):
        gc.callbacks.append(callback)
        gc.collect()
        time.sleep(30)

    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = sys.unraisablehook
    monkeypatch.setattr(command, "run", run)
    try:
        assert cli.main(["train"]) == 128 + number
    finally:
        gc.callbacks.remove(callback)
        signal.signal(signal.SIGINT, interrupt)
    assert sent
    assert capsys.readouterr().err == f"atlasjax: stopped by signal {number}.\n"
    assert sys.unraisablehook is hook


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "atlasjax", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "train" in done.stderr


def test_help_is_quick_and_imports_nothing_heavy():
    code = "import sys; from atlasjax import cli; cli.main(['--help']); print(sorted({'jax', 'tyro', 'grain'} & set(sys.modules)))"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "atlasjax train" in done.stdout
    assert time.perf_counter() - started < 5


def test_info(capsys):
    assert cli.main(["info", "--preset", "titans-tiny", "transformer++-tiny", "--sequence-length", "128"]) == 0
    out = capsys.readouterr().out
    for words in ("parameters", "forward FLOPs per token", "titans-tiny", "memory of titans"):
        assert words in out
    titans, attention = next(line for line in out.splitlines() if "state per sequence" in line).split("│")[2:4]
    assert "tokens" not in titans
    assert attention.strip() == "0.50 MiB at 128 tokens"  # 4 layers of 128 keys and values of 128 float32


def test_info_refuses_an_implementation_of_no_memory(capsys):
    assert cli.main(["info", "--preset", "swa-tiny", "--implementation", "pallas_gpu"]) == 2
    assert "implementation is 'pallas_gpu', but swa-tiny has no memory" in capsys.readouterr().err


def test_info_of_a_size_names_and_rules(capsys, monkeypatch):
    from atlasjax.cli import info

    monkeypatch.setattr(info, "preset_names", lambda size: [f"swa-{size}", f"mamba-{size}"])
    assert cli.main(["info", "--size", "tiny"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "-tiny" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["swa-tiny", "mamba-tiny"]
    assert "1,082,368" in rows[1]
    assert cli.main(["info", "--names"]) == 0
    assert "\ngated-deltanet-h2\n" in capsys.readouterr().out
    assert cli.main(["info", "--rules"]) == 0
    assert "| `atlas` |" in capsys.readouterr().out


def test_the_default_run_is_what_the_readme_says():
    from atlasjax.train import default_config

    config = default_config("atlas-tiny")
    assert (config.run_dir, config.data.source) == ("runs/atlas-tiny", "embedded")
    assert dataclasses.replace(config, steps=config.steps) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "lambada"], "--tasks lambada needs lm-eval: pip install 'atlasjax[eval]'."),
        (["--tasks", "niah1"], "--tasks niah1 needs lm-eval: pip install 'atlasjax[eval]'. Did you mean 'niah_1'?"),
        (["--tasks", "lambada", "--limit", "1.5"], "limit is 1.5; it must be a whole number of documents, or a share below 1."),
        (["--tasks", "lambada", "--batch-size", "0"], "batch_size is 0; it must be at least 1."),
        (["--tasks", "lambada", "--stream", "--window", "8"], "--stream reads whole documents, so it takes no --window."),
        (["--tasks", "lambada", "--text", "book.txt"], "--text does not go with --tasks lambada."),
        (["--tasks", "lambada", "--stream", "--piece", "8"], "--piece does not go with --tasks lambada."),
        (["--tasks", "niah_1", "--stream"], "--stream does not go with --tasks niah_1."),
        (["--tasks", "niah_1", "--lengths", "4kb"], "lengths has '4kb'; it must be a number of tokens such as 4096 or 4k."),
        (["--tasks", "niah_1", "--depths", "120"], "depths has 120; it must be in [0, 100]."),
        (["--tasks", "niah_1", "--samples", "0"], "samples is 0; it must be at least 1."),
        (["--tasks", "niah_1", "--samples", "1000000000"], "samples is 1000000000; it must be at most 100,000."),
        (["--tasks", "niah_1", "--seed", str(2**32)], "seed is 4294967296; it must be at most 4,294,967,295."),
        (["--tasks", "lambada", "--limit", "1e400"], "limit is inf; it must be a whole number of documents, or a share below 1."),
        (["--tasks", "lambada", "--limit", "nan"], "limit is nan; it must be a whole number of documents, or a share below 1."),
        (["--tasks", "json:task"], "task 'json:task': 'json' has no 'task'."),
        (["--tasks", "niah_1", "--limit", "3"], "--limit does not go with --tasks niah_1."),
        (["--tasks", "lambada", "--lengths", "2k"], "--lengths does not go with --tasks lambada."),
    ],
)  # fmt: skip
def test_refused_tasks(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["evaluate", *arguments]) == 2
    assert capsys.readouterr().err == f"atlasjax: {words}\n"
