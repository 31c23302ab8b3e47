"""The documents name tests, files, pages and extras that exist, and no page takes more than ten minutes to read.

Each test checks one rule in all documents and lists every violation with its file and line.
"""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torchlake"
FAULTS = sorted(ROOT.glob("docs/explanation/faults*.md"))
PAGES = sorted(ROOT.glob("docs/**/*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/*.md")])
REPOSITORY = "https://github.com/torchlake/torchlake"
RAW = "https://raw.githubusercontent.com/torchlake/torchlake/main/"
WORDS_PER_PAGE = 2000
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def lines(document: Path) -> tuple[tuple[str, str], ...]:
    """The place of each line of a document, as file and number, and the line."""
    text, name = document.read_text(encoding="utf-8"), document.relative_to(ROOT)
    return tuple((f"{name}:{number}", line) for number, line in enumerate(text.splitlines(), 1))


class NamedTest(NamedTuple):
    """A test that a line names; an empty name stands for the whole file."""

    place: str
    file: str
    name: str


def named_tests(numbered: tuple[tuple[str, str], ...]) -> Iterator[NamedTest]:
    """Find test files below tests/ and the tests named in them; `::name` alone is in the file named before it."""
    for place, line in numbered:
        file = ""
        for path, name in re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", line) if line.startswith("|") else ():
            file = path or file
            yield NamedTest(place, file, name)


def test_faults_name_tests_that_exist() -> None:
    named = [one for page in FAULTS for one in named_tests(lines(page))]
    missing = []
    for place, file, name in named:
        path = ROOT / "tests" / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not (re.search(rf"^def {name}\(", text, re.MULTILINE) if name else text):
            missing.append(f"{place}: there is no test {file}::{name}")
    assert missing == []
    assert len(named) > 150


def test_named_tests_are_found() -> None:
    numbered = (("page:1", "| `a/test_b.py::test_c`, `::test_d` (slow); `test_e.py` and `x` |"), ("page:2", "`f.py`"))
    assert [one[1:] for one in named_tests(numbered)] == [
        ("a/test_b.py", "test_c"),
        ("a/test_b.py", "test_d"),
        ("test_e.py", ""),
    ]


class Link(NamedTuple):
    """A link of a document to a file of the repository: as written, the file, and the anchor."""

    place: str
    target: str
    file: Path
    anchor: str


def links(document: Path) -> Iterator[Link]:
    """Find the links of a document to files of the repository."""
    for place, line in lines(document):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            local = re.match(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/|{re.escape(RAW)}", target)
            path, _, anchor = (target[local.end() :] if local else target).partition("#")
            if local:
                yield Link(place, target, ROOT / path, anchor)
            elif not target.startswith(("http", "mailto")):
                yield Link(place, target, document.parent / path if path else document, anchor)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings."""
    headings = [line.lstrip("#").strip() for _, line in lines(page) if re.match("#+ ", line)]
    return frozenset(re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings)


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for place, target, file, anchor in (link for document in DOCUMENTS for link in links(document)):
        if not file.exists():
            broken.append(f"{place}: {target} leads to no file")
        elif anchor and anchor not in anchors(file.resolve()):
            broken.append(f"{place}: {target} leads to no heading")
    assert broken == []


def test_links_out_of_the_pages_are_absolute() -> None:
    """The site has the files in docs/ only."""
    outside = [
        f"{link.place}: {link.target}"
        for page in PAGES
        for link in links(page)
        if not link.file.resolve().is_relative_to(ROOT / "docs") and not link.target.startswith("https://")
    ]
    assert outside == []


def test_links_of_the_readme_are_relative_and_become_absolute_in_the_wheel() -> None:
    """On GitHub they lead to files of the same commit, on PyPI to GitHub; test_distribution.py reads the wheel."""
    readme = ROOT / "README.md"
    found = list(links(readme))
    assert [f"{link.place}: {link.target}" for link in found if link.target.startswith("https://")] == []
    assert len(found) > 5
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = hook.with_absolute_links(readme.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert [target for target in targets if target.startswith(RAW)] == re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(targets) >= len(found)


def test_one_page_says_how_to_install() -> None:
    """On the day of the release that page changes; CONTRIBUTING.md names it."""
    install = re.compile(r"pip install (-e )?['\"]?(\.|torchlake)['\"]?(\s|`|$)")
    pages = [page for page in DOCUMENTS if page.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]
    said = {place.partition(":")[0] for page in pages for place, line in lines(page) if install.search(line)}
    assert said == {"docs/reference/installation.md"}


def test_a_search_leads_to_a_section() -> None:
    """The site's search weights headings; these are words that people look for."""
    headings = "\n".join(line.lower() for page in PAGES for _, line in lines(page) if re.match("#+ ", line))
    wanted = (
        *(
            "confusion matrix",
            "errors of rows",
            "troubleshooting",
            "duplicates",
            "leakage",
            "misclassified",
            "serve a model",
        ),
        *("push a model to the hub", "early stopping", "imbalanced classes", "installation", "cross-validate"),
    )
    assert [words for words in wanted if words not in headings] == []


def test_tables_have_no_backslash() -> None:
    """In the code of a cell GitHub leaves a backslash before a bar out, and the site shows it."""
    cells = [place for page in DOCUMENTS for place, line in lines(page) if line.startswith("|") and "\\|" in line]
    assert cells == []


def test_code_has_no_entities() -> None:
    """Between backticks `&#124;` is shown as it is written; `<code>` has the character."""
    found = [
        place
        for page in DOCUMENTS
        for place, line in lines(page)
        if any("&#" in code for code in re.findall(r"`([^`]*)`", line))
    ]
    assert found == []


def test_named_source_files_exist() -> None:
    roots = (SOURCE, ROOT, ROOT / "tests", ROOT / "src")
    missing = [
        f"{place}: there is no file {path}"
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"
        for place, line in lines(document)
        for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", line)
        if not any((root / path).exists() for root in roots)
    ]
    assert missing == []


def test_pages_are_short() -> None:
    """A page is read in ten minutes; code blocks do not count."""
    limits = dict.fromkeys(PAGES, WORDS_PER_PAGE) | {ROOT / "README.md": 900}
    texts = {page: page.read_text(encoding="utf-8") for page in limits}
    words = {page: len((text if page.parent == ROOT else FENCE.sub("", text)).split()) for page, text in texts.items()}
    assert [
        f"{page.relative_to(ROOT)}: {words[page]} words, at most {most}"
        for page, most in limits.items()
        if words[page] > most
    ] == []


def test_every_page_is_in_the_navigation() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(r"'([\w/-]+\.md)'", str(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_every_extra_is_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "reference" / "installation.md").read_text(encoding="utf-8")
    named = {name for names in re.findall(r"torchlake\[([\w,]+)\]", text) for name in names.split(",")}
    assert named == project["optional-dependencies"].keys() - {"test", "docs"}


def test_the_life_of_a_chunk_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "life-of-a-chunk.md").read_text(encoding="utf-8")
    files = re.findall(r"`(\w+(?:/\w+)+\.py)`", text)
    assert len(text.splitlines()) <= 60
    assert len(files) > 25
    assert [name for name in files if not (SOURCE / name).is_file()] == []
