"""Imports go one way, and cost what they should."""

import ast
import graphlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Each room and what it may import of the project besides itself.
FOUNDATION = {
    "atlasjax.cache",
    "atlasjax.flops",
    "atlasjax.json_text",
    "atlasjax.trusted",
    "atlasjax.names",
    "atlasjax.check",
    "atlasjax.machine",
    "atlasjax.mesh_axes",
    "atlasjax.config_json",
}
MAY_IMPORT = {
    "pallas_kernels": set(),
    "atlasjax.cache": set(),
    "atlasjax.flops": set(),
    "atlasjax.json_text": set(),
    "atlasjax.trusted": set(),
    "atlasjax.names": {"atlasjax.json_text", "atlasjax.trusted"},
    "atlasjax.check": {"atlasjax.names"},
    "atlasjax.machine": {"atlasjax.check"},
    "atlasjax.mesh_axes": set(),
    "atlasjax.config_json": {"atlasjax.names", "atlasjax.trusted"},
    "atlasjax.memory": {"atlasjax.storage", "pallas_kernels"} | FOUNDATION,
    "atlasjax.rules": {"atlasjax.memory"} | FOUNDATION,
    "atlasjax.mixers": {"atlasjax", "atlasjax.memory", "atlasjax.rules", "atlasjax.storage"} | FOUNDATION,
    "atlasjax.storage": {"atlasjax", "atlasjax.json_text", "atlasjax.names"},
    "atlasjax.data": {"atlasjax", "atlasjax.storage"} | FOUNDATION,
    "atlasjax.nn": {
        "atlasjax",
        "atlasjax.memory",
        "atlasjax.mixers",
        "atlasjax.rules",
        "pallas_kernels",
    }
    | FOUNDATION,
    "atlasjax.table1": {"atlasjax", "atlasjax.memory", "atlasjax.rules"} | FOUNDATION,
    "atlasjax.presets": {"atlasjax", "atlasjax.nn", "atlasjax.rules"} | FOUNDATION,
    "atlasjax.distributed": {"atlasjax", "atlasjax.memory", "atlasjax.mixers"} | FOUNDATION,
    "atlasjax.evaluate": {"atlasjax", "atlasjax.generate", "atlasjax.nn"} | FOUNDATION,
    "atlasjax.generate": {"atlasjax", "atlasjax.nn", "atlasjax.storage"} | FOUNDATION,
    "atlasjax.serve": {"atlasjax", "atlasjax.generate", "atlasjax.nn", "atlasjax.storage"} | FOUNDATION,
    "atlasjax.train": {
        "atlasjax",
        "atlasjax.data",
        "atlasjax.distributed",
        "atlasjax.evaluate",
        "atlasjax.memory",
        "atlasjax.nn",
        "atlasjax.presets",
        "atlasjax.storage",
    }
    | FOUNDATION,
    "atlasjax.interop": {
        "atlasjax",
        "atlasjax.data",
        "atlasjax.distributed",
        "atlasjax.memory",
        "atlasjax.mixers",
        "atlasjax.nn",
        "atlasjax.rules",
        "atlasjax.storage",
        "atlasjax.train",
    }
    | FOUNDATION,
    "atlasjax.tune": {"atlasjax", "atlasjax.distributed", "atlasjax.memory", "atlasjax.nn", "atlasjax.train"}
    | FOUNDATION,
    "atlasjax.plan": {"atlasjax", "atlasjax.distributed", "atlasjax.nn", "atlasjax.train"} | FOUNDATION,
}
MAY_IMPORT |= {f"atlasjax.{name}": {"atlasjax", "atlasjax.mixers"} for name in ("elastic", "gam")}  # public names
ON_TOP = {"atlasjax", "atlasjax.__main__", "atlasjax.cli"}  # may import all; nothing below knows the command line
# Inside `atlasjax.memory`: each room or module and what it may import of it besides itself.
_SHARED = {
    "axes",
    "blocks",
    "call_checks",
    "check",
    "family",
    "gates",
    "grid",
    "layerwise",
    "bounds",
    "meshes",
    "products",
    "rule",
    "tokens",
}
_FAMILIES = {"fast_weights", "softmax", "large_chunk", "mesa", "caching", "log_linear", "hierarchical"}
MEMORY_MAY_IMPORT = {
    "axes": {"blocks", "products"},
    "gates": set(),
    "tokens": {"gates"},
    "blocks": {"products"},
    "products": set(),
    "bounds": {"axes", "blocks", "meshes"},
    "meshes": {"tokens"},
    "grid": {"products"},
    "layerwise": {"grid", "rule", "tokens"},
    "check": set(),
    "call_checks": {"check", "gates", "products", "tokens"},
    "rule": {"call_checks", "gates", "tokens"},
    "family": {"gates", "layerwise", "rule", "tokens"},
    "partition": {"rule", "tokens"},
    "part_checks": {"axes", "gates", "fast_weights", "products"},  # the last one for the type of parameters
    "fast_weights": _SHARED | {"part_checks"},
    "softmax": _SHARED | {"part_checks"},
    "large_chunk": _SHARED | {"fast_weights"},
    "mesa": _SHARED,
    "caching": _SHARED | {"fast_weights", "softmax", "wrapped"},
    "log_linear": _SHARED | {"caching", "wrapped"},
    "hierarchical": _SHARED | {"axes", "caching", "fast_weights", "wrapped"},
    "wrapped": {"family", "gates", "rule", "tokens"},
    "normalized": _SHARED | {"axes", "fast_weights"},
    "saved": {"call_checks", "check", "rule"},
    "tuned": set(),
    "backends": {"fast_weights", "gates", "rule", "tokens", "tuned"},  # the types of what kernels are asked
    "suggested": {"gates", "rule"},
    "truncation": {"grid", "meshes", "rule", "tokens"},
    "api": {
        "backends",
        "call_checks",
        "check",
        "fast_weights",
        "gates",
        "layerwise",
        "meshes",
        "partition",
        "rule",
        "tokens",
        "truncation",
    },
}
HEAVY = [
    "orbax",
    "grain",
    "matplotlib",
    "tokenizers",
    "pyarrow",
    "tensorboardX",
    "tyro",
    "rich",
    "sentencepiece",
    "safetensors",
    "lm_eval",
    "flax",
    "optax",
]


