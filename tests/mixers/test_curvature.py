"""The write keys of preconditioned DeltaNet against their definition, token by token in float64: values, streams, packed rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers.curvature import preconditioned_keys
from tests import comparisons

BATCH, TIME, HEADS, KEY = 2, 13, 3, 4
CENTER = np.array([-0.2, 0.5, -1.0], np.float32)

pytestmark = pytest.mark.usefixtures("compile_fast")


def inputs(seed=0):
    """k, β^a and α^a, float32. The third key has a zero, and the sixth token forgets everything."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(BATCH, TIME, HEADS, KEY)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[:, 2, :, 0] = 0
    alpha = rng.uniform(0.5, 1, k.shape[:3]).astype(np.float32)
    alpha[:, 5] = 0
    return k, rng.uniform(size=k.shape[:3]).astype(np.float32), alpha


def definition(k, beta, alpha, ids=None, largest=1.5):
    k = k.astype(np.float64)
    keys, a = np.zeros_like(k), np.zeros((BATCH, HEADS, KEY))
    for t in range(TIME):
        if ids is not None and t:
            a = np.where((ids[:, t] != ids[:, t - 1])[:, None, None], 0, a)
        a = alpha[:, t, :, None] * a + beta[:, t, :, None] * k[:, t] ** 2
        distance = np.log(a + 1e-6) - CENTER[:, None]
        keys[:, t] = k[:, t] * largest ** (-distance / (1 + abs(distance)))
    return keys, a


close = functools.partial(comparisons.close, tolerance=1e-6)


def test_whole_sequences_and_pieces():
    given = inputs()
    expected, last = definition(*given)
    keys, a = preconditioned_keys(*given, CENTER)
    close(keys, expected)
    close(a, last)
    assert np.all(np.abs(expected) <= 1.5 * np.abs(given[0]))
    for cuts in ((0, 6, 12, 13), range(TIME + 1)):
        pieces, a = [], None
        for start, stop in itertools.pairwise(cuts):
            y, a = preconditioned_keys(*(x[:, start:stop] for x in given), CENTER, state=a)
            pieces.append(y)
        close(jnp.concatenate(pieces, 1), expected)
        close(a, last)


def test_segments_start_at_zero_and_bfloat16_rounds_keys_only():
    given, ids = inputs(1), np.array([[0] * 4 + [2] * 9, [1] * 5 + [0] * 2 + [1] * 6])
    expected, last = definition(*given, ids, largest=2.0)
    keys, a = preconditioned_keys(*given, CENTER, segment_ids=ids, largest=2.0)
    close(keys, expected)
    close(a, last)
    k, *gates = given
    half = jnp.asarray(k, jnp.bfloat16)
    keys, a = preconditioned_keys(half, *gates, CENTER, segment_ids=ids, largest=2.0)
    assert (keys.dtype, a.dtype) == (jnp.bfloat16, jnp.float32)
    close(a, definition(np.asarray(half, np.float32), *gates, ids)[1])
    close(keys.astype(jnp.float32), expected, tolerance=0.01)


def test_derivatives_are_finite_where_nothing_was_seen():
    k, beta, alpha = inputs()
    total = lambda *x: jnp.sum(preconditioned_keys(*x)[0] ** 2)
    k[:, :2] = 0
    for gradient in jax.grad(total, range(3))(k, beta, alpha):
        assert np.all(np.isfinite(gradient))


K, BETA, ALPHA = inputs()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"step_size": BETA[:, :, :1]}, r"preconditioned_keys: step_size has shape \(2, 13, 1\), must be .*heads=3"),
        ({"center": CENTER[:2]}, r"preconditioned_keys: center has shape \(2,\), must be \[heads=3\]"),
        ({"center": float("nan")}, "preconditioned_keys: center"),
        ({"largest": 2.5}, "preconditioned_keys: largest"),
        ({"state": K[:, 0, :, 1:]}, r"state has shape \(2, 3, 3\), must be \[batch=2, heads=3, key_dim=4\]"),
        ({"state": K[:, 0], "segment_ids": np.zeros((2, 13), int)}, "segment_ids are given with a state"),
    ],
)
def test_refuses(changed, says):
    with pytest.raises(ValueError, match=says):
        preconditioned_keys(**{"k": K, "step_size": BETA, "retention": ALPHA} | changed)
