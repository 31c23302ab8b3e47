"""The private names of other libraries that the source uses are those of the table in CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torchlake

ROOT = Path(__file__).parents[2]
SOURCE = Path(torchlake.__file__).parent
PYTHON = {"_replace", "_asdict", "_fields", "_exit"}  # documented by Python


def is_private(name: str) -> bool:
    return name.startswith("_") and not re.fullmatch(r"_+|__\w+__", name)


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            for module in modules:
                if not module.startswith("torchlake"):
                    yield from filter(is_private, module.split("."))
                    yield from (one.name for one in node.names if "." not in one.name and is_private(one.name))


def test_the_table_names_all() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    own = {name for tree in trees for name in defined(tree)}
    found = {name for tree in trees for name in used(tree)} - own - PYTHON
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Private names of other libraries")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"\b_\w+", row.split("|")[1])}
    assert found - listed == set(), "add them to the table, with a test that fails when they are gone"
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert {name for name in listed if name not in code} == set(), "they are no longer used"
    for row in rows:
        _, _, where, test, *_ = row.split("|")
        for name in re.findall(r"`([^`]+)`", where):
            assert (SOURCE / name).exists(), name
        for name in re.findall(r"`([^`]+)`", test):
            path, _, function = name.partition("::")
            assert (ROOT / "tests" / path).exists(), name
            assert not function or f"def {function}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), name
