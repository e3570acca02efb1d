"""docs/equations.md: every numbered equation of the papers once, and every function and test that it names exists."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EQUATIONS = {"A": 58, "M": 15, "E": 31, "G": 6}  # the numbered equations of each paper
COLUMNS = "| equation | what it says | code | test |"
# Words of the papers that lead a reader of the first pages to the code.
WORDS = """
    Omega rule; polynomial features; Muon; Newton–Schulz; attentional bias; retention gate; OmegaNet; Deep Linear Attention; DLA;
    SWLA; DeepTransformer; SWDT; DOT; Hebbian rule; delta rule; Titans; momentum; gated MLP; residual memory; gated residual memory;
    GRM; memory soup; sparse selective caching; SSC; online memory; cached memories; connector; log-linear; HiPPO; Elastic Memory;
    HiPPO kernel; polynomial sampling; trapezoidal attention; Gated Associative Memory; MAC; MAG; MAL
"""
PAGES = ("README.md", "docs/architecture.md", "docs/semantics.md")

PAGE = (ROOT / "docs/equations.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| [AMEG] ", line)
]


@functools.cache
def definitions(path):
    """Name → node of what a file defines at its top level, and in its classes as Class.name."""
    found = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def named(cell):
    """(path, name) of every reference in a cell, which holds nothing else."""
    references = re.findall(r"`([\w/]+\.py):([\w.]+)`", cell)
    assert ", ".join(f"`{path}:{name}`" for path, name in references) == cell, cell
    return references


def numbers(equation):
    """The numbered equations of "A Delta Rule, Eq. 47" or "A Eq. 1, 19–21"; those without a number have a name."""
    paper, _, rest = equation.partition(" ")
    listed = re.search(r"Eq\. (\d+(?:–\d+)?(?:, \d+(?:–\d+)?)*)", rest)
    named = [part for part in (rest.replace(listed[0], "") if listed else rest).split(", ") if part]
    assert listed or named
    for name in named:
        assert re.match(r"(Table|Tables|Fig\.|App\.|§|Hebbian Rule|Delta Rule|[A-Z])", name), equation
    for part in listed[1].split(", ") if listed else ():
        first, _, last = part.partition("–")
        assert int(first) < int(last or int(first) + 1), equation
        yield from ((paper, number) for number in range(int(first), int(last or first) + 1))


def test_every_numbered_equation_is_in_one_row():
    assert PAGE.count(COLUMNS) == len(EQUATIONS)
    found = [number for row in ROWS for number in numbers(row[0])]
    assert sorted(found) == sorted((paper, n) for paper, count in EQUATIONS.items() for n in range(1, count + 1))
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "_"))
def test_what_a_row_names_exists(row):
    _, says, code, test = row
    assert says
    if test == "–":
        assert re.match(r"not code: \w", code)
        return
    for path, name in named(code):
        assert name in definitions(path), f"{path} does not define {name}"
    for path, name in named(test):
        assert path.startswith("tests/")
        assert name.startswith("test_")
        assert name in definitions(path), f"{path} does not define {name}"
        marks = [ast.unparse(mark) for mark in definitions(path)[name].decorator_list]
        assert "pytest.mark.slow" not in marks, f"{path}:{name} does not run by default"


@pytest.mark.parametrize("pages", [PAGES, ("docs/equations.md",)], ids=["first_pages", "equations"])
def test_the_words_of_the_papers_are_there(pages):
    text = " ".join("\n".join((ROOT / page).read_text() for page in pages).split())
    case = lambda word: 0 if word.isupper() else re.IGNORECASE  # DOT is no dot product
    words = [" ".join(word.split()) for word in WORDS.split(";")]
    assert [word for word in words if not re.search(rf"\b{word}\b", text, case(word))] == []


def test_what_the_introduction_names_exists():
    references = re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE.partition(COLUMNS)[0])
    assert len(references) == 3
    assert [name for path, name in references if name not in definitions(path)] == []


def test_from_the_readme_it_is_one_hop():
    assert "](docs/equations.md)" in (ROOT / "README.md").read_text()
