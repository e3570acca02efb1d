"""Memory that preparing and reading take: not more for a longer text."""

import subprocess
import sys

import pytest

from tests.marks import some_slow

PROGRAM = """
import resource, sys
from atlasjax.data import *
text, out, packing, megabytes = sys.argv[1:]
with open(text, "w") as file:
    for line in range(int(megabytes) * 2**13):
        file.write(f"{line:0126d}\\n\\n")  # 128 bytes
config = DataConfig(source="text", paths=(text,), packing=packing, tokenizer="byte", validation_fraction=0.01)
prepare(config, out, workers=1)
config = DataConfig(source="prepared", paths=(out,), packing=packing, sequence_length=4096, batch_size=8)
tokens = sum(batch["inputs"].size for batch in make_pipeline(config, make_tokenizer(config), "train", repeat=False))
assert tokens > 0.9 * int(megabytes) * 2**20, tokens
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak(tmp_path, packing, megabytes):
    """MiB of resident memory that a process needs at most, to prepare a text of so many MiB and to read it all."""
    arguments = [tmp_path / f"{megabytes}.txt", tmp_path / f"{megabytes}", packing, megabytes]
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    return int(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("packing", some_slow(["contiguous", "documents"], ["contiguous"]))
def test_memory_does_not_grow_with_the_text(tmp_path, packing):
    short, long = (peak(tmp_path, packing, megabytes) for megabytes in (2, 26))
    assert long - short < 10, (short, long)  # the text alone is 24 MiB longer
