"""`atlasjax tune`: a backend that is slow, fast, wrong or broken, registered for this machine's CPU."""

import dataclasses
import json
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


def test_the_fastest_that_is_right_is_chosen(registry, tmp_path):
    registry(Fake("slow", delay=0.2))
    registry(Fake("fast", delay=0.01))
    registry(Fake("faster_and_wrong", factor=1.5))
    registry(Fake("not_a_number", factor=float("nan")))
    registry(Fake("broken", fails=True))
    registry(Fake("picky", reason="q is too small"))
    registry(Fake("elsewhere", platform="tpu"))
    said = []
    choice, results = tune(sizes(), seconds=0.0, say=said.append)
    assert choice.implementation == "fast"
    assert choice.ratio_to_xla > 1.5
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
    tuned.write(tuned.Choice(*key, "doubled", 3.0))
    assert jnp.allclose(scan(), 2 * plain)
    assert not jnp.allclose(scan(jnp.bfloat16), 2 * plain, atol=0.1), "another dtype was not measured"
    tuned.write(tuned.Choice(*key, "xla", 0.9))
    assert jnp.allclose(scan(), plain)
    assert len(tuned.read()) == 1
    tuned.write(tuned.Choice(key[0], "0.0.1", *key[2:], "doubled", 3.0))
    tuned.write(tuned.Choice(key[0], key[1], "other sources", *key[3:], "doubled", 3.0))
    assert jnp.allclose(scan(), plain), "measured with another jax, or other kernels"


def test_a_backend_that_is_gone_is_not_taken(registry):
    tuned.write(tuned.Choice(*tuned.key_of(RULE, 4, 4, "float32"), "gone", 3.0))
    q = jnp.zeros((1, 8, 2, 4))
    assert backends._preferred(RULE, q, q) == []


def test_a_damaged_file_is_no_choice(registry, tmp_path):
    (tmp_path / tuned.FILE).write_text("[1, 2")
    with pytest.warns(
        UserWarning, match=r"tuned.json cannot be read .*; its choices do not count. Run `atlasjax tune` again"
    ):
        assert tuned.read() == {}


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
    tuned.write(tuned.Choice(*tuned.key_of(found.rule, width, found.value_dim, "float32"), "chosen", 3.0))
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
    monkeypatch.setattr("atlasjax.cli.tune.tune", lambda sizes, seconds: tune(sizes, seconds=0.0))
    offer(config, "linear-attention-tiny")
    assert len(asked) == (answer is not None)
    found = tuned.read().get(tuned.key_of(RULE, 4, 4, "float32"))
    assert (found and found.implementation) == chosen
    capsys.readouterr()
    offer(config, "linear-attention-tiny")
    assert len(asked) == (answer is not None), "asked once"
    assert (
        "`atlasjax tune --preset linear-attention-tiny` takes about two minutes" in capsys.readouterr().out
    ) == again


def test_a_run_on_this_cpu_asks_nothing(capsys):
    offer(default_config("titans-tiny"), "titans-tiny")
    assert capsys.readouterr().out == ""
