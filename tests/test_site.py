"""The pages of the site: they build without a warning, their Python runs, their commands are real, their tables up to date."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from unittest import mock

import pytest

from atlasjax import cli, rules
from atlasjax.train import default_config
from tests.marks import some_slow

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
READMES = sorted((ROOT / "experiments").glob("*/README.md"))
WITH_COMMANDS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *READMES]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]
API = {
    "memory": "atlasjax.memory",
    "nn": "atlasjax.nn",
    "train": "atlasjax.train",
    "data": "atlasjax.data",
    "distributed": "atlasjax.distributed",
}


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_builds_strictly(tmp_path):
    for name in ("mkdocs", "mkdocstrings", "material", "nbconvert"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in ("index.html", "status.html", "api/memory.html", "experiments/zoo/index.html"):
        assert (tmp_path / "site" / page).is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]* rel=\"?(?:stylesheet|preconnect)\"?[^>]* href=\"?([^\" >]+)", page.read_text()
        )
        assert loaded
        assert not [link for link in loaded if "//" in link], f"{page} loads what is not of the site"
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "site/notebooks" / notebook.name).is_file()
        text = notebook.read_text()
        page = (tmp_path / "site/notebooks" / f"{notebook.stem}.html").read_text()
        assert page.count(f'src="{notebook.stem}_files/') == text.count('"image/png"') > 0
        assert "subprocess" in text
        assert "subprocess" not in page  # the cell that installs the library
    assert "notebooks/01_watching_a_memory_learn.html" in (tmp_path / "site/getting_started.html").read_text()
    # From the disk, a browser reads the search's index as a script, and its worker in a frame.
    assert "javascripts/iframe-worker.js" in (tmp_path / "site/index.html").read_text()
    assert (tmp_path / "site/search/search_index.js").read_text().startswith("var __index = {")
    for page, package in API.items():
        text = (tmp_path / f"site/api/{page}.html").read_text()
        names = importlib.import_module(package).__all__
        missing = [n for n in names if not re.search(rf'id="{package}\.(\w+\.)?{n}"|<code>{n}</code>', text)]
        assert not missing, f"docs/api/{page}.md does not have {missing}"


# The longest run with `-m slow`: what they call has tests of its own.
@pytest.mark.parametrize(
    "page",
    some_slow(
        WITH_PYTHON, [DOCS / f"{stem}.md" for stem in ("streaming", "training", "getting_started", "in_your_model")]
    ),
    ids=lambda page: page.stem,
)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, registered_rules):
    """All blocks of a page, one after another, with the names of those before."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_equinox_of_a_page_runs():
    """The blocks marked "py" need Equinox, which is no dependency."""
    pytest.importorskip("equinox")
    (block,) = re.findall(r"```py\n(.*?)```", (DOCS / "in_your_model.md").read_text(), re.DOTALL)
    exec(compile(block, "in_your_model.md, Equinox", "exec"), {"__name__": "__main__"})


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"^ *- .*?: (\S+\.md)$", nav, re.MULTILINE))
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}  # pages of the site only
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | notebooks
    assert not there - listed
    listed -= notebooks
    assert {page for page in listed if not (DOCS / page).exists()} == {p for p in listed if (ROOT / p).exists()}


_INSIDE = (
    "memory",
    "train",
    "memory/fast_weights",
    "memory/softmax",
    "memory/large_chunk",
    "memory/mesa",
    "memory/caching",
    "memory/log_linear",
    "memory/hierarchical",
    "mixers/elastic",
)


@pytest.mark.parametrize("folder", _INSIDE)
def test_the_architecture_names_every_module(folder):
    """The table after "Inside `folder`" has every module of the folder, and no other."""
    name = {"memory": "atlasjax.memory", "train": "atlasjax.train"}.get(folder, folder.removeprefix("memory/"))
    after = (DOCS / "architecture.md").read_text().split(f"Inside `{name}`")
    assert len(after) == 2
    rows = re.search(r"(?:^\|.*\n)+", after[1], re.MULTILINE)[0].splitlines()[2:]
    named = [module for row in rows for module in re.findall(r"`([\w/]+)`", row.split("|")[1])]
    there = (ROOT / "atlasjax" / folder).iterdir()
    modules = [f"{path.stem}{'/' * path.is_dir()}" for path in there if path.is_dir() or path.suffix == ".py"]
    assert sorted(named) == sorted(module for module in modules if "__" not in module)


