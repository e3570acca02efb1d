"""flash-linear-attention's slow PyTorch functions as an oracle, pieces of its layers in plain PyTorch, and comparisons with ours.

They are files of the package fla-core that need neither triton nor a GPU; the package itself does, so each file is loaded alone.
"""

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

NEEDS = "needs the extra 'oracle' or 'interop' (torch, einops, fla-core)"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("einops", reason=NEEDS)
F = torch.nn.functional
try:
    FLA = importlib.metadata.distribution("fla-core")
except importlib.metadata.PackageNotFoundError:
    pytest.skip(NEEDS, allow_module_level=True)


@functools.cache
def naive(operation):
    """The module fla/ops/<operation>/naive.py."""
    path = FLA.locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"naive_{operation.replace('/', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_first(function):
    """For functions of [batch, heads, time, …]. A state that they return with y stays as it is."""

    def call(*arrays, **options):
        out = function(*(x.transpose(1, 2) for x in arrays), **options)
        return (out[0].transpose(1, 2), *out[1:]) if isinstance(out, tuple) else out.transpose(1, 2)

    return call


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def heads(x, count):
    return x.unflatten(-1, (count, -1))


def convolved(x, weight):
    """SiLU of a depthwise causal convolution over time."""
    mixed = F.conv1d(x.transpose(1, 2), weight, padding=weight.shape[-1] - 1, groups=len(weight))
    return F.silu(mixed[..., : x.shape[1]]).transpose(1, 2)


def close(found, expected, tolerance, name=""):
    """An array within `tolerance` times the largest entry of a tensor."""
    expected = expected.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=name)


def compare(ours, theirs, arrays, tolerance, *, gradient_tolerance=None):
    """Two functions of the same arrays: all that they return, and the gradients of a weighted sum of it.

    ours: (arrays) → y, or a tuple such as (y, state); theirs: (tensors) → the same. arrays: float32, by name.
    """
    as_tuple = lambda x: tuple(x) if isinstance(x, tuple | list) else (x,)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    expected, rng = as_tuple(theirs(*tensors.values())), np.random.default_rng(1)
    weights = [rng.standard_normal(x.shape).astype(np.float32) for x in expected]
    sum((x * torch.tensor(w)).sum() for x, w in zip(expected, weights, strict=True)).backward()

    def summed(*x):
        found = as_tuple(ours(*x))
        return sum(jnp.sum(x * w) for x, w in zip(found, weights, strict=True)), found

    run = jax.jit(jax.value_and_grad(summed, tuple(range(len(arrays))), has_aux=True))
    (_, found), gradients = run(*map(jnp.asarray, arrays.values()))
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a, b, tolerance, f"output {number}")
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        assert np.abs(gradient).max() > 0, name
        close(gradient, tensor.grad, gradient_tolerance or tolerance, f"gradient of {name}")
