"""Checkpoints: exact round trips, damage noticed and survived, failing writes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.train import CheckpointError, Checkpoints, ConfigError, NonFiniteError, TrainState
from atlasjax.train.errors import RunError, SaveError
from atlasjax.train.reports.runtime_errors import explained
from atlasjax.train.saving import checkpoint, integrity
from atlasjax.train.saving.quiet import root_cause
from atlasjax.train.saving.step_folders import check_path
from tests.marks import some_slow
from tests.train.tiny import child

OPTIMIZER = optax.adamw(1e-3)
CONFIG = {"model": {"dim": 4}}


def make_state(step: int, fill: float = 0.0) -> TrainState:
    params = {"layer": {"kernel": jax.random.normal(jax.random.key(step), (64, 128)) + fill}, "bias": jnp.arange(8.0)}
    noise = lambda leaf: jax.random.normal(jax.random.key(step + 1), leaf.shape) if leaf.ndim else leaf
    return TrainState(params, jax.tree.map(noise, OPTIMIZER.init(params)), jax.random.key(step), jnp.int32(step))


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A folder with the steps 2, 4 and 6; tests that damage it take a copy."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(make_state(step), [{"next": step}], CONFIG)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"),
        key=lambda path: path.stat().st_size,
    )


def test_round_trip_is_exact(saved):
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.steps() == [2, 4, 6]
        restored = checkpoints.restore(abstract(make_state(6)))
        earlier = checkpoints.restore(abstract(make_state(4)), step=4)
        assert checkpoints.newest_config() == CONFIG
    assert (restored.step, restored.positions, restored.skipped) == (6, [{"next": 6}], [])
    chex.assert_trees_all_equal(jax.random.key_data(restored.state.key), jax.random.key_data(jax.random.key(6)))
    chex.assert_trees_all_equal(restored.state.params, make_state(6).params)
    assert jax.tree.structure(restored.state) == jax.tree.structure(make_state(6))
    chex.assert_trees_all_equal(earlier.state.params, make_state(4).params)


def test_another_mesh(saved):
    mesh = make_mesh(MeshConfig(2, 2, 2))
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=split if x.ndim == 2 else NamedSharding(mesh, PartitionSpec())
        ),
        make_state(6),
    )
    with Checkpoints(saved) as checkpoints:
        state = checkpoints.restore(target).state
    assert state.params["layer"]["kernel"].sharding == split
    np.testing.assert_array_equal(state.params["layer"]["kernel"], make_state(6).params["layer"]["kernel"])


def test_another_dtype_is_not_called_damage(saved):
    """Of parameters that a model under `jax_enable_x64` would have in another dtype than its checkpoint."""
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
    target = abstract(make_state(6)).params
    message = r"\.params\['bias'\] was saved as float32, the model has bfloat16"
    with Checkpoints(saved) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.restore_params(jax.tree.map(cast, target), 6)


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(make_state(step), [None], CONFIG)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["2", "3"]


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("params", truncate),
        ("params", flip_a_bit),
        ("params", os.remove),
        ("optimizer", flip_a_bit),
        pytest.param("optimizer", truncate, marks=pytest.mark.slow),
        pytest.param("optimizer", os.remove, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_damage_is_noticed_and_the_one_before_is_used(copy, part, damage):
    damage(largest_file(copy / "6" / part))
    with Checkpoints(copy) as checkpoints:
        restored = checkpoints.restore(abstract(make_state(6)))
        [(step, reason)] = restored.skipped
        assert (restored.step, step) == (4, 6)
        assert "cannot be read" in reason or "damaged" in reason
        chex.assert_trees_all_equal(restored.state.params, make_state(4).params)
        aside = checkpoints.set_aside(6)
        assert aside.is_dir()
        assert checkpoints.steps() == [2, 4]
        checkpoints.save(make_state(6), [{"next": 6}], CONFIG)  # the step can be saved again
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore(abstract(make_state(6))).step == 6


@pytest.mark.parametrize(
    "name", ["position/data.json", "_CHECKPOINT_METADATA", "params/_METADATA", "integrity/data.json"]
)
def test_damaged_metadata(copy, name):
    truncate(copy / "6" / name)
    with Checkpoints(copy) as checkpoints:
        restored = checkpoints.restore(abstract(make_state(6)))
        assert restored.step in (4, 6)
        chex.assert_trees_all_equal(restored.state.params, make_state(restored.step).params)


OTHER = {
    "position": ([{"next": 7}], None, [], {}, "x", 3),
    "config": ({"model": {"dim": 5}}, None, [], "x"),
    "integrity": (None, [], {}, {".step": 6}, "x", {".step": "6"}),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=[pytest.mark.slow] if number else [])
        for name, values in OTHER.items()
        for number, value in enumerate(values)
    ],
)
def test_a_changed_text_is_damage(copy, name, value):
    """It can be read, and is JSON; only its sum tells that it is not what was saved."""
    (copy / "6" / name / "data.json").write_text(json.dumps(value))
    with Checkpoints(copy) as checkpoints:
        restored = checkpoints.restore(abstract(make_state(6)))
        assert (restored.step, restored.positions, [step for step, _ in restored.skipped]) == (4, [{"next": 4}], [6])
        params, used, _ = checkpoints.restore_params(abstract(make_state(6)).params)
        assert used == 4
        chex.assert_trees_all_equal(params, make_state(4).params)
        assert checkpoints.newest_config() == CONFIG


def test_the_tokenizer_of_a_run_is_kept_and_checked(copy):
    file = copy / "8/integrity/data.json"
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.newest_tokenizer() == (6, None)
        checkpoints.save(make_state(8), [{"next": 8}], CONFIG, "abc")
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.newest_tokenizer() == (8, "abc")
    whole = json.loads(file.read_text())
    for value in ("abd", None):
        file.write_text(json.dumps({**whole, "tokenizer": value}))
        with Checkpoints(copy) as checkpoints:
            assert checkpoints.newest_tokenizer() == (6, None)
            assert [step for step, _ in checkpoints.restore(abstract(make_state(8))).skipped] == [8]
    old = {name: value for name, value in whole.items() if name not in ("tokenizer", ".tokenizer")}
    file.write_text(json.dumps(old))
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.newest_tokenizer() == (8, None)
        assert checkpoints.restore(abstract(make_state(8))).step == 8


def test_a_checkpoint_in_another_steps_folder_is_not_believed(copy):
    shutil.rmtree(copy / "4")
    shutil.copytree(copy / "2", copy / "4")
    (copy / "6").rename(copy / "8")
    with Checkpoints(copy) as checkpoints:
        restored = checkpoints.restore(abstract(make_state(6)))
        assert (restored.step, restored.positions) == (2, [{"next": 2}])
        assert checkpoints.restore_params(abstract(make_state(6)).params)[1] == 2
    assert [(step, reason.split(":")[0]) for step, reason in restored.skipped] == [
        (8, "it holds step 6"),
        (4, "it holds step 2"),
    ]


NO_METADATA = (
    "null", "[1]", '"x"', "3", "{}", '{"commit_timestamp_nsecs": "x"}', '{"commit_timestamp_nsecs": 1e300}',
    '{"commit_timestamp_nsecs": NaN}', '{"commit_timestamp_nsecs": [1]}', '{"item_handlers": 3}',
    '{"item_handlers": {"params": 3}}', '{"item_handlers": []}',
    '{"performance_metrics": {"other": 1}}', '{"performance_metrics": 3}', '{"custom_metadata": [1]}',
)  # fmt: skip


@pytest.mark.parametrize("text", some_slow(NO_METADATA, NO_METADATA[5:]))
def test_json_that_is_no_metadata_is_damage(copy, text):
    (copy / "6/_CHECKPOINT_METADATA").write_text(text)
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.steps() == [2, 4, 6]
        assert checkpoints.newest_config() == CONFIG
        restored = checkpoints.restore(abstract(make_state(6)))
        assert restored.step in (4, 6)
        chex.assert_trees_all_equal(restored.state.params, make_state(restored.step).params)
        if restored.step == 6:  # Orbax does not need what is missing
            return
        [(step, reason)] = restored.skipped
        assert step == 6
        assert "cannot be read" in reason
        assert "\n" not in reason
        with pytest.raises(CheckpointError, match=r"/6: cannot be read"):
            checkpoints.restore(abstract(make_state(6)), step=6)
        checkpoints.set_aside(6)
        checkpoints.save(make_state(6), [{"next": 6}], CONFIG)
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore(abstract(make_state(6))).step == 6


def test_no_usable_checkpoint(copy):
    for step in (2, 4, 6):
        truncate(largest_file(copy / str(step) / "params"))
    with Checkpoints(copy) as checkpoints, pytest.raises(CheckpointError, match="No usable checkpoint") as info:
        checkpoints.restore(abstract(make_state(6)))
    assert all(f"/{step}:" in str(info.value) for step in (2, 4, 6))
    assert "\n" not in str(info.value)


def test_a_step_that_is_not_there(saved):
    with (
        Checkpoints(saved) as checkpoints,
        pytest.raises(ConfigError, match=r"no checkpoint of step 3 .* \[2, 4, 6\]"),
    ):
        checkpoints.restore(abstract(make_state(6)), step=3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, value):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(make_state(1), [None], CONFIG)
        with pytest.raises(NonFiniteError, match="after step 2"):
            checkpoints.save(make_state(2, fill=value), [None], CONFIG)
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize(("name", "saved"), [("least", [1]), ("bias", [])])
def test_what_an_optimizer_keeps_beside_moments_may_be_infinite(tmp_path, name, saved):
    state = make_state(1)
    state = dataclasses.replace(state, optimizer=(state.optimizer, {name: jnp.full(8, np.inf)}))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with contextlib.nullcontext() if saved else pytest.raises(NonFiniteError, match="after step 1"):
            checkpoints.save(state, [None], CONFIG)
        checkpoints.wait()
        assert checkpoints.steps() == saved
        if saved:
            chex.assert_trees_all_equal(checkpoints.restore(abstract(state)).state.optimizer, state.optimizer)


def test_a_disk_without_room_is_refused_before_writing(copy, monkeypatch):
    usage = shutil.disk_usage(copy)
    with Checkpoints(copy) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"step 8 failed: the disk has 0.0 MiB free.*newest is .*/6"):
            checkpoints.save(make_state(8), [None], CONFIG)
    assert sorted(path.name for path in copy.iterdir()) == ["2", "4", "6"]


def test_a_full_disk_of_another_process_stops_all(copy, monkeypatch):
    """Before anything is written: a process that began would wait for the others."""
    told = []

    def agreed(cause):
        told.append(cause)
        return "the disk has 1.0 MiB free; the checkpoint needs 2.0 MiB (in process 1)"

    with Checkpoints(copy) as checkpoints:
        monkeypatch.setattr(checkpoint, "agreed_cause", agreed)
        with pytest.raises(CheckpointError, match=r"step 8 failed: the disk has 1.0 MiB free.*\(in process 1\)"):
            checkpoints.save(make_state(8), [None], CONFIG)
        assert checkpoints.steps() == [2, 4, 6]
    assert told == [None]


def test_a_write_that_fails_leaves_nothing_half_written(copy):
    """In a child process whose files may not grow past 8 KiB, as on a full disk: the failure is in the background thread."""
    done = child("tests.train.failing_save", str(copy))
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Saving the checkpoint of step 8 failed" in done.stdout
    assert "File too large" in done.stdout
    assert f"newest is {copy / '6'}" in done.stdout
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in copy.iterdir()) == ["2", "4", "6"]
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore(abstract(make_state(6))).step == 6


def test_a_save_whose_arrays_could_not_be_read_is_a_failure(tmp_path):
    """Orbax calls it complete; in a folder [x] it finds none of what it has written."""
    folder = tmp_path / "[x]"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(make_state(2), [None], CONFIG)
        with pytest.raises(
            SaveError, match=r"step 2 failed: params/manifest.ocdbt is missing, .* no earlier checkpoint"
        ):
            checkpoints.wait()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("name", "found"), [("lr[1e-3]", "[1e-3]"), ("[x]/run", "[x]"), ("a\\b", "\\")])
def test_a_path_from_which_orbax_could_not_read_is_refused(tmp_path, name, found):
    with pytest.raises(ValueError, match=f"run_dir is .*, whose absolute path has {re.escape(repr(found))}; it should"):
        check_path(tmp_path / name)
    check_path(tmp_path / "a]b[c")  # no pattern of glob


def test_a_full_disk_is_said():
    """TensorStore calls it RESOURCE_EXHAUSTED, as XLA does a device's memory."""
    said = f'RESOURCE_EXHAUSTED: Failed writing: "{"x" * 300}": Failed to write 8 bytes to file 45: No space left on device [28]'
    cause = root_cause(ValueError(said))
    assert cause.startswith('the disk is full (Failed writing: "xxx')
    with pytest.raises(SaveError, match="Saving failed: RESOURCE_EXHAUSTED"), explained(pathlib.Path("run")):
        raise SaveError(f"Saving failed: {said}")
    with pytest.raises(RunError, match="does not fit the device's memory"), explained(pathlib.Path("run")):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")


