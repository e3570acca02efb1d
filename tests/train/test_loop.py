"""The training loop: what it refuses, how it stops, what it writes."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal

import pytest

from atlasjax.config_json import to_dict
from atlasjax.data import DataConfig
from atlasjax.data.tokenizers import BpeTokenizer, ByteTokenizer, make_tokenizer
from atlasjax.distributed import MeshConfig
from atlasjax.train import (
    Checkpoints,
    ConfigError,
    Interrupted,
    NonFiniteError,
    OptimizerConfig,
    load_run,
    resume,
    train,
)
from atlasjax.train import setup as setup_lib
from atlasjax.train.reports import metrics
from atlasjax.train.reports.progress import Progress
from atlasjax.train.saving import lock
from atlasjax.train.setup import run_tokenizer
from atlasjax.train.signals import StopSignals
from tests.marks import some_slow
from tests.train.test_checkpoint import largest_file, truncate
from tests.train.test_trackers import Noted
from tests.train.tiny import MODEL, config, train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")
NO_EVALUATION = {"validation_fraction": 0.0}  # where none is looked at: one program less to compile


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of four steps: (config, result)."""
    run = config(tmp_path_factory.mktemp("done"), eval_every=2, tensorboard=True, profile="2:3", trackers=(Noted,))
    return run, train(run)


def test_what_a_run_leaves(done):
    run, result = done
    folder = pathlib.Path(run.run_dir)
    assert (result.step, result.resumed_from) == (4, 0)
    assert result.checkpoint == folder / "checkpoints" / "4"
    assert result.checkpoint.is_dir()
    assert json.loads((folder / "config.json").read_text())["model"]["dim"] == 16
    assert (folder / "tokenizer" / "tokenizer.json").is_file()
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    tracked = Noted.made[0].calls
    assert [call[:2] for call in tracked if call[1:2] == ("train",)] == [(step, "train") for step in (1, 2, 3, 4)]
    assert (tracked.count("commit"), tracked[-1]) == (2, "close")
    records = metrics.read(folder / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4]
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [2, 4]
    assert records[-1]["bits_per_byte"] == result.evaluation.bits_per_byte
    timing = [record for record in records if record["kind"] == "timing"]
    assert [record["step"] for record in timing] == [2, 4]
    assert all(0 <= record["input_seconds"] < record["step_seconds"] for record in timing)
    assert all(record["tokens_seen"] == record["step"] * 8 * 16 for record in records if record not in timing)
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_it_learns(done):
    losses = [loss for _, loss in train_losses(done[0].run_dir)]
    assert losses[-1] < losses[0] - 0.1


def test_a_finished_run_does_nothing_more(done, capsys):
    run, result = done
    again = train(run)
    assert again.resumed_from == again.step == 4
    assert again.evaluation == result.evaluation
    assert "All 4 steps are done" in capsys.readouterr().out
    assert len(train_losses(run.run_dir)) == 4


def test_another_architecture_is_refused_before_anything_is_compiled(done, monkeypatch):
    run, _ = done
    monkeypatch.setattr(setup_lib, "prepare", lambda config: pytest.fail("went on to prepare the run"))
    other = dataclasses.replace(run, model=dataclasses.replace(MODEL, dim=32, num_layers=3))
    with pytest.raises(ConfigError, match=r"another architecture \(model.dim: 16 → 32, model.num_layers: 2 → 3\)"):
        train(other)


@pytest.mark.parametrize(
    ("changes", "words"), [({"seed": 1}, "seed: 0 → 1"), ({"data": {"batch_size": 16}}, "data.batch_size: 8 → 16")]
)
def test_other_data_or_seed_is_refused(done, changes, words):
    run, _ = done
    if "data" in changes:
        changes = {"data": dataclasses.replace(run.data, **changes["data"])}
    with pytest.raises(ConfigError, match=words):
        train(dataclasses.replace(run, **changes))


