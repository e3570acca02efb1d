"""What the processes of a run compare before they are connected."""

import dataclasses
import json

import pytest

from atlasjax.distributed import ProcessConfig
from atlasjax.distributed.rendezvous import differences
from atlasjax.train.preflight import _digest, facts
from tests.train.tiny import config


def differing(first, second) -> str:
    reports = {
        index: {"host": "h", "processes": 2, "facts": json.loads(json.dumps(facts(run)))}
        for index, run in enumerate((first, second))
    }
    return differences(reports)


def test_only_the_place_of_a_process_may_differ(tmp_path):
    run = config(tmp_path)
    one, other = (dataclasses.replace(run, processes=ProcessConfig(True, "h:1", 2, index)) for index in range(2))
    assert differing(one, other) == ""


def test_a_config_that_differs_is_named(tmp_path):
    run = config(tmp_path)
    assert "config.steps is 5 in process 1 (h) and 4 in process 0" in differing(run, dataclasses.replace(run, steps=5))


@pytest.mark.parametrize("text", ["another text", None])
def test_files_that_differ_are_named(tmp_path, text):
    run = config(tmp_path)
    here = facts(run)
    path = tmp_path / "text.txt"
    path.unlink() if text is None else path.write_text(text)
    there = facts(run)
    assert here["files"]["data.paths"].startswith("1 file, ")
    reports = {index: {"host": "h", "processes": 2, "facts": found} for index, found in enumerate((here, there))}
    assert "files.data.paths is " in differences(reports)


@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_files_of_one_size_that_differ_are_named(tmp_path, where):
    run = config(tmp_path)
    path, content = tmp_path / "text.txt", bytearray(200_000)
    path.write_bytes(content)
    here = facts(run)
    content[int(where * (len(content) - 1))] = 1
    path.write_bytes(content)
    reports = {index: {"host": "h", "processes": 2, "facts": found} for index, found in enumerate((here, facts(run)))}
    assert "files.data.paths is " in differences(reports)


def test_some_of_many_files_are_read(tmp_path, monkeypatch):
    from atlasjax.train import preflight

    run, read = config(tmp_path), []
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text("text")
    monkeypatch.setattr(preflight, "_MOST_SAMPLED", 10)
    monkeypatch.setattr(preflight, "_sample", lambda path: read.append(path) or b"")
    preflight.facts(dataclasses.replace(run, data=dataclasses.replace(run.data, paths=(str(folder),))))
    assert len([path for path in read if path.parent == folder]) == 9  # every third


def test_an_evaluation_set_that_differs_is_named(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text("a text")
    run = dataclasses.replace(config(tmp_path), evaluation_sets=(f"wiki={path}",))
    here = facts(run)
    path.write_text("another text")
    reports = {index: {"host": "h", "processes": 2, "facts": found} for index, found in enumerate((here, facts(run)))}
    assert "files.evaluation_sets.wiki is '1 file, 12 bytes" in differences(reports)


def test_a_digest_is_of_all_source_files(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    digests = [_digest("some_package")]
    (package / "inner" / "part.py").write_text("x = 1")
    digests.append(_digest("some_package"))
    (package / "inner" / "part.py").write_text("x = 2")
    digests.append(_digest("some_package"))
    assert len(set(digests)) == 3
