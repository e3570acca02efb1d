"""Files and functions stay short enough to be read at once."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
FILES = [path for room in ("atlasjax", "pallas_kernels", "experiments") for path in (ROOT / room).rglob("*.py")]


def test_no_file_over_400_lines():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert len(sizes) > 400
    assert {path: lines for path, lines in sizes.items() if lines > 400} == {}


def lines(function):
    """Lines of a function without its decorators and its docstring, which may be long."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_no_function_over_60_lines():
    """Where this fails, give the function's steps names."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > 60:
                found[str(path.relative_to(ROOT)), node.name] = lines(node)
    assert found == {}