def test_files_and_names_that_contributing_has_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:atlasjax|tests|docs|experiments|pallas_kernels|\.github)/[\w./]*)`", text)
    assert len(paths) > 15
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []
    # The rows of the table of a mixer's files: file and the name in it.
    for path, name in {
        "atlasjax/nn/config.py": "MIXER_NAMES", "tests/nn/baseline_formulas.py": "FORMULAS",
        "atlasjax/presets/architectures.py": "BASELINES", "tests/memory/test_engine.py": "RELATIVES",
        "tests/memory/test_closed_forms.py": "ROWS",
    }.items():  # fmt: skip
        assert name in text
        assert re.search(rf"^(def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


# Commands.

_SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|atlasjax|pip|pytest|mkdocs|ruff)(?: |$)")


def commands(text):
    """Every command that a page prints: in shell blocks, indented, or as code within a line."""
    lines = [line for block in _SHELL.findall(text) for line in block.splitlines()]
    rest = _FENCED.sub("", text)
    lines += [line.strip() for line in rest.splitlines() if line.startswith("    ")]
    lines += re.findall(r"`([^`\n]+)`", rest)
    for line in lines:
        if _COMMAND.match(line.strip()):
            parts = [shlex.split(part, comments=True) for part in line.split("&&")]
            yield from ([word for word in part if "=" not in word or word.startswith("-")] for part in parts)


class Reached(BaseException):  # no error: the command reports those in a line
    """What a command would have done with its parsed options."""


def _reached(*_, **__):
    raise Reached


def _run_atlasjax(arguments, monkeypatch):
    monkeypatch.setattr("atlasjax.cli.options.evaluate.checkpoint_folder", lambda _: None)  # there is no run
    monkeypatch.setattr("atlasjax.cli.options.export_weights.checkpoint_folder", lambda _: None)
    targets = "train.train evaluate.load_run evaluate.load_tasks options.generate.checked info.plan_training tune.tune"
    for target in (
        *targets.split(),
        "import_weights.import_weights",
        "export_weights.export_weights",
        "options.serve.checked",
    ):
        monkeypatch.setattr(f"atlasjax.cli.{target}", _reached)
    monkeypatch.setattr("atlasjax.plan.cuda.check_installed", lambda: None)  # an extra that tests do without
    monkeypatch.setattr("atlasjax.cli.train._with_vocabulary", lambda config: config)  # it opens tokenizers
    monkeypatch.setattr(
        "atlasjax.cli.options.train._base", lambda *_: default_config("gated-deltanet-tiny")
    )  # it opens a run
    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"atlasjax.cli.options.{command}.check_there", lambda _: None)  # nor a text
    monkeypatch.setattr("atlasjax.cli.options.train.read_config", lambda _: {})  # there is no file
    monkeypatch.setattr("atlasjax.cli.options.train.run_config", lambda _: None)  # it looks into folders and buckets
    monkeypatch.setattr(
        "atlasjax.cli.prepare.storage", mock.Mock(path=_reached, expanded=_reached)
    )  # it looks into buckets
    monkeypatch.setattr("atlasjax.cli.info._sizes", lambda config: {})
    monkeypatch.setattr("atlasjax.cli.info.preset_names", lambda size: [f"atlas-{size}"])
    with contextlib.suppress(Reached):
        assert cli.main(arguments) == 0, arguments


def _run_script(words):
    """The script until its options are parsed, if it has any."""
    name, arguments = (words[1].replace(".", "/") + ".py", words[2:]) if words[0] == "-m" else (words[0], words[1:])
    path = ROOT / name
    assert path.is_file(), f"{path} is not there"
    if "parse_args(" not in path.read_text():
        assert not arguments, f"{path} has no options"
        return
    parse_args = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda *given: _reached(parse_args(*given)))
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Reached):
            runpy.run_path(str(path), run_name="__main__")


def _extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.parent.name if page in READMES else page.stem)
def test_commands_are_real(page, monkeypatch, capsys):
    for command in commands(page.read_text()):
        match command:
            case ["atlasjax", *arguments]:
                _run_atlasjax(arguments, monkeypatch)
            case ["python", "-m", module, *_] if module in ("pytest", "pip") or importlib.util.find_spec(module):
                if module.startswith("experiments"):
                    _run_script(command[1:])
            case ["python", *words]:
                _run_script(words)
            case ["pip", "install", *words]:
                for extras in re.findall(r"\[(.*?)\]", " ".join(words)):
                    assert set(extras.split(",")) <= set(_extras())
            case ["mkdocs", subcommand, *_]:
                assert subcommand in ("build", "serve")


