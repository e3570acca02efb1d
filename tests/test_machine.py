"""What cannot fit is refused with the largest number that can."""

import pytest

from atlasjax import machine
from atlasjax.mixers.elastic import banks


def test_the_largest_that_fits():
    machine.check_fits("n", 10, 0, 10, 100, "it")
    machine.check_fits("n", 10**400, 0, 10, None, "it")
    for value, least, each, said in (
        (11, 0, 10, "n is 11, for which it would take 0 GiB; it must be at most 10, with 0.0 GiB of memory."),
        (
            10**400,
            50,
            10,
            "n is an integer of more than 300 digits, for which it would take an integer of more than 300 digits GiB; ",
        ),
        (1, 0, 101, "not even 1 fits"),
    ):
        with pytest.raises(ValueError, match=r"^n is ") as error:
            machine.check_fits("n", value, least, each, 100, "it")
        assert said in str(error.value)
    assert machine.machine_memory() > 2**28


def test_a_bank_that_does_not_fit(tmp_path):
    for name in ("order", "blocks"):
        with pytest.raises(ValueError, match=rf"^hippo: {name} is 1000000000000, for which "):
            banks.load(**{"order": 4, "block_size": 2, "blocks": 3, "cache_dir": tmp_path, name: 10**12})
    assert list(tmp_path.iterdir()) == []
