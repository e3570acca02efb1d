"""metrics.jsonl is a log: it only grows, and no line of it stops a run."""

import json

import pytest

from atlasjax.train.reports import metrics


def write(folder, steps, after_step=0):
    with metrics.MetricsWriter(folder, after_step) as writer:
        for step in steps:
            writer.write(step, "train", {"loss": step + after_step / 100})


def losses(folder):
    return [(record["step"], record["loss"]) for record in metrics.read(folder / "metrics.jsonl")]


def test_a_step_that_was_taken_again_counts_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, [3, 4, 5], after_step=2)
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 3.02), (4, 4.02), (5, 5.02)]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)  # nothing is lost


def test_a_run_that_begins_again(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [1])
    assert losses(tmp_path) == [(1, 1)]


def test_a_run_that_begins_again_measures_its_first_model_once(tmp_path):
    write(tmp_path, [0, 1, 2])
    write(tmp_path, [0, 1])
    assert [step for step, _ in losses(tmp_path)] == [0, 1]


def test_an_incomplete_last_line(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ki')
    assert losses(tmp_path) == [(1, 1), (2, 2)]
    write(tmp_path, [3], after_step=2)
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 3.02)]


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"null", b"[1]", b'"x"', b'{"step": "1", "kind": "train"}', b'{"step": 1}', b"\0", b"[" * 10**5],
)
def test_a_bad_line_stops_nothing(tmp_path, line):
    write(tmp_path, [1])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    before = path.read_bytes()
    write(tmp_path, [2], after_step=1)
    assert path.read_bytes().startswith(before)
    with pytest.warns(UserWarning, match="1 lines are not records; the first is line 1"):
        assert losses(tmp_path) == [(1, 1), (2, 2.01)]


def test_the_file_is_lines_of_json(tmp_path):
    write(tmp_path, [1])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "kind": "train", "loss": 1.0}
