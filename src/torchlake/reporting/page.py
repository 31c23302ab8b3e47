"""The frame of every page: style, tables, pictures and cards of rows; `page.html` is the template.

A page is self-contained: inline style, pictures as inline SVG (`figures.py`), nothing loaded from elsewhere. Only the
filter box of an evaluation's page has a script. The template escapes every text.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from torchlake.reporting import figures

Section = tuple[str, str, str, Any]
"A class of CSS, the title, the macro that draws the content, and the content; without content it is left out."
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
