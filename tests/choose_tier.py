"""Chooses the default tier by measurement: writes tests/full_tier.txt from the times and the coverage of all tests of CI.

    pip install pytest-cov
    python -m pytest -m "full or not full" -p tests.choose_tier --cov=atlasjax --cov=pallas_kernels --cov-branch --cov-context=test
    python -m tests.choose_tier .coverage

As a plugin it appends the processor seconds of each test, those of its child processes too, to `test_times.jsonl`. Run the first
command with an empty $JAX_COMPILATION_CACHE_DIR. Cheap cases stay in the default tier; then those follow that add most functions
and lines of the library per second, as long as there is time.
"""

import ast
import collections
import json
import os
import pathlib
import re
import sqlite3
import sys
import time

import pytest

from atlasjax import rules
from tests.tiers import LIST

TIMES = pathlib.Path("test_times.jsonl")
CHEAP = 0.1  # processor seconds of a case, which stays
CHEAPEST = 0.2  # of the cheapest case of a test, which stays
# Of all that stay. Programs that they share with tests that do not stay cost half as much again, collecting takes the rest of 600.
BUDGET = 290
A_FUNCTION = 150  # that nothing has called yet, in lines
# A case of each rule stays, of the tests that compare it with a definition.
OF_EACH_RULE = re.compile(r"tests/memory/(softmax/)?test_(engine|streaming|closed_forms|layerwise|bound)\.py")
NEW_CASES_RUN = (  # a rule that is new to these tables runs by default, so their cases are listed one by one
    "tests/memory/test_engine.py::test_outputs_state_and_gradients",
    "tests/memory/test_streaming.py::test_every_split",
    "tests/memory/softmax/test_engine.py::test_outputs_state_and_gradients",
    "tests/memory/softmax/test_streaming.py::test_every_split",
)


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    processor, wall = _processor_seconds(), time.monotonic()
    try:
        return (yield)
    finally:
        spent = {"processor": round(_processor_seconds() - processor, 3), "wall": round(time.monotonic() - wall, 3)}
        with TIMES.open("a") as file:
            file.write(json.dumps({"id": item.nodeid, **spent}) + "\n")


def costs() -> dict[str, float]:
    """Seconds of each test. One that waits, or whose children outlive it, costs half of its wall time: there are two workers."""
    rows = map(json.loads, TIMES.read_text().splitlines())
    waits = lambda row: row["wall"] > max(2, 2.2 * row["processor"])
    return {row["id"]: max(row["processor"], row["wall"] / 2) if waits(row) else row["processor"] for row in rows}


def covered(database: str) -> dict[str, set[tuple]]:
    """What each test ran: (file, line) and (file, first line, name of a function). The empty name has what imports ran."""
    connection = sqlite3.connect(database)
    files = dict(connection.execute("select id, path from file"))
    tests = {key: name.partition("|")[0] for key, name in connection.execute("select id, context from context")}
    functions = {file: _functions(path) for file, path in files.items()}
    found = collections.defaultdict(set)
    for file, test, line in connection.execute("select file_id, context_id, tono from arc where tono > 0"):
        found[tests[test]] |= {(file, line), *((file, *function) for function in functions[file].get(line, ()))}
    return found


def _functions(path: str) -> dict[int, list]:
    """Line → the functions in whose body it is."""
    found = collections.defaultdict(list)
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for line in range(node.body[0].lineno, node.end_lineno + 1):
                found[line].append((node.lineno, node.name))
    return found


def by_test(cases) -> dict[str, list[str]]:
    """Test → its cases."""
    found = collections.defaultdict(list)
    for case in cases:
        found[case.partition("[")[0]].append(case)
    return found


def choose(cost: dict[str, float], ran: dict[str, set[tuple]]) -> set[str]:
    """The cases of the default tier."""
    kept = {case for case, seconds in cost.items() if seconds < CHEAP}
    for cases in by_test(cost).values():
        cheapest = min(cases, key=cost.get)
        kept |= {cheapest} if cost[cheapest] < CHEAPEST else set()
    for rule in rules.REGISTRY:
        named = re.compile(rf"\[(.*\W)?{rule}(_\w+)?(\W.*)?\]$")
        compared = [
            case for case in cost if OF_EACH_RULE.match(case) and named.search(case) and "suggested" not in case
        ]
        kept |= {min(compared, key=cost.get)} if compared else set()
    seen = set().union(ran[""], *(ran[case] for case in kept))
    gain = lambda case: sum(1 if len(what) == 2 else A_FUNCTION for what in ran[case] - seen)
    rest, spent = cost.keys() - kept, sum(cost[case] for case in kept)
    while fits := sorted(case for case in rest if spent + cost[case] <= BUDGET):
        best = max(fits, key=lambda case: gain(case) / (cost[case] + 0.05))
        if not gain(best):
            break
        kept, rest, seen, spent = kept | {best}, rest - {best}, seen | ran[best], spent + cost[best]
    missing = {what for case in rest for what in ran[case] if len(what) == 3} - seen
    print(
        f"default: {len(kept)} of {len(cost)} cases, {spent:.0f} of {sum(cost.values()):.0f} processor seconds",
        file=sys.stderr,
    )
    print("only the full tier calls", ", ".join(sorted(name for *_, name in missing)) or "nothing", file=sys.stderr)
    return kept


def lines(cost: dict[str, float], kept: set[str]):
    """The list, a file after the other."""
    of_file = lambda case: case.partition("::")[0]
    for file in sorted({of_file(case) for case in cost}):
        cases = [case for case in cost if of_file(case) == file]
        if not kept.intersection(cases):
            yield _line(file, cases, cost)
            continue
        for test, of_test in by_test(cases).items():
            full, by_default = ([case for case in of_test if (case in kept) is inside] for inside in (False, True))
            if not full:
                continue
            if by_default and (test in NEW_CASES_RUN or len(full) <= 1 + len(by_default)):
                yield from (_line(case, [case], cost) for case in full)
            else:
                yield _line(test, full, cost)
                yield from (f"!{case}" for case in by_default)


def _line(name: str, cases: list[str], cost: dict[str, float]) -> str:
    assert "#" not in name
    return f"{name}  # {sum(cost[case] for case in cases):.1f} s"


if __name__ == "__main__":
    seconds = costs()
    head = [line for line in LIST.read_text().splitlines() if line.startswith("# ")]
    LIST.write_text("\n".join([*head, *lines(seconds, choose(seconds, covered(sys.argv[1])))]) + "\n")
