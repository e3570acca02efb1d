"""What a fork gets: the workflow, the hooks before a commit and the issue forms are valid, and call what `.ci/run` calls."""

import os
import pathlib
import re
import tomllib

import pytest

yaml = pytest.importorskip("yaml")  # of the extras `test` and `docs`
ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = (ROOT / ".ci/run").read_text()


def load(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_is_ci_run_on_the_oldest_and_a_newer_python():
    workflow = load(".github/workflows/ci.yml")
    assert {"push", "pull_request"} == set(workflow[True])  # YAML reads the key `on` as true
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    oldest, *newer = job["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert newer
    assert all(f"PYTHON=python{version} .ci/run" in (ROOT / "CONTRIBUTING.md").read_text() for version in newer)


def test_hooks_are_commands_of_ci_run():
    (local,) = load(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    tools = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"]["dev"]}
    for hook in local["hooks"]:
        words = [word for word in hook["entry"].split() if not word.startswith("-")]
        assert words[0] in tools
        assert re.search(rf"^{' '.join(words)}\b", CI, re.MULTILINE), f"{hook['entry']} is not in .ci/run"
    assert {hook["id"] for hook in local["hooks"]} == {"ruff-check", "ruff-format", "mypy"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.stem)
def test_issue_forms(path):
    form = load(path)
    assert form["name"]
    assert form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]
    for page in re.findall(r"\bdocs/\w+\.md", path.read_text()):
        assert (ROOT / page).is_file()
