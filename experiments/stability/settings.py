"""Settings of the stability experiments that their tables name as well, and the options of their commands."""

import argparse
import pathlib

from experiments import command

RESULTS = pathlib.Path(__file__).parent / "results"

# `wide.py`. A Table 7 has the rate.
TABLE_7_RATE = 1.5e-3
STEPS, TOKENS = 200, 512
EVERY = {"atlas": 16}  # tokens per write, where a write of every token (Newton–Schulz of each) takes too long on a CPU

# `candidates.py`: the bounds that were compared, and those whose runs `train.py` has, with its value of `bounded`.
CANDIDATES = ("paper", "left_over", "triangular", "pivot", "share", "norm")
IN_TRAIN = {"paper": False, "left_over": True}


def options(doc: str | None, rows: str) -> argparse.ArgumentParser:
    """The options of every command: the file of its rows, and whether it only writes what is made of them."""
    parser = command.parser(doc)
    parser.add_argument("--rows", type=pathlib.Path, default=RESULTS / rows)
    parser.add_argument("--report", action="store_true", help="only write the tables and the plot")
    return parser
