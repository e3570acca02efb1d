"""Generates the tables of the pages from the repository: from recorded measurements, tests, and the rules themselves. Also
what needs the address of the repository (docs/repository.toml).

    python docs/generate.py                         # updates the tables between the marks of all pages
    python docs/generate.py docs/reliability.md     # of one page

A test fails if a page is not up to date. A table is a function in `docs/tables`. Its page names it by the marks
`<!-- table: NAME -->` before the table and `<!-- end -->` after it.
"""

import pathlib
import re
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.tables import evidence, kernels, measured, repository, rules, status, weights, year  # noqa: E402

TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        rules.choosing_rules, rules.choosing_sizes,
        measured.bench_memory, measured.bench_blocks, measured.bench_decoding, measured.bench_decoding_models,
        measured.bench_decoding_large,
        measured.bench_decoding_tpu, measured.bench_softmax_memories, measured.bench_caching, measured.bench_muon,
        measured.bench_compile,
        measured.bench_commands,
        measured.bench_zoo,
        measured.serving_load, measured.devices_sequence, measured.devices_longest,
        measured.reliability_faults, measured.reliability_packing, measured.packing_models,
        measured.input_speed, measured.input_memory,
        measured.mad, measured.needles,
        evidence.evidence_summary, evidence.evidence_settings, evidence.evidence_commands, evidence.evidence_fresh,
        evidence.evidence_model, evidence.evidence_details, evidence.choosing_memories,
        year.year_proofs, year.year_standing, year.year_models, year.bench_year,
        weights.weights_families, weights.weights_tensors, weights.weights_import, weights.weights_added,
        repository.repository_badges, repository.repository_clone, repository.repository_colab,
        status.status_devices, status.status_rules, status.status_proofs, kernels.status_kernels, status.status_plans,
        status.status_experiments, status.status_systems,
    )
}  # fmt: skip
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with up-to-date tables."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def pages() -> list[pathlib.Path]:
    """The pages that have tables."""
    files = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "experiments").glob("*/README.md")),
    ]
    return [path for path in files if _MARKED.search(path.read_text())]


def main(names: list[str]) -> None:
    """Updates the pages that are named, or all, and the other files that have the address."""
    known = {str(page.relative_to(ROOT)): page for page in pages()}
    if unknown := set(names) - set(known):
        raise SystemExit(f"{sorted(unknown)[0]!r} is no page with tables; those are {', '.join(known)}.")
    for name in names or known:
        known[name].write_text(filled(known[name].read_text()))
    for path, made in ({} if names else repository.files()).items():
        path.write_text(made(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
