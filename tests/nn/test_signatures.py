"""What the public modules tell about their arguments."""

import inspect

from flax import nnx

from atlasjax import nn

EVERY = [getattr(nn, name) for name in nn.__all__]  # loaded when they are asked for
MODULES = [value for value in EVERY if inspect.isclass(value) and issubclass(value, nnx.Module)]


def test_signatures_tell_the_arguments():
    assert len(MODULES) > 15
    for module in MODULES:
        told = inspect.signature(module).parameters
        assert list(told) == list(inspect.signature(module.__init__).parameters)[1:], module
        assert not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in told.values()), module
    assert list(inspect.signature(nn.MemoryMixer).parameters) == ["config", "similar_keys", "rngs"]


def test_a_subclass_tells_its_own():
    class Mine(nn.MemoryMixer):
        def __init__(self, width, *, rngs):
            pass

    assert list(inspect.signature(Mine).parameters) == ["width", "rngs"]
    assert list(inspect.signature(nn.RMSNorm((4,), (None,), 1e-6)).parameters) == ["x"]  # of a module, its call
