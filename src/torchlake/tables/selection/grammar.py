"""Parse the text of a condition, a small part of SQL:

    any    all [or all]...                  all    not [and not]...
    not    [not] test                       test   (any), a column that is true or false, or
           column = value                   also != <> < <= > >=, or value = column
           column [not] in (value, ...)     column [not] between value and value
           column is [not] null             column [not] like 'text%'
    value  3, -0.5, 1e3, 'text' (a quote inside is doubled), true, false
    column a name, or "any name" or `any name` in quotes

Keywords may have any case; names keep theirs. An error shows its place in the text.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, cast

from torchlake.errors import UsageError
from torchlake.tables.selection.conditions import (
    Both,
    Column,
    Compares,
    Condition,
    Either,
    IsNull,
    Like,
    Not,
    OneOf,
    Operator,
)

MAX_DEPTH = 100
"Maximum nesting of parentheses and `not`."
WORDS = frozenset({"and", "or", "not", "in", "is", "null", "like", "between", "true", "false"})
FLIPPED: dict[str, Operator] = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_TOKENS = re.compile(
    r"""(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
    |(?P<name>[^\W\d]\w*)
    |(?P<sign><>|<=|>=|!=|[=<>(),])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    kind: str
    "number, text, name, end, or the keyword or sign itself."
    value: str
    at: int


def parse(text: str) -> Condition:
    """Return the condition in `text`. Raises UsageError showing the place of a mistake."""
    parser = _Parser(text)
    condition = parser.any_of()
    parser.take("end", "and, or, or the end")
    return condition


def mistake(text: str, at: int, problem: str) -> str:
    """Return a message with the text and a mark below the place of the problem."""
    line = re.sub(r"\s", " ", text)
    return f"where, character {at + 1}: {problem}\n  {line}\n  {' ' * at}^"


def _tokens(text: str) -> list[Token]:
    found, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TOKENS.match(text, at)
        if match is None:
            unclosed = {"'": "the closing quote of a string is missing", '"': "the closing quote of a name is missing"}
            problem = unclosed.get(text[at], f"{text[at]!r} cannot be used in a condition")
            raise UsageError(mistake(text, at, f"{problem}."))
        kind, value = cast(str, match.lastgroup), match[0]
        if kind in ("text", "quoted"):
            kind, value = "text" if kind == "text" else "name", value[1:-1].replace(value[0] * 2, value[0])
        elif kind == "sign" or (kind == "name" and value.lower() in WORDS):
            kind = value = {"<>": "!="}.get(value, value.lower())
        found.append(Token(kind, value, at))
        at = match.end()
    return [*found, Token("end", "", len(text))]


class _Parser:
    """A parser that reads tokens from left to right; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.place = self.depth = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.place]

    def skip(self, *kinds: str) -> bool:
        """Take the next tokens if they are of these kinds; return whether they are."""
        same = [token.kind for token in self.tokens[self.place : self.place + len(kinds)]] == [*kinds]
        self.place += len(kinds) * same
        return same

    def take(self, kind: str, expected: str) -> Token:
        if self.next.kind != kind:
            raise self.unexpected(expected)
        self.place += 1
        return self.tokens[self.place - 1]

    def unexpected(self, expected: str) -> UsageError:
        token = self.next
        given = "the condition ends" if token.kind == "end" else f"got {token.value!r}"
        hint = " Compare with a single =." if token.kind == "=" and self.tokens[self.place - 1].kind == "=" else ""
        return UsageError(mistake(self.text, token.at, f"expected {expected}, but {given}.{hint}"))

    def any_of(self) -> Condition:
        parts = [self.all_of()]
        while self.skip("or"):
            parts.append(self.all_of())
        return parts[0] if len(parts) == 1 else Either(parts=tuple(parts))

    def all_of(self) -> Condition:
        parts = [self.negated()]
        while self.skip("and"):
            parts.append(self.negated())
        return parts[0] if len(parts) == 1 else Both(parts=tuple(parts))

    def negated(self) -> Condition:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UsageError(mistake(self.text, self.next.at, f"nested more than {MAX_DEPTH} deep."))
        found = Not(part=self.negated()) if self.skip("not") else self.test()
        self.depth -= 1
        return found

    def test(self) -> Condition:
        if self.skip("("):
            found = self.any_of()
            self.take(")", "and, or, or ')'")
            return found
        if self.next.kind in ("number", "text", "true", "false"):
            value, operator = self.value(), self.operator()
            return Compares(column=self.column("a column"), operator=FLIPPED[operator], value=value)
        column = self.column("a column, not, or '('")
        if self.skip("is"):
            negative = self.skip("not")
            self.take("null", "null or not null")
            return Not(part=IsNull(column=column)) if negative else IsNull(column=column)
        negative = self.skip("not")
        rules: dict[str, Callable[[Column], Condition]] = {
            "in": self.one_of,
            "like": self.like,
            "between": self.between,
        }
        rule = rules.get(self.next.kind)
        if rule is not None:
            self.place += 1
            found = rule(column)
            return Not(part=found) if negative else found
        if negative:
            raise self.unexpected("in, like or between")
        if self.next.kind in FLIPPED:
            return Compares(column=column, operator=self.operator(), value=self.value())
        return Compares(column=column, operator="=", value=True)

    def one_of(self, column: Column) -> Condition:
        self.take("(", "'('")
        values = [self.value()]
        while self.skip(","):
            values.append(self.value())
        self.take(")", "',' or ')'")
        return OneOf(column=column, values=tuple(values))

    def like(self, column: Column) -> Condition:
        return Like(column=column, pattern=self.take("text", "a pattern in single quotes").value)

    def between(self, column: Column) -> Condition:
        low = self.value()
        self.take("and", "and")
        bounds = Compares(column=column, operator=">=", value=low)
        return Both(parts=(bounds, Compares(column=column, operator="<=", value=self.value())))

    def column(self, expected: str) -> Column:
        token = self.take("name", expected)
        return Column(name=token.value, at=token.at)

    def operator(self) -> Operator:
        if self.next.kind not in FLIPPED:
            raise self.unexpected("a comparison (= != < <= > >=)")
        self.place += 1
        return cast(Operator, self.tokens[self.place - 1].kind)

    def value(self) -> Any:
        token = self.next
        if token.kind == "null":
            problem = "a comparison with null is never true. Write 'is null' or 'is not null'."
            raise UsageError(mistake(self.text, token.at, problem))
        if token.kind == "name":
            problem = f"expected a value, but got {token.value!r}. Write a string in single quotes, '{token.value}'."
            raise UsageError(mistake(self.text, token.at, problem))
        if token.kind not in ("number", "text", "true", "false"):
            raise self.unexpected("a number, a string in single quotes, true or false")
        self.place += 1
        if token.kind in ("true", "false"):
            return token.kind == "true"
        if token.kind == "text":
            return token.value
        whole = re.fullmatch(r"[+-]?\d+", token.value)
        return int(token.value) if whole else Decimal(token.value)
