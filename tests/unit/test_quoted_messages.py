"""Messages that the documentation quotes are in the source, word for word: readers search for them.

A page quotes a message in one of three places: the first column of a table whose header is `message`, bold code at the
beginning of a paragraph or list item, and a line of a code block that begins with `error:` or `warning:`. In a quote,
`...` stands for words that are left out.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
)
HOLE, OMITTED = "\0", "\1"
"Stand for a value that the code puts into a message, and for words that a quote leaves out."
SHARE = 0.4
"The least share of a quote that has to be the message's own words, not values."
MAX_VALUE = 24
"The most letters of a value in a quote; longer ones are left out."
VALUE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrfg]")
CODE = re.compile(r"`([^`]+)`")
BOLD = re.compile(r"^(?:[-*] |\d+\. )?\*\*`([^`]+)`\*\*")
PRINTED = re.compile(r"^(?:error|warning): (.+)")
IN_QUOTES = re.compile(r"^(?:[-*] (?:\*\*)?|\*\*)\"")


class Quote(NamedTuple):
    """A message that a document quotes."""

    place: str
    text: str


def quotes(name: str, text: str) -> Iterator[Quote]:
    """Find the messages that a document quotes; `name` is its path."""
    fenced, header = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{name}:{number}"
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            yield from (Quote(place, one) for one in PRINTED.findall(line))
        elif line.startswith("|"):
            first = line.split("|")[1].strip()
            header = header or first
            yield from (Quote(place, one) for one in CODE.findall(first) if header == "message" and " " in one)
        else:
            header = ""
            yield from (Quote(place, one) for one in BOLD.findall(line) if " " in one)


def messages(source: str) -> Iterator[str]:
    """Find the strings of a module that are not docstrings, with HOLE for each value."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings:
            yield " ".join(VALUE.sub(HOLE, _template(node)).split())


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return HOLE


@cache
def all_messages() -> tuple[str, ...]:
    """All strings of the source that have two words or more."""
    found = {text for path in ROOT.glob("src/**/*.py") for text in messages(path.read_text(encoding="utf-8"))}
    return tuple(sorted(text for text in found if " " in text))


def share(quote: str, message: str) -> float:
    """Return the share of a quote's letters that are a message's own, not values; 0 if it is not a part of it."""
    # The most own letters so far, by position in the message and letters of the value at it.
    best: dict[tuple[int, int], int] = {(at, 0): 0 for at in range(len(message) + 1)}
    for letter in quote:
        following: dict[tuple[int, int], int] = {}

        def reach(at: int, value: int, own: int, following: dict[tuple[int, int], int] = following) -> None:
            following[at, value] = max(own, following.get((at, value), 0))

        for (at, value), own in sorted(best.items()):
            if letter == OMITTED:
                for later in range(at, len(message) + 1):
                    reach(later, 0, own)
                continue
            if message[at : at + 1] == HOLE:
                if value < MAX_VALUE:
                    reach(at, value + 1, own)
                at += 1
            if message[at : at + 1] == HOLE:
                reach(at, 1, own)
            elif message[at : at + 1] == letter:
                reach(at + 1, 0, own + 1)
        best = following
    return max(best.values(), default=0) / len(quote.replace(OMITTED, ""))


def is_said(quote: str, said: tuple[str, ...]) -> bool:
    """Return whether a quote is a part of one of the messages, or of two that are joined by a colon."""
    text = " ".join(quote.replace("...", OMITTED).split())
    words = set(re.findall(r"\w{3,}", text))
    for message in said:
        if len(words & set(re.findall(r"\w{3,}", message))) * 3 >= len(words) and share(text, message) >= SHARE:
            return True
    return any(
        is_said(text[: match.end()], said) and is_said(text[match.end() :], said) for match in re.finditer(": ", text)
    )


def test_quoted_messages_are_in_the_source() -> None:
    found = [quote for path in DOCUMENTS for quote in quotes(str(path.relative_to(ROOT)), path.read_text("utf-8"))]
    assert [f"{place}: no message is {text!r}" for place, text in found if not is_said(text, all_messages())] == []
    assert len(found) > 25


def test_messages_are_not_quoted_in_other_ways() -> None:
    """The first test would not see a message in quotation marks."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: write a message as bold code: {line[:60]}"
        for path in DOCUMENTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if IN_QUOTES.match(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("scored: being written by pid 7 on host", True),
        ("being written by", True),
        ("Wait for it ... work is kept", True),
        ("scored: written by pid 7", False),
        ("Wait for it, or end it; finished work is kept.", False),
        ("scored: locked by pid 7 on host since noon", False),
        ("where, character 3: there is no column 'star'", True),
        ("where, character 3: this table has no column 'star'", False),
    ],
)
def test_a_message_with_other_words_is_not_found(quote: str, expected: bool) -> None:
    source = '''
def fail(name, holder, at, column):
    """A docstring: locked by pid 7 on host since noon."""
    log.warning("where, character %d: %s", at, f"there is no column {column!r}.")
    raise Locked(f"{name}: being written by {holder}. " "Wait for it, or stop it; finished work is kept.")
'''
    assert is_said(quote, tuple(messages(source))) is expected


def test_quotes_are_found() -> None:
    text = """
**`a first`** (exit code 65). Not `this one`, nor **`word`**.

| message | what to do |
|---|---|
| `a second` or `a third` | not `this one` |

| field | meaning |
|---|---|
| `not this` | |

- **`a fourth`**: and `not this`.

```text
warning: a fifth
not this
```
"""
    assert [quote.text for quote in quotes("page", text)] == ["a first", "a second", "a third", "a fourth", "a fifth"]
