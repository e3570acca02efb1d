"""Runs in a bucket: trained, stopped, killed and continued by processes that share nothing else."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import signal

import numpy as np
import pytest

from atlasjax import cli, storage
from atlasjax.config_json import to_dict
from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig, ProcessConfig
from atlasjax.storage import lease
from atlasjax.train import ConfigError, OptimizerConfig, TrainConfig, load_run, train
from atlasjax.train.errors import SaveError
from atlasjax.train.reports import metrics
from atlasjax.train.reports.plot import plot_loss
from atlasjax.train.saving import checkpoint, compiled_programs, saves, step_folders
from tests.distributed.test_processes import coordinator
from tests.storage.server import BUCKET, Fault
from tests.train.test_compiled_programs import STEP, compilations, keep_all  # noqa: F401
from tests.train.tiny import TEXT, child, config, finish

pytestmark = pytest.mark.usefixtures("compile_fast")
NO_EVALUATION = {"validation_fraction": 0.0}  # where none is looked at: one program less to compile
RUNS = f"gs://{BUCKET}/runs"
STEPS = 9
THREE = {"steps": 3, "checkpoint_every": 1, "keep": 2, "eval_every": 2}


def in_bucket(run: TrainConfig, name: str) -> TrainConfig:
    """The run with its folder and its text in the bucket."""
    storage.path(f"{RUNS}/text/text.txt").write_bytes(TEXT.encode())
    data = dataclasses.replace(run.data, paths=(f"{RUNS}/text",))
    return dataclasses.replace(run, data=data, run_dir=f"{RUNS}/{name}")


def train_losses(run_dir: str) -> list[tuple[int, float]]:
    records = metrics.read(f"{run_dir}/metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def done(server, tmp_path_factory):
    """A finished run that keeps two of its three checkpoints: (config, result)."""
    tiny = config(tmp_path_factory.mktemp("done"), **THREE, tensorboard=True)
    run = in_bucket(tiny, "done")
    return run, train(run)


def test_what_a_run_leaves(done, server):
    run, result = done
    assert (result.step, result.resumed_from) == (3, 0)
    assert result.checkpoint == storage.path(f"{run.run_dir}/checkpoints/3")
    names = {name.removeprefix("runs/done/").partition("/")[0] for name in server.names("runs/done/")}
    assert names == {"checkpoints", "config.json", "loss_curve.png", "metrics.jsonl", "tensorboard", "tokenizer"}
    steps = {name.split("/")[3] for name in server.names("runs/done/checkpoints/")}
    assert steps == {"2", "3"}
    assert json.loads(server.read("runs/done/config.json")) == to_dict(run)
    assert server.read("runs/done/loss_curve.png").startswith(b"\x89PNG")
    records = metrics.read(f"{run.run_dir}/metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3]
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [2, 3]


def test_event_files_are_whole(done, server):
    from tensorboardX.proto.event_pb2 import Event

    tags = set()
    for name in server.names("runs/done/tensorboard/"):
        content = server.read(name)
        while content:  # length (8 bytes), its sum (4), the record, its sum (4)
            length = int.from_bytes(content[:8], "little")
            assert len(content) >= length + 16
            tags |= {value.tag for value in Event.FromString(content[12 : 12 + length]).summary.value}
            content = content[length + 16 :]
    assert {"train/loss", "evaluation/bits_per_byte"} <= tags


def test_the_numbers_are_those_of_a_run_on_a_disk(done, tmp_path):
    run, result = done
    local = config(tmp_path, **THREE)
    other = train(local)
    assert train_losses(local.run_dir) == train_losses(run.run_dir)
    assert other.evaluation == result.evaluation


def test_load_run(done):
    """A checkpoint without its marker is not there: its save was killed."""
    run, _ = done
    storage.path(f"{run.run_dir}/checkpoints/9/params/left").write_bytes(b"half")
    loaded = load_run(run.run_dir)
    assert (loaded.step, loaded.config) == (3, run)
    assert load_run(run.run_dir, step=2).step == 2
    with pytest.raises(ConfigError, match="no run in it"):
        load_run(run.run_dir + "x")


def test_a_finished_run_does_nothing_more(done, server, capsys):
    run, result = done
    again = train(run)
    assert again.resumed_from == again.step == 3
    assert again.evaluation == result.evaluation
    assert "All 3 steps are done" in capsys.readouterr().out
    assert not server.names("runs/done/checkpoints/9/")


def test_commands(done, capsys):
    run, result = done
    assert cli.main(["evaluate", "--run-dir", run.run_dir, "--max-batches", "1"]) == 0
    assert f"{result.evaluation.bits_per_byte:9.4f}" in capsys.readouterr().out
    assert cli.main(["evaluate", "--run-dir", run.run_dir, "--text", f"{RUNS}/text/*.txt", "--stream"]) == 0
    assert str(plot_loss(run.run_dir, title="again")) == f"{run.run_dir}/loss_curve.png"


@pytest.mark.slow  # it loads the run as `evaluate` does, and goes on as in tests/test_cli.py
def test_generate(done, capsys):
    run, _ = done
    assert cli.main(["generate", "--run-dir", run.run_dir, "--prompt", "the ", "--max-tokens", "8"]) == 0
    assert "the " in capsys.readouterr().out


def test_a_tokenizer_and_parquet_from_the_bucket(server, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from atlasjax.data.sources import load_documents
    from atlasjax.data.tokenizers import BpeTokenizer, load_tokenizer, make_tokenizer

    trained = BpeTokenizer.train([TEXT], 300)
    folder = storage.path(f"{RUNS}/tokenizer")
    trained.save(folder)
    assert (load_tokenizer(folder).encode(TEXT) == trained.encode(TEXT)).all()
    made = make_tokenizer(DataConfig(tokenizer=f"bpe:{folder}/bpe.json"))
    assert (made.encode(TEXT) == trained.encode(TEXT)).all()
    with pytest.raises(FileNotFoundError, match=r"tokenizer file 'gs://pod/no.json' does not exist"):
        make_tokenizer(DataConfig(tokenizer=f"bpe:gs://{BUCKET}/no.json"))
    storage.path(f"{RUNS}/zipped/a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    zipped = DataConfig(source="text", paths=(f"{RUNS}/zipped",), validation_fraction=0.0)
    assert load_documents(zipped, "train")[0] == TEXT
    texts = [f"document {i}" for i in range(40)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=8)
    storage.path(f"{RUNS}/parquet/x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes())
    documents = load_documents(
        DataConfig(source="parquet", paths=(f"{RUNS}/parquet",), validation_fraction=0.0), "train"
    )
    assert [documents[i] for i in range(len(documents))] == texts


def damage(server, name: str) -> None:
    """Cuts the largest object below a name in half, as a fault of the store would."""
    largest = max(server.names(name), key=lambda one: len(server.read(one)))
    content = server.read(largest)
    storage.path(f"gs://{BUCKET}/{largest}").write_bytes(content[: len(content) // 2])


def test_a_damaged_checkpoint_is_set_aside(server, tmp_path, capsys):
    run = in_bucket(config(tmp_path, data_changes=NO_EVALUATION), "damaged")
    train(run)
    before = train_losses(run.run_dir)
    damage(server, "runs/damaged/checkpoints/4/params/")
    result = train(run)
    out = capsys.readouterr().out
    assert "The checkpoint of step 4 is unusable" in out
    assert f"It is now in {run.run_dir}/damaged/4" in out
    assert (result.resumed_from, result.step) == (2, 4)
    assert train_losses(run.run_dir) == before
    assert server.names("runs/damaged/damaged/4/params/")


@pytest.mark.slow  # three runs in processes of their own; the same run in one process is compared above
def test_processes_that_share_nothing_but_the_bucket(server, tmp_path):
    """Killed after steps 4 and 7, each time continued by another process in another folder: bit for bit the same run."""
    tiny = config(tmp_path, steps=STEPS, eval_every=3)
    whole, killed = in_bucket(tiny, "whole"), in_bucket(tiny, "killed")
    uninterrupted = child("tests.storage.child", to_dict(whole), "-1", wait=False)
    outputs = [child("tests.storage.child", to_dict(killed), str(kill_at)) for kill_at in (4, 7, -1)]
    done = finish(uninterrupted)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [one.returncode for one in outputs] == [-signal.SIGKILL, -signal.SIGKILL, 0], outputs[-1].stderr[-2000:]
    assert "Resuming" not in outputs[0].stdout
    for output in outputs[1:]:
        assert "did not end properly, or runs; waiting" in output.stdout  # the lease of the killed one
        assert "Resuming from step" in output.stdout
    losses = train_losses(whole.run_dir)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert train_losses(killed.run_dir) == losses
    assert (tmp_path / "text.txt").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # two runs with gloo; tests/distributed has the same on a disk
def test_two_processes_of_one_job(server, tmp_path):
    """Each writes its part of a checkpoint; one process alone goes on from there, with the numbers of a run on a disk."""
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
    tiny = config(tmp_path, steps=6, mesh=MeshConfig(1, 2), optimizer=optimizer)
    run = in_bucket(tiny, "together")
    address, jobs = coordinator(), []
    for index in range(2):
        place = dataclasses.replace(run, steps=4, processes=ProcessConfig(True, address, 2, index))
        jobs.append(child("tests.storage.child", to_dict(place), "-1", wait=False))
    train(tiny)
    results = [finish(job) for job in jobs]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
    for index in range(2):
        assert server.names(f"runs/together/checkpoints/4/params/ocdbt.process_{index}/")
    resumed = train(run)
    assert (resumed.resumed_from, resumed.step) == (4, 6)
    expected, found = train_losses(tiny.run_dir), train_losses(run.run_dir)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in expected], rtol=1e-5)


@pytest.mark.slow  # tests/train/test_compiled_programs.py has a folder on a disk
def test_compiled_programs(server, tmp_path, keep_all, caplog, capsys):  # noqa: F811
    """A second start finds its programs in the bucket; a bucket that refuses them does not stop it."""
    run = in_bucket(config(tmp_path, data_changes=NO_EVALUATION, compilation_cache=True), "compiled")
    train(dataclasses.replace(run, steps=2))
    folder = f"runs/compiled/compiled/{compiled_programs.environment()}/"
    assert [name for name in server.names(folder) if STEP in name]
    with compilations(caplog) as (compiled, found):
        train(run)
    assert STEP in found
    assert STEP not in compiled
    capsys.readouterr()
    refused = Fault(
        lambda method, path: "/compiled/" in path and f"{compiled_programs.environment()}" in path, status=403
    )
    with server.faulty(refused), compilations(caplog) as (compiled, found):
        train(dataclasses.replace(run, steps=5))
    out = capsys.readouterr().out
    assert "The compiled programs of the run cannot be read (gs://pod/runs/compiled/" in out
    assert STEP in compiled


def test_one_job_at_a_time(server, tmp_path, monkeypatch):
    """The second job is refused while the first one trains; it is told who does."""
    monkeypatch.setattr(lease, "SECONDS", 8.0)  # it is renewed four times in them, which the second waits for
    run = in_bucket(config(tmp_path, data_changes=NO_EVALUATION), "busy")
    refused = []

    def on_step(step: int) -> None:
        if step == 2:
            with pytest.raises(ConfigError, match=r"another job trains in it \(process") as caught:
                train(run)
            refused.append(caught.value)

    train(run, on_step=on_step)
    assert refused
    assert [step for step, _ in train_losses(run.run_dir)] == [1, 2, 3, 4]


def test_a_run_whose_lease_was_taken_over_writes_nothing_more(server, tmp_path):
    run = in_bucket(config(tmp_path, data_changes=NO_EVALUATION), "taken")

    def on_step(step: int) -> None:
        if step == 3:
            storage.path(f"{run.run_dir}/lease").write_bytes(b'{"owner": "process 2 on b", "seconds": 60}')

    with pytest.raises(storage.StoreError, match=r"another job \(process 2 on b\) has taken over"):
        train(run, on_step=on_step)
    assert {name.split("/")[3] for name in server.names("runs/taken/checkpoints/")} == {"2"}
    assert server.read("runs/taken/lease")  # the other's


def test_a_save_that_fails_leaves_the_checkpoints_before_it(server, tmp_path, saves_at_once, capsys):
    """The bucket refuses to take anything more in the middle of a save, and of its repetitions."""
    run = in_bucket(config(tmp_path, data_changes=NO_EVALUATION), "refused")
    refused = Fault(lambda method, path: method == "POST" and "checkpoints/4/" in path and "/d/" in path, status=403)
    with (
        server.faulty(refused),
        pytest.raises(SaveError, match=f"the newest is {run.run_dir}/checkpoints/2") as caught,
    ):
        train(run)
    assert refused.seen > saves.REPEATS
    assert "\n" not in str(caught.value)
    assert notices(capsys) == [f"({n} of {saves.REPEATS})" for n in range(1, saves.REPEATS + 1)]
    assert {name.split("/")[3] for name in server.names("runs/refused/checkpoints/")} == {"2"}
    assert train(run).resumed_from == 2


@pytest.fixture
def saves_at_once(monkeypatch):
    monkeypatch.setattr(saves, "PAUSE", 0.01)


def notices(capsys) -> list[str]:
    """The count at the end of each line that says that a state is saved again."""
    lines = [line for line in capsys.readouterr().out.splitlines() if "Saving again in" in line]
    assert all(line.startswith("Saving the checkpoint of step") for line in lines)
    return [line[line.rindex("(") : -1] for line in lines]


def every(n: int, but: tuple[str, ...] = ()):
    """Matches every n-th request, except those of the lease, which a thread makes at any time, and those with one of `but`."""
    count = itertools.count(1)
    return lambda method, path: not any(part in path for part in ("/lease", *but)) and next(count) % n == 0


# Requests whose answer must not be lost. The emulator forgets an upload in parts when it is complete, where Google answers
# as before. A lost answer about a manifest fails the save: see `test_a_lost_answer_about_a_manifest`.
NOT_LOST = ("upload_id", "manifest.ocdbt")


def test_a_run_through_errors_that_pass_and_slow_answers(server, tmp_path, done, no_pauses):
    """Every answer is slow, and some are errors that pass, of which some come after what was asked was done."""
    run = in_bucket(config(tmp_path, **THREE | {"checkpoint_every": 2}), "faulty")
    faults = [
        Fault(every(60, but=NOT_LOST), status=503, after=True),
        Fault(every(25), status=500),
        Fault(lambda method, path: True, seconds=0.02),
    ]
    with server.faulty(*faults):
        train(run)
    assert all(fault.seen for fault in faults)
    assert train_losses(run.run_dir) == train_losses(done[0].run_dir)


def lost_manifest(step: int, place: str, times: int = 1) -> Fault:
    """Tensorstore asks again, and takes its own manifest for another process's: the save fails."""
    parts = f"checkpoints/{step}/", place, "manifest.ocdbt"
    return Fault(
        lambda method, path: method == "POST" and all(part in path for part in parts),
        status=503,
        after=True,
        times=times,
    )


