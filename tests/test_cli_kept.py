"""Results of finished requests in a file, or in a store."""

import uuid

import pytest

from atlasjax import storage
from atlasjax.cli.kept import KeptResults


@pytest.fixture(params=["disk", "store"])
def file(request, tmp_path):
    return (
        storage.path(tmp_path) if request.param == "disk" else storage.path(f"memory://{uuid.uuid4()}")
    ) / "in/x.jsonl"


def test_results_outlive_a_command(file):
    kept = KeptResults(file)
    kept.add("generate_until", ("a", {"until": ["x"], "max_gen_toks": 3}), "é\u2028")
    kept.add("loglikelihood", ("a", "b"), (-1.5, True))
    kept.add("loglikelihood", ("a", "b"), (0.0, False))  # the first one counts
    assert kept.get("loglikelihood", ("a", "b")) == (-1.5, True)
    kept.close()
    kept.close()
    again = KeptResults(file)
    assert again.found == 2
    assert again.get("generate_until", ("a", {"max_gen_toks": 3, "until": ["x"]})) == "é\u2028"
    assert again.get("generate_until", ("a", {"until": ["x"], "max_gen_toks": 4})) is None
    assert again.get("loglikelihood_rolling", ("a", "b")) is None
    again.add("loglikelihood", ("c", "d"), (-2.0, False))
    again.close()
    last = KeptResults(file)
    assert last.found == 3
    last.remove()
    last.remove()
    assert KeptResults(file).found == 0
    assert not file.exists()


def test_a_line_that_was_not_finished_is_no_result(tmp_path):
    file = tmp_path / "x.jsonl"
    kept = KeptResults(file)
    kept.add("loglikelihood", ("a", "b"), -1.5)
    kept.close()
    file.write_bytes(file.read_bytes() + b'["half\n[1]\n[[], 2]\n5\n\xff\n["a", 1')
    kept = KeptResults(file)
    assert kept.found == 1
    kept.add("loglikelihood", ("c", "d"), -2.5)
    kept.close()
    again = KeptResults(file)
    assert [again.get("loglikelihood", one) for one in (("a", "b"), ("c", "d"))] == [-1.5, -2.5]
