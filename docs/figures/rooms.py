"""The figure of docs/architecture.md: the rooms of the package and who imports whom, read from the sources.

    python docs/figures/rooms.py        # writes rooms.svg beside this file

An arrow points to what is imported. Imports that follow from others are left out: where A imports B and B imports C, no arrow goes
from A to C. So are the nine small modules that anything may import.
"""

import ast
import pathlib
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ("atlasjax", "pallas_kernels")
FOUNDATION = {"json_text", "trusted", "names", "check", "mesh_axes", "config_json", "flops", "cache", "machine"}
# Room → (column, row) of its box; rows from the bottom.
PLACES = {
    "cli": (3.5, 8),
    "plan": (0.5, 7),
    "interop": (1.5, 7),
    "tune": (2.5, 7),
    "serve": (4, 7),
    "train": (1.5, 6),
    "data": (0, 5),
    "distributed": (1, 5),
    "presets": (2, 5),
    "evaluate": (3, 5),
    "generate": (4, 5),
    "table1": (5, 5),
    "nn": (2.5, 4),
    "storage": (0.5, 0),
    "mixers": (2.5, 3),
    "rules": (2.5, 2),
    "memory": (2.5, 1),
    "pallas_kernels": (2.5, 0),
}
WIDTH, HEIGHT, COLUMN, ROW, MARGIN = 112, 34, 130, 62, 16


def room(module: str) -> str:
    """`atlasjax.memory.api` → memory; `pallas_kernels.delta_rule` → pallas_kernels."""
    parts = module.split(".")
    return parts[0] if parts[0] != "atlasjax" or len(parts) == 1 else parts[1]


def imported(path: pathlib.Path) -> Iterator[str]:
    """Modules of the project that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "atlasjax":
            yield from (f"atlasjax.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def imports() -> dict[str, set[str]]:
    """Room → the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            here = room(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            others = {room(name) for name in imported(path) if name.split(".")[0] in PACKAGES and "__" not in name}
            found[here] = found.get(here, set()) | (others - {here})
    # The package itself loads its rooms when they are asked for, and `python -m` its command.
    left_out = {"atlasjax", "__main__", "elastic", "gam", *FOUNDATION}  # the last two are names of mixers
    return {name: others - left_out for name, others in found.items() if name not in left_out}


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Edges of the graph without those that follow from others."""

    def reached(start: str) -> set[str]:
        return graph[start].union(*(reached(other) for other in graph[start]))

    direct = lambda a, b: not any(b in reached(other) for other in graph[a] - {b})
    return [(a, b) for a in sorted(graph) for b in sorted(graph[a]) if direct(a, b)]


def svg() -> str:
    """The picture."""
    graph = imports()
    if set(graph) != set(PLACES):
        raise ValueError(f"docs/figures/rooms.py: PLACES has {sorted(PLACES)}, the package {sorted(graph)}.")
    rows = max(row for _, row in PLACES.values())
    left = lambda name: MARGIN + PLACES[name][0] * COLUMN
    top = lambda name: MARGIN + (rows - PLACES[name][1]) * ROW
    width = MARGIN * 2 + WIDTH + COLUMN * max(column for column, _ in PLACES.values())
    height = MARGIN * 2 + HEIGHT + ROW * rows
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'font-family="sans-serif" font-size="14">',
        "<title>Rooms of the package; an arrow points to what is imported</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for a, b in arrows(graph):
        x1, y1, x2, y2 = left(a) + WIDTH / 2, top(a) + HEIGHT, left(b) + WIDTH / 2, top(b) - 2
        if PLACES[a][1] - PLACES[b][1] > 2:  # from afar: in at the side, so as not to cross the box above
            x2, y2 = x2 + (1 if x1 > x2 else -1) * (WIDTH / 2 + 2), top(b) + HEIGHT / 2
        lines.append(
            f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="#666" stroke-width="1.3" fill="none" marker-end="url(#head)"/>'
        )
    for name in PLACES:
        heart = name == "memory"
        middle, baseline = left(name) + WIDTH / 2, top(name) + HEIGHT / 2 + 5
        fill, stroke = ("#dbe7fb", "#1f77b4") if heart else ("#f4f4f4", "#888")
        lines.append(
            f'<rect x="{left(name):g}" y="{top(name):g}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="{stroke}"/>'
        )
        lines.append(f'<text x="{middle:g}" y="{baseline:g}" text-anchor="middle" fill="#222">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "rooms.svg").write_text(svg())
