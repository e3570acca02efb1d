"""The first cell of the notebooks, in kernels that do not have the library: where a clone may lie, and what was installed before.

A stub in the place of pip says what it was asked, and installs as pip does. `-m slow` runs a notebook with the real one.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib

import pytest

from docs.tables import repository

ROOT = pathlib.Path(__file__).parent.parent
CELL = (ROOT / "docs/first_cell.py").read_text()
FOUND = "import atlasjax, pallas_kernels; print(atlasjax.__file__)\n"
# Records the command, and copies what a wheel would have. $REPLACES: a package that it also brings in a new version.
PIP = """
import os, pathlib, shutil, sys, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
(site / "asked").write_text("\\n".join(sys.argv[1:]))
source = pathlib.Path(sys.argv[-1])
for name in ("atlasjax", "pallas_kernels"):
    if source.is_dir():
        shutil.copytree(source / name, site / name, ignore=lambda *_: ["memory", "nn", "train", "interop"])
(site / "atlasjax-0.1.0.dist-info").mkdir()
(site / "atlasjax-0.1.0.dist-info/METADATA").write_text("Name: atlasjax\\nVersion: 0.1.0\\n")
if name := os.environ.get("REPLACES"):
    (site / f"{name}-1.dist-info").rename(site / f"{name}-2.dist-info")
    (site / f"{name}-2.dist-info/METADATA").write_text(f"Name: {name}\\nVersion: 2\\n")
"""
# What `pip install -e` leaves where packages are beside other folders: a finder, which comes after the path.
FINDER = """
import importlib.util, sys
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in ("atlasjax", "pallas_kernels"):
            return importlib.util.spec_from_file_location(name, "CLONE/" + name + "/__init__.py")
sys.meta_path.append(Finder)
"""


class Bare:
    """An environment with nothing but a stub of pip, and a clone of the repository in a folder of its own."""

    def __init__(self, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder / "env"], check=True)
        paths = sysconfig.get_paths(vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
        self.python, self.site = pathlib.Path(paths["scripts"]) / "python", pathlib.Path(paths["purelib"])
        self.folder, self.working = folder, folder / "content"
        self.working.mkdir()
        (self.site / "pip").mkdir()
        (self.site / "pip/__main__.py").write_text(PIP)
        (self.site / "pip/__init__.py").touch()

    def clone(self, path):
        """As a clone lies: the packages, beside folders that are none."""
        path.mkdir(parents=True)
        for name in ("atlasjax", "pallas_kernels", "pyproject.toml", "docs", "notebooks"):
            target = path / name
            if name == "notebooks":
                target.mkdir()
            else:
                target.symlink_to(ROOT / name)
        return path

    def run(self, code, working=None, **environment):
        """Runs code as a kernel does, with the working folder in the path."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [self.python, "-c", code], cwd=working or self.working, env={**clean, **environment},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    @property
    def asked(self):
        """What pip was asked, None if it was not."""
        return (self.site / "asked").read_text().split("\n") if (self.site / "asked").exists() else None


@pytest.fixture
def bare(tmp_path):
    return Bare(tmp_path)


@pytest.mark.parametrize("place", ["in the working folder", "above it", "the working folder", "elsewhere"])
@pytest.mark.parametrize("before", ["", "import atlasjax\n"])
def test_installs_the_clone(bare, place, before):
    """`before`: the user has tried to import it, which makes a package of a folder of that name."""
    clone = bare.clone(bare.folder / "elsewhere" if place == "elsewhere" else bare.working / "atlasjax")
    working = {"above it": clone / "notebooks", "the working folder": clone}.get(place, bare.working)
    cell = CELL.replace('CLONE = ""', f'CLONE = "{clone}"') if place == "elsewhere" else CELL
    tried = f"try:\n    {before}except ImportError:\n    pass\n" if before else ""
    done = bare.run(tried + cell + FOUND, working)
    assert done.returncode == 0, done.stderr
    assert bare.asked == ["install", "--quiet", str(clone)]
    source = clone if place == "the working folder" else bare.site
    assert done.stdout.split("\n")[-2] == str(source / "atlasjax/__init__.py")


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ["a path", "a finder"])
def test_sees_what_was_installed_while_the_kernel_ran(bare, kind, hidden):
    """`pip install -e` in a cell before, of a clone in the working folder (which hides it) or of one elsewhere."""
    clone = bare.clone(bare.working / "atlasjax" if hidden else bare.folder / "elsewhere/atlasjax")
    line = str(clone) if kind == "a path" else "import editable_finder"
    files = {"editable.pth": line + "\n", "editable_finder.py": FINDER.replace("CLONE", str(clone))}
    files["atlasjax-0.1.0.dist-info/METADATA"] = "Name: atlasjax\nVersion: 0.1.0\n"
    installs = f"""
        import pathlib
        for name, text in {files!r}.items():
            path = pathlib.Path({str(bare.site)!r}, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    """
    done = bare.run(textwrap.dedent(installs) + CELL + FOUND)
    assert done.returncode == 0, done.stderr
    assert bare.asked is None
    assert done.stdout.strip() == str(clone / "atlasjax/__init__.py")


def test_does_nothing_where_it_is_installed(bare):
    """Not even where a clone lies in the working folder."""
    clone = bare.clone(bare.working / "atlasjax")
    assert bare.run(CELL).returncode == 0
    (bare.site / "asked").unlink()
    done = bare.run(CELL + FOUND)
    assert done.stdout.strip() == str(bare.site / "atlasjax/__init__.py")
    assert bare.asked is None
    assert clone.is_dir()


