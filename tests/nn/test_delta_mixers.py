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


def test_comba_refuses_negative_eigenvalues():
    given = config(gated_deltanet=GatedDeltaNetConfig(negative_eigenvalues=True))
    with pytest.raises(ValueError, match=r"mixer 'comba': .* must be False, because α − β may be −2"):
        make_mixer("comba", given, rngs=nnx.Rngs(0))


def test_initial_values_are_the_published_ones():
    params = lambda name: nnx.to_pure_dict(nnx.state(make_mixer(name, config(), rngs=nnx.Rngs(0)), nnx.Param))
    comba, curvature = params("comba"), params("pgdn")["curvature"]
    assert np.all(comba["inner_decay"] == 1)
    assert np.all(comba["correction"] == 1)
    np.testing.assert_allclose(curvature["center"], -0.2)
    assert np.all(np.exp(curvature["A_log"]) <= 16)
    step = np.log1p(np.exp(curvature["dt_bias"]))
    assert np.all((step > 0.9e-3) & (step < 0.11))
