"""Parsing of command lines into frozen dataclasses, with tyro."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import TypeVar, cast

from atlasjax.train.errors import ConfigError

T = TypeVar("T")


def parse(cls: type[T], command: str, description: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Parses the arguments of one command.

    Args:
      cls: the dataclass of its options.
      command: its name.
      description: its description, shown in the help.
      arguments: the command line after the command's name.
      default: values of options that are not given.

    Raises:
      ConfigError: the dataclass rejects a value.
      SystemExit: help was requested (0), or the arguments do not parse (2). tyro has printed the reason.
    """
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed = tyro.cli(
                cls,
                prog=f"atlasjax {command}",
                description=description,
                args=list(arguments),
                default=default,
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except SystemExit:
        message = _value_error(printed.getvalue())
        if message:
            raise ConfigError(message) from None
        print(printed.getvalue(), end="", file=sys.stderr)
        raise
    return cast(T, parsed)


def _value_error(text: str) -> str:
    """The message in the box that tyro draws around a ValueError of a nested dataclass, or "" for any other box."""
    lines = [line.strip(" │╭╮╰╯─|-") for line in text.splitlines()]
    if not lines or not lines[0].startswith("Value error"):
        return ""
    words = " ".join(lines[1:]).partition("For full helptext")[0].split()
    return re.sub(r"^Error parsing \S+: ", "", " ".join(words))


def pop_option(arguments: Sequence[str], name: str, default: str) -> tuple[str, list[str]]:
    """Removes `--name value` or `--name=value` from a command line before it is parsed in full.

    Returns:
      (the last value given, or `default`; the other arguments).

    Raises:
      ConfigError: the value is missing.
    """
    value, rest = default, []
    iterator = iter(arguments)
    for argument in iterator:
        if argument == f"--{name}":
            following = next(iterator, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"--{name} needs a value.")
            value = following
        elif argument.startswith(f"--{name}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return value, rest