def refused(step: int, place: str, times: int) -> Fault:
    """The store refuses what is written there, without a repetition."""
    parts = f"checkpoints/{step}/", place
    return Fault(lambda method, path: method == "POST" and all(part in path for part in parts), status=403, times=times)


def array_sums(sums: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in sums.items() if name.startswith((".params", ".optimizer"))}


# The last save, the first one, and one that goes on while steps are taken: two runs each.
@pytest.mark.parametrize(
    ("failing", "kept"),
    [
        pytest.param(6, [2, 4, 6], marks=pytest.mark.slow),
        pytest.param(2, [2, 4, 6], marks=pytest.mark.slow),
        pytest.param(4, [2, 5, 6], marks=pytest.mark.slow),
    ],
)
def test_a_lost_answer_about_a_manifest(server, tmp_path, saves_at_once, monkeypatch, capsys, failing, kept):
    """The state is saved again; if it is gone by then, the present one is. The numbers stay."""
    monkeypatch.setattr(checkpoint, "agreed_done", lambda done: True)  # a step here is shorter than a save
    local = config(tmp_path, steps=6, log_every=1)
    run = in_bucket(local, f"lost-{failing}")
    lost = lost_manifest(failing, "")
    with server.faulty(lost):
        result = train(run)
    assert lost.seen == 1
    assert notices(capsys) == [f"(1 of {saves.REPEATS})"]
    assert step_folders.complete_steps(result.checkpoint.parent) == kept
    undisturbed = train(local)
    assert train_losses(run.run_dir) == train_losses(local.run_dir)
    assert result.evaluation == undisturbed.evaluation
    assert load_run(run.run_dir).step == 6  # its arrays have their sums
    for step in kept:
        if (folder := pathlib.Path(local.run_dir) / f"checkpoints/{step}").exists():
            found = json.loads(
                server.read(f"runs/{result.checkpoint.parent.parent.name}/checkpoints/{step}/integrity/data.json")
            )
            assert array_sums(found) == array_sums(json.loads((folder / "integrity/data.json").read_text()))