def test_load_run(done):
    run, _ = done
    loaded = load_run(run.run_dir)
    assert (loaded.step, loaded.config) == (4, run)
    assert loaded.model(loaded.tokenizer.encode("the ")[None]).shape == (1, 4, 256)
    with pytest.raises(ConfigError, match="no run in it"):
        load_run(run.run_dir + "x")
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 .*\[2, 4\]"):
        load_run(run.run_dir, step=3)


def test_a_truncated_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, capsys):
    run = config(tmp_path, data_changes=NO_EVALUATION)
    train(run)
    before = train_losses(run.run_dir)
    truncate(largest_file(tmp_path / "run/checkpoints/4/params"))
    result = train(run)
    out = capsys.readouterr().out
    assert "The checkpoint of step 4 is unusable" in out
    assert "Resuming from step 2" in out
    assert (result.resumed_from, result.step) == (2, 4)
    assert train_losses(run.run_dir) == before
    assert result.checkpoint.is_dir()
    assert (tmp_path / "run/damaged/4").is_dir()


def test_an_old_checkpoint_that_is_unreadable_is_set_aside(done, tmp_path):
    """Orbax does not see it, so it would stay for ever beside those that are kept."""
    finished, _ = done
    run = dataclasses.replace(finished, run_dir=str(tmp_path / "run"))
    shutil.copytree(finished.run_dir, run.run_dir)
    (tmp_path / "run/checkpoints/2/_CHECKPOINT_METADATA").write_text("[1]")
    setup = setup_lib.prepare(run)
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        _, resumed_from, notes = resume.first_state(setup, checkpoints, iter(setup.train_data))
        assert (resumed_from, checkpoints.steps()) == (4, [4])
    aside = tmp_path / "run/damaged/2"
    assert aside.is_dir()
    assert "The checkpoint of step 2 is unusable: cannot be read (its metadata" in notes[0]
    assert notes[0].endswith(f"It is now in {aside}.")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    run = config(
        tmp_path,
        data_changes=NO_EVALUATION,
        steps=9,
        checkpoint_every=1,
        log_every=3,
        optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0),
    )
    with pytest.raises(
        NonFiniteError, match=r"of step 2 is (nan|inf)\. The last good checkpoint is .*/1\. .*learning_rate"
    ):
        train(run)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["1"]
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(
        NonFiniteError, match=r"No checkpoint was saved yet\. .* Run the same command .* to start again\."
    ):
        train(dataclasses.replace(run, checkpoint_every=0))


