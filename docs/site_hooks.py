"""Hooks of `mkdocs build`: pages outside docs/ become pages of the site, and links that work in the repository work there.

The reports in `experiments/`, CONTRIBUTING.md and CHANGELOG.md stay where they are. Pages in docs/ link to them as in the
repository (`../experiments/zoo/README.md`), and they link to each other, to figures and to rows. All linked
files become part of the site. Notebooks become pages with their figures; a link to a notebook leads to its page.
"""

import os
import pathlib
import posixpath
import re
import sys
from collections.abc import Iterator
from typing import Any

import nbconvert
import nbformat
from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.tables import repository  # noqa: E402

PAGES = ("experiments/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


class NoUnderscores(Extension):
    """Underscores belong to formulas such as ‖S‖_F and M_t, and never mean emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:
        delimiters = getattr(md, "delimiters", None)  # from Markdown 3.11 on
        if delimiters is not None:
            delimiters.remove("_")
        md.inlinePatterns.deregister("em_strong2", strict=False)


def on_config(config: Any) -> Any:
    """Adds the extension above, for pages and docstrings."""
    config["markdown_extensions"].append(NoUnderscores())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, the files that any page links to, and the notebooks."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            _add(files, config, path)
    for file in [file for file in files if file.is_documentation_page()]:
        for target in _targets(file):
            _add(files, config, target)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _add(files, config, path)
        for name, content in _notebook(path):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _notebook(path: pathlib.Path) -> Iterator[tuple[str, str | bytes]]:
    """The page of a notebook, without its first cell, and its figures: (name in the folder, content)."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.cells = [cell for cell in notebook.cells if cell.metadata.get("cellView") != "form"]
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = nbconvert.MarkdownExporter().from_notebook_node(notebook, resources)
    title, _, rest = _linked(text.strip().replace("![png]", "![]"), path.parent, f"notebooks/{path.name}").partition(
        "\n"
    )
    colab = repository.colab(f"notebooks/{path.name}")
    also = f" · [Open in Colab]({colab})" if colab else ""
    yield f"{path.stem}.md", f"{title}\n\n[The notebook itself]({path.name}){also}\n{rest}\n"
    yield from resources["outputs"].items()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between places in the repository into links between pages of the site."""
    if page.file.generated_by and page.file.abs_src_path is None:
        return markdown  # of a notebook, whose links have been turned
    return _linked(markdown, _in_repository(page.file).parent, page.file.src_uri)


def _linked(markdown: str, folder: pathlib.Path, uri: str) -> str:
    """The text of a page at `uri` of the site, which lies in `folder` of the repository."""

    def replace(match: re.Match) -> str:
        target = _resolve(folder, match[2])
        if target is None:
            return match[0]
        if target.suffix == ".ipynb":
            target = target.with_suffix(".md")  # its page
        link = posixpath.relpath(_in_site(target), posixpath.dirname(uri))
        return f"{match[1]}{link}{match[3] or ''})"

    return _LINK.sub(replace, markdown)


def _add(files: Files, config: Any, path: pathlib.Path) -> None:
    if files.get_file_from_path(_in_site(path)) is None:
        files.append(File.generated(config, _in_site(path), abs_src_path=str(path)))


def _targets(file: File) -> Iterator[pathlib.Path]:
    path = _in_repository(file)
    for match in _LINK.finditer(path.read_text(encoding="utf-8")):
        target = _resolve(path.parent, match[2])
        if target is not None:
            yield target


def _resolve(folder: pathlib.Path, link: str) -> pathlib.Path | None:
    """The file in the repository to which a relative link points. None for other links and missing files."""
    if ":" in link or link.startswith("/"):
        return None
    path = pathlib.Path(os.path.normpath(folder / link))
    if path.is_dir():
        path = path / "README.md"
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _in_repository(file: File) -> pathlib.Path:
    return pathlib.Path(str(file.abs_src_path)).resolve()


def _in_site(path: pathlib.Path) -> str:
    """Path in the site's source tree, whose root is docs/."""
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")
