"""The recurrence as the papers have it: how it is called, and that a bounded rule differs from it even for small steps."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import cli, memory, rules
from atlasjax.memory import structures
from atlasjax.nn import MemoryConfig
from tests.marks import some_slow
from tests.memory.cases import assert_close, make_inputs

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", rules.REGISTRY)
def test_a_bounded_rules_docstring_has_the_papers(name):
    rule = rules.REGISTRY[name]()
    calls = re.findall(r"`(\S+\.unbounded\(\))`", rules.REGISTRY[name].__doc__)
    if not calls:
        assert not rule.is_bounded
        return
    (call,) = calls
    found = eval(call, {"rules": rules})
    assert found == rule.unbounded() != rule
    assert not found.is_bounded


def test_the_other_calls_that_pages_print(monkeypatch):
    from atlasjax.cli import train as command

    for page in ("README.md", "docs/rules.md", "docs/choosing_a_rule.md"):
        text = (ROOT / page).read_text()
        for call in ("`rule.unbounded()`", "`MemoryConfig(bounded=False)`", "`--model.memory.no-bounded`"):
            assert call in text, (page, call)
    assert MemoryConfig("titans", bounded=False).build() == rules.titans().unbounded()
    found = []
    monkeypatch.setattr(command, "offer", lambda config, preset: found.append(config))
    monkeypatch.setattr(command, "train", lambda config, **_: None)
    monkeypatch.setattr(command, "_report", lambda *_: None)
    assert cli.main(["train", "--preset", "titans-tiny", "--model.memory.no-bounded"]) == 0
    assert found[0].model.memory.build() == found[0].model.memory.build().unbounded()


def test_small_steps_correct_the_error_of_the_decayed_memory(x64):
    """SEMANTICS 1.12: x_t of a step that goes to zero, for a matrix memory with chunks of 4."""
    rule, eta, time = rules.titans_no_momentum(4, structures.Matrix()), 1e-7, 11
    params, q, k, v, gates = make_inputs(
        rule, batch=1, heads=1, time=time, dtype=jnp.float64, step_size=eta, retention=0.9
    )
    _, state = memory.scan(rule, params, None, q, k, v, gates)
    W, wrote, papers = params.weights["W"][0], 0.0, 0.0
    for t in range(time):
        key, value = k[0, t, 0], v[0, t, 0]
        read = 0.9 ** (t - t % 4) * (W @ key)  # by the memory at the chunk's start
        error = read - value
        left = 1.0 + (0.9 ** (t % 4) - 1.0) * (error @ read) / (error @ error + 1e-4 * value @ value)
        write = -eta * jnp.outer(error, key)
        wrote, papers = 0.9 * wrote + left * write, 0.9 * papers + write
    assert_close((state.memory["W"][0, 0] - 0.9**time * W) / eta, wrote / eta, 1e-5)
    assert jnp.linalg.norm(wrote - papers) > 0.01 * jnp.linalg.norm(papers)


# Of what is written, in percent: chunk → for α = 1, the suggested α (time scales of 512 to 8,192 tokens), 0.99 and 0.9.
APART = {16: (0.0, 0.147, 0.59, 5.84), 64: (0.0, 0.719, 4.94, 37.5)}


@pytest.mark.parametrize("chunk", some_slow(APART, [64]))
def test_how_far_small_steps_of_titans_are_from_the_papers(chunk, x64):
    """The numbers of SEMANTICS 1.12: the difference of the memory after 256 random tokens."""
    rule, heads, dim, time = rules.titans(chunk), 2, 8, 256
    sizes = {"num_heads": heads, "key_dim": dim, "value_dim": dim}
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    params = wide(memory.init_params(rule, jax.random.key(0), **sizes))
    gates = wide(memory.suggested_gates(rule, batch_size=1, time=time, **sizes))
    gates = gates._replace(step_size=1e-4 * gates.step_size)
    k, v = jax.random.normal(jax.random.key(0), (2, 1, time, heads, dim))
    k, v = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (k, v))

    @jax.jit
    def apart(retention):
        end = lambda rule, gates: (
            memory.scan(rule, params, None, k, k, v, gates._replace(retention=retention))[1].memory
        )
        papers, found = end(rule.unbounded(), gates), end(rule, gates)
        kept = {name: jnp.prod(retention, axis=1)[..., None, None] * w for name, w in params.weights.items()}
        norm = lambda a, b: jnp.sqrt(sum(jnp.sum((a[name] - b[name]) ** 2) for name in a))
        return 100.0 * norm(papers, found) / norm(papers, kept)

    fixed = [jnp.full_like(gates.retention, x) for x in (1.0, 0.99, 0.9)]
    found = [float(apart(x)) for x in (fixed[0], gates.retention, *fixed[1:])]
    np.testing.assert_allclose(found, APART[chunk], rtol=0.01, atol=0.001)


def test_without_the_decay_in_x_a_chunk_could_enlarge_a_memory():
    """Chunks of five full steps with targets of zero, on rows of length 1 of a matrix memory, in 20,000 random draws."""
    rng = np.random.default_rng(0)
    draws, tokens = 20_000, 5
    keys = rng.standard_normal((tokens, draws, 2))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    retention = rng.choice([0.0, 0.5, 1.0], (tokens, draws, 1))
    start = np.broadcast_to([1.0, 0.0], (draws, 2))
    inner = lambda a, b: np.sum(a * b, axis=-1, keepdims=True)

    def lengths(counts_decay):
        w, decayed = start, np.ones((draws, 1))
        for key, alpha in zip(keys, retention, strict=True):
            error = inner(start, key)
            moved = inner(error * key, w - (start if counts_decay else decayed * start))
            w, decayed = alpha * w - (1.0 + moved / error**2) * error * key, alpha * decayed
        return np.linalg.norm(w, axis=-1)

    assert lengths(counts_decay=True).max() < 1 + 1e-9
    np.testing.assert_allclose(lengths(counts_decay=False).max(), 1.3, atol=0.05)
