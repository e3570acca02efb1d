"""`atlasjax tune`: a backend that is slow, fast, wrong or broken, registered for this machine's CPU."""

import dataclasses
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.cli import main
from atlasjax.cli.tune import offer
from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.memory import backends, tuned
from atlasjax.memory.fast_weights import fastest
from atlasjax.train import default_config
from atlasjax.tune import Sizes, sizes_of, tune

RULE = rules.linear_attention()
SMALL = (
    *(
        "--preset",
        "linear-attention-tiny",
        "--model.dim",
        "16",
        "--model.num-heads",
        "2",
        "--data.sequence-length",
        "16",
    ),
    *("--data.batch-size", "1", "--seconds", "0"),
)


@dataclasses.dataclass
class Fake:
    """The XLA engine, slower by `delay` seconds a call, wrong by `factor`, or failing."""

    name: str
    factor: float = 1.0
    delay: float = 0.0
    fails: bool = False
    reason: str | None = None
    platform: str | None = "cpu"
    is_partitioned: bool = True

    def unsupported(self, rule, params, state, q, packed):
        return self.reason

    def is_preferred(self, rule, q, v):
        return False

    def scan(self, rule, params, state, q, *rest):
        if self.fails:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nat a place")
        y, state = rule.scan(params, state, _slowly(q, self.delay), *rest)
        return self.factor * y, state


def _slowly(q, delay):
    def wait(x):
        time.sleep(delay)
        return x

    @jax.custom_vjp
    def slow(q):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(q.shape, q.dtype), q) if delay else q

    slow.defvjp(lambda q: (slow(q), None), lambda _, dy: (dy,))
    return slow(q)


