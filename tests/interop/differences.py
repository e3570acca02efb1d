"""A plugin of pytest that keeps the largest difference that each test found, relative to the largest number of the array.

    pytest -n0 -p tests.interop.differences --differences FILE.jsonl tests/interop/test_fla_kda.py

The file then has one line of JSON for each test that compared arrays, in place of its earlier one. docs/rules_2026.md is made of
experiments/benchmarks/peer_differences.jsonl.
"""

import json
import pathlib

import numpy as np

from tests.memory import cases

_found: dict[str, float] = {}
_test = ""


def _keep(actual, expected):
    want = np.asarray(expected)
    if want.size and np.issubdtype(want.dtype, np.floating):
        want, have = want.astype(np.float64), np.asarray(actual).astype(np.float64)
        scale = np.abs(want).max()
        if scale > 0:
            _found[_test] = max(_found.get(_test, 0.0), float(np.abs(have - want).max() / scale))


def _watched(compare, keep):
    def watched(actual, expected, *args, **options):
        compare(actual, expected, *args, **options)
        keep(actual, expected)

    return watched


def _leaves(actual, expected):
    import jax

    for have, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        _keep(have, want)


# Before test modules take them.
np.testing.assert_allclose = _watched(np.testing.assert_allclose, _keep)
cases.assert_close = _watched(cases.assert_close, _leaves)


def pytest_addoption(parser):
    parser.addoption("--differences", type=pathlib.Path, required=True)


def pytest_runtest_setup(item):
    global _test
    _test = item.nodeid


def pytest_runtest_teardown():
    global _test
    _test = ""


def pytest_sessionfinish(session):
    path = session.config.getoption("--differences")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = {row["test"]: row["difference"] for row in rows}
    kept |= {name: float(f"{found:.2g}") for name, found in _found.items() if name}
    path.write_text("".join(json.dumps({"test": t, "difference": d}) + "\n" for t, d in sorted(kept.items())))
