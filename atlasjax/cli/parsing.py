"""Parsing of command lines into frozen dataclasses, with tyro."""

import contextlib
import io
import re
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
      ConfigError: the arguments cannot be parsed, or the dataclass rejects a value.
      SystemExit: help was requested (0).
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
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ConfigError(_one_line(printed.getvalue(), command)) from None
    return cast(T, parsed)


def _one_line(text: str, command: str) -> str:
    """The text of tyro's error message, without the box around it, and its suggestions."""
    rule = re.compile(r"[ │╭╮╰╯─|+-]*[─-]{5}[ │╭╮╰╯─|+-]*")
    sections: list[list[str]] = [[]]
    for line in text.splitlines()[1:]:
        if rule.fullmatch(line):
            sections.append([])
        else:
            sections[-1].append(line.strip(" │|"))
    sections = [section for section in sections if any(section)] or [["the arguments could not be parsed."]]
    said = " ".join(" ".join(sections[0]).partition("Argument helptext:")[0].split())
    said = re.sub(r"^Error parsing \S+: ", "", said)
    said = said.partition(" Arguments are applied to")[0].replace(f" (applied to atlasjax {command})", "")
    if text.lstrip(" ╭─+-").startswith("Value error"):
        return said
    hints = [
        f" Did you mean {section[1].split()[0]}?"
        for section in sections
        if section and section[0] == "Perhaps you meant:"
    ]
    for group in re.findall(r"in atlasjax (\S+:\S+) --help", " ".join(re.sub("[│|]", " ", text).split())):
        hints.append(f" It comes after {group}.")
    end = "" if said.endswith((".", ")")) else "."
    return f"{said}{end}{''.join(hints[:2])} `atlasjax {command} --help` lists the options."


def pop_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Removes `--name value` or `--name=value` from a command line before it is parsed in full.

    Returns:
      (the last value given, or None; the other arguments).

    Raises:
      ConfigError: the value is missing.
    """
    value: str | None = None
    rest = []
    iterator = iter(arguments)
    for argument in iterator:
        option, equals, inside = argument.partition("=")
        if option.replace("_", "-") != f"--{name}":
            rest.append(argument)
        elif equals:
            value = inside
        else:
            following = next(iterator, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"--{name} needs a value.")
            value = following
    return value, rest
