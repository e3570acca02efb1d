"""Tables of the rules of 2025 and 2026: how each is proven, where it stands beside the papers' rules, and its speed."""

import dataclasses
import itertools
import re

import numpy as np

from docs.tables.source import BENCHMARKS, ROOT, rows, table
from experiments.rows import Row, read_rows


@dataclasses.dataclass(frozen=True)
class Proof:
    """A rule or model, and the tests that compare it with its definition and with a peer.

    Attributes:
      name: as a user finds it.
      definition: test against its definition, file::function.
      peer: with what it is compared.
      compared: tests with rows in peer_differences.jsonl: the beginnings of their names.
      files: files of `atlasjax/` that the commits which added it changed, and what they are for.
      commits: those commits.
    """

    name: str
    definition: str
    peer: str
    compared: tuple[str, ...]
    files: str
    commits: tuple[str, ...]


_NAIVE = "tests/interop/test_fla"
_FORMS = "tests/memory/test_closed_forms.py::test_engine_is_the_published_recurrence"
_KEYS = "the write with a read key of its own 11, for all rules that have one"
PROOFS = (
    Proof(
        "`rules.kda`, mixer `kda`", _FORMS, "fla: naive_recurrent_kda; its layer; transformers' Kimi-Linear and Ling",
        (f"{_NAIVE}_kda.py::test_rule_is_their_recurrence", f"{_NAIVE}_kda.py::test_layer_is_theirs[kda",
         f"{_NAIVE}_kda.py::test_layer_is_that_of_transformers"),
        "rule 2, mixer 4", ("2ef0b43d", "3f9d3e56"),
    ),
    Proof(
        "`rules.gdn2`, mixer `gdn2`", _FORMS, "fla: naive_recurrent_gdn2; its layer",
        ("tests/interop/test_from_fla.py::test_values_states_and_gradients[chunk_gdn2]",
         f"{_NAIVE}_kda.py::test_layer_is_theirs[gdn2"),
        f"mixer 4; {_KEYS}", ("90a17355", "cb2d9306"),
    ),
    Proof(
        "`rules.comba`, mixer `comba`", _FORMS, "fla: naive_chunk_comba; its layer",
        (f"{_NAIVE}_preconditioned.py::test_values_and_gradients[comba", f"{_NAIVE}_delta_layers.py::test_layer[comba]"),
        f"with `pgdn` 8; {_KEYS}", ("92ea6077", "cb2d9306"),
    ),
    Proof(
        "`rules.pgdn`, mixer `pgdn`", _FORMS, "fla: naive_recurrent_precond_gated_delta_rule; its layer",
        (f"{_NAIVE}_preconditioned.py::test_values_and_gradients[pgdn", f"{_NAIVE}_delta_layers.py::test_layer[pgdn]"),
        "with `comba` 8", ("92ea6077",),
    ),
    Proof(
        "`rules.pkda`, mixer `pkda`", _FORMS, "fla: naive_recurrent_precond_kda; its layer",
        (f"{_NAIVE}_preconditioned.py::test_values_and_gradients[pkda", f"{_NAIVE}_delta_layers.py::test_layer[pkda]"),
        "mixer 4", ("fdb23f4f",),
    ),
    Proof(
        "mixer `gated_deltaproduct`", "tests/mixers/test_delta_product.py::test_writes_of_a_token_are_its_rows",
        "fla: naive_recurrent_gated_delta_product; its layer",
        (f"{_NAIVE}_delta_product.py::test_values_and_gradients", f"{_NAIVE}_delta_layers.py::test_layer[gated_deltaproduct"),
        "function 1, mixer 8", ("07742cc4", "ae26b5c7"),
    ),
    Proof(
        "`rules.mamba3`, mixer `mamba3`, SISO and MIMO", "tests/mixers/test_mamba3.py::test_scan_is_its_definition",
        "a complex state in NumPy, from the paper; its modules need CUDA",
        ("tests/mixers/test_mamba3.py::test_the_definition_is_a_complex_state",
         "tests/mixers/test_mamba3.py::test_scan_is_its_definition"),
        "rule and mixer 10", ("e43cd521",),
    ),
    Proof(
        "`rules.momentum_delta`, mixer `momentum_deltanet`", "tests/memory/test_closed_forms.py::test_momentum_delta",
        "fla: recurrent_momentum_delta_rule_ref; its layer",
        (f"{_NAIVE}_momentum_delta.py::test_rule", f"{_NAIVE}_momentum_delta.py::test_mixer"),
        "rule 8, of which 6 its block form; mixer 5", ("54d9dae2", "d48466b4"),
    ),
    Proof(
        "`rules.lact`, mixer `lact`", "tests/memory/large_chunk/test_formula.py::test_lact",
        "the recurrence in PyTorch, by autograd; in NumPy",
        ("tests/interop/test_large_chunk_torch.py::test_values_and_gradients",
         "tests/memory/large_chunk/test_formula.py::test_lact"),
        "family and rules 17, mixer 7", ("1e55e4e7", "b9127be2"),
    ),
    Proof(
        "`rules.in_place_ttt`", "tests/memory/large_chunk/test_formula.py::test_in_place_ttt", "the recurrence in NumPy",
        ("tests/memory/large_chunk/test_formula.py::test_in_place_ttt",), "with `lact`", ("1e55e4e7",),
    ),
    Proof(
        "`memory.HierarchicalRule`, `titans-tnt`, `omeganet-tnt`, `atlas-tnt`",
        "tests/memory/test_hierarchical.py::test_values_and_gradients", "the paper's equations 5 to 7 and 15 in NumPy",
        ("tests/memory/test_hierarchical.py::test_the_definition_is_the_papers",), "family 10, models 8", ("3a4035c1", "0504e732"),
    ),
    Proof(
        "`rules.mesa`, mixer `mesa`", "tests/memory/test_mesa.py::test_values_and_gradients",
        "fla: naive_mesa_net_exact; its layer; naive_mesa_net_CG, which ends early",
        (f"{_NAIVE}_mesa.py::test_values_and_gradients[conjugate_gradient-exact]", f"{_NAIVE}_mesa.py::test_the_layer",
         f"{_NAIVE}_mesa.py::test_values_and_gradients[conjugate_gradient-CG]"),
        "rule 4, mixer 5; the family apart", ("04676d45", "7611b4bc"),
    ),
)  # fmt: skip


