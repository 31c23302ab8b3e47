"""The page of a comparison, compare.html: differences, tests, rows won and lost; of runs, settings and curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.redaction import redacted
from torchlake.reporting import figures
from torchlake.reporting.page import (
    PageFrame,
    Rows,
    Section,
    cards_of,
    duration,
    render_page,
    shortened,
    shown_rows,
    shown_value,
)
from torchlake.tables.failures import format_reasons


def write_comparison(folder: Path, facts: Mapping[str, Any], lists: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write compare.html and compare.json.

    `lists` has for each further model the numbers of the rows that it won and lost, in the first model's `file` of
    rows, and what it `said` of them.
    """
    wanted = [place for one in lists for word in ("won", "lost") for place in one[word]]
    facts = redacted({**facts, "written": datetime.now(UTC).isoformat(timespec="seconds")})
    made = {"columns": atomic_io.read_json(file.with_name("eval.json"))["made"].get("columns")}
    page = render_comparison({**facts, "made": made}, shown_rows(file, wanted), lists)
    atomic_io.write_bytes(folder / "compare.html", page.encode(), site="comparison.page")
    atomic_io.write_json(folder / "compare.json", facts, site="comparison.facts")


def render_comparison(facts: Mapping[str, Any], rows: Rows, lists: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    about = facts["about"]
    differences = []
    for one in facts["differences"]:
        known = {name: math.nan if value is None else value for name, value in one.items()}  # as JSON has NaN
        entry = {name: known[name] for name in ("metric", "model")}
        entry |= {name: f"{known[name]:.4f}" for name in ("first", "value")}
        entry |= {"difference": f"{known['difference']:+.4f}"}
        entry |= {"95 % interval": f"{known['low']:+.4f} to {known['high']:+.4f}", "verdict": verdict(known)}
        differences.append(entry)
    sections: list[Section] = [
        ("full", "Differences from the first model", "grid", differences),
        ("full", "Rows", "parts", _pairs(facts["pairs"])),
        ("full", "Rows that are left out", "parts", _left_out(facts["failed"])),
        ("full", "Settings that differ", "grid", _settings(facts["models"], about.get("settings", {}))),
        *([("full", "Curves", "figures", _curves(about["curves"]))] if about.get("curves") else []),
        *(
            ("full", f"Rows that {one['model']} {word}", "cards", _cards(facts, rows, one[word], one["said"]))
            for one in lists
            for word in ("won", "lost")
        ),
    ]
    has_rows = any(one[word] for one in lists for word in ("won", "lost"))
    if has_rows:
        sections.insert(
            4 + bool(about.get("curves")), ("full", "Find rows", "filter", "Show only rows with these words:")
        )
    spent = zip(facts["models"], about.get("seconds", []), strict=False)
    names = distinct_names(facts["models"])
    seconds = [(f"in steps: {names[model]}", duration(some)) for model, some in spent]
    frame = PageFrame(
        title="Comparison of models",
        subtitle=f"first: {facts['models'][0]}; compared with it: {', '.join(facts['models'][1:])}",
        state=f"{facts['rows']:,} rows",
        written=facts["written"],
        tiles=[("rows", f"{facts['rows']:,}"), ("left out", f"{facts['left_out']:,}"), *seconds],
        has_filter=has_rows,
    )
    return render_page(frame, sections)


def verdict(one: Mapping[str, Any]) -> str:
    """Return better, worse, that the interval includes no difference, or that there is no interval."""
    if math.isnan(one["low"] + one["high"]):
        return "undefined"
    if one["low"] <= 0 <= one["high"]:
        return "no difference shown"
    return "better" if (one["low"] > 0) == (one["better"] == "higher") else "worse"


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    table = []
    for pair in pairs:
        entry = {"model": pair["model"], "same prediction": f"{pair['agreement']:.1%}"}
        entry |= {"won": f"{pair['won']:,}", "lost": f"{pair['lost']:,}"}
        entry |= {"McNemar's p": f"{pair['p']:.4g}"} if "p" in pair else {}
        entry |= {"corrected (Holm)": f"{pair['p_holm']:.4g}"} if "p_holm" in pair else {}
        table.append(entry)
    return [
        ("lines", ["Won: wrong in the first model, right in this one; of numbers, closer. Lost: the reverse."]),
        ("grid", table),
    ]


def _left_out(failed: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    table = [
        {"model": one["model"], "rows": one["rows"], "because of": ", ".join(format_reasons(one["errors"]))}
        for one in failed
    ]
    rows = [{"row": row["key"], "model": one["model"], "error": row["error"]} for one in failed for row in one["first"]]
    details = {"title": "The first rows", "form": "grid", "content": rows}
    return [("grid", table), ("details", details)] if table else []


def distinct_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the ends of paths by which they differ."""
    every = list(dict.fromkeys(paths))
    for depth in range(1, max(len(Path(one).parts) for one in every)):
        names = {one: "/".join(Path(one).parts[-depth:]) for one in every}
        if len({*names.values()}) == len(every):
            return names
    return dict(zip(every, every, strict=True))


def _settings(models: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        {"setting": name, **{model: shown_value(name, one) for model, one in zip(models, values, strict=True)}}
        for name, values in settings.items()
    ]


def _curves(curves: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str] | None]:
    drawn = []
    for name, series in curves.items():
        names = distinct_names(series)
        named = {names[run]: points for run, points in series.items()}
        ends = "; ".join(f"{run} ends at {points[-1][1]:.4g}" for run, points in named.items())
        title = name.replace("_", " ").capitalize()
        drawn.append(figures.picture(title, ends, figures.lines(named, x="step", y="", smooth=True)))
    return drawn


def _cards(
    facts: Mapping[str, Any], rows: Rows, places: Sequence[int], said: Mapping[int, Any]
) -> list[dict[str, Any]]:
    shown = cards_of(facts, rows, places)
    for card, place in zip(shown, places, strict=True):
        card["facts"].append(("this model's prediction", shortened(str(said.get(place))), ""))
    return shown
