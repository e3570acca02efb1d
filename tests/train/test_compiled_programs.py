"""A second start takes its programs from the run's folder; nothing about that folder can fail a run."""

import contextlib
import dataclasses
import json
import logging
import pathlib

import jax
import pytest

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.distributed import MeshConfig, ProcessConfig
from atlasjax.train import OptimizerConfig, train
from atlasjax.train.saving import compiled_programs, runs
from tests.distributed.test_processes import coordinator
from tests.train.tiny import child, config, finish, train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")
STEP = "jit_traced"  # the name of the training step's program, and of the evaluation's


@pytest.fixture
def keep_all():
    """Programs of any size are kept, as those of real models would be."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@contextlib.contextmanager
def compilations(caplog):
    """Gives two lists: the names of programs that are compiled, and those that are found."""
    compiled: list[str] = []
    found: list[str] = []
    jax.clear_caches()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="jax._src.compiler"):
        yield compiled, found
    for record in caplog.records:
        text = record.getMessage()
        for start, names in (
            ("PERSISTENT COMPILATION CACHE MISS", compiled),
            ("Persistent compilation cache hit", found),
        ):
            if text.startswith(start):
                names.append(text.split("'")[1])
    caplog.clear()


def run_config(folder: pathlib.Path, **changes):
    optimizer = OptimizerConfig(warmup_steps=2, schedule="constant")  # others have the number of steps in the program
    return config(
        folder, optimizer=optimizer, data_changes={"validation_fraction": 0.0}, compilation_cache=True, **changes
    )


def test_a_second_start_does_not_compile_again(tmp_path, keep_all, caplog, capsys):
    run = run_config(tmp_path)
    own = jax.config.jax_compilation_cache_dir
    with compilations(caplog) as (compiled, found):
        train(dataclasses.replace(run, steps=2))
    assert STEP in compiled
    assert STEP not in found
    (folder,) = (tmp_path / "run/compiled").iterdir()
    assert folder.name == compiled_programs.environment()
    assert any(file.name.startswith(STEP) for file in folder.iterdir())
    assert jax.config.jax_compilation_cache_dir == own
    with compilations(caplog) as (compiled, found):
        train(run)
    assert STEP in found
    assert STEP not in compiled
    losses = train_losses(run.run_dir)
    # Damaged programs are compiled again, and replaced.
    files = [file for file in folder.iterdir() if file.name.startswith(STEP)]
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-100] + bytes(100))
    (folder.parent / "cpu-of-another-version").mkdir()
    capsys.readouterr()
    with compilations(caplog) as (compiled, found):
        train(dataclasses.replace(run, steps=5))
    assert STEP in compiled
    assert "programs in" in capsys.readouterr().out
    with compilations(caplog) as (compiled, found):
        train(dataclasses.replace(run, steps=6))
    assert STEP in found
    assert train_losses(run.run_dir)[:4] == losses


def test_only_who_asks_for_it_runs_what_is_kept(tmp_path, monkeypatch):
    """A program is code. Neither several processes, nor a bucket, nor the config in a run's folder is a reason to load one."""
    run = config(tmp_path)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(compiled_programs.CompiledPrograms, "load", lambda self: pytest.fail("programs are loaded"))
    for one in (
        run,
        dataclasses.replace(run, run_dir="gs://bucket/run"),
        dataclasses.replace(run, compilation_cache=False),
    ):
        with compiled_programs.kept(one, print) as programs:
            assert programs is None
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(dataclasses.replace(run, compilation_cache=True))))
    saved = runs.run_config(folder)
    assert saved is not None
    assert saved.compilation_cache is None


def test_a_folder_that_cannot_be_read_or_written(tmp_path):
    """One line each, and no error: a file is in the folder's place."""
    said: list[str] = []
    (tmp_path / "compiled").write_text("a file")
    local = tmp_path / "local"
    local.mkdir()
    programs = compiled_programs.CompiledPrograms(tmp_path / "compiled/cpu-1", local, said.append)
    programs.load()
    assert said == []
    (local / "program-cache").write_bytes(b"program")
    programs.save()
    programs.close()
    assert len(said) == 1
    assert "cannot be kept" in said[0]
    refused = compiled_programs.CompiledPrograms(_Refuses(), local, said.append)
    refused.load()
    assert "cannot be read (gs://x: access is refused)" in said[1]


class _Refuses(storage.StorePath):
    def __init__(self):
        super().__init__("gs://x")

    def is_dir(self):
        raise storage.StoreError("gs://x: access is refused.")


@pytest.mark.slow  # two jobs of two processes; the programs themselves are those of the tests above
def test_two_processes(tmp_path, monkeypatch):
    """Both read what process 0 kept. On a CPU only process 0 can use it: JAX's keys are different in each process there."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax._src.compiler")
    for steps, hit in ((2, False), (4, True)):
        address, jobs = coordinator(), []
        for index in range(2):
            run = run_config(
                tmp_path, steps=steps, mesh=MeshConfig(2), processes=ProcessConfig(True, address, 2, index)
            )
            jobs.append(child("tests.train.child", to_dict(run), "-1", wait=False))
        results = [finish(job) for job in jobs]
        assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
        assert (f"Persistent compilation cache hit for '{STEP}'" in results[0].stderr) == hit
        assert (f"COMPILATION CACHE MISS for '{STEP}'" in results[0].stderr) != hit
    assert len(list((tmp_path / "run/compiled").iterdir())) == 1
