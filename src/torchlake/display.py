"""How results look: one line or a line and short tables, as text and as HTML in a notebook.

The names in them come from users' data: control characters are escaped, what is long is cut in its middle, and HTML is
escaped. The HTML has no style but the alignment of cells, so that it follows the notebook's theme.
"""

import html
import math
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Table = Sequence[Sequence[Any]]
"Rows of cells; the first row has the names of the columns."
Shown = tuple[str, Sequence[Table]]
"The line and the tables of a result."
Class = TypeVar("Class", bound=type)

WIDTH = 110
LINES = 20
HTML_CELL = 300
WIDEST = 80
"Columns of running text."
QUOTED = re.compile(r"(?<!\w)('[^']*'|\"[^\"]*\")(?!\w)")
BLANK = "\0"
"Stands for a blank at which a line may not be broken."


def shown(cls: Class) -> Class:
    """Give a class the text and the HTML of what its method `_shown` returns."""
    for name, function in {"__repr__": _as_text, "__str__": _as_text, "_repr_html_": _as_html}.items():
        setattr(cls, name, function)
    return cls


def count(number: int, noun: str) -> str:
    """Return a number of things: "1 row", "2 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def grid(rows: Table, left: Sequence[int] = (0,)) -> list[str]:
    """Return lines of aligned columns: those in `left` to the left, the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    aligned = (
        [
            f"{cell!s:<{width}}" if at in left else f"{cell!s:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in aligned]


def wrapped(lines: Sequence[str]) -> list[str]:
    """Return the lines, broken between words to fit the terminal and at most 80 columns; continued lines are
    indented.

    A name in quotes stays whole, so that its blanks can be seen.
    """
    width = min(shutil.get_terminal_size().columns, WIDEST) - 1
    whole = (QUOTED.sub(lambda quoted: quoted[0].replace(" ", BLANK), line) for line in lines)
    fitted = (textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in whole)
    return [piece.replace(BLANK, " ") for pieces in fitted for piece in pieces or [""]]


def _as_text(self: Any) -> str:
    line, tables = self._shown()
    name = type(self).__name__
    lines = [f"{name}({_clean(line, WIDTH - len(name) - 2)})"]
    for table in tables:
        rows, more = _first_rows(table, LINES // len(tables) - 3, WIDTH)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        while sum(widths) + 2 * len(widths) > WIDTH:
            widths[widths.index(max(widths))] -= 1
        fitted = [[_short(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        lines += [""] * (table is not tables[0])
        lines += [*grid(fitted, left=_text_columns(rows)), *more]
    return "\n".join(lines)


def _as_html(self: Any) -> str:
    line, tables = self._shown()
    parts = [f"<div><b>{type(self).__name__}</b> {html.escape(_clean(line, HTML_CELL))}</div>"]
    for table in tables:
        rows, more = _first_rows(table, LINES // len(tables) - 3, HTML_CELL)
        left = _text_columns(rows)
        cells = [
            "".join(
                f'<{tag} style="text-align:{"left" if at in left else "right"}">{html.escape(cell)}</{tag}>'
                for at, cell in enumerate(row)
            )
            for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
        ]
        parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
        parts += [f"<div>{line}</div>" for line in more]
    return "\n".join(parts)


def _first_rows(table: Table, most: int, limit: int) -> tuple[list[list[str]], list[str]]:
    """Return the head and the first rows as text, and a line that counts the others if there are any."""
    rows = [[_clean(_formatted(cell), limit) for cell in row] for row in table[: most + 1]]
    left_out = len(table) - len(rows)
    return rows, [f"... {left_out:,} more"] if left_out else []


def _text_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the columns with a cell that is not a number; they are aligned to the left."""
    columns = enumerate(zip(*rows[1:], strict=True))
    return [
        at for at, column in columns if any(cell.strip("-+.,%0123456789e") not in ("", "nan", "inf") for cell in column)
    ]


def _formatted(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4f}" if 1e-3 <= abs(value) < 1e9 or value == 0 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _clean(text: str, limit: int) -> str:
    """Return the text in at most `limit` characters, without line breaks and other control characters."""
    visible = (c if c.isprintable() else ascii(c)[1:-1] for c in _short(text, 4 * limit))
    return _short("".join(visible), limit)


def _short(text: str, limit: int) -> str:
    """Return the text, cut in its middle if it is longer."""
    end = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[: limit - 3 - end]}...{text[len(text) - end :]}"


def plain(value: Any) -> Any:
    """Convert `value` to what strict JSON allows: dataclasses as objects, paths as strings, NaN as null, no numpy
    types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