@pytest.mark.slow  # two runs with gloo each
@pytest.mark.parametrize(
    ("process", "fault", "times"),
    [
        pytest.param(1, refused(4, "params/ocdbt.process_1/d/", 10**9), 10**9, id="process 1, always"),
        pytest.param(1, refused(4, "params/ocdbt.process_1/d/", 1), 1, id="process 1, once"),
        pytest.param(0, lost_manifest(4, "params/ocdbt.process_0/"), 1, id="process 0, a lost answer"),
        pytest.param(0, refused(4, "params/manifest", 1), 1, id="the end, once"),
    ],
)
def test_a_save_that_fails_in_one_of_two_processes(server, tmp_path, process, fault, times):
    """Both save again, or end with the same line."""
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
    tiny = config(tmp_path, steps=4, mesh=MeshConfig(1, 2), optimizer=optimizer)
    run = in_bucket(tiny, f"told-{tmp_path.name}")
    address = coordinator()
    with server.faulty(fault):
        jobs = [
            child(
                "tests.storage.child",
                to_dict(dataclasses.replace(run, processes=ProcessConfig(True, address, 2, index))),
                "-1",
                wait=False,
            )
            for index in range(2)
        ]
        train(tiny)
        results = [finish(job) for job in jobs]
    said = f"(in process {process}). The checkpoints before it are intact"
    assert said in results[0].stdout, results[0].stdout + results[0].stderr[-3000:]
    if times == 1:
        assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
        assert load_run(run.run_dir).step == 4
        expected, found = train_losses(tiny.run_dir), train_losses(run.run_dir)
        assert [step for step, _ in found] == [1, 2, 3, 4]
        np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in expected], rtol=1e-5)
        return
    for result in results:
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith(
            "atlasjax.train.errors.SaveError: Saving the checkpoint of step 4"
        )
        assert said in result.stderr.splitlines()[-1]
    assert {name.split("/")[3] for name in server.names(f"{run.run_dir.partition('pod/')[2]}/checkpoints/")} == {"2"}


