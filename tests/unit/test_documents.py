"""The documents name tests, files, pages and extras that exist, and no page takes more than ten minutes to read."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torchlake"
FAULTS = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/explanation/faults*.md")))
TABLES = "\n".join(line for line in FAULTS.splitlines() if line.startswith("|"))
PAGES = sorted(ROOT.glob("docs/**/*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/*.md")])
REPOSITORY = "https://github.com/torchlake/torchlake"
RAW = "https://raw.githubusercontent.com/torchlake/torchlake/main/"
WORDS_PER_PAGE = 2000
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def named_tests(text: str) -> list[tuple[str, str]]:
    """Test files below tests/ and the tests named in them; `::name` alone belongs to the file named before it."""
    found, file = [], ""
    for path, name in re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", text):
        file = path or file
        found.append((file, name))
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(named_tests(TABLES))))
def test_faults_names_tests_that_exist(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE) if name else text


def test_names_are_found() -> None:
    text = "`a/test_b.py::test_c`, `::test_d` (slow); `test_e.py` and `x`"
    assert named_tests(text) == [("a/test_b.py", "test_c"), ("a/test_b.py", "test_d"), ("test_e.py", "")]


def test_faults_names_many() -> None:
    assert len(named_tests(TABLES)) > 150


def links(document: Path) -> list[tuple[str, Path, str]]:
    """Each link of a document to a file of the repository: as written, the file, and the anchor."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        local = re.match(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/|{re.escape(RAW)}", target)
        path, _, anchor = (target[local.end() :] if local else target).partition("#")
        if local:
            found.append((target, ROOT / path, anchor))
        elif not target.startswith(("http", "mailto")):
            found.append((target, document.parent / path if path else document, anchor))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, page, anchor in links(document):
        assert page.exists(), f"{document.name}: {target}"
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_out_of_the_pages_are_absolute(page: Path) -> None:
    """The site has the files in docs/ only."""
    outside = [target for target, path, _ in links(page) if not path.resolve().is_relative_to(ROOT / "docs")]
    assert [target for target in outside if not target.startswith("https://")] == []


def test_links_of_the_readme_work_outside_of_the_repository() -> None:
    assert all(target.startswith("https://") for target, _, _ in links(ROOT / "README.md"))
    assert len(links(ROOT / "README.md")) > 5


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=name_of)
def test_named_source_files_exist(document: Path) -> None:
    for path in set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", document.read_text(encoding="utf-8"))):
        assert any((root / path).exists() for root in (SOURCE, ROOT, ROOT / "tests", ROOT / "src")), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    assert len(prose(page).split()) <= WORDS_PER_PAGE


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_every_page_is_in_the_navigation() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(r"'([\w/-]+\.md)'", str(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_every_extra_is_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "reference" / "installation.md").read_text(encoding="utf-8")
    named = {name for names in re.findall(r"torchlake\[([\w,]+)\]", text) for name in names.split(",")}
    assert named == project["optional-dependencies"].keys() - {"test", "docs"}
