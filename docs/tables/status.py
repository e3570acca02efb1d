"""Tables of the page that shows what has been verified, and how."""

import ast
import importlib
import json
from collections.abc import Callable, Iterable

from atlasjax import memory, rules
from atlasjax.presets import rule_name
from docs.tables.rules import PLATFORMS, supported
from docs.tables.source import BENCHMARKS, ROOT, rows, table
from experiments.rows import read_rows


def tests_in(path: str) -> dict[str, list[ast.FunctionDef]]:
    """File → its test functions, of a file or of a folder of tests/."""
    place = ROOT / "tests" / path
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    found = {}
    for file in files:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        found[file.relative_to(ROOT).as_posix()] = [f for f in functions if f.name.startswith("test_")]
    return found


def _over(name: str, path: str) -> list[str]:
    """Test functions of tests/PATH that run over every case of the table NAME."""
    found = []
    for file, functions in tests_in(path).items():
        for function in functions:
            for decorator in function.decorator_list:
                arguments = decorator.args if isinstance(decorator, ast.Call) else []
                if any(isinstance(argument, ast.Name) and argument.id == name for argument in arguments):
                    found.append(f"`{file}::{function.name}`")
    return found


def _cases(path: str, table_name: str) -> dict[str, ast.expr]:
    """Case → its expression, of a table of rules in a module of tests."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == table_name for t in targets) and isinstance(value, ast.Dict):
            found |= {key.value: v for key, v in zip(value.keys, value.values) if isinstance(key, ast.Constant)}
    return found


# What is proven → the tests of plain rules and of softmax memories, each a module of tests/memory and a function over cases.
PROOFS = {
    "gradients": (
        "test_engine.test_outputs_state_and_gradients",
        "softmax.test_engine.test_outputs_state_and_gradients",
    ),
    "splits": ("test_streaming.test_every_split", "softmax.test_streaming.test_every_split"),
}


def default_cases(test: Callable[..., None]) -> dict[str, bool]:
    """Case of a parametrized test → whether CI runs it."""
    marks = test.pytestmark  # type: ignore[attr-defined]
    slow = any(mark.name == "slow" for mark in marks)
    [cases] = [mark.args[1] for mark in marks if mark.name == "parametrize" and mark.args[0] == "name"]
    found = {}
    for case in cases:
        name, own = (case.values[0], case.marks) if hasattr(case, "marks") else (case, ())
        found[name] = not slow and all(mark.name != "slow" for mark in own)
    return found


def proofs(name: str) -> tuple[list[str], list[str]]:
    """What CI proves of a rule, and what only `pytest -m slow` does."""
    softmax = isinstance(rules.REGISTRY[name](), memory.SoftmaxRule)
    cases = _cases(f"tests/memory/{'softmax/' if softmax else ''}cases.py", "RULES")
    of_others = set(rules.REGISTRY) - {name}
    own = [
        case
        for case, value in cases.items()
        if case not in of_others and (name in (case, *_names(value)) or case.startswith(f"{name}_"))
    ]
    in_ci, if_slow = [], []
    for what, tests in PROOFS.items():
        module, _, function = tests[softmax].rpartition(".")
        runs = default_cases(getattr(importlib.import_module(f"tests.memory.{module}"), function))
        found = [runs[case] for case in own if case in runs]
        if found:
            (in_ci if any(found) else if_slow).append(what)
    return in_ci, if_slow


def _names(node: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name)
    }


def status_devices() -> str:
    """All devices named in the rows, and whether any of them is an accelerator."""
    devices = accelerators()
    sources = {"kernels_measured.jsonl": rows(BENCHMARKS / "kernels_measured.jsonl")}
    recorded = json.loads((ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text())
    lines = sorted(
        {
            (row["device"], row["platform"], f"`experiments/benchmarks/{name}`")
            for name, found in sources.items()
            for row in found
        }
        | {(row["device"], row["platform"], "`atlasjax/memory/fast_weights/fastest.json`") for row in recorded}
    )
    if devices:
        said = f"**Accelerators with measured times: {', '.join(devices)}.**"
    else:
        said = (
            "**No accelerator has run anything yet.** All measured times in the repository are from CPUs, and the table that can "
            f"select kernels by default (`atlasjax/memory/fast_weights/fastest.json`) has {len(recorded)} rows. All statements "
            "about TPUs and GPUs below come from their compilers and from interpret mode on a CPU."
        )
    return said + "\n\n" + table(("device", "platform", "rows"), lines)


def accelerators() -> list[str]:
    """Devices other than CPUs that the rows of measured time name."""
    found = rows(BENCHMARKS / "kernels_measured.jsonl") + json.loads(
        (ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text()
    )
    return sorted({row["device"] for row in found if row["platform"] != "cpu"})


def status_rules() -> str:
    """Each named rule: whether it is tested against the definition, and which kernels support it and which models were trained."""
    trained: dict[str, set[str]] = {"embedded": set(), "tinyshakespeare": set(), "moby_dick": set()}
    for row in rows("experiments/stability/results/train.jsonl"):
        if row["bounded"] and row["diverged_at"] is None:
            trained[row["text"]].add(row["preset"])

    def line(name: str) -> Iterable[object]:
        proven = (", ".join(part) or "–" for part in proofs(name))
        models = [text for text, presets in trained.items() if rule_name(name) in presets]
        kernels = [supported(name, implementation) for implementation in PLATFORMS]
        return (f"`{name}`", *proven, *kernels, ", ".join(models) or "no")

    kernel_columns = (f"{label} kernel" for label in PLATFORMS.values())
    head = ("rule", "proven in CI", "with `-m slow`", *kernel_columns, "tiny model trained on")
    return table(head, map(line, rules.REGISTRY))


def status_proofs() -> str:
    """The tests that run over the tables of cases."""
    caching = "tests/memory/caching/test_caching.py"
    lines = [
        ("memory rules", "tests/memory/cases.py", _over("RULES", "memory")),
        (
            "softmax memories",
            "tests/memory/softmax/cases.py",
            _over("GRADED", "memory/softmax") + _over("STREAMED", "memory/softmax"),
        ),
        ("cached memories", caching, _over("CASES", "memory/caching")),
    ]
    return table(("family", "cases", "tests over them"), [(a, f"`{b}`", "<br>".join(c)) for a, b, c in lines])


def status_plans() -> str:
    """Training steps compiled for pods and GPUs, counted. Of repeated plans the last one counts."""
    from experiments.benchmarks.plans import key  # it sets flags of compilers for its process

    newest = {key(row): row for row in rows(BENCHMARKS / "plans.jsonl")}
    lines = []
    for devices in sorted({row["topology"] for row in newest.values()}):
        here = [row for row in newest.values() if row["topology"] == devices]
        planned = [row for row in here if row.get("plan") is not None]
        largest = max(planned, key=lambda row: row["total_bytes"])
        lines.append(
            (
                devices,
                len({row["preset"] for row in planned}),
                len(planned),
                sum(row["fits"] for row in planned),
                len(here) - len(planned),
                f"{largest['total_bytes'] / 2**30:.2f} (`{largest['preset']}`, {largest['implementation']})",
            )
        )
    head = ("devices", "presets", "plans", "that fit", "not planned", "most GiB per device")
    return table(head, lines, right=(1, 2, 3, 4))


def status_experiments() -> str:
    """Rows of each experiment."""
    lines = []
    for folder in sorted(path for path in (ROOT / "experiments").iterdir() if (path / "README.md").is_file()):
        files = {file.with_name(file.name.removesuffix(".gz")) for file in folder.rglob("*.jsonl*")}
        for file in sorted(files):
            found = read_rows(file)
            devices = sorted({str(row["device"]) for row in found if "device" in row})
            name = file.relative_to(ROOT / "experiments").as_posix()
            lines.append(
                (
                    f"[{folder.name}](../{folder.name}/README.md)",
                    f"`{name}`",
                    len(found),
                    ", ".join(devices),
                )
            )
    return table(("experiment", "file", "rows", "device named in the rows"), lines, right=(2,))


# System → its code and its tests.
SYSTEMS = {
    "memory rules": ("atlasjax/memory", ("tests/memory",)),
    "softmax memories": ("atlasjax/memory/softmax", ("tests/memory/softmax",)),
    "Memory Caching": ("atlasjax/memory/caching", ("tests/memory/caching",)),
    "Elastic Memory": ("atlasjax/mixers/elastic", ("tests/mixers/elastic", "tests/nn/test_elastic.py")),
    "Gated Associative Memory": ("atlasjax/mixers/gam.py", ("tests/mixers/test_gam.py", "tests/nn/test_gam.py")),
    "attention and state spaces": ("atlasjax/mixers", ("tests/mixers", "tests/nn/test_attention.py")),
    "language models, every architecture": ("atlasjax/nn", ("tests/test_models.py", "tests/nn")),
    "data": ("atlasjax/data", ("tests/data",)),
    "training, checkpoints, resume": ("atlasjax/train", ("tests/train",)),
    "several devices and processes": ("atlasjax/distributed", ("tests/distributed",)),
    "evaluation and generation": (
        "atlasjax/evaluate",
        ("tests/evaluate", "tests/test_generate.py", "tests/test_contexts.py"),
    ),
}


def status_systems() -> str:
    """Each part of the library and its tests."""
    for code, tests in SYSTEMS.values():
        for path in (code, *tests):
            if not (ROOT / path).exists():
                raise FileNotFoundError(f"docs/tables/status.py: SYSTEMS names {path}, which is not there.")
    lines = [(name, f"`{code}`", ", ".join(f"`{path}`" for path in tests)) for name, (code, tests) in SYSTEMS.items()]
    return table(("system", "code", "tests, on a CPU"), lines)
