"""The shape of the source tree: few modules at the top, packages and functions of a size that one can read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torchlake

SOURCE = Path(torchlake.__file__).parent
PLUG_INS = {
    "engines",
    "runtimes",
    "sources",
    "strategies",
    "targets",
    "tasks",
}  # one file for each plug-in, however many there are
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
MAX_BODY = 60
MAX_PARAMETERS = 12


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None and len(function.body) > 1 else function.body
    last = body[-1].end_lineno
    assert last is not None
    return last - body[0].lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def test_the_top_level_fits_on_a_screen() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 14


def test_packages_say_what_they_are_for_and_are_small() -> None:
    found = []
    for package in PACKAGES:
        name = package.relative_to(SOURCE)
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
        if not text:
            found.append(f"{name}: has no docstring")
        if package.name in PLUG_INS:
            continue
        found += [f"{name}: its docstring lacks {word!r}" for word in ("In:", "Out:", "Read `") if word not in text]
        files = len(list(package.glob("*.py"))) - 1
        if not 3 <= files <= 10:
            found.append(f"{name}: has {files} files")
    assert found == []


def test_functions_are_short_and_take_few_parameters() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for function in functions(path):
            place = f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
            if body_lines(function) > MAX_BODY:
                found.append(f"{place}: {body_lines(function)} lines")
            if parameters(function) > MAX_PARAMETERS and path != SOURCE / "cli" / "app.py":
                found.append(f"{place}: {parameters(function)} parameters")
    assert found == []


def test_the_measures_count(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    lines = "\n".join(f"    x{number} = {number}" for number in range(61))
    path.write_text(f'def long(a, /, b, *, c):\n    """Text."""\n{lines}\n')
    (function,) = functions(path)
    assert (body_lines(function), parameters(function)) == (61, 3)
