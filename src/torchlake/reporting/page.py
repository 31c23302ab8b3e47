"""The frame of every page: style, tables, pictures and cards of rows; `page.html` is the template.

A page is self-contained: inline style, pictures as inline SVG (`figures.py`), nothing loaded from elsewhere. Only the
filter box of an evaluation's page has a script. The template escapes every text.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from torchlake.reporting import figures

Section = tuple[str, str, str, Any]
"A class of CSS, the title, the macro that draws the content, and the content; without content it is left out."
CHARACTERS = 600
"Of a cell on the page; of longer ones the beginning, or the part around a span or an answer."
Rows = Mapping[int, Mapping[str, Any]]
"Rows of rows.parquet by number."
FILTER = """const box=document.getElementById("filter"),cards=[...document.querySelectorAll("[data-row]")];
box.addEventListener("input",()=>{const words=box.value.toLowerCase().split(/\\s+/);let n=0;for(const card of cards){
const text=card.textContent.toLowerCase();n+=!(card.hidden=!words.every(word=>text.includes(word)))}
document.getElementById("found").textContent=box.value?n+" of "+cards.length+" rows":""})"""


@dataclass(frozen=True, kw_only=True)
class PageFrame:
    """What a page says besides its sections."""

    title: str
    subtitle: str
    state: str
    "A word or number that stands out in the subtitle."
    written: str
    tiles: Sequence[tuple[str, str]]
    "Main numbers, each with its name."
    has_filter: bool = False
    notes: Sequence[str] = ()


def render_page(frame: PageFrame, sections: Sequence[Section]) -> str:
    """Return the HTML of a page."""
    hashed = base64.b64encode(hashlib.sha256(FILTER.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += f"; script-src 'sha256-{hashed}'" if frame.has_filter else ""
    shown = [one for one in sections if one[3]]
    drawn = figures.is_available() or not any(map(_wants_pictures, sections))
    return _template().render(
        frame=frame,
        sections=shown,
        shown=shown_value,
        policy=policy,
        script=FILTER,
        missing="" if drawn else figures.MISSING,
    )


def _wants_pictures(section: Section) -> bool:
    return section[2] == "figures" or (section[2] == "parts" and any(form == "figures" for form, _ in section[3]))


@cache
def _template() -> Template:
    templates = Environment(
        loader=PackageLoader("torchlake.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return templates.get_template("page.html")


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are empty or off."""
    kept = {name: given(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return {name: value for name, value in kept.items() if value is not False and value not in (None, "", [], {})}


def shown_value(name: str, value: Any) -> str:
    """Return a value as text; names with "bytes" or "memory" are sizes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and ("bytes" in name or "memory" in name):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 else f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return ", ".join(shown_value(name, item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown_value(key, item)}" for key, item in value.items())
    return str(value)


def duration(seconds: float) -> str:
    """Return seconds as text."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def number(value: float | None) -> str:
    """Return a metric as text."""
    return "-" if value is None else f"{value:.4f}"


def bounds(low: float | None, high: float | None) -> str:
    """Return an interval as text."""
    return "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def folded(title: str, form: str, content: Any) -> tuple[str, Any]:
    """Return content that is closed until it is clicked."""
    return "details", {"title": title, "form": form, "content": content}


MARKED = ("label", "prediction", "suggested")
"The columns whose spans are marked."

# Cards: the rows that a page shows, each with its facts and texts.


def shown_rows(path: Path, places: Iterable[int]) -> Rows:
    """Return some rows of rows.parquet by number, without those columns that the page does not show."""
    wanted, found, first = np.unique(np.array(list(places), dtype=np.int64)), dict[int, Any](), 0
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name != "probabilities"]
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            inside = wanted[(wanted >= first) & (wanted < first + rows)]
            if len(inside):
                some = file.read_row_group(group, columns=names).take(pa.array(inside - first))
                found |= dict(zip(inside.tolist(), some.to_pylist(), strict=True))
            first += rows
    return found


def cards_of(facts: Mapping[str, Any], rows: Rows, places: Sequence[int]) -> list[dict[str, Any]]:
    """Return the facts and the texts of some rows of an evaluation, in the form that the page shows."""
    return [_card(facts["kind"], rows[place], facts["made"].get("columns")) for place in places]


def _card(kind: str, row: Mapping[str, Any], inputs: Sequence[str] | None) -> dict[str, Any]:
    """Return the facts and the texts of a row; spans and answers are marked in the last input."""
    columns = list(row)
    shown = [(columns[0], str(row[columns[0]]), "")]
    for name in ("label", "prediction", "suggested", "probability", "score", "loss", "tokens", "truncated"):
        value = row.get(name)
        left_out = kind == "texts" and name in ("label", "prediction")
        left_out |= (name == "truncated" and value is False) or (name == "suggested" and value == row["label"])
        if value is not None and not left_out:
            wrong = name == "prediction" and row.get("right") is False
            shown.append((name, _value(value), "bad" if wrong else ""))
    after = columns[columns.index("error") + 1 :] if "error" in columns else []
    hidden = ("label_quality", "label_issue", "suggested", "trained_on", "random")
    written = [("expected", row["label"]), ("written", row["prediction"])] if kind == "texts" else []
    texts = [(name, [(shortened(text), False)]) for name, text in written]
    kept = [name for name in after if name not in hidden and row[name] is not None]
    texts += [(name, _marked(kind if inputs and name == inputs[-1] else "", row, row[name])) for name in kept]
    return {"facts": shown, "texts": texts}


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        found = value.get("text") or value.get("label") or "no answer"
        return " | ".join(map(str, found)) if isinstance(found, list) else str(found)
    if isinstance(value, list):
        if value and isinstance(value[0], Mapping):
            return ", ".join(f"{one['label']} {one['start']}-{one['end']}" for one in value)
        return ", ".join(map(str, value)) or "no label"
    return shortened(str(value))


def _marked(kind: str, row: Mapping[str, Any], value: Any) -> list[tuple[str, bool]]:
    """Return a cell in pieces, each marked or not."""
    text = value if isinstance(value, str) else str(value)
    places: list[tuple[int, int]] = []
    if kind == "spans" and isinstance(value, str):
        places = sorted({(one["start"], one["end"]) for name in MARKED for one in row.get(name) or []})
    elif kind == "answers" and isinstance(row.get("prediction"), str) and row["prediction"]:
        start = text.find(row["prediction"])
        places = [(start, start + len(row["prediction"]))] if start >= 0 else []
    if not places:
        return [(shortened(text), False)]
    first = max(0, places[0][0] - CHARACTERS // 2)
    pieces, at = [("... " if first else "", False)], first
    for start, stop in places:
        if start >= at and stop <= first + CHARACTERS:
            pieces += [(text[at:start], False), (text[start:stop], True)]
            at = stop
    return [*pieces, (text[at : first + CHARACTERS] + ("..." if len(text) > first + CHARACTERS else ""), False)]


def shortened(text: str) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}... ({len(text):,} characters)"
