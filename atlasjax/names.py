"""Name lookup: in a table, with a suggestion for unknown names, or by importing an object from a user's module.

Configs store names, so that they can be saved and loaded in another process. "package.module:object" names any importable
object. A class or function passed directly is stored under that name. `atlasjax.trusted` decides which names a file may give.
"""

import contextlib
import difflib
import importlib
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from atlasjax import json_text, trusted

T = TypeVar("T")

_MOST_NAMES = 40  # a message lists at most this many


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`.

    Args:
      kind: what the name refers to ("preset", "memory rule", …), used in the message.
      name: the name to look up.
      table: known names → objects.

    Raises:
      ValueError: `name` is not in the table; the message suggests the closest name, and lists all names if there are few.
    """
    if isinstance(name, str) and name in table:
        return table[name]
    close = difflib.get_close_matches(str(name), table, n=6, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    known = f"Known: {', '.join(sorted(table))}."
    if len(table) > _MOST_NAMES:
        others = ", ".join(close[1:]) or ", ".join(sorted(table)[:6]) + ", …"
        known = f"There are {len(table)}; {'others like it' if close[1:] else 'the first'}: {others}."
    raise ValueError(f"Unknown {kind} {name!r}.{hint} {known}")


def resolve(kind: str, name: str, table: Mapping[str, object]) -> Any:
    """The object that a name refers to: `table[name]`, or the imported object for "package.module:object".

    A name that a file gives is one of the table's objects, or is refused unless its module is trusted (`trusted.reading`).

    Args:
      kind, name, table: as in `lookup`.

    Raises:
      ValueError: the name is not in the table, the module cannot be imported or raises an error, it has no such object, or a file
        gives the name and may not.
    """
    if ":" not in name or name in table:
        return lookup(kind, name, table)
    # A part of the library that was given as an object is stored under its full name; a file may name it without trust.
    for known in table.values():
        if name == _full_name(known):
            return known
    module_name, _, path = name.partition(":")
    if "" in (*module_name.split("."), *path.split(".")):
        raise ValueError(f"{kind} is {name!r:.200}; it must be like 'package.module:object'.")
    trusted.admit(kind, name)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{kind} {name!r}: module {module_name!r} cannot be imported ({error}). It must be installed, or in a "
            "folder on PYTHONPATH."
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        raise ValueError(f"{kind} {name!r}: importing {module_name!r} raised {in_one_line(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{kind} {name!r}: {module_name!r} has no {path!r}.{hint}")
        found = getattr(found, part)
    trusted.check_owner(kind, name, found)
    return found


def _full_name(value: object) -> str:
    """The name "package.module:object" of a class or function, whether or not it can be imported by it."""
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported on first use.

    Args:
      package: its name.
      modules: name of a module in it (after a dot: beside it) → its public names, with spaces between them.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(f".{home[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def name_of(kind: str, value: object) -> str:
    """The name "package.module:object" of a class or function. A string is returned unchanged.

    A file may give the name too from now on (`trusted.give`).

    Raises:
      ValueError: the object cannot be imported by name, such as a lambda or a class defined inside a function.
    """
    if isinstance(value, str):
        trusted.give(value)
        return value
    name = _full_name(value)
    if not callable(value) or "<" in name or name.startswith(":"):
        raise ValueError(
            f"{kind} must be a name, or a class or function at the top of a module, so that a saved config can name it; "
            f"got {value!r}."
        )
    trusted.give(name)
    return name


def options_text(owner: str, name: str, value: object) -> str:
    """Options in the form that configs store: a JSON object as text, with sorted keys.

    Args:
      owner, name: used in the message.
      value: a mapping, or the text of a JSON object.

    Raises:
      ValueError: `value` is neither.
    """
    try:
        options = json_text.parse(value, "it") if isinstance(value, str) else value
        if not isinstance(options, Mapping):
            raise TypeError("not a JSON object")
        return json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"""{owner}: {name} must be a JSON object such as '{{"size": 3}}', got {value!r} ({error})."""
        ) from None


def check_options(owner: str, mixers: tuple[str, ...], options: str, given: object) -> None:
    """Checks that options for a mixer of one's own have such a mixer.

    Args:
      owner, given: the config and its field `mixer`, used in the message.
      mixers: names of mixers; those of one's own are "package.module:Class".
      options: as `options_text` returns them.

    Raises:
      ValueError: there are options and no such mixer.
    """
    if options != "{}" and not any(":" in name for name in mixers):
        raise ValueError(
            f"{owner}: mixer_options={options} are for a mixer of your own, named 'package.module:Class'; mixer is {given!r}."
        )


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """The signature of a function or of a class's constructor. None for C code without signature information."""
    made_by_init = inspect.isclass(function) and inspect.isfunction(function.__init__)
    try:
        # Flax modules are called through a metaclass that accepts any arguments.
        signature = inspect.signature(function.__init__ if made_by_init else function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:] if made_by_init else parameters)


def takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function or class has a parameter called `name`."""
    signature = signature_of(function)
    return signature is not None and name in signature.parameters


def call_with(
    kind: str, name: str, function: Callable[..., T], *arguments: object, options: str,
    but: tuple[type[Exception], ...] = (), **keywords: object,
) -> T:  # fmt: skip
    """`function(*arguments, **keywords, **options)`.

    Raises:
      ValueError: `function` does not accept these arguments; or it is a user's own, "package.module:object", and raises something,
        except the errors of `but`, which go on as they are.
    """
    given, signature = json.loads(options), signature_of(function)
    try:
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called")
        if signature is None:
            return function(*arguments, **keywords, **given)
        signature.bind(*arguments, **keywords, **given)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r} with options {options}: {error}.") from None
    module, is_own, _ = name.partition(":")
    if not is_own:
        return function(*arguments, **keywords, **given)
    with named(f"{kind} {name!r}{': __init__' if inspect.isclass(function) else ''}", module, but=but):
        return function(*arguments, **keywords, **given)


@contextlib.contextmanager
def named(what: str, module: str = "", *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns an error of a user's code into a ValueError that says what raised it. Errors of `but` go on as they are.

    module: the user's module, of which the message names the line.
    """
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ValueError(f"{what} raised {in_one_line(error, module)}.") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # a chain may end in itself
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def in_one_line(error: BaseException, module: str = "") -> str:
    """The kind of an error, the first line of what it says, and the last line of a module that it passed through."""
    words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(". :")
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == module]
    return f"{words} (line {lines[-1]} of {module})" if lines else words
