"""The page of an evaluation, eval.html: what eval.json says, with the texts of a few rows of rows.parquet."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.reporting import figures
from torchlake.reporting.page import PageFrame, Rows, Section, cards_of, given, render_page, shortened, shown_rows

SCORES = 200
"Classes whose scores are shown."
CELLS = 10
"Confusions that are listed; the others are folded."
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
    tiles = [(name.replace("_", " "), _number(one["value"])) for name, one in headline] + tiles
    lists = [
        (
            "full",
            title,
            "parts",
            [("lines", [LOSSES.get(facts["kind"], "")]), ("cards", cards_of(facts["kind"], rows, found[name]))],
        )
        for name, title in LISTED
        if found.get(name)
    ]
    sections: list[Section] = [
        ("full", "Metrics", "parts", _metrics(facts)),
        *_of_classes(facts, rows),
        *_of_numbers(found),
        ("full", "Retrieval by rank", "grid", found.get("retrieval", [])),
        ("full", "Cosines of pairs", "parts", _cosines(found.get("cosines"))),
        ("full", "Loss by position in the text", "grid", _positions(found.get("positions", []))),
        ("full", "Calibration", "parts", _calibration(found.get("calibration"))),
        ("full", "Threshold", "parts", _threshold(found.get("threshold", []))),
        ("full", "If the least sure rows go to a person", "parts", _coverage(found.get("coverage", []))),
        ("full", "By slice", "parts", _slices(found.get("slices"), facts["kind"])),
        *([("full", "Find rows", "filter", "Show only rows with these words:")] if lists else []),
        *lists,
        ("full", "Labels to look at", "parts", _hints(facts, rows)),
        ("full", "Rows that the model was trained on", "parts", _trained(facts, rows)),
        ("full", "Lengths and scores", "parts", _histograms(found.get("histograms", {}))),
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _metrics(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    base = facts["sections"].get("baseline", {"metrics": {}})
    table = []
    for name, one in facts["metrics"].items():
        entry = {"metric": name, "value": _number(one["value"]), "95 % interval": _range(one["low"], one["high"])}
        if base["metrics"]:
            entry["without a model"] = _number(base["metrics"].get(name))
        table.append(entry)
    lines = [f"Without a model: {base['answer']}."] if base["metrics"] else []
    reasons = [{"rows left out because of": reason, "rows": rows} for reason, rows in facts["errors"].items()]
    return [("grid", table), ("lines", lines), ("grid", reasons)]


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


def _of_classes(facts: Mapping[str, Any], rows: Rows) -> Iterable[Section]:
    """Yield scores and confusions of classes, labels, entity types and answers."""
    found = facts["sections"]
    yield "full", "Per class", "parts", _scores(found.get("classes", []), "class")
    yield "full", "Per label", "parts", _scores(found.get("labels", []), "label")
    yield "full", "Per entity type", "parts", _scores(found.get("entities", {}).get("types", []), "type")
    answers = [
        {"questions": one["kind"], "rows": one["rows"], "exact": _number(one["mean"])}
        | {"95 % interval": _range(one["low"], one["high"]), "mean f1": _number(one["f1"])}
        for one in found.get("answerable", [])
    ]
    yield "full", "Questions with and without an answer", "grid", answers
    for name, title in (("confusion", "Confusions"), ("confused", "Confused labels"), ("entities", "Confusions")):
        one = found.get(name)
        if one and (one["pairs"] or one.get("counts")):
            yield "full", title, "parts", _confusions(facts, one, rows)


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
    listed = [
        {
            "id": links[pair["label"], pair["predicted"]],
            "title": f"{pair['rows']:,} rows: {pair['label']} predicted as {pair['predicted']}",
            "cards": cards_of(facts["kind"], rows, pair["list"]),
        }
        for pair in found["pairs"]
    ]
    more = (
        [_folded(f"{len(listed) - CELLS:,} further confusions", "cells", listed[CELLS:])] if len(listed) > CELLS else []
    )
    return [*parts, ("cells", listed[:CELLS]), *more]


def _of_numbers(found: Mapping[str, Any]) -> Iterable[Section]:
    one = found.get("residuals")
    if not one:
        return
    table = [
        {
            "label": f"{band['from']:.4g} to {band['to']:.4g}",
            "rows": band["rows"],
            "mean prediction": band["prediction"],
        }
        | {"mean residual": band["residual"], "mean absolute difference": band["absolute"]}
        for band in one["bands"]
    ]
    widths = [{"share of rows": f"{share:.0%}", "within": f"± {width:.4g}"} for share, width in one["widths"]]
    seen = f"{len(one['points'])} rows, drawn at random; on the line predictions are true"
    drawn = figures.picture("Predicted against true", seen, figures.predicted_against_true(one["points"]))
    yield "full", "Predicted against true", "parts", [("figures", [drawn]), ("grid", table), ("grid", widths)]


def _calibration(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if not found:
        return []
    seen = f"expected calibration error {found['ece']:.4f}; below the dotted line the model is too sure"
    drawn = figures.picture("Reliability", seen, figures.reliability(found["bins"]))
    table = [
        {"confidence": f"{one['from']:.2f} to {one['to']:.2f}", "rows": one["rows"]}
        | {"mean confidence": _number(one["confidence"]), "share right": _number(one["right"])}
        for one in found["bins"]
    ]
    return [("figures", [drawn]), _folded("The numbers", "grid", table)]


def _folded(title: str, form: str, content: Any) -> tuple[str, Any]:
    return "details", {"title": title, "form": form, "content": content}


def _threshold(curves: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    if not curves:
        return []
    wanted = [
        {"label": one["label"], "wanted precision": least, "threshold": _number(at)}
        | {"precision": _number(precision), "recall": _number(recall)}
        for one in curves
        for least, at, precision, recall in one["wanted"]
    ]
    seen = ", ".join(f"average precision of {one['label']} {one['average_precision']:.3f}" for one in curves[:6])
    drawn = figures.picture("Precision and recall", seen, figures.precision_recall(curves))
    points = [
        {"label": one["label"], "threshold": _number(at), "precision": _number(a), "recall": _number(b)}
        for one in curves[:6]
        for at, a, b in one["points"][:: max(1, len(one["points"]) // 12)]
    ]
    return [("figures", [drawn]), ("grid", wanted), _folded("Some points of the curve", "grid", points)]


def _coverage(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    if not found:
        return []
    points = [(one["answered"], one["right"]) for one in found]
    seen = f"{found[0]['right']:.1%} right if all are answered, {found[-1]['right']:.1%} of the surest quarter"
    draw = figures.lines({"right": points}, x="share answered", y="share right")
    table = [
        {"answered": f"{one['answered']:.0%}", "rows": one["rows"], "share right": _number(one["right"])}
        | {"with a score of at least": _number(one["score"])}
        for one in found
    ]
    return [("figures", [figures.picture("Score against coverage", seen, draw)]), ("grid", table)]


def _positions(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "loss": _number(one["loss"]), "perplexity": _perplexity(one["loss"])} for one in found]


def _perplexity(loss: float) -> str:
    return f"{exp(min(loss, 700.0)):.4g}"


def _slices(found: Mapping[str, Any] | None, kind: str) -> list[tuple[str, Any]]:
    if not found:
        return []
    table = [
        {
            "slice": one["slice"],
            "value": shortened(one["value"]),
            "rows": one["rows"],
            found["unit"]: _number(one["mean"]),
        }
        | ({"perplexity": _perplexity(one["mean"])} if kind == "language" else {})
        | {"95 % interval": _range(one["low"], one["high"]), "lost": f"{one['lost']:+.1f}"}
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
    lines = [f"{found['rows']:,} labels to look at, by {found['by']}; the least likely first."]
    if found["by"].startswith("the probability"):
        lines.append("With cleanlab (torchlake[hints]) they are chosen by confident learning.")
    return [("lines", lines), ("cards", cards_of(facts["kind"], rows, found["list"]))]


def _trained(facts: Mapping[str, Any], rows: Rows) -> list[tuple[str, Any]]:
    found = facts["sections"].get("trained")
    if not found:
        return []
    line = f"{found['rows']:,} of {found['of']:,} rows have the inputs of a row of the training table, to the letter. "
    line += "What the model says of them does not show what it says of new ones." if found["rows"] else ""
    return [("lines", [line]), ("cards", cards_of(facts["kind"], rows, found["list"]))]


def _cosines(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if not found:
        return []
    middle = ", ".join(f"{value:.3f} {name}" for name, value in list(found["quantiles"][2].items())[1:])
    draw = figures.steps(found["edges"], found["counts"], "cosine")
    drawn = figures.picture("Cosines of equal and of random pairs", f"the median is {middle}", draw)
    bins = zip(found["edges"], found["edges"][1:], *found["counts"].values(), strict=False)
    numbers = [{"cosine": f"{a:.4g} to {b:.4g}", **dict(zip(found["counts"], n, strict=True))} for a, b, *n in bins]
    lines = ["Random: the first text with the second one of another row. Pairs that belong together should be apart."]
    return [
        ("figures", [drawn]),
        ("lines", lines),
        ("grid", found["quantiles"]),
        _folded("The numbers", "grid", numbers),
    ]


def _histograms(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    drawn, tables = [], []
    for name, bins in found.items():
        if bins:
            most = max(bins, key=lambda one: one[2])
            seen = f"most rows, {most[2]:,}, from {most[0]:.4g} to {most[1]:.4g}"
            drawn.append(figures.picture(name.capitalize(), seen, figures.histogram(bins, name)))
            table = [{name: f"{start:.4g} to {stop:.4g}", "rows": rows} for start, stop, rows in bins]
            tables.append(_folded(f"The numbers of {name}", "grid", table))
    return [("figures", drawn), *tables] if drawn or tables else []