def test_commands_are_found():
    text = (
        "see `atlasjax info --names`.\n\n    pip install -e . && atlasjax train\n\n```sh\npython x.py a  # why\n```\n"
    )
    assert list(commands(text)) == [
        ["python", "x.py", "a"],
        ["pip", "install", "-e", "."],
        ["atlasjax", "train"],
        ["atlasjax", "info", "--names"],
    ]


# Tables.


@pytest.mark.xdist_group("site_tables")  # they share what they trace
@pytest.mark.parametrize(
    "page",
    [page for page in [ROOT / "README.md", *PAGES, *READMES] if "<!-- table: " in page.read_text()],
    ids=lambda page: page.parent.name if page in READMES else page.stem,
)
def test_tables_are_what_the_repository_says(page, generate):
    assert page.read_text() == generate.filled(page.read_text()), "run: python docs/generate.py"


def test_deviations_has_the_numbers_of_the_presets():
    """Each sentence with the number that the code has now."""
    page = (DOCS / "deviations.md").read_text()
    elastic, gam, atlas = (default_config(name) for name in ("elastic-exp-98m", "gam-22m", "atlas-340m"))
    mac, tiny_mac = (default_config(f"titans-mac-{size}").model.attention for size in ("340m", "tiny"))
    of_a, tiny = (default_config(f"elastic-exp-{size}").model.elastic for size in ("340m", "tiny"))
    truncations = [
        default_config(f"{name}-{size}").model.memory.truncation
        for size in ("340m", "tiny")
        for name in ("atlas", "atlas++")
    ]
    for sentence in (
        f"sliding windows ({elastic.model.attention.window:,} in E's sizes",
        f"blocks of {of_a.block_size:,}, samples of {atlas.data.sequence_length:,} and sample positions for a history of "
        f"{of_a.context:,}",
        f"in tiny models {tiny.block_size}, {default_config('atlas-tiny').data.sequence_length} and {tiny.context}",
        f"SWA, MAG, MAL and SWDT have windows of {mac.window:,}",
        f"{mac.persistent_tokens} persistent tokens in MAC, MAG and MAL ({tiny_mac.persistent_tokens} in tiny models)",
        "at most {:,} and {} tokens (tiny: {:,} and {})".format(*truncations),
        f"a vocabulary of {atlas.model.vocab_size:,}",
        f"c = {rules.atlas().window}, b = {rules.atlas().chunk_size} (`rules`); TTT {rules.ttt_mlp().chunk_size}, delta rules "
        f"{rules.delta_rule().chunk_size}",
        f"{atlas.optimizer.warmup_steps:,} steps, a tenth of the peak, norm 1, (0.9, 0.95)",
    ):
        assert sentence in page
    assert "a tenth of the peak in `atlasjax train`" in page
    assert {config.optimizer.final_fraction for config in (elastic, gam, atlas)} == {0.1}
    assert "4e-4 for every size (`train/defaults.py`); 4e-3 for tiny models" in page
    rates = [
        default_config(f"atlas-{size}").optimizer.learning_rate for size in ("170m", "340m", "760m", "1.3b", "tiny")
    ]
    assert rates == [4e-4] * 4 + [4e-3]


def test_status_says_which_tests_run_by_default(generate):
    """Of what it says of a rule, from the marks of the tests themselves."""
    from tests.memory.test_streaming import test_every_split as splits

    runs = generate.status.default_cases(splits)
    assert runs["longhorn"]
    assert not runs["linear_attention"]
    assert generate.status.proofs("longhorn") == (["gradients", "splits"], [])
    assert generate.status.proofs("linear_attention") == ([], ["gradients", "splits"])


def test_the_figure_of_the_rooms_is_what_the_sources_say():
    spec = importlib.util.spec_from_file_location("docs_rooms", DOCS / "figures/rooms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "figures/rooms.svg").read_text() == module.svg(), "run: python docs/figures/rooms.py"


def test_readme_says_whether_an_accelerator_has_run_anything(generate):
    claim = "No kernel has run on a TPU or GPU yet" in (ROOT / "README.md").read_text()
    assert claim == (not generate.status.accelerators()), "the README's last link says what has run on accelerators"
    assert ("No accelerator has run anything yet" in (DOCS / "status.md").read_text()) == claim
