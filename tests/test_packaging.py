"""What is published: a source distribution that builds, and a wheel that works without the repository."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
SMOKE = """
import importlib.resources, pathlib
import jax
import atlasjax
from atlasjax import memory, rules

assert "site-packages" in atlasjax.__file__, atlasjax.__file__
for name in ("py.typed", "memory/fast_weights/fastest.json"):
    assert (importlib.resources.files("atlasjax") / name).is_file(), name
rule = rules.atlas(chunk_size=4, window=2)
sizes = {"num_heads": 1, "key_dim": 4, "value_dim": 4}
params = memory.init_params(rule, jax.random.key(0), **sizes)
q = jax.random.normal(jax.random.key(1), (1, 6, 1, 4)) / 2
y, state = memory.scan(rule, params, None, q, q, q, memory.suggested_gates(rule, batch_size=1, time=6, **sizes))
print(y.shape, bool(jax.numpy.isfinite(y).all()))
"""
BACKEND = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"


def run(*command, cwd, **kwargs):
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False, **kwargs
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def build(kind, source, target):
    target.mkdir()
    run(sys.executable, "-c", BACKEND, f"build_{kind}", target, cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """(sdist, wheel): the wheel is built from the unpacked sdist."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77, as pyproject.toml says")
    folder = tmp_path_factory.mktemp("packaging")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in tracked:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    sdist = build("sdist", folder / "source", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", source, folder / "wheel")


def test_contents(distributions):
    sdist, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"atlasjax/py.typed", "atlasjax/memory/fast_weights/fastest.json"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"atlasjax", "pallas_kernels"}
    modules = {
        path.relative_to(ROOT).as_posix()
        for room in ("atlasjax", "pallas_kernels")
        for path in (ROOT / room).rglob("*.py")
    }
    assert modules <= names, "a package without __init__.py is left out"
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert modules | {"pyproject.toml", "README.md", "LICENSE"} <= files


def test_the_wheel_works_outside_the_repository(distributions, tmp_path):
    """In a fresh environment with the packages of this one, and the wheel in the place of the repository."""
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "env", cwd=tmp_path)
    paths = sysconfig.get_paths(vars={"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")})
    scripts, packages = pathlib.Path(paths["scripts"]), pathlib.Path(paths["purelib"])
    run(scripts / "python", "-m", "pip", "install", "--no-deps", "--no-index", distributions[1], cwd=tmp_path)
    # An environment within an environment sees the system's packages, not those of the one that runs the tests.
    outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "zz_outer.pth").write_text("\n".join(outer) + "\n")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    assert run(scripts / "python", "-c", SMOKE, cwd=tmp_path, env=environment).split("\n")[0] == "(1, 6, 1, 4) True"
    version = importlib.metadata.version("atlasjax")
    assert run(scripts / "atlasjax", "--version", cwd=tmp_path, env=environment).strip() == f"atlasjax {version}"
