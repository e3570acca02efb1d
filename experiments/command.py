"""The common parts of the commands: options, loops over missing rows, progress, plans of large sizes."""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.flops import count_flops
from atlasjax.nn import ModelConfig
from atlasjax.nn.abstract import abstract_model, count_parameters, state_bytes
from experiments.rows import Row, append_row, append_rows, rows_of_recipe

Run = tuple[int, float]  # seed and learning rate
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")  # a recipe, which is a dataclass


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command whose module has this docstring, which --help shows as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def options(doc: str | None, results: pathlib.Path) -> argparse.ArgumentParser:
    """The options of every command: the folder of its rows, and whether it only writes what is made of them."""
    made = parser(doc)
    made.add_argument("--out", type=pathlib.Path, default=results, help="folder of the results")
    made.add_argument("--report", action="store_true", help="measure nothing, only write table and plot of the rows")
    return made


def add_fields(
    parser: argparse.ArgumentParser, recipe: type, *, without: Collection[str] = ("text",), **told: str
) -> None:
    """An option for each field of a recipe but these, with its default. A field whose default is None is an integer.

    told: field → its help.
    """
    for field in dataclasses.fields(recipe):
        if field.name not in without:
            kind = int if field.default is None else type(field.default)
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=kind, default=field.default, help=told.get(field.name))


def recipe_of(recipe: Callable[..., R], given: argparse.Namespace, **fields: Any) -> R:
    """The recipe of the options of `add_fields`, and of other fields."""
    names = [field.name for field in dataclasses.fields(recipe) if field.name not in fields]  # type: ignore[arg-type]
    return recipe(**{name: getattr(given, name) for name in names}, **fields)


def add_grid(
    parser: argparse.ArgumentParser,
    recipes: Mapping[str, Any],
    models: Iterable[str],
    numbers: Iterable[str],
    *,
    seeds: int = 3,
    planned: Sequence[str] = ("paper",),
) -> None:
    """Adds the options of models that are trained with several seeds and rates.

    Args:
      recipes: name of a size → its recipe.
      models: those that are trained without --models.
      numbers: fields of the recipe, each an option.
      seeds: their number without --seeds.
      planned: sizes that are only printed without --go.
    """
    parser.add_argument("--size", choices=list(recipes), default="small")
    told = f"with --size {' or '.join(planned)}: run it, do not only print the plan"
    parser.add_argument("--go", action="store_true", help=told)
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=list(models))
    parser.add_argument("--rates", nargs="+", type=float, metavar="RATE", help="the default depends on --size")
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds, counted from 0")
    for name in numbers:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)


def changed(recipe: R, given: argparse.Namespace, names: Iterable[str]) -> R:
    """The recipe with the fields that were given as options."""
    found = {name: getattr(given, name) for name in names}
    return dataclasses.replace(recipe, **{name: value for name, value in found.items() if value is not None})


def check_seeds(seeds: int) -> None:
    """Raises ValueError for less than one."""
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}.")


