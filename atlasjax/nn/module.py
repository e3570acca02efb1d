"""The base class of the library's Flax modules."""

import inspect

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
