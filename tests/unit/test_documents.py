"""The documents name tests, files and pages that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torchlake"
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
TABLE = "\n".join(line for line in FAULTS.splitlines() if line.startswith("|"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])


def named_tests(text: str) -> list[tuple[str, str]]:
    """Test files below tests/ and the tests named in them; `::name` alone belongs to the file named before it."""
    found, file = [], ""
    for path, name in re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", text):
        file = path or file
        found.append((file, name))
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(named_tests(TABLE))))
def test_faults_names_tests_that_exist(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE) if name else text


def test_names_are_found() -> None:
    text = "`a/test_b.py::test_c`, `::test_d` (slow); `test_e.py` and `x`"
    assert named_tests(text) == [("a/test_b.py", "test_c"), ("a/test_b.py", "test_d"), ("test_e.py", "")]


def test_faults_names_many() -> None:
    assert len(named_tests(TABLE)) > 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith(("http", "mailto")):
            continue
        path, _, anchor = target.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), f"{document.name}: {target}"
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_named_source_files_exist(document: Path) -> None:
    for path in set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", document.read_text(encoding="utf-8"))):
        assert any((root / path).exists() for root in (SOURCE, ROOT, ROOT / "tests", ROOT / "src")), path