@pytest.mark.parametrize("number", some_slow([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_a_signal_finishes_the_step_and_saves(tmp_path, number):
    run = config(tmp_path, steps=50, checkpoint_every=0, data_changes=NO_EVALUATION)

    def on_step(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"after step 4, saved in .*/4\. Run the same command") as info:
        train(run, on_step=on_step)
    assert info.value.signal == number
    assert signal.getsignal(number) is before
    result = train(dataclasses.replace(run, steps=5))
    assert result.resumed_from == 4


def test_an_evaluation_that_a_signal_prevented_is_made_up_for(done, tmp_path):
    """At a step on the way and at the last one: the resumed run has the records of one that was not stopped."""
    run = config(tmp_path, eval_every=2)
    for stop in (2, 4):

        def on_step(step: int, stop: int = stop) -> None:
            if step == stop - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Interrupted, match=f"after step {stop}, saved"):
            train(run, on_step=on_step)
    result = train(run)
    assert result.evaluation == done[1].evaluation
    train(run)  # finished: it evaluates, and records nothing
    found, expected = (
        [
            record
            for record in metrics.read(pathlib.Path(each.run_dir) / "metrics.jsonl")
            if record["kind"] == "evaluation"
        ]
        for each in (run, done[0])
    )
    assert found == expected


def test_a_signal_whose_exception_was_lost_is_remembered():
    with StopSignals() as signals:
        with contextlib.suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="Stopped by signal 15 before the first step"):
            signals.remember()


def test_a_terminal_that_closes():
    """Its shell sends SIGHUP too, and the second one does not end the process. Under nohup neither counts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Where the tests run in the background of a shell, it is ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as signals:
            signals.remember()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received(1, agree=False) == signal.SIGHUP
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.signal(signal.SIGHUP, signal.SIG_IGN) is signal.SIG_DFL
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupt)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_output_that_is_closed_does_not_end_a_run(error, monkeypatch, capsys):
    class Closed(io.StringIO):
        def flush(self):
            raise error

    monkeypatch.setattr("sys.stdout", Closed())
    with Progress(0, 4) as progress:
        progress.report(1, 2.0)
        progress.print("more")
        progress.report(2, 2.0)
    said = capsys.readouterr().err
    assert said == f"Nothing more is shown ({error}); training goes on.\n"


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [("{}", {"momentum": 0.9}, True), ({"momentum": 0.9}, {"momentum": 0.5}, False)],
)
def test_options_that_change_the_optimizers_state_are_refused(done, tmp_path, monkeypatch, old, new, refused):
    run = config(tmp_path, optimizer=OptimizerConfig(name="optax:sgd", options=old))
    changed = dataclasses.replace(run, optimizer=OptimizerConfig(name="optax:sgd", options=new))
    shutil.copytree(pathlib.Path(done[0].run_dir) / "checkpoints", tmp_path / "run/checkpoints")
    monkeypatch.setattr(Checkpoints, "newest_config", lambda _: to_dict(run))
    if refused:
        with pytest.raises(ValueError, match=r"must not change \(optimizer.options: '{}' → '{\"momentum\": ?0.9}'\)"):
            resume.check_resumable(changed)
    else:
        assert [line.partition(":")[0] for line in resume.check_resumable(changed)] == ["optimizer.options"]


def test_a_signal_before_the_first_step(tmp_path, monkeypatch):
    """It says what happened, and leaves nothing behind."""
    monkeypatch.setattr(setup_lib, "prepare", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="Stopped by signal 15 before the first step") as info:
        train(config(tmp_path))
    assert info.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run").exists()


def test_one_job_in_a_folder(done):
    run, _ = done
    with lock.hold(pathlib.Path(run.run_dir)):
        for _ in range(2):  # a refusal does not take the lock away
            with pytest.raises(ConfigError, match=rf"another job trains in it \(process {os.getpid()} on "):
                train(run)
    with lock.hold(pathlib.Path(run.run_dir)):
        pass


def test_two_jobs_that_start_together(tmp_path, monkeypatch):
    """Neither finds the folder; while one reads its data the other makes the folder and holds it."""
    run = config(tmp_path)
    prepare = setup_lib.prepare
    with contextlib.ExitStack() as other:

        def meanwhile(config):
            pathlib.Path(run.run_dir).mkdir()
            other.enter_context(lock.hold(pathlib.Path(run.run_dir)))
            return prepare(config)

        monkeypatch.setattr(setup_lib, "prepare", meanwhile)
        with pytest.raises(ConfigError, match="another job trains in it"):
            train(run)
    assert [path.name for path in pathlib.Path(run.run_dir).iterdir()] == ["lock"]


def test_reading_a_run_leaves_a_save_in_progress_alone(done):
    run, _ = done
    saving = pathlib.Path(run.run_dir) / "checkpoints" / "6.orbax-checkpoint-tmp"
    saving.mkdir()
    load_run(run.run_dir)
    assert saving.is_dir()
    saving.rmdir()


def test_a_file_in_the_place_of_a_folder(tmp_path):
    run = config(tmp_path)
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="which is not a folder"):
        train(run)
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("")
    with pytest.raises(ConfigError, match="'checkpoints' in it is not a folder"):
        train(run)
    with pytest.raises(ConfigError, match="no run in it"):
        load_run(run.run_dir)


@pytest.mark.parametrize(
    "content", some_slow(["", "null", "[]", '{"kind": 3}', "\xff", None], ["null", "[]", "\xff"]), ids=str
)
def test_a_damaged_tokenizer(done, content, tmp_path):
    run, _ = done
    folder = shutil.copytree(run.run_dir, tmp_path / "copy")
    if content is None:
        shutil.rmtree(folder / "tokenizer")
    else:
        (folder / "tokenizer/tokenizer.json").write_text(content, encoding="latin-1")
    for use in (lambda: load_run(folder), lambda: train(dataclasses.replace(run, run_dir=str(folder)))):
        with pytest.raises(ConfigError, match=r"tokenizer .*(damaged|kind 3|missing)"):
            use()


def test_a_tokenizer_of_the_same_size_is_not_believed(done, tmp_path):
    run, _ = done
    folder = shutil.copytree(run.run_dir, tmp_path / "copy")
    BpeTokenizer.train(["x"], 256).save(folder / "tokenizer")
    begun = dataclasses.replace(run, run_dir=str(tmp_path / "new"), init_from=str(folder))
    for use in (
        lambda: load_run(folder),
        lambda: train(dataclasses.replace(run, run_dir=str(folder))),
        lambda: train(begun),
    ):
        with pytest.raises(
            ConfigError, match=r"copy/tokenizer' is not the tokenizer of the run in .*copy': its fingerprint is"
        ):
            use()
    assert not (tmp_path / "new").exists()
    for file in folder.glob("checkpoints/*/integrity/data.json"):  # as an older version wrote it
        content = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in content.items() if "tokenizer" not in name}))
    assert isinstance(load_run(folder).tokenizer, BpeTokenizer)


def test_the_tokenizer_of_a_start_without_a_checkpoint_is_not_used(done, tmp_path):
    run, _ = done
    other = config(tmp_path, data_changes={"tokenizer": "bpe:300"})
    ByteTokenizer().save(tmp_path / "run/tokenizer")
    assert run_tokenizer(other).fingerprint == make_tokenizer(other.data).fingerprint
    make_tokenizer(other.data).save(tmp_path / "run/tokenizer")
    assert isinstance(run_tokenizer(dataclasses.replace(other, init_from=run.run_dir)), ByteTokenizer)
    shutil.copytree(pathlib.Path(run.run_dir) / "checkpoints", tmp_path / "run/checkpoints")
    with pytest.raises(ValueError, match="is not the tokenizer of the run"):
        run_tokenizer(dataclasses.replace(other, init_from=run.run_dir))


def test_nothing_is_written_through_a_link_at_a_temporary_name(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = config(tmp_path, steps=1, data_changes=NO_EVALUATION)
    for name in ("config.json.partial", "metrics.partial", "lock", f"tokenizer/.tokenizer.json.{os.getpid()}.partial"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).symlink_to(precious)
    with pytest.raises(OSError, match="lock"):
        train(run)
    (tmp_path / "run/lock").unlink()
    save_tokenizer = ByteTokenizer().save
    save_tokenizer(tmp_path / "run/tokenizer")
    train(run)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": MeshConfig(8, 1, 2)}, "needs 16 devices; there are 8"),
        ({"mesh": MeshConfig(8), "accumulation": 2}, r"8 / 2 = 4 sequences; it must be divisible .* 8 × 1 = 8"),
        ({"model": dataclasses.replace(MODEL, vocab_size=100)}, "model.vocab_size is 100; it must be at least 256"),
        ({"data_changes": {"sequence_length": 10_000}}, "too short for one sequence"),
        ({"data_changes": {"paths": ("/nonexistent/text.txt",)}}, "/nonexistent/text.txt"),
        ({"run_dir": "runs/lr[1e-3]"}, r"run_dir is 'runs/lr\[1e-3\]', whose absolute path has '\[1e-3\]'"),
    ],
)
def test_bad_input_leaves_no_folder_behind(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        train(config(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_of_text(tmp_path):
    (tmp_path / "empty").mkdir()
    run = dataclasses.replace(config(tmp_path), data=DataConfig(source="text", paths=(str(tmp_path / "empty"),)))
    with pytest.raises(ConfigError, match="empty"):
        train(run)
