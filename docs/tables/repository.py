"""What needs the address of the repository, which is in docs/repository.toml alone."""

import json
import pathlib
import re
import tomllib
from collections.abc import Callable

from docs.tables.source import ROOT

FILE = "docs/repository.toml"
_NONE = "The repository has no public address yet"
_URLS = re.compile(r"(\[project\.urls\][^\n]*\n).*?(?=\n\[|\Z)", re.DOTALL)
_CITED = re.compile(r"^(?:repository-code: .*\n)?(?=license: )", re.MULTILINE)
_CELL = re.compile(r"\n# %%(?: cellView=\"form\")?\n.*?(?=\n# %%)", re.DOTALL)


def address() -> str:
    """The address, without a slash at its end. Empty if there is none.

    Raises:
      ValueError: it is no address of https.
    """
    found = tomllib.loads((ROOT / FILE).read_text())["address"]
    if found and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+(?<!\.git)", found):
        raise ValueError(
            f"{FILE}: address must be like https://host/owner/name, without .git, or empty; got {found!r}."
        )
    return found


def colab(path: str) -> str | None:
    """Where Colab opens a notebook. None unless the repository is on GitHub, from which Colab reads."""
    owner = address().partition("https://github.com/")[2]
    return f"https://colab.research.google.com/github/{owner}/blob/main/{path}" if owner else None


def repository_badges() -> str:
    here, first = address(), colab("notebooks/01_watching_a_memory_learn.ipynb")
    if first is None:
        return f"[Repository]({here})" if here else ""
    tests, badge = f"{here}/actions/workflows/ci.yml", "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![CI]({tests}/badge.svg)]({tests}) [![Open in Colab]({badge})]({first})"


def repository_clone() -> str:
    here = address()
    folder = here.rpartition("/")[2]
    return f"    git clone {here} && cd {folder}" if here else f"{_NONE} (`{FILE}`): go to your copy of it."


def repository_colab() -> str:
    paths = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    links = [f"[{path.split('/')[1][:2]}]({colab(path)})" for path in paths if colab(path)]
    if links:
        return f"On Colab: {', '.join(links)}. The first cell installs the library."
    return (
        f"{_NONE}. On Colab, upload a copy of it to the working folder: the first cell installs the library from there."
    )


def urls(pyproject: str) -> str:
    """pyproject.toml with the addresses of [project.urls]."""
    here = address()
    lines = [f'Repository = "{here}"', f'Issues = "{here}/issues"'] if here else []
    return _URLS.sub(lambda match: match[1] + "".join(f"{line}\n" for line in lines), pyproject)


def cited(citation: str) -> str:
    """CITATION.cff with the address."""
    return _CITED.sub(f'repository-code: "{address()}"\n' if address() else "", citation, count=1)


def first_cell() -> str:
    """The code of the first cell of every notebook."""
    return (ROOT / "docs/first_cell.py").read_text().replace('ADDRESS = ""', f'ADDRESS = "{address()}"').strip()


def script(text: str) -> str:
    """A notebook as a script, with the first cell."""
    cell = f'\n# %% cellView="form"\n{first_cell()}\n'
    return _CELL.sub(lambda _: cell, text, count=1)


def notebook(text: str) -> str:
    """A notebook with the first cell, which Colab folds."""
    content = json.loads(text)
    cell = next(cell for cell in content["cells"] if cell["cell_type"] == "code")
    cell.update(source=first_cell().splitlines(keepends=True), outputs=[], metadata={"cellView": "form"})
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def files() -> dict[pathlib.Path, Callable[[str], str]]:
    """The files besides the pages that have the address, and what makes them."""
    made: dict[pathlib.Path, Callable[[str], str]] = {ROOT / "pyproject.toml": urls, ROOT / "CITATION.cff": cited}
    made |= {path: script for path in sorted((ROOT / "notebooks").glob("*.py"))}
    return made | {path: notebook for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