def progress(name: str, steps: int, every: int = 200) -> Callable[[int, float], None]:
    """A function of a step and the best loss of a model's runs, which prints them at every so many steps and at the last one."""
    started = time.perf_counter()

    def say(step: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            spent = time.perf_counter() - started
            print(f"[{spent:5.0f} s] {name}: step {step}/{steps}, best loss {loss:.3f}", flush=True)

    return say


def sizes(config: ModelConfig, length: int) -> Row:
    """Parameters, and floats of the state of one sequence."""
    return {"parameters": count_parameters(config), "state_floats": state_bytes(config, length=length) // 4}


def rows_of_runs(fields: Row, runs: Sequence[Run], results: Iterable[Row], recipe: Any) -> list[Row]:
    """The row of each run of a model: fields of the model, seed and learning rate, the run's results, and the recipe."""
    return [
        {**fields, "seed": seed, "learning_rate": rate, **result, "recipe": dataclasses.asdict(recipe)}
        for (seed, rate), result in zip(runs, results, strict=True)
    ]


def train_missing(
    path: pathlib.Path,
    rows: dict[Any, Row],
    key_of: Callable[[Row], Any],
    wanted: Iterable[Row],
    runs: Sequence[Run],
    measure: Callable[[Row, list[Run], pathlib.Path | None], list[Row]],
    partial: Callable[[Row, list[Run]], pathlib.Path] | None = None,
) -> None:
    """Trains what has no row yet, and adds its rows to the file and to `rows`.

    Args:
      path: of the rows.
      rows: those of the file, by `key_of`.
      wanted: the fields of a row that name a model. Its missing runs train in one compiled program.
      runs: seed and learning rate of every run.
      measure: the rows of a model's runs; `partial` of them is its last argument.
      partial: where an unfinished training is kept. It is deleted after the rows are in the file, so that nothing is lost between.
    """
    for model in wanted:
        missing = [run for run in runs if key_of({**model, "seed": run[0], "learning_rate": run[1]}) not in rows]
        if missing:
            kept = None if partial is None else partial(model, missing)
            found = measure(model, missing, kept)
            append_rows(path, found)
            if kept is not None:
                kept.unlink(missing_ok=True)
            rows |= {key_of(row): row for row in found}


def trained(
    given: argparse.Namespace,
    name: str,
    recipe: Any,
    key_of: Callable[[Row], Any],
    wanted: Iterable[Row],
    rates: Iterable[float],
    measure: Callable[[Row, list[Run], pathlib.Path | None], list[Row]],
    write: Callable[[list[Row], pathlib.Path], str],
    partial: Callable[[Row, list[Run]], pathlib.Path] | None = None,
) -> None:
    """Trains what is missing in `<out>/<name>.jsonl`, unless only a report is asked for, and prints the page of all its rows.

    Args:
      given: out, report and seeds.
      recipe, key_of, wanted, measure, partial: as for `rows_of_recipe` and `train_missing`.
      rates: learning rates of each seed.
      write: rows and their path → the page, which it also writes.
    """
    path = given.out / f"{name}.jsonl"
    rows = rows_of_recipe(path, recipe, key_of)
    runs = [(seed, rate) for seed in range(given.seeds) for rate in rates]
    train_missing(path, rows, key_of, [] if given.report else wanted, runs, measure, partial)
    if rows:
        print(write(list(rows.values()), path))


def measure_each(
    path: pathlib.Path, rows: dict[K, Row], todo: Mapping[K, str], measure: Callable[[K], Row]
) -> list[str]:
    """Trains models of text one after another. Adds each row to the file and to `rows`.

    Args:
      path, rows: as for `train_missing`.
      todo: key → what is printed of it.
      measure: key → its row. A FloatingPointError, of a model that diverged, does not stop the others.

    Returns:
      The names, as they were printed, of the models that diverged.
    """
    failed = []
    for number, (key, told) in enumerate(todo.items(), 1):
        started = time.perf_counter()
        try:
            rows[key] = measure(key)
        except FloatingPointError as error:
            failed.append(told)
            print(f"{told} FAILED: {error}", flush=True)
            continue
        append_row(path, rows[key])
        found, seconds = rows[key]["bits_per_byte"], time.perf_counter() - started
        print(f"[{number}/{len(todo)}] {told}: {found:.3f} bits per byte, {seconds:.0f} s", flush=True)
    return failed


def finish(
    path: pathlib.Path, rows: Mapping[Any, Row], failed: Sequence[str], write: Callable[[list[Row], pathlib.Path], str]
) -> None:
    """Writes the page of the rows and prints it. Ends the process with the names of the models that diverged, if some did."""
    if rows:
        print(write(list(rows.values()), path))
    if failed:
        sys.exit(f"No number for: {'; '.join(failed)}.")


def forward_flops(config: ModelConfig, length: int) -> tuple[int, int]:
    """FLOPs of the layers for one sequence, and of the head for one token."""
    graphdef, params = nnx.split(abstract_model(config), nnx.Param)
    tokens, hidden = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1, config.dim), config.dtype)
    body = count_flops(lambda p, x: nnx.merge(graphdef, p).hidden(x), params, tokens)
    return body, count_flops(lambda p, x: nnx.merge(graphdef, p).logits(x), params, hidden)


def plan(
    first: str,
    costs: Mapping[str, tuple[Row, float]],
    runs: int,
    command: str,
    names: Sequence[str],
    out: str,
    size: str = "paper",
) -> str:
    """What is printed of large trainings, and the commands of one accelerator, or of two hosts with half of the models each.

    Each host writes to a folder of its own: hosts may share a file system without sharing its locks.

    Args:
      first: the first line.
      costs: a model → its `sizes`, and the FLOPs of one of its runs (three times those of the forward pass).
      runs: of each of them.
      command, names, out, size: the command without its --models and --out, and these.
    """
    parts = [part for part in (names[::2], names[1::2]) if part]
    flops = runs * sum(each for _, each in costs.values())
    return "\n".join([
        first,
        f"{'model':32} {'parameters':>11} {'state floats':>12} {'PFLOP per run':>13}",
        *(f"{name:32} {of['parameters']:11,} {of['state_floats']:12,} {each / 1e15:13.3f}" for name, (of, each) in costs.items()),
        f"Together {flops / 1e15:,.0f} PFLOP: {flops / 40e12 / 3600:,.0f} hours of one accelerator at 40 TFLOP/s.",
        "One accelerator, row by row:",
        f"    {command} --out {out}",
        "Two hosts, each with its own models and its own folder; then their rows in one file:",
        *(f"    {command} --models {' '.join(part)} --out {out}/host-{host}" for host, part in enumerate(parts)),
        f"    cat {out}/host-*/{size}.jsonl > {out}/{size}.jsonl",
    ])  # fmt: skip
