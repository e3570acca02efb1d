"""Updates of Muon that are not formed, against the definition: values, derivatives, rounding, and when they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory.blocks import Factors
from atlasjax.memory.fast_weights import orthogonal
from atlasjax.memory.fast_weights.newton_schulz import polynomial_is_accurate
from pallas_kernels.newton_schulz import SCHEDULES, coefficients, newton_schulz
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close
from tests.memory.test_engine import EXACT, both, shared, shared_inputs


def random_block(out, inputs, dtype, count=3, tokens=5, start=1.0):
    """A block of `tokens` gradients, `count` of whose tokens write: start, beta, coefficients, left, inputs, queries, decay."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape)
    written = -np.tril(rng.uniform(0.2, 1.0, (count, tokens)), tokens - count)
    parts = (
        start * normal(out, inputs), rng.uniform(0.2, 0.9, count), written, normal(tokens, out), normal(tokens, inputs),
        normal(tokens, inputs), rng.uniform(0.0, 1.0, (tokens, count)),
    )  # fmt: skip
    return tuple(jnp.asarray(x, dtype) for x in parts)


def results(schedule, steps, make, start, beta, written, left, inputs, h, decay):
    """Reads of the queries, and the sum of the updates."""
    made = make(orthogonal.Momenta(start, beta, written, Factors(left, inputs)), coefficients(schedule, steps))
    return made.read(h, decay, h.dtype), made.total(decay[-1])


def defined(schedule, steps):
    return lambda momenta, _: orthogonal.Formed(newton_schulz(momenta.formed(), steps, schedule))


def unformed(momenta, triples):
    return orthogonal.updates(momenta, triples, 5, channels=False)


@pytest.mark.parametrize("forced", [True, False], ids=["unformed", "formed"])
@pytest.mark.parametrize(("shape", "name", "start"), [
    ((3, 7), "standard", 1.0), ((7, 3), "standard", 1.0), ((4, 4), "standard", 1.0), ((8, 4), "polar_express", 0.0),
])  # fmt: skip
def test_values_and_derivatives(shape, name, start, forced, x64, monkeypatch):
    monkeypatch.setattr(orthogonal, "_without_forming", lambda *_: forced)
    schedule = SCHEDULES[name]
    args = random_block(*shape, jnp.float64, start=start)

    def both_ways(make):
        def loss(*args):
            read, total = results(schedule, 5, make, *args)
            weigh = lambda x: jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape))
            return weigh(read) + weigh(total), (read, total)

        return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(7)), has_aux=True))(*args)

    assert_close(both_ways(unformed), both_ways(defined(schedule, 5)), EXACT)


@pytest.mark.parametrize("shape", some_slow([(32, 128), (128, 32), (48, 96)], [(128, 32), (48, 96)]))
@pytest.mark.parametrize(("name", "start"), [("standard", 0.0), ("standard", 0.3), ("polar_express", 0.0)])
def test_rounding_in_float32(shape, name, start):
    """Also of momenta of rank at most 5, whose Q is large where S is zero."""
    run = lambda make, args: results(SCHEDULES[name], 5, make, *args)
    args = random_block(*shape, jnp.float32, start=start)
    have = run(unformed, args)
    with jax.enable_x64(True):
        up = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in args)
        assert_close(have, run(defined(SCHEDULES[name], 5), up), 1e-3)


def test_which_form_is_used():
    def form(out, inputs, steps=5, schedule="standard", **options):
        args = random_block(out, inputs, jnp.float32)[:5]
        momenta = orthogonal.Momenta(*args[:3], Factors(*args[3:]))
        made = jax.eval_shape(
            lambda momenta: orthogonal.updates(
                momenta, coefficients(SCHEDULES[schedule], steps), 5, **({"channels": False} | options)
            )[-1],
            momenta,
        )
        return "unformed" if len(made.shape) == 2 else "formed"

    assert form(64, 256) == form(256, 128) == form(64, 128, schedule="polar_express") == "unformed"
    # Nearly square, inaccurate, nothing to iterate, and a decay that does not commute with Q.
    assert form(64, 64) == form(64, 256, steps=6) == form(64, 256, steps=0) == form(64, 256, channels=True) == "formed"
    assert not polynomial_is_accurate(coefficients(SCHEDULES["polar_express"], 6))


@pytest.mark.parametrize("name", ["atlas_every", pytest.param("atlas", marks=pytest.mark.slow)])
def test_memories_without_forming(name, x64, monkeypatch):
    """The memories of the tests are so small that forming takes fewer operations."""
    monkeypatch.setattr(orthogonal, "_without_forming", lambda *_: True)
    rule = RULES[name]
    args = shared_inputs(rule)
    assert_close(both(rule)[1](*args), shared(rule)[0](*args), EXACT)
