"""The README's example runs as it stands, and no placeholder was left in it."""

import pathlib
import re

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["recalled"].shape == (1, 5, 2, 8)


def test_no_placeholder():
    assert not re.findall(r"@[A-Z]+@", README)
