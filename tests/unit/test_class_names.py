"""One name, one thing: no two public classes of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

import torchlake

SOURCES = Path(torchlake.__file__).parent


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCES)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
