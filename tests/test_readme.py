"""The README's example runs as it stands, its links lead somewhere, and no placeholder was left in it."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["recalled"].shape == (1, 5, 2, 8)


def test_no_placeholder():
    assert not re.findall(r"@[A-Z]+@", README)


def test_short():
    assert len([line for line in README.splitlines() if not line.startswith("<!--")]) <= 90


def test_links():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []
