"""The names of the rules: `register` and the tables that it fills."""

from collections.abc import Callable
from typing import TypeVar

from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.mesa import MesaRule
from atlasjax.memory.softmax import SoftmaxRule

Rule = MemoryRule | SoftmaxRule | MesaRule
Factory = TypeVar("Factory", bound=Callable[..., Rule])

REGISTRY: dict[str, Callable[..., Rule]] = {}
WRITES: dict[str, str] = {}  # how each rule writes its memory, in the paper's symbols: the last column of the table


def register(write: str) -> Callable[[Factory], Factory]:
    """Decorator: registers a function that returns a rule, under the function's name.

    Args:
      write: how the memory is written. W is a matrix memory, M any memory, ∇ its inner gradient at M_{t'}.

    Raises:
      ValueError: another function is registered under this name.
      TypeError: `write` is missing.
    """
    if not isinstance(write, str):
        raise TypeError(f'rules.register: write is {write!r}; it must be text, as in @rules.register("W_t = …").')

    def add(factory: Factory) -> Factory:
        name = factory.__name__
        if name in REGISTRY and REGISTRY[name].__module__ != factory.__module__:
            raise ValueError(f"rules.register: {name!r} is already the name of {REGISTRY[name].__module__}.{name}.")
        REGISTRY[name], WRITES[name] = factory, write
        return factory

    return add
