"""A kernel that is compiled for a platform that cannot run it is refused in one line, before anything is compiled."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from atlasjax import memory, rules

RULE = rules.gated_delta_rule()
TOKENS = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)


def lowered(implementation: str, platform: str) -> str:
    params = memory.MemoryParams({"W": jnp.zeros((1, 8, 8))}, None, None)
    scan = functools.partial(memory.scan, RULE, params, None, implementation=implementation)
    summed = lambda q: jnp.sum(scan(q, q, q, memory.Gates(retention=0.9, step_size=0.1))[0])
    return jax.jit(jax.grad(summed)).trace(TOKENS).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("implementation", "platform", "message"),
    [
        (
            "pallas_tpu",
            "cpu",
            r'"pallas_tpu" runs on TPUs, and this call is compiled for cpu; give "xla" or "reference"',
        ),
        ("pallas_gpu", "cpu", r'"pallas_gpu" runs on .*, and this call is compiled for cpu; give "xla" or "reference"'),
        ("pallas_gpu", "tpu", 'compiled for tpu; give "pallas_tpu", "xla" or "reference"'),
        ("pallas_tpu", "cuda", 'compiled for cuda; give "pallas_gpu", "xla" or "reference"'),
    ],
)
def test_another_platform(implementation, platform, message):
    with pytest.raises(ValueError, match=message) as refused:
        lowered(implementation, platform)
    assert str(refused.value).startswith("implementation=")
    assert "\n" not in str(refused.value)


def test_own_platform_and_the_interpreter():
    assert "tpu_custom_call" in lowered("pallas_tpu", "tpu")
    with pltpu.force_tpu_interpret_mode():
        assert "tpu_custom_call" not in lowered("pallas_tpu", "cpu")
