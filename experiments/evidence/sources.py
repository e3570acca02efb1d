"""Comparisons over seeds, from the rows of the experiments.

Each function returns `Line`s: one for each setting in which rows of both sides exist, with the seeds that both have.
"""

import dataclasses
import functools
import itertools
import math
import operator
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from experiments.capacity.report import TITLES, area
from experiments.evidence import counting
from experiments.intervals import Comparison, clearly_above, paired
from experiments.language import compare as of_language
from experiments.mad.report import orders
from experiments.mad.tasks import TASKS
from experiments.mqar.report import best, chance
from experiments.needles import report as of_needles
from experiments.needles.tasks import TASKS as NEEDLES
from experiments.orders import AT_CHANCE
from experiments.rows import Row, by_model, read_rows
from experiments.studies.compare import BYTES, compared
from experiments.studies.models import LENGTH

ROOT = pathlib.Path(__file__).resolve().parents[2]
CAPACITY = "capacity/results/capacity.jsonl"  # under experiments/, seeds 0 to 9
FRESH = "evidence/results/fresh.jsonl"  # seeds 10 to 19


Losses = dict[str, dict[int, float]]  # model → seed → bits per byte


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of one comparison of the capacity experiment: two memories, and where they are compared."""

    better: str
    worse: str
    keys: str
    budget: int
    passes: int


@dataclasses.dataclass(frozen=True)
class Line:
    """One comparison in one setting.

    Attributes:
      setting: what is compared, and where.
      comparison: the paired differences; positive is what the paper says.
      unit: of the differences.
      tokens: tokens that each run read.
      source: the folder of the experiment.
      aside: why the comparison decides nothing, whatever its intervals: both sides at chance or no better than a trigram, a
        control, or a comparison that the papers do not make.
      counted: of language models, where they are compared, and those that are not clearly better than a trigram, each with its
        mean loss.
      case: the same settings as data; of the capacity experiment.
    """

    setting: str
    comparison: Comparison
    unit: str
    tokens: int
    source: str
    aside: str = ""
    counted: tuple[str, tuple[str, ...]] = ("", ())
    case: Case | None = None

    @property
    def verdict(self) -> str:
        return self.aside or self.comparison.verdict


@functools.cache
def rows(path: str) -> tuple[Row, ...]:
    return tuple(read_rows(ROOT / "experiments" / path))


def at_chance(sides: Iterable[dict[int, float]], level: float) -> str:
    """`AT_CHANCE` if neither side is clearly above it."""
    return "" if any(clearly_above(side, level) for side in sides) else AT_CHANCE


def of_texts(
    setting: str, comparison: Comparison, tokens: int, source: str, text: str, losses: Losses, where: str = "", unit: str = BYTES
) -> Line:  # fmt: skip
    """A line of language models, which is set aside if none of them has learned more than counting (`counting.beats`).

    Args:
      setting, comparison, tokens, source: as in `Line`.
      text: the text of their runs.
      losses: each of them → seed → held-out bits per byte.
      where: what the page calls these runs.
      unit: as in `Line`.
    """
    trigram = counting.level(source, text)
    weak = tuple(
        f"{name} {np.mean(list(by_seed.values())):.3f}"
        for name, by_seed in losses.items()
        if not counting.beats(by_seed, trigram)
    )
    aside = counting.NO_BETTER if len(weak) == len(losses) else ""
    return Line(setting, comparison, unit, tokens, source, aside, (f"{where or text} (trigram {trigram:.3f})", weak))


# Capacity.


def capacity(
    pairs: Iterable[tuple[str, str]], budgets: Sequence[int] = (256, 1024), path: str = CAPACITY
) -> list[Line]:
    """(better, worse) memories: the mean distance of their curves, in doublings of the number of pairs."""
    table = {(r["budget"], r["passes"], r["keys"], r["memory"]): r for r in rows(path)}
    settings = sorted({key[:3] for key in table}, key=lambda k: (k[0], k[1], list(TITLES).index(k[2])))
    found = []
    for (better, worse), setting in itertools.product(pairs, settings):
        a, b = (table.get((*setting, name)) for name in (better, worse))
        if a is None or b is None or setting[0] not in budgets:
            continue
        _, passes, keys = setting
        comparison = paired(*({i: x for i, x in enumerate(area(row))} for row in (a, b)))
        assert comparison is not None
        size = f"{a['floats']:,} and {b['floats']:,} floats"
        times = "one pass" if passes == 1 else f"{passes} passes"
        told = f"{better} against {worse}: {TITLES[keys]}, {times}, {size}"
        tokens, case = passes * a["recipe"]["pairs"][-1], Case(better, worse, keys, setting[0], passes)
        found.append(Line(told, comparison, "doublings of pairs", tokens, "capacity", case=case))
    return found


# Recall.


def _recalled(
    pair: tuple[str, str], groups: Mapping[str, list[Row]], source: str, told: Callable[[Row, Row], str],
    level: Callable[[Row], float], value: Callable[[Row], float] = operator.itemgetter("accuracy"),
) -> list[Line]:  # fmt: skip
    """The line of a (better, worse) pair, each at its best learning rate; none without rows of both.

    Args:
      pair: models.
      groups: model → its rows at its best rate.
      source: as in `Line`.
      told: a row of each → where they are compared.
      level: recipe → what needs no memory.
      value: row → accuracy.
    """
    sides = [{row["seed"]: value(row) for row in groups.get(name, [])} for name in pair]
    if (comparison := paired(*sides)) is None:
        return []
    one, other = (groups[name][0] for name in pair)
    where, recipe = told(one, other), one["recipe"]
    setting = f"{' against '.join(pair)}{where}"
    return [Line(setting, comparison, "accuracy", _tokens(recipe), source, at_chance(sides, level(recipe)))]


def _state(one: Row, other: Row) -> str:
    return f"{one['state_floats']:,} and {other['state_floats']:,} floats of state"


def mqar(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) models of MQAR: accuracy, each at its best learning rate."""
    found = []
    sizes = [best(list(rows(f"mqar/results/{size}.jsonl"))) for size in ("small", "long")]
    level = lambda recipe: chance(recipe["vocab_size"], recipe["length"], recipe["pairs"])
    told = lambda a, b: f", width {a['width']}, {a['recipe']['steps']:,} steps, {_state(a, b)}"
    for pair, chosen in itertools.product(pairs, sizes):
        for width in sorted({width for _, width in chosen}):
            groups = {name: group for (name, of), group in chosen.items() if of == width}
            found += _recalled(pair, groups, "mqar", told, level)
    return found


