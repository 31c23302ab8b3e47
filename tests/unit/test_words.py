"""The documentation and the source have no phrases that read like a translation; see CONTRIBUTING, "Style"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SOURCES = sorted(path for folder in ("src", "tools", "bench", "examples") for path in ROOT.glob(f"{folder}/**/*.py"))
IDIOMS = r"(?!no (?:longer|more|less|later)\b)"
"After a form of `be`; every other `no` has a noun, and then the sentence should say `is not a`."
NOUNS = r"(?:block|class|classifi\w+|col\w+|edit\w+|fi\w+|format|generat\w+|input|mod\w+|protocol|stream|table|task)"
"What `text` may describe: `a text file`."
PHRASES = {
    rf"(?<!there )\b(?:is|are|was|were|be) {IDIOMS}no\b": 'write "is not a"',
    r"(?<!there )(?<!may )\b(?:is|are|was|were|be) (?-i:none)\b(?! of)": "say what is missing or invalid",
    rf"\ba text\b(?!-| {NOUNS}\b)": 'write "text", "a string", "a document" or "a row"',
    r"\ban URL": 'write "a URL"',
    r"\b(?:anew|lies?|lain|mend(?:s|ed)?|nobody|told|unasked|whoever|whence|thence|likewise)\b": "use a current word",
    r"\bof one's own\b": 'write "your own"',
    r"\bhad from\b": 'write "got from"',
    r"(?<!, )\bso many\b(?! that)": "name the number",
    r"\b(?:an)?other \w+ than\b": 'write "... other than"',
    r"\bwithout end\b": 'write "indefinitely"',
    r"\balso (?:after|if|when|where|while)\b": 'write "even if"',
    r"\b(?:goes|went|going) on\b(?! to\b)": 'write "continues"',
}


def text_lines(document: Path) -> Iterator[tuple[int, str]]:
    """Find the lines of a document outside of code, without names in backquotes."""
    fenced = False
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "`", line)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Find the texts of a module: docstrings, messages and comments, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`]*`", "`", node.value)
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|  )# (.*)", line):
            yield number, comment[1]


def faults(lines: Iterator[tuple[int, str]], where: str) -> Iterator[str]:
    """Find the phrases in numbered texts; a phrase may span two lines of a docstring."""
    for number, text in lines:
        for phrase, advice in PHRASES.items():
            for match in re.finditer(phrase, text, re.IGNORECASE):
                line = number + text.count("\n", 0, match.start())
                yield f"{where}:{line}: {' '.join(match[0].split())!r}: {advice}"


def test_documents() -> None:
    found = [fault for path in DOCUMENTS for fault in faults(text_lines(path), str(path.relative_to(ROOT)))]
    assert found == []


def test_docstrings_messages_and_comments() -> None:
    texts = {str(path.relative_to(ROOT)): strings(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert [fault for name, found in texts.items() for fault in faults(found, name)] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("That is no path.", 1),
        ("There is no path, and it is no longer used.", 0),
        ("a label that is none", 1),
        ("If there is none, a text file is read.", 0),
        ("A text is expected.", 1),
        ("in another encoding than UTF-8", 1),
        ("The part lies there, which somebody told us.", 2),
    ],
)
def test_phrases_are_found(text: str, number: int) -> None:
    assert len(list(faults(iter([(1, text)]), "page"))) == number


def test_texts_of_a_module_are_found() -> None:
    source = '"""A docstring\nof a module."""\nraise ValueError(f"{x} is `no` name")  # a comment\n'
    assert list(strings(source)) == [(1, "A docstring\nof a module."), (3, " is ` name"), (3, "a comment")]


def test_code_of_a_document_is_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It `is no` name.\n```\nis no name\n```\nIt is no name.\n", encoding="utf-8")
    assert [fault.split(": ")[0] for fault in faults(text_lines(page), "page")] == ["page:5"]
