"""Three tiers of tests: by default cheap ones that cover everything once, `full` the rest of CI, `slow` products of all cases.

    pytest                            # default: at most 5 minutes on two cores that never ran the tests
    pytest -m "full or not full"      # CI
    pytest -m slow                    # what CI leaves out
    pytest -m "slow or not slow"      # all three
    pytest tests/test_x.py::test_y    # a test that is named runs, in whatever tier it is

`slow` is a mark beside the test: its reason is another test that has the same parts. `full` is a list, `full_tier.txt`: its reason
is a measured time, which changes with edits elsewhere, and one place shows everything that the default leaves out.
"""

import functools
import pathlib
import re

import pytest

LIST = pathlib.Path(__file__).parent / "full_tier.txt"


@functools.cache
def patterns() -> list[tuple[bool, re.Pattern]]:
    """(whether what matches is `full`, pattern over ids of tests), in the order of the list: the last one that matches decides."""
    lines = [line.partition("#")[0].strip() for line in LIST.read_text().splitlines()]
    return [(not line.startswith("!"), _pattern(line.removeprefix("!"))) for line in lines if line]


def _pattern(line: str) -> re.Pattern:
    """`*` is any text; a file, a folder and a test without parameters are all that is in them."""
    return re.compile(".*".join(map(re.escape, line.split("*"))) + r"($|(?<=/)|/|::|\[).*", re.DOTALL)


def is_full(nodeid: str) -> bool:
    """Whether the list puts a test into the `full` tier."""
    found = [full for full, pattern in patterns() if pattern.match(nodeid)]
    return bool(found) and found[-1]


def left_out(expression: str) -> set[str]:
    """The tiers that do not run with pytest's `-m expression`: those above the highest one that it names."""
    if re.search(r"\bslow\b", expression):
        return set()
    return {"slow"} if re.search(r"\bfull\b", expression) else {"slow", "full"}


@pytest.hookimpl(specname="pytest_collection_modifyitems", tryfirst=True)  # before pytest looks at `-m`
def pytest_choose_tiers(config, items):
    """Marks what the list names, and leaves out the tiers that were not asked for. For a conftest.py to import."""
    for item in items:
        if is_full(item.nodeid):
            item.add_marker("full")
    if any("::" in argument for argument in config.args):
        return
    out = left_out(config.option.markexpr)
    runs = lambda item: not any(item.get_closest_marker(tier) for tier in out)
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)