def test_sources_in_the_path_are_not_enough(bare):
    """They do not bring what they need: a clone that somebody has put into the path, with what an old build left in it."""
    clone = bare.clone(bare.working / "atlasjax")
    (clone / "atlasjax.egg-info").mkdir()
    (clone / "atlasjax.egg-info/PKG-INFO").write_text("Name: atlasjax\nVersion: 0.1.0\n")
    done = bare.run(f"import sys\nsys.path.append({str(clone)!r})\n" + CELL + FOUND)
    assert done.returncode == 0, done.stderr
    assert bare.asked == ["install", "--quiet", str(clone)]


def test_without_a_clone(bare):
    done = bare.run(CELL)
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: no clone of atlasjax in {bare.working}: set CLONE to the folder of one and run this again"
    )
    done = bare.run(CELL.replace('ADDRESS = ""', 'ADDRESS = "https://example.org/a/atlasjax"'))
    assert bare.asked == ["install", "--quiet", "git+https://example.org/a/atlasjax"]
    assert done.stderr.splitlines()[-1].startswith(
        "RuntimeError: atlasjax is installed, but this kernel does not see it"
    )


def test_failures_of_pip_are_told(bare):
    bare.clone(bare.working / "atlasjax")
    (bare.site / "pip/__main__.py").write_text("raise SystemExit('no space left')")
    done = bare.run(CELL)
    assert done.stderr.splitlines()[-1].endswith("atlasjax: no space left")


def test_a_loaded_package_that_pip_replaces_needs_a_restart(bare):
    bare.clone(bare.working / "atlasjax")
    (bare.site / "jax").mkdir()
    (bare.site / "jax/__init__.py").touch()
    (bare.site / "jax-1.dist-info").mkdir()
    (bare.site / "jax-1.dist-info/METADATA").write_text("Name: jax\nVersion: 1\n")
    done = bare.run("import jax\n" + CELL, REPLACES="jax")
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: restart the kernel and run this again: pip has replaced {'jax': '1'} by {'jax': '2'}"
    )


def test_all_notebooks_have_it():
    for path, made in repository.files().items():
        assert made(path.read_text()) == path.read_text(), "run: python docs/generate.py"
    notebooks = [path for path in repository.files() if path.suffix == ".ipynb"]
    assert len(notebooks) >= 6
    for path in notebooks:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert "".join(cells[0]["source"]) == repository.first_cell()


@pytest.mark.parametrize("address", ["", "https://github.com/an-owner/a-name", "https://example.org/group/a-name"])
def test_one_file_has_the_address(monkeypatch, address):
    monkeypatch.setattr(repository, "address", lambda: address)
    texts = {path.name: make(path.read_text()) for path, make in repository.files().items()}
    cell = f'ADDRESS = "{address}"'
    for name in ("pyproject.toml", "CITATION.cff"):
        assert (address in texts[name]) if address else ("github" not in texts[name])
    assert all(cell in text.replace('\\"', '"') for name, text in texts.items() if name[:2].isdigit())
    urls = {"Repository": address, "Issues": f"{address}/issues"} if address else {}
    assert tomllib.loads(texts["pyproject.toml"])["project"]["urls"] == urls
    assert repository.urls(texts["pyproject.toml"]) == texts["pyproject.toml"]
    assert repository.cited(texts["CITATION.cff"]) == texts["CITATION.cff"]
    told = {name: getattr(repository, f"repository_{name}")() for name in ("badges", "clone", "colab")}
    assert ("git clone https://" in told["clone"]) == bool(address)
    assert ("colab.research.google.com" in told["colab"]) == ("github" in address)
    assert all(address in text or name == "colab" for name, text in told.items())
    assert ("no public address" in told["clone"]) == (not address)


@pytest.mark.parametrize(
    "wrong", ["github.com/a/b", "http://github.com/a/b", "https://github.com/a/b/", "https://github.com/a/b.git"]
)
def test_a_wrong_address_is_refused(tmp_path, monkeypatch, wrong):
    (tmp_path / "docs").mkdir()
    (tmp_path / repository.FILE).write_text(f'address = "{wrong}"')
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"address must be like https://host/owner/name, without \.git, or empty; got"):
        repository.address()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["in the working folder", "above it"])
def test_a_notebook_in_a_bare_environment(tmp_path, layout):
    """A fresh clone, pip itself, the real dependencies, and a kernel of that environment. It needs no network."""
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    bare = Bare(tmp_path)
    shutil.rmtree(bare.site / "pip")
    for path in {pathlib.Path(path) for path in sys.path if path.endswith("site-packages")}:
        for entry in path.iterdir():
            if not any(name in entry.name for name in ("atlasjax", ".pth", "pip", "__pycache__")):
                (bare.site / entry.name).symlink_to(entry)
    clone = bare.working / "atlasjax"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), files):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    kernel = tmp_path / "jupyter/kernels/bare"
    kernel.mkdir(parents=True)
    argv = [str(bare.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "bare", "language": "python"}))
    notebook = jupytext.read(clone / "notebooks/01_watching_a_memory_learn.py")
    working = clone / "notebooks" if layout == "above it" else bare.working
    environment = {
        "JUPYTER_PATH": str(tmp_path / "jupyter"), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PYTHONPATH": "",
        "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    client = nbclient.NotebookClient(
        notebook, timeout=600, startup_timeout=300, kernel_name="bare", resources={"metadata": {"path": str(working)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client.execute()
    assert (bare.site / "atlasjax/memory").is_dir()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