def test_what_a_killed_save_left_is_cleared_away(copy):
    leftover = copy / "8.orbax-checkpoint-tmp"
    shutil.copytree(copy / "6", leftover)
    (leftover / "commit_success.txt").unlink()
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.steps() == [2, 4, 6]
        checkpoints.save(make_state(8), [{"next": 8}], CONFIG)
    assert sorted(path.name for path in copy.iterdir()) == ["4", "6", "8"]


def test_fingerprints_do_not_depend_on_the_mesh():
    mesh = make_mesh(MeshConfig(2, 4, 1))
    state = make_state(1)
    split = jax.device_put(state.params["layer"]["kernel"], NamedSharding(mesh, PartitionSpec("data", "fsdp")))
    whole = integrity.describe({"k": state.params["layer"]["kernel"]})
    assert integrity.describe({"k": split}) == whole
    assert whole["finite"]
    swapped = split[::-1]  # the same numbers in other places
    assert integrity.damaged(integrity.describe({"k": swapped})["sums"], whole["sums"]) == ["['k']"]


def test_fingerprints_need_no_copy():
    """On a CPU XLA fuses what it sums; a copy of each array made an import need twice its size."""
    state = [jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((4, 64, 512), jnp.bfloat16)]
    compiled = integrity._fingerprint.lower(state, frozenset()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * sum(x.size * x.dtype.itemsize for x in state)
