"""Rotary positions: complex rotations, and products that depend on the distance only."""

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.mixers.rotary import rotate


def test_rotation_of_pairs_and_distance():
    x, y = (jax.random.normal(jax.random.key(i), (2, 5, 3, 6)) for i in (0, 1))
    position = jnp.array([[0, 1, 2, 3, 4], [7, 8, 9, 1000, 1001]])
    turned = np.asarray(rotate(x, position))
    pairs = np.asarray(x[..., :3] + 1j * x[..., 3:])
    angle = np.asarray(position)[:, :, None, None] * 10_000.0 ** (-np.arange(3) / 3)
    expected = pairs * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], axis=-1), atol=2e-4)

    products = lambda shift: np.einsum("bthd,bshd->bhts", rotate(x, position + shift), rotate(y, position + shift))
    np.testing.assert_allclose(products(11), products(0), atol=5e-4)
    half = rotate(x.astype(jnp.bfloat16), position)
    assert half.dtype == jnp.bfloat16
