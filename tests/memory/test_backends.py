"""The registry of backends: a user's own, several for one platform, and what each does not support."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.memory import backends
from tests.memory.cases import assert_close, make_inputs


@dataclasses.dataclass
class Marked:
    """The XLA engine with outputs times `factor`, so that a test sees which one ran."""

    name: str
    factor: float
    platform: str | None = "cpu"
    is_partitioned: bool = True
    preferred: bool = True
    most_tokens: int = 100

    def unsupported(self, rule, params, state, q, packed):
        return f"q has {q.shape[1]} tokens, more than {self.most_tokens}" if q.shape[1] > self.most_tokens else None

    def is_preferred(self, rule, q, v):
        return self.preferred

    def scan(self, rule, *arguments):
        y, state = rule.scan(*arguments)
        return self.factor * y, state


MODULE_LEVEL = Marked("module_level", 7.0)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    rule = rules.titans(8)
    params, *rest = make_inputs(rule, time=20)
    plain, state = memory.scan(rule, params, None, *rest)
    return lambda **options: memory.scan(rule, params, None, *rest, **options), plain, state


def test_the_first_that_is_preferred_and_serves_the_call(registry):
    run, plain, state = registry
    backends.register_backend(Marked("few", 2.0, most_tokens=8))
    backends.register_backend(Marked("not_preferred", 3.0, preferred=False))
    backends.register_backend(Marked("first", 4.0))
    backends.register_backend(Marked("second", 5.0))
    backends.register_backend(Marked("elsewhere", 6.0, platform="tpu"))
    assert_close(run(), (4.0 * plain, state), 1e-6)
    for name, factor in {"xla": 1.0, "not_preferred": 3.0, "second": 5.0, "elsewhere": 6.0}.items():
        assert_close(run(implementation=name)[0], factor * plain, 1e-6)
    with pytest.raises(ValueError, match='implementation="few" cannot run this call: q has 20 tokens, more than 8'):
        run(implementation="few")
    with pytest.raises(ValueError, match=r"Unknown implementation 'secnd'\. Did you mean 'second'"):
        run(implementation="secnd")


def test_a_name_of_a_module(registry):
    run, plain, _ = registry
    assert_close(run(implementation="tests.memory.test_backends:MODULE_LEVEL")[0], 7.0 * plain, 1e-6)


def test_what_xla_cannot_split_runs_alone_or_inside_shard_map(registry, monkeypatch):
    run, plain, _ = registry
    backends.register_backend(Marked("kernel", 2.0, is_partitioned=False))
    q = jnp.zeros((1, 8, 2, 4))
    assert backends.needs_partition(None, rules.titans(), q, q)
    assert backends.needs_partition("kernel", rules.titans(), q, q)
    assert not backends.needs_partition("xla", rules.titans(), q, q)
    assert jax.device_count() > 1
    assert_close(run()[0], plain, 1e-6)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert_close(run()[0], 2.0 * plain, 1e-6)


def test_what_is_no_backend_is_refused(registry):
    with pytest.raises(ValueError, match="int has no name, platform, is_partitioned, unsupported, is_preferred, scan"):
        backends.register_backend(3)
    with pytest.raises(ValueError, match="the name 'xla' is already registered"):
        backends.register_backend(Marked("xla", 1.0))
