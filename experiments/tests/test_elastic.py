"""experiments/elastic: the table in the repository is what the command gives, and the published numbers are in it."""

import pathlib

from atlasjax.mixers.elastic import banks
from experiments.elastic import build, reconstruction


def test_the_table_is_current_and_has_the_published_numbers():
    folder = pathlib.Path(reconstruction.__file__).parent
    table = reconstruction.table()
    assert (folder / "reconstruction.md").read_text() == table
    readme = (folder / "README.md").read_text()
    for (sines, discretization), published in reconstruction.PUBLISHED.items():
        [row] = [line for line in table.splitlines() if line.startswith(f"| {sines} | {discretization} |")]
        said, measured = row.split("|")[3:5]
        assert float(said) == published == float(f"{float(measured):.1e}")  # the paper prints two digits
        assert row in readme


def test_the_check_of_a_bank_can_fail(tmp_path):
    bank = banks.load(8, 4, 3, cache_dir=tmp_path)
    assert max(build.check(bank, 2)) < 1e-7
    assert min(build.check(banks.Bank(bank.transitions[::-1], bank.kernels), 2)) > 1e-3
