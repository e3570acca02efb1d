"""experiments/benchmarks/compile_cpu.py."""

import argparse
import json
import sys

from experiments.benchmarks import compile_cpu


def test_a_child_says_what_the_first_result_took(capsys, monkeypatch):
    """A line for the first result, and one for each line of its input."""
    monkeypatch.setattr(sys, "stdin", ["\n"])
    monkeypatch.setattr(compile_cpu, "SHORTEST", 1e-9)
    compile_cpu.work("rules", "linear_attention", argparse.Namespace(length=8, heads=1, dim=4, started=0.0))
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["hlo_lines"] > 0
    assert row["trace_s"] > 0
    assert row["temporary_bytes"] > 0


def test_ratios_are_those_of_the_numbers_that_both_trees_have():
    result = {"now": {"trace_s": 1.0, "code": 0, "new": 3}, "other": {"trace_s": 4.0, "code": 0}}
    assert compile_cpu.ratios(result) == {"trace_s": 0.25}
    assert compile_cpu.least([{"a": 2}, {"a": 1}]) == {"a": 1}
