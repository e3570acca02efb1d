"""Which of your own parts a file may name: a config in a file must not decide what is imported and called.

Configs name objects as "package.module:object". A name that is written in Python or typed on the command line is imported. A name
that a file gives is imported only if it was given in this process too, or if its module is trusted (`trust`). The library's own
parts need neither.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class _File(NamedTuple):
    """A file that is being read: its name for messages, and its JSON."""

    name: str
    values: object


_reading: ContextVar[_File | None] = ContextVar("reading", default=None)
_modules: set[str] = set()  # trusted
_given: set[str] = set()  # names that this process was given by Python code or by its command line
_imported: set[str] = set()  # names of parts that are not the library's
_said: set[tuple[str, str]] = set()  # file and name that a line was printed for


def trust(*modules: str) -> None:
    """Lets files name parts of these modules and of the modules below them, for as long as this process runs.

    A run that was trained with parts of your own names them in its config. `trust("my_parts")` lets `load_run`, `train` and
    others import them. Trust a module whose code you know: whoever wrote the file chooses which of its objects are called, and with
    which options.

    Args:
      modules: names of modules, such as "my_parts" or "my_package.rules".

    Raises:
      ValueError: one is not a module's name.
    """
    for module in modules:
        if not isinstance(module, str) or "" in module.split(".") or ":" in module:
            raise ValueError(
                f"trust: {module!r} is not the name of a module; it must be like 'my_parts' or 'my_package.rules'."
            )
    _modules.update(modules)


def give(name: str) -> None:
    """Notes that this process was given a name by Python code or by its command line. While a file is read it has no effect."""
    if _reading.get() is None:
        _given.add(name)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Modules and names that are trusted or given inside do not count after it: one command does not vouch for the next."""
    before = [(names, set(names)) for names in (_modules, _given, _imported, _said)]
    try:
        yield
    finally:
        for names, earlier in before:
            names.intersection_update(earlier)


@contextlib.contextmanager
def reading(file: str, values: object) -> Iterator[None]:
    """Names that are resolved inside come from a file.

    Args:
      file: what it is, for messages.
      values: its JSON, in which the field of a name is looked for.
    """
    token = _reading.set(_File(file, values))
    try:
        yield
    finally:
        _reading.reset(token)


def admit(kind: str, name: str) -> None:
    """Says which file asks for a part, before its module is imported; or refuses it.

    Args:
      kind: what the name refers to.
      name: "package.module:object", none of the library's.

    Raises:
      ValueError: a file gives the name, which this process was not given, and its module is not trusted.
    """
    file, module = _reading.get(), name.partition(":")[0]
    give(name)
    if file is not None:
        field = _field(file.values, name) or kind
        if name not in _given and not is_trusted(module):
            raise ValueError(refusal(field, name, module))
        if (name not in _given or module not in sys.modules) and (file.name, name) not in _said:
            _said.add((file.name, name))
            print(
                f"atlasjax: {file.name}: {field} is {name!r}, so {module!r} is imported.", file=sys.stderr, flush=True
            )
    _imported.add(name)


def refusal(field: str, name: str, module: str) -> str:
    """The line for a name in a file that is not imported."""
    return (
        f"{field} is {name!r:.200}, a name of your own or of somebody else, which could run any code of {module!r:.100}; nothing "
        f"was imported. If you trust both this file and that module, add --trust {module:.100} (in Python: "
        f"atlasjax.trust({module!r:.100}))."
    )


def check_owner(kind: str, name: str, found: object) -> None:
    """Refuses an object that a file reaches through a trusted module, but that is defined in another one.

    Raises:
      ValueError: the module that it says it is defined in is not trusted.
    """
    if _reading.get() is None or name in _given:
        return
    while isinstance(found, functools.partial):
        found = found.func
    owner = getattr(found, "__module__", None)
    if not isinstance(owner, str) or not is_trusted(owner):
        raise ValueError(
            f"{kind} {name!r:.200} is defined in {owner!r}, not in the module that it is named in, so a file may not name it. "
            "If you trust that module too, add it to --trust (in Python: atlasjax.trust)."
        )


def own_modules(values: object) -> list[str]:
    """The modules of parts in the JSON of a config that was resolved in this process and that are not the library's."""
    found: set[str] = set()
    for name in _imported:
        if _field(values, name) is not None:
            found.add(name.partition(":")[0])
    return sorted(found)


def is_trusted(module: str) -> bool:
    """Whether a module, or one that it is in, is trusted."""
    return any(module == one or module.startswith(f"{one}.") for one in _modules)


def _field(values: object, name: str, path: str = "") -> str | None:
    """The dotted field of a JSON value that has this text, or has it in a list."""
    if values == name:
        return path or None
    if isinstance(values, list | tuple):
        return next((found for value in values if (found := _field(value, name, path)) is not None), None)
    for key, value in values.items() if isinstance(values, dict) else ():
        found = _field(value, name, f"{path}.{key}" if path else str(key))
        if found is not None:
            return found
    return None