@pytest.fixture
def registry(monkeypatch, tmp_path):
    monkeypatch.setenv("ATLASJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr("atlasjax.tune.BACKENDS", backends.BACKENDS)

    class SlowXLA(backends._XLA):
        def scan(self, rule, params, state, q, *rest):
            return rule.scan(params, state, _slowly(q, 0.05), *rest)

    backends.BACKENDS["xla"] = SlowXLA()
    return lambda fake: backends.BACKENDS.__setitem__(fake.name, fake)


def sizes(**changes):
    return Sizes(
        **{
            "rule": RULE,
            "batch_size": 1,
            "time": 16,
            "num_heads": 2,
            "key_dim": 4,
            "value_dim": 4,
            "dtype": "float32",
            **changes,
        }
    )


def choice(key, implementation, ratio=3.0, shape=(1, 8, 2)):
    own = tuned.own_sources(backends.BACKENDS[implementation]) if implementation in backends.BACKENDS else ""
    return tuned.Choice(*key, shape, implementation, own, ratio)


def test_the_fastest_that_is_right_is_chosen(registry, tmp_path):
    registry(Fake("slow", delay=0.2))
    registry(Fake("fast", delay=0.01))
    registry(Fake("faster_and_wrong", factor=1.5))
    registry(Fake("not_a_number", factor=float("nan")))
    registry(Fake("broken", fails=True))
    registry(Fake("picky", reason="q is too small"))
    registry(Fake("elsewhere", platform="tpu"))
    said = []
    found, results = tune(sizes(), seconds=0.0, say=said.append)
    assert found.implementation == "fast"
    assert found.ratio_to_xla > 1.5
    assert found.shape == (1, 16, 2)
    problems = {result.name: result.problem for result in results}
    assert list(problems) == ["xla", "slow", "fast", "faster_and_wrong", "not_a_number", "broken", "picky"]
    assert problems["slow"] == problems["fast"] == problems["xla"] == ""
    assert problems["faster_and_wrong"].startswith("wrong: relative error 5.0e-01, allowed 0.001; please report it")
    assert problems["not_a_number"].startswith("wrong: relative error inf")
    assert problems["broken"] == "failed: RuntimeError: RESOURCE_EXHAUSTED: no memory"
    assert problems["picky"] == "not supported: q is too small"
    assert len(said) == 7
    assert json.loads((tmp_path / tuned.FILE).read_text())[0]["implementation"] == "fast"


def test_scan_follows_the_choice(registry):
    registry(Fake("doubled", factor=2.0))
    arrays = [jnp.ones((1, 8, 2, 4)) / 2] * 3
    params = memory.init_params(RULE, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(RULE, batch_size=1, time=8, num_heads=2, key_dim=4)

    def scan(dtype=jnp.float32):
        jax.clear_caches()  # as a new process
        return memory.scan(RULE, params, None, *(x.astype(dtype) for x in arrays), gates)[0]

    plain = scan()
    key = tuned.key_of(RULE, 4, 4, "float32")
    tuned.write(choice(key, "doubled"))
    assert jnp.allclose(scan(), 2 * plain)
    assert not jnp.allclose(scan(jnp.bfloat16), 2 * plain, atol=0.1), "another dtype was not measured"
    tuned.write(choice(key, "xla", 0.9))
    assert jnp.allclose(scan(), plain)
    assert len(tuned.read()[key]) == 1
    tuned.write(choice((key[0], "0.0.1", *key[2:]), "doubled"))
    tuned.write(choice((key[0], key[1], "other sources", *key[3:]), "doubled"))
    assert jnp.allclose(scan(), plain), "measured with another jax, or other kernels"
    tuned.write(choice(key, "doubled", shape=(64, 4096, 16)))
    assert jnp.allclose(scan(), plain), "the other call is nearer in size"
    tuned.write(choice(key, "xla", shape=(64, 4096, 16)))
    tuned.write(choice(key, "doubled"))
    assert jnp.allclose(scan(), 2 * plain)


def test_a_choice_does_not_count_in_a_job_of_several_processes(registry, monkeypatch):
    """Each host has a cache folder of its own, and all must run the same program."""
    registry(Fake("doubled", factor=2.0))
    tuned.write(choice(tuned.key_of(RULE, 4, 4, "float32"), "doubled"))
    q = jnp.zeros((1, 8, 2, 4))
    assert [backend.name for backend in backends._preferred(RULE, q, q)] == ["doubled"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert backends._preferred(RULE, q, q) == []


def test_a_choice_does_not_outlive_the_module_of_a_backend(registry):
    registry(Fake("doubled", factor=2.0))
    made = choice(tuned.key_of(RULE, 4, 4, "float32"), "doubled")
    assert made.backend, "it is not of this library"
    tuned.write(dataclasses.replace(made, backend="another"))
    q = jnp.zeros((1, 8, 2, 4))
    assert backends._preferred(RULE, q, q) == []


def test_rules_of_ones_own_with_equal_names_are_different():
    @dataclasses.dataclass(frozen=True)
    class L2(type(RULE.objective)):
        pass

    own = dataclasses.replace(RULE, objective=L2())
    assert tuned.key_of(RULE, 4, 4, "float32")[3] == repr(RULE)
    assert tuned.own_sources(own)
    assert tuned.key_of(own, 4, 4, "float32")[3] != repr(own)


class Forgetful(Fake):
    """Takes every call for one document from a fresh memory, or returns the wrong state."""

    def scan(self, rule, params, state, q, k, v, gates, segment_ids, max_segments):
        if self.reason == "segments":
            return rule.scan(params, state, q, k, v, gates, None, None)
        y, after = rule.scan(params, state, q, k, v, gates, segment_ids, max_segments)
        return y, jax.tree.map(jnp.zeros_like, after) if state is not None else after

    def unsupported(self, rule, params, state, q, packed):
        return None


@pytest.mark.parametrize(
    ("ignores", "words"), [("segments", "wrong for packed documents"), ("state", "wrong after a state")]
)
def test_states_and_packed_documents_are_compared_too(registry, ignores, words):
    registry(Forgetful("forgetful", reason=ignores))
    made, results = tune(sizes(), seconds=0.0, say=lambda _: None)
    assert made.implementation == "xla"
    assert results[1].problem.startswith(words)


class Falling(Fake):
    """Right in the check, and out of memory at the size of the model."""

    def scan(self, rule, params, state, q, *rest):
        def fail(x):
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

        if q.shape[1] == 16:
            q = jax.pure_callback(fail, jax.ShapeDtypeStruct(q.shape, q.dtype), jax.lax.stop_gradient(q))
        return rule.scan(params, state, q, *rest)


def test_a_backend_that_fails_when_it_runs_is_no_end(registry):
    registry(Falling("falling"))
    registry(Fake("fast", delay=0.01))

    def refuse(*_):
        raise ValueError("the probe failed")

    asked = Fake("asked")
    asked.unsupported = refuse
    registry(asked)
    made, results = tune(sizes(), seconds=0.0, say=lambda _: None)
    assert made.implementation == "fast"
    problems = {result.name: result.problem for result in results}
    assert problems["falling"].startswith("failed: ")
    assert problems["asked"] == "failed: ValueError: the probe failed"


def test_a_backend_that_is_gone_is_not_taken(registry):
    tuned.write(choice(tuned.key_of(RULE, 4, 4, "float32"), "gone"))
    q = jnp.zeros((1, 8, 2, 4))
    assert backends._preferred(RULE, q, q) == []


@pytest.mark.parametrize("content", [b"[1, 2", b"\xff\xfe", b"{}", b"[" * 100_000, b"[[1], 2, null]"])
def test_a_damaged_file_is_no_choice(registry, tmp_path, content):
    (tmp_path / tuned.FILE).write_bytes(content)
    q = jnp.zeros((1, 8, 2, 4))
    words = r"tuned.json cannot be read .*; its choices do not count, .* Run `atlasjax tune` again"
    with pytest.warns(UserWarning, match=words) as said:
        assert [tuned.choice_for(RULE, q, q) for _ in range(2)] == [None, None]
    assert len(said) == 1


def test_a_user_without_a_home_has_no_choices(registry, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("ATLASJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pathlib.Path, "home", no_home)
    assert tuned.read() == {}
    with pytest.raises(FileNotFoundError, match="set ATLASJAX_CACHE"):
        tuned.write(choice(tuned.key_of(RULE, 4, 4, "float32"), "xla"))


@pytest.mark.parametrize(("field", "value"), [
    ("shape", ["a", 1, 1]), ("shape", [1]), ("shape", [10**400, 1, 1]), ("shape", 5), ("shape", [0, 1, 1]),
    ("ratio_to_xla", "fast"), ("ratio_to_xla", float("nan")), ("implementation", 5), ("backend", None),
    ("key_dim", "4"), ("dtype", {}),
])  # fmt: skip
def test_a_damaged_row_is_no_choice(registry, tmp_path, field, value):
    row = dataclasses.asdict(choice(tuned.key_of(RULE, 4, 4, "float32"), "xla"))
    (tmp_path / tuned.FILE).write_text(json.dumps([{**row, field: value}]))
    q = jnp.zeros((1, 8, 2, 4))
    with pytest.warns(UserWarning, match="tuned.json cannot be read"):
        assert tuned.choice_for(RULE, q, q) is None


def test_a_fifo_or_a_link_in_the_place_of_the_file(registry, tmp_path):
    """A FIFO is not waited for; a link is replaced, and what it leads to stays."""
    os.mkfifo(tmp_path / tuned.FILE)
    with pytest.warns(UserWarning, match="tuned.json cannot be read .it is not a file"):
        assert tuned.read() == {}
    (tmp_path / tuned.FILE).unlink()
    (tmp_path / "precious").write_text("[]")
    for name in (tuned.FILE, f".{tuned.FILE}.{os.getpid()}"):
        (tmp_path / name).symlink_to("precious")
    made = choice(tuned.key_of(RULE, 4, 4, "float32"), "xla")
    tuned.write(made)
    assert (tmp_path / "precious").read_text() == "[]"
    assert tuned.read() == {made.key: [made]}


def test_a_row_of_another_version_is_kept_and_does_not_count(registry, tmp_path):
    made = choice(tuned.key_of(RULE, 4, 4, "float32"), "xla")
    row = json.loads(json.dumps(dataclasses.asdict(made)))
    newer, damaged = {**row, "stars": 5}, {**row, "device": ["x"]}
    (tmp_path / tuned.FILE).write_text(json.dumps([newer, damaged, row]))
    with pytest.warns(UserWarning, match="cannot be read"):
        assert tuned.read() == {made.key: [made]}
    other = choice(tuned.key_of(RULE, 8, 8, "float32"), "xla")
    tuned.write(other)
    assert json.loads((tmp_path / tuned.FILE).read_text())[:2] == [newer, damaged]
    with pytest.warns(UserWarning, match="cannot be read"):
        assert tuned.read() == {made.key: [made], other.key: [other]}


def test_the_sizes_of_a_preset():
    config = default_config("titans-tiny")
    (found,) = sizes_of(config)
    assert (found.batch_size, found.time, found.num_heads, found.dtype) == (4, 256, 4, config.model.dtype)
    assert found.rule == config.model.memory.build()
    (found,) = sizes_of(default_config("gated-deltanet-tiny"))
    assert (found.rule, found.num_heads, found.key_dim, found.value_dim) == (rules.gated_delta_rule(), 4, 32, 64)
    assert [found.rule for found in sizes_of(default_config("gated-deltanet-h2-tiny"))] == [
        rules.retnet(),
        rules.gated_delta_rule(),
    ]


def test_the_sizes_of_a_part_of_a_sequence(registry):
    """`memory.scan` finds what was measured for them."""
    registry(Fake("chosen", fails=True))
    config = default_config("linear-attention-tiny")
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, tensor=1, sequence=4))
    (found,) = sizes_of(config)
    length, width = config.data.sequence_length, found.key_dim
    assert (found.time, found.value_dim) == (length // 4, 2 * width)
    tuned.write(choice(tuned.key_of(found.rule, width, found.value_dim, "float32"), "chosen"))
    params = memory.init_params(found.rule, jax.random.key(0), num_heads=2, key_dim=width, value_dim=width)
    arrays = [jnp.ones((2, 8, 2, width))] * 3
    gates = memory.suggested_gates(found.rule, batch_size=2, time=8, num_heads=2, key_dim=width)
    partition = memory.Partition(make_mesh(config.mesh), ("data",), time=("sequence",))
    with pytest.raises(RuntimeError, match="no memory"):
        jax.eval_shape(
            lambda *arrays: memory.scan(found.rule, params, None, *arrays, gates, partition=partition), *arrays
        )


def test_heads_that_the_mesh_does_not_divide():
    config = dataclasses.replace(default_config("titans-tiny"), mesh=MeshConfig(data=1, tensor=8))
    (found,) = sizes_of(config)
    assert found.num_heads == 4


@pytest.mark.parametrize(
    ("preset", "words"),
    [("transformer++-tiny", "has no memory"), ("dot-tiny", "a SoftmaxRule, for which there are no")],
)
def test_models_without_kernels(preset, words):
    with pytest.raises(ValueError, match=words):
        sizes_of(default_config(preset))


def test_the_command(registry, tmp_path, capsys):
    registry(Fake("pallas_fake", delay=0.01))
    assert main(["tune", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "batch 1, 16 tokens, 2 heads, keys 8, values 8" in out
    assert "chosen: pallas_fake; saved in" in out
    assert main(["tune", "--preset", "transformer++-tiny"]) == 2
    assert "the model has no memory" in capsys.readouterr().err


def test_what_is_shared_fits_the_shipped_table(registry, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuned, "platform", lambda: "tpu")
    monkeypatch.setitem(backends.BACKENDS, "pallas_tpu", Fake("pallas_tpu", platform="tpu"))
    share = tmp_path / "share.json"
    assert main(["tune", *SMALL, "--share", str(share)]) == 0
    (row,) = fastest.read(share)
    assert (row.platform, row.kernel, row.head_dim, row.implementation) == ("tpu", "chunk_memory", 8, "pallas_tpu")
    assert row.ratio_to_xla > 1


def test_a_kernel_that_is_wrong_is_shared_as_one_that_is_never_chosen(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "platform", lambda: "tpu")
    monkeypatch.setitem(backends.BACKENDS, "pallas_tpu", Fake("pallas_tpu", factor=1.5, platform="tpu"))
    registry(Fake("mine", delay=0.01, platform="tpu"))
    share = tmp_path / "share.json"
    assert main(["tune", *SMALL, "--share", str(share)]) == 0
    (row,) = fastest.read(share)
    assert (row.implementation, row.ratio_to_xla) == ("pallas_tpu", 0.0)


def test_a_cache_that_cannot_be_written(registry, tmp_path, capsys, monkeypatch):
    """The measurement is shown and shared, and a run goes on."""
    monkeypatch.setattr(tuned, "platform", lambda: "tpu")
    monkeypatch.setitem(backends.BACKENDS, "pallas_tpu", Fake("pallas_tpu", platform="tpu"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATLASJAX_CACHE", str(tmp_path / "file" / "folder"))
    share = tmp_path / "share.json"
    assert main(["tune", *SMALL, "--share", str(share)]) == 1
    shown = capsys.readouterr()
    assert "chosen: pallas_tpu, but not saved" in shown.out
    assert "the choice does not count" in shown.err
    assert len(fastest.read(share)) == 1
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: "n")
    monkeypatch.setattr("atlasjax.cli.tune.sizes_of", lambda config: [sizes()])
    offer(default_config("linear-attention-tiny"), "linear-attention-tiny")
    assert "No choice was saved" in capsys.readouterr().out


def test_a_named_backend_is_not_measured_silently(registry, capsys):
    assert main(["tune", *SMALL, "--model.memory.implementation", "tests.test_tune:NAMED"]) == 2
    assert "only calls that name it use" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "chosen", "again"), [("", "fast", False), ("n", "xla", False), (None, None, True)])
def test_a_run_asks_once(registry, monkeypatch, capsys, answer, chosen, again):
    config = default_config("linear-attention-tiny")
    registry(Fake("fast", delay=0.01))
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: answer is not None, raising=False)
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    small = sizes()
    monkeypatch.setattr("atlasjax.cli.tune.sizes_of", lambda config: [small])
    monkeypatch.setattr("atlasjax.cli.tune.tune", lambda sizes, seconds, save: tune(sizes, seconds=0.0, save=save))
    offer(config, "linear-attention-tiny")
    assert len(asked) == (answer is not None)
    found = tuned.read().get(tuned.key_of(RULE, 4, 4, "float32"), [])
    assert [one.implementation for one in found] == ([chosen] if chosen else [])
    capsys.readouterr()
    offer(config, "linear-attention-tiny")
    assert len(asked) == (answer is not None), "asked once"
    assert (
        "`atlasjax tune --preset linear-attention-tiny` takes about two minutes" in capsys.readouterr().out
    ) == again


def test_a_run_on_this_cpu_asks_nothing(capsys):
    offer(default_config("titans-tiny"), "titans-tiny")
    assert capsys.readouterr().out == ""


def test_an_answer_that_is_cut_off_is_no(registry, monkeypatch, capsys):
    registry(Fake("fast"))

    def cut_off(text):
        raise EOFError

    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", cut_off)
    monkeypatch.setattr("atlasjax.cli.tune.sizes_of", lambda config: [sizes()])
    offer(default_config("linear-attention-tiny"), "linear-attention-tiny")
    assert "Training with XLA." in capsys.readouterr().out
    assert tuned.read() == {}


NAMED = Fake("named")


@pytest.mark.parametrize(
    ("name", "words"), [("Fake", "Fake is a class; give an instance"), ("sizes", "function has no name")]
)
def test_a_named_backend_is_one(name, words):
    with pytest.raises(ValueError, match=words):
        backends.backend_of(f"tests.test_tune:{name}")
