"""Parsing of command lines into frozen dataclasses, with tyro."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from atlasjax import check, trusted
from atlasjax.cli.arguments import option_name, ordered, other_name
from atlasjax.train.errors import ConfigError, user_errors

T = TypeVar("T")


def parse(cls: type[T], command: str, description: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Parses the arguments of one command, and trusts the modules of its option --trust, if it has one.

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
                args=ordered(cls, arguments),
                default=default,
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ConfigError(_one_line(printed.getvalue(), command, cls)) from None
    for option, value in numbers_of(parsed):
        if isinstance(value, int) and abs(value) > check.MOST:
            raise ConfigError(
                f"--{option} is {check.shown(value)}; it must be an integer of 64 bits, at most {check.MOST}."
            )
    with user_errors():
        trusted.trust(*getattr(parsed, "trust", ()))
    return cast(T, parsed)


def numbers_of(command: object, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """The options of a command, an instance of its dataclass, whose values are numbers, with these: ("data.batch-size", 8)."""
    hints = typing.get_type_hints(type(command), include_extras=True)
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        value, name = getattr(command, field.name), option_name(field, hints[field.name])
        if dataclasses.is_dataclass(value):
            yield from numbers_of(value, f"{prefix}{name}." if name else prefix)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _one_line(text: str, command: str, cls: type) -> str:
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
    if (unreadable := _unreadable(said, text)) is not None:
        return f"{unreadable} `atlasjax {command} --help` lists the options."
    said = re.sub(r"^Error parsing \S+: ", "", said)
    said = said.partition(" Arguments are applied to")[0].replace(f" (applied to atlasjax {command})", "")
    if text.lstrip(" ╭─+-").startswith("Value error"):
        return said
    hints = []
    for option in re.findall(r"--[\w.-]+", said) if said.startswith("Unrecognized") else ():
        if (meant := other_name(cls, option)) is not None and meant != option:
            hints.append(f" Did you mean {meant}?")
    if not hints:
        hints = [
            f" Did you mean {section[1].split()[0]}?"
            for section in sections
            if section and section[0] == "Perhaps you meant:"
        ]
    end = "" if said.endswith((".", ")")) else "."
    return f"{said}{end}{''.join(hints[:2])} `atlasjax {command} --help` lists the options."


# Messages of Python and tyro about a value that is not of the option's type.
_NOT_OF_TYPE = (
    "invalid literal for int()",
    "could not convert string",
    "no type matching",
    "Could not find valid parse",
)
_TYPES = {"INT": "an integer", "FLOAT": "a number"}


def _unreadable(said: str, text: str) -> str | None:
    """The line about a value that is not of its option's type; None if tyro's message `text` is about something else."""
    found = re.match(r"Error parsing (--\S+): (.*)", said)
    if found is None or not found[2].startswith(_NOT_OF_TYPE):
        return None
    option, values = found[1], re.search(r"\[(.*?)\]|('.*')", found[2])
    lines = [line.strip(" │|") for line in text.splitlines()]
    wanted = next((line.removeprefix(f"{option} ") for line in lines if line.startswith(f"{option} ")), None)
    if values is None or wanted is None:
        return None
    optional, kind = wanted.startswith("{None}|"), wanted.removeprefix("{None}|")
    return f"{option} is {values[1] or values[2]}; it must be {_TYPES.get(kind, kind)}{' or None' if optional else ''}."


def pop_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Removes `--name value` or `--name=value` from a command line before it is parsed in full.

    Returns:
      (the last value given, or None; the other arguments).

    Raises:
      ConfigError: the value is missing or empty.
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
    if value == "":
        raise ConfigError(f"--{name} is empty; it needs a value.")
    return value, rest


# Options that may name a part of your own.
_PARTS = ("rule", "mixer", "source", "name", "schedule", "implementation", "add-memory", "trackers")


def admit_given(arguments: Sequence[str]) -> None:
    """Trusts the modules of --trust, and notes the names of own parts, where files are read before a command line is parsed.

    Raises:
      ConfigError: a module's name is none.
    """
    option = ""
    for argument in arguments:
        value: str | None = argument
        if argument.startswith("--"):
            option, equals, inside = argument.removeprefix("--").partition("=")
            option = option.replace("_", "-").rpartition(".")[2]
            value = inside if equals else None
        if value is not None and option == "trust":
            with user_errors():
                trusted.trust(value)
        elif value is not None and option in _PARTS:
            trusted.give(value)