def year_proofs() -> str:
    """Each rule of the year with its tests and the largest difference from a peer."""
    found = {row["test"]: row["difference"] for row in rows(BENCHMARKS / "peer_differences.jsonl")}

    largest = lambda test: max(x for name, x in found.items() if name.startswith(test))

    lines = [
        (
            proof.name,
            _named(proof.definition),
            proof.peer,
            "<br>".join(f"{largest(test):.1e}, {_named(test)}" for test in proof.compared),
            f"{proof.files} ({', '.join(f'`{commit}`' for commit in proof.commits)})",
        )
        for proof in PROOFS
    ]
    head = ("rule", "against its definition", "peer", "largest difference, test", "files of the library")
    return table(head, lines)


def _named(test: str) -> str:
    """The test without the folder. Raises ValueError if there is none of that name."""
    path, _, function = test.partition("::")
    if not re.search(rf"^def {function.partition('[')[0]}\(", (ROOT / path).read_text(), re.MULTILINE):
        raise ValueError(f"docs/tables/year.py: there is no test {test}.")
    return f"`{test.removeprefix('tests/').partition('[')[0]}`"


# Memory of the capacity experiment → whose it is.
STANDING = {
    "linear": "delta rule; KDA and Gated DeltaNet without decay",
    "linear, own erasing rate": "Gated DeltaNet-2, Comba",
    "linear, momentum": "Momentum DeltaNet",
    "mesa": "MesaNet",
    "mesa, exact": "MesaNet, solved exactly",
    "linear, c=4": "the Omega rule of a matrix",
    "linear, Muon": "Muon of a matrix",
    "polynomial 2": "polynomial features",
    "deep 2": "Titans without momentum",
    "deep 2, momentum": "Titans",
    "deep 2, momentum, TNT": "TNT around Titans",
    "deep 2, c=4": "the Omega rule of a deep memory",
}


