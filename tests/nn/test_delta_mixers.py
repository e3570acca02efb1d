"""The mixers with delta rules of several writes or keys: their limits, sizes and initial values. test_baselines.py has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import DeltaProductConfig, GatedDeltaNetConfig, ModelConfig
from atlasjax.nn.mixers import make_mixer

pytestmark = pytest.mark.usefixtures("compile_fast")


def config(**changes):
    return ModelConfig(dim=8, num_heads=2, head_dim=4, dtype="float32", **changes)


def test_one_write_is_gated_deltanet():
    product = DeltaProductConfig(writes=1, value_heads=4)
    net = GatedDeltaNetConfig(value_heads=4, negative_eigenvalues=True)
    given = config(gated_deltaproduct=product, gated_deltanet=net)

    @jax.jit
    def outputs(x):
        mixers = (make_mixer(name, given, rngs=nnx.Rngs(0)) for name in ("gated_deltaproduct", "gated_deltanet"))
        return [mixer(x) for mixer in mixers]

    got, expected = outputs(jax.random.normal(jax.random.key(0), (2, 7, 8)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert jnp.abs(expected).max() > 0.1


def test_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="DeltaProductConfig: value_heads=3 must be a multiple of num_heads=2"):
        make_mixer("gated_deltaproduct", config(gated_deltaproduct=DeltaProductConfig(value_heads=3)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="DeltaProductConfig: writes"):
        DeltaProductConfig(writes=0)
