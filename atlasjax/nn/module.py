"""The base classes of the library's Flax modules."""

import inspect
from typing import Any

import jax
from flax import nnx


class _Signature:
    """The signature of a class: the arguments of its `__init__`, also in subclasses.

    The metaclass of nnx takes `*args, **kwargs`, which is what `inspect.signature`, `help` and editors would show otherwise.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # whose signature is that of `__call__`
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Module(nnx.Module):
    """An `nnx.Module` whose signature tells the arguments of its constructor."""

    __signature__ = _Signature()


class ObservedModule(Module):
    """A mixer whose `__call__` is its `observe` (`mixers.ObservedMixer`) without the size of the memory."""

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Arguments as for `observe`."""
        return self.observe(x, segment_ids, max_segments)[0]

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        raise NotImplementedError


class LayerwiseModule(Module):
    """A mixer whose `extend` is its `extend_layer` (`mixers.LayerwiseMixer`) for the state of one layer."""

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state. Outputs beyond max_length are NaN."""
        return self.extend_layer(x, state, None)

    def extend_layer(self, x: jax.Array, states: Any, layer: jax.Array | None) -> tuple[jax.Array, Any]:
        raise NotImplementedError