def room(module):
    parts = module.split(".")
    return parts[0] if parts[0] != "atlasjax" else ".".join(parts[:2])


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module in ("atlasjax", "atlasjax.memory"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("package", ["atlasjax", "pallas_kernels"])
def test_import_direction(package):
    for path in (ROOT / package).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if room(module) in ON_TOP:
            continue
        allowed = MAY_IMPORT[room(module)]
        for name in imports(path):
            if name.split(".")[0] not in ("atlasjax", "pallas_kernels"):
                if room(module) == "pallas_kernels":
                    assert name.split(".")[0] in {"jax", "jaxtyping", *sys.stdlib_module_names}, (
                        f"{path} imports {name}"
                    )
                continue
            if room(name) != room(module):
                assert room(name) in allowed, f"{path} imports {name}; {room(module)} may import {sorted(allowed)}"


def test_import_direction_inside_the_memory():
    found = {path.name.removesuffix(".py") for path in (ROOT / "atlasjax/memory").iterdir() if "__" not in path.name}
    assert found == set(MEMORY_MAY_IMPORT)
    for inside, allowed in MEMORY_MAY_IMPORT.items():
        place = ROOT / "atlasjax/memory" / inside
        for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            for name in imports(path):
                if name.startswith("atlasjax.memory."):
                    other = name.split(".")[2]
                    assert other in allowed | {inside}, f"{path} imports {name}; {inside} may import {sorted(allowed)}"


def modules(*packages):
    """Every module of the packages, with its parsed file."""
    for package in packages or ("atlasjax", "pallas_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield module, ast.parse(path.read_text())


def files_imported(tree):
    """Files of the project that are imported, those for types and those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in (
            "atlasjax",
            "pallas_kernels",
            "experiments",
        ):
            for alias in node.names:
                name = f"{node.module}.{alias.name}".replace(".", "/")
                is_module = (ROOT / name).with_suffix(".py").exists() or (ROOT / name / "__init__.py").exists()
                yield name.replace("/", ".") if is_module else node.module


def test_no_circles_of_files():
    graph = {module: set(files_imported(tree)) - {module} for module, tree in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the files


def test_no_imports_of_files_inside_functions():
    """They would hide circles."""
    found = {}
    for module, tree in modules():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (inside := {*files_imported(function)}):
                found[module, function.name] = inside
    assert not found


def test_names_that_experiments_and_pages_import_exist():
    """Also those that a function imports when it is called, perhaps after hours."""
    jax.devices()  # two of the modules set flags of XLA for a process of their own: not for the tests after this one
    files = [path for folder in ("experiments", "docs", "notebooks") for path in (ROOT / folder).rglob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
                continue
            if node.module.split(".")[0] not in ("atlasjax", "pallas_kernels", "experiments"):
                continue
            with mock.patch.dict(os.environ):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")  # raises if it is not a module either


def modules_after(statement):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


# Prints every public module: the name it is asked by, and its own. In a process in which nothing else has been imported.
_AS_ATTRIBUTES = """
import types, atlasjax
def show(name, module, seen):
    print(name, module.__name__)
    public = dir(module) if module is atlasjax else getattr(module, "__all__", ())
    for part in public:
        value = getattr(module, part)
        if isinstance(value, types.ModuleType) and value.__name__.startswith("atlasjax") and value not in seen:
            show(f"{name}.{part}", value, [*seen, value])
show("atlasjax", atlasjax, [atlasjax])
"""
_IMPORTED = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    scope = {}
    exec(f"from {parent} import {last} as second; import {name} as third" if parent else "second = third = None", scope)
    assert not parent or scope["second"] is scope["third"] is module, name
    print(name, module.__name__)
"""


def test_public_modules_are_attributes_and_can_be_imported():
    """The same module in both ways, whichever comes first: `from atlasjax.elastic import hippo`, `atlasjax.elastic.hippo`."""
    run = lambda *code: subprocess.check_output([sys.executable, "-c", *code], text=True).splitlines()
    attributes = run(_AS_ATTRIBUTES)
    found = dict(line.split() for line in attributes)
    documented = {f"atlasjax.{page.stem}" for page in (ROOT / "docs/api").glob("*.md")} - {"atlasjax.shapes"}
    assert documented <= set(found)
    assert found["atlasjax.elastic.hippo"] == "atlasjax.mixers.elastic.hippo"
    assert found["atlasjax.memory.structures"] == "atlasjax.memory.axes.structures"
    names = sorted(found, reverse=True)  # the inner ones first
    assert sorted(run(_IMPORTED, *names)) == sorted(attributes)


def test_importing_costs_what_jax_costs():
    """By modules, which is exact, not by a clock; `experiments/benchmarks/memory_cpu.py import` measures seconds."""
    assert not any(name.split(".")[0] in ("jax", *HEAVY) for name in modules_after("import atlasjax"))
    assert "jax" not in modules_after("import atlasjax.plan.libtpu")  # whose environment must be set before
    loaded = modules_after("import atlasjax.memory, atlasjax.rules")
    assert not [name for name in HEAVY if name in loaded]


ERRORS = """
train --steps x
train --lr 1
train --preset titans-340m --model.dim 100
train --run-dir RUN --steps 0
train --data.source text --data.paths nowhere
train --config nowhere.toml
prepare --out x --workers 0
evaluate --run-dir nowhere
evaluate --piece 3
generate --run-dir nowhere
generate --temperature -1
serve --port 99999
serve --run-dir nowhere
import
export a --run-dir nowhere
tune --seconds -1
info --plan v5f
info --preset atlas-tyny
"""
PROGRAM = """
import sys
from atlasjax import cli
for line in sys.argv[1].strip().splitlines():
    assert cli.main(line.split()) == 2, line
    print(line, *sorted({name.split(".")[0] for name in sys.modules}), sep="|")
"""


def test_an_error_of_a_command_costs_what_jax_costs(tmp_path):
    """It must not wait for modules that take as long to import as jax itself."""
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.json").write_text(json.dumps({"model": {}}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ERRORS], capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    slow = {name for name in HEAVY if name not in ("tyro", "rich")} | {"google", "IPython", "fsspec"}
    for line in done.stdout.splitlines():
        command, *loaded = line.split("|")
        assert slow.isdisjoint(loaded), command
    assert len(done.stdout.splitlines()) == len(ERRORS.split("\n")) - 2
