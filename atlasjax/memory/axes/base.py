"""The base class of all choices of a rule: traits, and claims that are not inherited."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar


class Axis:
    """Base class of the choices that make up a rule."""

    claims: ClassVar[Mapping[str, bool]] = {}  # name → value in a class that does not make the claim

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "summary" not in cls.__dict__:
            cls.summary = Axis.summary  # type: ignore[method-assign]  # the parent's summary may be wrong for the subclass
        for name, default in cls.claims.items():
            if name not in cls.__dict__:
                setattr(cls, name, default)

    def summary(self) -> str:
        """Its description in the table of rules."""
        return repr(self)


def check_choice(owner: str, name: str, value: object, kind: type[Axis]) -> None:
    """Raises ValueError if `value` is not an instance of `kind`, or cannot be static under jit."""
    if not isinstance(value, kind):
        hint = f" Give an instance, {value.__name__}(...), not the class." if isinstance(value, type) else ""
        raise ValueError(f"{owner}: {name} must be a {kind.__module__}.{kind.__name__}, got {value!r}.{hint}")
    # Another object would be another key of jit's cache, also if it is made alike, and a change of it would not be seen.
    if not (dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen):
        raise ValueError(
            f"{owner}: {name} must be a frozen dataclass, so that equal ones are compiled once; put "
            f"@dataclasses.dataclass(frozen=True) above class {type(value).__name__}."
        )
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"{owner}: {name}={value!r} must be hashable to be static under jit ({error}). Make {type(value).__name__} a frozen "
            "dataclass whose fields are numbers, strings or tuples."
        ) from None


def is_exactly(value: object, *kinds: type) -> bool:
    """Whether a value's class is exactly one of these, not a subclass. For code restricted to known formulas, such as kernels."""
    return type(value) in kinds