@pytest.mark.parametrize(
    ("run_dir", "words"),
    [
        ("gz://pod/x", "run_dir: 'gz://pod/x' cannot be opened. Unknown scheme 'gz'. Did you mean 'gs'"),
        ("gs:/pod/x", "run_dir: 'gs:/pod/x' is neither a path nor a URL; did you mean 'gs://pod/x'"),
        ("memory://pod/x", "run_dir is 'memory://pod/x'; checkpoints are written to gs:// or to a folder"),
        ("gs://no-such-bucket/x", "run_dir is 'gs://no-such-bucket/x'; there is no such bucket"),
    ],
)
def test_a_run_dir_that_cannot_be(server, tmp_path, monkeypatch, capsys, run_dir, words):
    """One line, exit code 2, nothing compiled, and no local folder of that name."""
    import jax

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled something"))
    assert cli.main(["train", "--run-dir", run_dir, "--preset", "linear-attention-tiny", "--mesh.data", "1"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.strip().count("\n") == 0
    assert list(tmp_path.iterdir()) == []


def test_no_access(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = config(tmp_path).run_dir
    for command in ("train", "evaluate", "generate"):
        with server.faulty(Fault(lambda method, path: True, status=401)):
            assert cli.main([command, "--run-dir", f"gs://{BUCKET}/{run[-3:]}"]) == 2
        error = capsys.readouterr().err
        assert "access is refused" in error
        assert "gcloud auth application-default login" in error
        assert error.strip().count("\n") == 0