def recall(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) models of `experiments.recall`: accuracy, each at its best learning rate."""
    groups = best(list(rows("recall/results/recall.jsonl")), by_model)
    level = lambda recipe: chance(recipe["vocab_size"], recipe["length"], [recipe["num_pairs"]])
    told = lambda a, b: f", width 64, {_state(a, b)}"
    return [line for pair in pairs for line in _recalled(pair, groups, "recall", told, level)]


def mad() -> list[Line]:
    """The models that Atlas beats on MAD's tasks by ATLAS Table 4: macro accuracy, each at its best learning rate."""
    found = list(rows("mad/results/small.jsonl"))
    lines = []
    for order in orders(found, "ATLAS, Table 4"):
        recipe, told = found[0]["recipe"], f"{order.better} against {order.worse}: {order.task.replace('_', ' ')}"
        tokens = recipe["steps"] * recipe["batch_size"] * TASKS[order.task].time
        aside = AT_CHANCE if order.at_chance else ""
        lines.append(Line(f"{told}, width {recipe['width']}", order.comparison, "accuracy", tokens, "mad", aside))
    return lines


def needles(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) models: questions answered, the mean over tasks and lengths, each at its best learning rate."""

    def told(one: Row, other: Row) -> str:
        lengths, steps = one["recipe"]["lengths"], one["recipe"]["steps"]
        return f": needles and places in texts of {lengths[0]:,} to {lengths[-1]:,} tokens, {steps:,} steps"

    found = []
    for pair, groups in itertools.product(pairs, _needles_sizes()):
        found += _recalled(pair, groups, "needles", told, lambda _: needles_chance(), of_needles.accuracy)
    return found


def _needles_sizes() -> list[of_needles.Groups]:
    return [of_needles.chosen(rows(f"needles/results/{size}.jsonl")) for size in ("small", "long")]


def _tokens(recipe: Row) -> int:
    return recipe["steps"] * recipe["batch_size"] * recipe["length"]


@functools.cache
def needles_chance() -> float:
    """The mean over the tasks of the needles."""
    return float(np.mean([task.chance() for task in NEEDLES.values()]))


def needles_at_test_time(setting: str, values: Sequence[int]) -> list[Line]:
    """Trained models with more computation for each token against less, both only in the test.

    Args:
      setting: see `experiments.needles.models.Variant`.
      values: increasing. Each is compared with the one before.
    """
    found = []
    for name, group in (item for groups in _needles_sizes() for item in groups.items()):
        recipe = group[0]["recipe"]
        for less, more in itertools.pairwise(values):
            for length in map(str, recipe["lengths"][:2]):
                sides = [
                    {row["seed"]: of_needles.tested(row, setting, x, length) for row in group} for x in (more, less)
                ]
                if any(None in side.values() for side in sides):
                    continue
                comparison = paired(*sides)  # type: ignore[arg-type]
                assert comparison is not None
                told = (
                    f"{name}, {setting.replace('_', ' ')} {more} against {less} in the test: {int(length):,} tokens, "
                    f"{recipe['steps']:,} steps"
                )
                found.append(Line(told, comparison, "accuracy", _tokens(recipe), "needles"))
    return found


# Language.


def zoo(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) tiny models: held-out bits per byte."""
    found = []
    for text in ("embedded", "tinyshakespeare"):
        found += _language(pairs, f"zoo/results/{text}.jsonl", f"{text}, tiny models", "zoo", text)
    return found


