"""The page of an evaluation, eval.html: what eval.json says, with the texts of a few rows of rows.parquet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.reporting.page import (
    PageFrame,
    Rows,
    Section,
    bounds,
    cards_of,
    given,
    number,
    render_page,
    shortened,
    shown_rows,
)
from torchlake.reporting.sections.classes import of_classes
from torchlake.reporting.sections.numbers import cosines, histograms, of_numbers, perplexity, positions
from torchlake.reporting.sections.probabilities import calibration, coverage, threshold

LISTED = (("worst", "The worst rows"), ("surest_wrong", "The surest wrong rows"), ("least_sure", "The least sure rows"))
LOSSES = {
    "classes": "loss: the negative logarithm of the probability of the label",
    "labels": "loss: the mean cross entropy of the labels",
    "number": "loss: the absolute difference",
    "spans": "loss: missed and spurious spans",
    "answers": "loss: 1 - F1 of words",
    "texts": "loss: 1 - F1 of words",
    "language": "loss: the mean over the tokens of the text",
    "vectors": "loss: the rank of the second text (prediction: the nearest one), or the difference from the similarity",
}


def write_page(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write eval.html into the folder of an evaluation."""
    file = folder / "rows.parquet"
    rows = shown_rows(file, _places(facts["sections"])) if file.is_file() else {}
    atomic_io.write_bytes(folder / "eval.html", render_evaluation(facts, rows).encode(), site="evaluation.page")


def render_evaluation(facts: Mapping[str, Any], rows: Rows) -> str:
    """Return the page for the values of eval.json; `rows` are those of rows.parquet that it lists."""
    found, made = facts["sections"], facts["made"]
    left = facts["rows"] - facts["failed"]
    tiles = [("rows", f"{facts['rows']:,}")]
    headline = list(facts["metrics"].items())[:3]
    tiles = [(name.replace("_", " "), number(one["value"])) for name, one in headline] + tiles
    lists = [
        (
            "full",
            title,
            "parts",
            [("lines", [LOSSES.get(facts["kind"], "")]), ("cards", cards_of(facts, rows, found[name]))],
        )
        for name, title in LISTED
        if found.get(name)
    ]
    sections: list[Section] = [
        ("full", "Metrics", "parts", _metrics(facts)),
        *of_classes(facts, rows),
        *of_numbers(found),
        ("full", "Retrieval by rank", "grid", found.get("retrieval", [])),
        ("full", "Cosines of pairs", "parts", cosines(found.get("cosines"))),
        ("full", "Loss by position in the text", "grid", positions(found.get("positions", []))),
        ("full", "Calibration", "parts", calibration(found.get("calibration"))),
        ("full", "Threshold", "parts", threshold(found.get("threshold", []))),
        ("full", "If the least sure rows go to a person", "parts", coverage(found.get("coverage", []))),
        ("full", "By slice", "parts", _slices(found.get("slices"), facts["kind"])),
        *([("full", "Find rows", "filter", "Show only rows with these words:")] if lists else []),
        *lists,
        ("full", "Labels to look at", "parts", _hints(facts, rows)),
        ("full", "Rows that the model was trained on", "parts", _trained(facts, rows)),
        ("full", "Lengths and scores", "parts", histograms(found.get("histograms", {}))),
        ("full", "How it was made", "rows", given({**made, "columns": made.get("columns", [])})),
    ]
    failed = f"{facts['failed']:,} of {facts['rows']:,} rows are in no metric. " if facts["failed"] else ""
    cut = facts["truncated"]
    failed += f"{cut:.1%} of the rows are truncated: the model did not read their ends." if cut else ""
    frame = PageFrame(
        title=f"Evaluation of {facts['title']}",
        subtitle=f"{made['task']} on {made['table'] if isinstance(made['table'], str) else ', '.join(made['table'])}",
        state=f"{left:,} rows measured",
        written=facts["written"],
        tiles=tiles,
        has_filter=bool(lists),
        notes=[failed] if failed else [],
    )
    return render_page(frame, sections)


def _places(found: Mapping[str, Any]) -> list[int]:
    """Return the numbers of all rows that the page lists."""
    pairs = [pair for name in ("confusion", "confused", "entities") for pair in found.get(name, {}).get("pairs", [])]
    lists = [found.get(name, []) for name, _ in LISTED] + [pair["list"] for pair in pairs]
    lists += [found.get(name, {}).get("list", []) for name in ("hints", "trained")]
    return [place for places in lists for place in places]


def _metrics(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    base = facts["sections"].get("baseline", {"metrics": {}})
    before = {"metrics": {}, **facts["sections"].get("untrained", {})}
    table = []
    for name, one in facts["metrics"].items():
        entry = {"metric": name, "value": number(one["value"]), "95 % interval": bounds(one["low"], one["high"])}
        if base["metrics"]:
            entry["without a model"] = number(base["metrics"].get(name))
        if before["metrics"]:
            entry["before training"] = number(before["metrics"].get(name))
        table.append(entry)
    lines = [f"Without a model: {base['answer']}."] if base["metrics"] else []
    lines += [f"Before training: the base model, {before['base']}."] if before["metrics"] else []
    lines += [f"The base model is not measured: {before['left_out']}."] if "left_out" in before else []
    reasons = [{"rows left out because of": reason, "rows": rows} for reason, rows in facts["errors"].items()]
    return [("grid", table), ("lines", lines), ("grid", reasons)]


def _slices(found: Mapping[str, Any] | None, kind: str) -> list[tuple[str, Any]]:
    if not found:
        return []
    table = [
        {
            "slice": one["slice"],
            "value": shortened(one["value"]),
            "rows": one["rows"],
            found["unit"]: number(one["mean"]),
        }
        | ({"perplexity": perplexity(one["mean"])} if kind == "language" else {})
        | {"95 % interval": bounds(one["low"], one["high"]), "lost": f"{round(one['lost'], 1) + 0.0:+.1f}"}
        | {"note": "few rows" if one["small"] else ""}
        for one in found["slices"]
    ]
    cut = [f"{values:,} values of {name}" for name, values in found.get("cut", {}).items()]
    lines = [
        *([f"Only the most frequent of {', '.join(cut)} were looked at."] if cut else []),
        f"{found['looked_at']:,} slices were looked at, and some look bad by chance: these are proposals, not proof.",
        "Lost: what a slice loses against the average of all rows.",
    ]
    return [("lines", lines), ("grid", table)]


def _hints(facts: Mapping[str, Any], rows: Rows) -> list[tuple[str, Any]]:
    found = facts["sections"].get("hints")
    if not found:
        return []
    what = "texts with words" if facts["kind"] == "spans" else "labels"
    lines = [f"{found['rows']:,} {what} to look at, by {found['by']}; the least likely first."]
    if found["by"].startswith("the probability"):
        lines.append("With cleanlab (torchlake[hints]) they are chosen by confident learning.")
    return [("lines", lines), ("cards", cards_of(facts, rows, found["list"]))]


def _trained(facts: Mapping[str, Any], rows: Rows) -> list[tuple[str, Any]]:
    found = facts["sections"].get("trained")
    if not found:
        return []
    line = f"{found['rows']:,} of {found['of']:,} rows have the inputs of a row of the training table, to the letter. "
    line += "What the model says of them does not show what it says of new ones." if found["rows"] else ""
    return [("lines", [line]), ("cards", cards_of(facts, rows, found["list"]))]