def year_standing() -> str:
    """Pairs recalled of 64 by memories of at most 1,024 floats, all of them counted, one pass: the mean over ten seeds."""
    from experiments.capacity.report import TITLES

    found: dict[tuple[str, str], Row] = {
        (row["memory"], row["keys"]): row
        for row in read_rows(ROOT / "experiments/capacity/results/capacity.jsonl")
        if (row["budget"], row["passes"]) == (1024, 1)
    }

    def cell(name: str, keys: str) -> str:
        row = found.get((name, keys))
        return "" if row is None else f"{np.mean(np.asarray(row['recalled'])[:, row['recipe']['pairs'].index(64)]):.2f}"

    lines = [
        (
            name,
            whose,
            f"{max(r['floats'] for k in TITLES if (r := found.get((name, k)))):,}",
            *(cell(name, k) for k in TITLES),
        )
        for name, whose in STANDING.items()
        if any((name, keys) in found for keys in TITLES)
    ]
    return table(("memory", "of", "floats", *TITLES.values()), lines, right=range(2, 3 + len(TITLES)))


# Tiny models, and those of the papers that they stand beside.
MODELS = (
    "kda", "gdn2", "comba", "pgdn", "pkda", "gated-deltaproduct", "mamba3", "mamba3-mimo", "momentum-deltanet", "momentum-delta",
    "mesa", "lact", "titans-tnt", "omeganet-tnt", "atlas-tnt",
)  # fmt: skip
BESIDE = ("gated-deltanet", "mamba2", "titans", "omeganet", "atlas", "titans-grm", "transformer++")


def year_models() -> str:
    """Held-out bits per byte of tiny models of equal size, on the text that comes with Python."""
    zoo = {row["model"]: row for row in rows("experiments/zoo/results/embedded.jsonl")}
    whole: dict[str, list[float]] = {}
    for row in rows("experiments/stability/results/train.jsonl"):
        if row["bounded"] and row["text"] == "embedded" and row["bits_per_byte"] is not None:
            whole.setdefault(row["preset"], []).append(row["bits_per_byte"])
    lines = []
    for name in itertools.chain(MODELS, BESIDE):
        if name in zoo or name in whole:
            after = whole.get(name, [])
            lines.append(
                (
                    f"`{name}`",
                    f"{zoo[name]['bits_per_byte']:.3f}" if name in zoo else "",
                    f"{np.mean(after):.3f}" if after else "",
                    len(after) or "",
                )
            )
    without = [f"`{name}`" for name in MODELS if name not in zoo and name not in whole]
    told = f"\nWithout a row yet: {', '.join(without)}.\n" if without else ""
    head = ("model", "zoo, 80 steps", "whole runs, 300 steps", "seeds of whole runs")
    return table(head, lines, right=(1, 2, 3)) + told


def bench_year() -> str:
    """Tokens per second of each rule beside `gated_delta_rule`: the newest run of `rules_cpu.py speed`."""
    runs = [row for row in rows(BENCHMARKS / "rules_cpu.jsonl") if row["command"] == "speed"]
    if not runs:
        return "Not measured yet.\n"
    run = runs[-1]
    lines = [
        (row["rule"], f"{run['length'] / row['seconds']:,.0f}", f"{row['seconds'] / row['gated_delta_rule_s']:.2f}")
        for row in run["rows"]
    ]
    head = ("rule", "tokens/s", "its time ÷ `gated_delta_rule`'s")
    told = f"{run['length']:,} tokens, {run['heads']} heads of {run['dim']}:\n\n"
    return told + table(head, lines, right=(1, 2))
