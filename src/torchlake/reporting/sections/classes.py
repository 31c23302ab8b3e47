"""Scores and confusions of classes, labels, entity types and answers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchlake.reporting.page import Rows, Section, bounds, cards_of, folded, number

SCORES = 200
"Classes whose scores are shown."
CELLS = 10
"Confusions that are listed; the others are folded."


def of_classes(facts: Mapping[str, Any], rows: Rows) -> Iterable[Section]:
    """Yield scores and confusions of classes, labels, entity types and answers."""
    found = facts["sections"]
    yield "full", "Per class", "parts", _scores(found.get("classes", []), "class")
    yield "full", "Per label", "parts", _scores(found.get("labels", []), "label")
    yield "full", "Per entity type", "parts", _scores(found.get("entities", {}).get("types", []), "type")
    answers = [
        {"questions": one["kind"], "rows": one["rows"], "exact": number(one["mean"])}
        | {"95 % interval": bounds(one["low"], one["high"]), "mean f1": number(one["f1"])}
        for one in found.get("answerable", [])
    ]
    yield "full", "Questions with and without an answer", "grid", answers
    for name, title in (("confusion", "Confusions"), ("confused", "Confused labels"), ("entities", "Confusions")):
        one = found.get(name)
        if one and (one["pairs"] or one.get("counts")):
            yield "full", title, "parts", _confusions(facts, one, rows)


def _scores(entries: Sequence[Mapping[str, Any]], what: str) -> list[tuple[str, Any]]:
    rows = []
    for entry in entries[:SCORES]:
        row = {what: entry["label"], "rows": entry["rows"], "predicted": entry["predicted"]}
        row |= {"partial": entry["partial"]} if "partial" in entry else {}
        for score in ("precision", "recall", "f1"):
            value, low, high = entry[score]
            row[score] = f"{value:.3f} ({low:.3f} to {high:.3f})"
        rows.append(row)
    more = [f"The {SCORES} with the lowest F1 of {len(entries):,}; eval.json has all."] if len(entries) > SCORES else []
    return [("lines", more), ("grid", rows)] if rows else []


def _confusions(facts: Mapping[str, Any], found: Mapping[str, Any], rows: Rows) -> list[tuple[str, Any]]:
    links = {(pair["label"], pair["predicted"]): f"cell-{at}" for at, pair in enumerate(found["pairs"])}
    parts: list[tuple[str, Any]] = []
    if found.get("counts"):
        names, lines = found["labels"], []
        for name, counts in zip(names, found["counts"], strict=True):
            total = max(1, sum(counts))
            cells = [
                {
                    "text": f"{count:,}",
                    "shade": f"{count / total:.2f}",
                    "link": links.get((name, other)) if count else None,
                }
                for other, count in zip(names, counts, strict=True)
            ]
            lines.append((name, cells))
        parts.append(
            ("lines", ["Each row is a true label; shades are shares of its rows. A number leads to its rows."])
        )
        parts.append(("matrix", {"labels": names, "rows": lines}))
    unit = "spans" if facts["kind"] == "spans" else "rows"
    listed = [
        {
            "id": links[pair["label"], pair["predicted"]],
            "title": f"{pair['rows']:,} {unit}: {pair['label']} predicted as {pair['predicted']}",
            "cards": cards_of(facts, rows, pair["list"]),
        }
        for pair in found["pairs"]
    ]
    more = (
        [folded(f"{len(listed) - CELLS:,} further confusions", "cells", listed[CELLS:])] if len(listed) > CELLS else []
    )
    return [*parts, ("cells", listed[:CELLS]), *more]