def state_sizes(*models: str) -> str:
    """The bytes of state of some tiny presets, by the rows of the zoo."""
    found = {row["model"]: row["state_bytes"] for row in rows("zoo/results/embedded.jsonl")}
    said = " and ".join(f"{found[name]:,} bytes in {name}" for name in models)
    return f"The state of the tiny presets has {said}."


def ablation(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) variants of atlas-tiny: held-out bits per byte."""
    return _language(pairs, "ablation/results/ablation.jsonl", "embedded, atlas-tiny", "ablation", "embedded")


def trained(pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """(better, worse) tiny presets in whole runs at their defaults: held-out bits per byte, on each text.

    Models of a seed read the same batches. Runs without the bound, and runs that diverged, are left out.
    """
    from atlasjax.train.defaults import default_config

    losses: dict[tuple[str, str], dict[int, float]] = {}
    steps, texts = 0, []
    for row in rows("stability/results/train.jsonl"):
        if row["bounded"] and row["bits_per_byte"] is not None:
            losses.setdefault((row["preset"], row["text"]), {})[row["seed"]] = row["bits_per_byte"]
            steps = row["steps"]
            texts.append(row["text"])
    data = default_config("titans-tiny").data
    tokens = steps * data.batch_size * data.sequence_length
    found = []
    for pair, text in itertools.product(pairs, dict.fromkeys(texts)):
        sides = {name: losses.get((name, text), {}) for name in pair}
        found += _compared(pair, sides, tokens, "stability", text, f"{text}, whole runs of tiny models")
    return found


def _language(pairs: Iterable[tuple[str, str]], path: str, where: str, source: str, text: str) -> list[Line]:
    losses: Losses = {}
    tokens = 0
    for row in rows(path):
        losses.setdefault(row["model"], {})[row["recipe"]["seed"]] = row["bits_per_byte"]
        tokens = row["tokens"]
    return [line for pair in pairs for line in _compared(pair, losses, tokens, source, text, where)]


def _compared(pair: tuple[str, str], losses: Losses, tokens: int, source: str, text: str, where: str) -> list[Line]:
    """The line of a (better, worse) pair of language models; none without rows of both. The rest is as for `of_texts`."""
    sides = {name: losses.get(name, {}) for name in pair}
    comparison = paired(sides[pair[1]], sides[pair[0]])  # a lower loss is better
    if comparison is None:
        return []
    return [of_texts(f"{' against '.join(pair)}: {where}", comparison, tokens, source, text, sides, where)]


def language_spread() -> float:
    """Standard deviation between seeds of a tiny model's bits per byte: `titans-tiny`, 300 steps, pooled over texts.

    Seeds are not paired there, so a difference of two models has √2 times this.
    """
    groups: dict[str, list[float]] = {}
    for row in rows("stability/results/train.jsonl"):
        if row["preset"] == "titans" and row["bounded"] and row["bits_per_byte"] is not None:
            groups.setdefault(row["text"], []).append(row["bits_per_byte"])
    variances = [(np.var(values, ddof=1), len(values) - 1) for values in groups.values() if len(values) > 1]
    return math.sqrt(sum(v * n for v, n in variances) / sum(n for _, n in variances))


def texts(experiment: str) -> list[str]:
    """The names of the texts of which an experiment has rows."""
    return sorted(path.stem for path in (ROOT / "experiments" / experiment / "results").glob("*.jsonl"))


def models_of(told: str) -> list[str]:
    """The models of a comparison that `experiments.studies` or `experiments.language` tells: "a against b, …: …"."""
    return told.partition(":")[0].partition(",")[0].split(" against ")


def studies(direction: str) -> list[Line]:
    """The comparisons of `experiments.studies` for one of its directions."""
    found = []
    for text in texts("studies"):
        group = list(rows(f"studies/results/{text}.jsonl"))
        losses: Losses = {}
        for row in group:
            losses.setdefault(row["model"], {})[row["seed"]] = row["bits_per_byte"]
        for line in (line for line in compared(group) if line.direction == direction):
            recipe = group[0]["recipe"]
            tokens = recipe["steps"] * recipe["batch_size"] * LENGTH
            sides = {name: losses[name] for name in models_of(line.told)}
            told, where = f"{line.told}: {text}", f"{text}, studies"
            found.append(of_texts(told, line.comparison, tokens, "studies", text, sides, where, line.unit))
    return found


def language(direction: str) -> list[Line]:
    """The comparisons of `experiments.language` for one of its directions: by the position in the context."""
    found = []
    for text in texts("language"):
        group = rows(f"language/results/{text}.jsonl")
        runs = of_language.chosen(group)
        for line in (line for line in of_language.compared(group) if line.direction == direction):
            models = ((name, runs[name]) for name in models_of(line.told))
            sides = {name: {seed: row["bits_per_byte"] for seed, row in of.items()} for name, of in models}
            tokens = _tokens(group[0]["recipe"])
            told = f"{line.told}, {text}"
            found.append(of_texts(told, line.comparison, tokens, "language", text, sides, unit=line.unit))
    return found
