"""The page of a run, and of a cross-validation: curves, validations, data, settings and machine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchlake.metrics import DIRECTIONS
from torchlake.preparation.findings import Finding
from torchlake.reporting import figures
from torchlake.reporting.page import PageFrame, Section, duration, given, render_page

VALIDATIONS_SHOWN = 20
Point = tuple[float, float]


def render(facts: Mapping[str, Any]) -> str:
    """Return the page for the facts that `report.collect` returns."""
    progress, job = facts["progress"], facts["job"]
    state = "complete" if facts["complete"] else f"at step {progress['steps']:,}, not complete"
    validation = facts["validations"]
    best = f" (step {facts['best_step']:,})" if facts["best_step"] else ""
    metrics = {name: f"{value:.4f}" for name, value in facts["metrics"].items() if value is not None}
    sections = [
        ("full", "Curves", *(("figures", _curves(facts)) if facts["losses"] else ("lines", ["No step yet."]))),
        ("full", "Rows of the validation", *_evaluation(facts)),
        ("", f"Validation of the best model{best}", "rows", metrics),
        ("", "Data", "rows", facts["data"]),
        ("full", "Data checks", "lines", [Finding(**one).line for one in facts["findings"]]),
        ("full", "Validations", "grid", validation[-VALIDATIONS_SHOWN:]),
        ("full", "Written at the last validation", "grid", facts["texts"]),
        ("", "Model", "rows", given(facts["model"])),
        *_of_job(job),
        ("", "Checkpoints", "grid", facts["checkpoints"]),
        ("full", "Warnings", "lines", facts["warnings"]),
        ("", "Machine that wrote this page", "rows", facts["machine"]),
        ("", "Versions", "rows", facts["versions"]),
    ]
    return _page(facts, state, _tiles(facts), sections)


def render_folds(facts: Mapping[str, Any]) -> str:
    """Return the page of a cross-validation."""
    means, deviations = facts.get("metrics", {}), facts.get("deviations", {})
    shown = {name: f"{mean:.4f} ± {deviations[name]:.4f}" for name, mean in means.items()}
    metric = facts.get("metric")
    tiles = [("folds", str(facts["number_of_folds"]))]
    tiles += [(f"{metric}, mean ± deviation".replace("_", " "), shown[metric])] if metric in shown else []
    sections = [
        ("full", "Mean and standard deviation over the folds", "rows", shown),
        ("full", "Validation of each fold's best model", "grid", facts.get("folds", [])),
        (
            "full",
            "Rows of the folds",
            "links",
            [(page, f"The rows of {page.split('/')[0]}") for page in facts["pages"]],
        ),
        *_of_job(facts["job"]),
    ]
    state = "complete" if facts["complete"] else "not complete"
    return _page(facts, state, tiles, sections)


def _page(facts: Mapping[str, Any], state: str, tiles: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    model = facts["job"]["model"]
    frame = PageFrame(
        title=facts["run"],
        subtitle=f"{model['task']} from {model['base']}",
        state=state,
        written=facts["written"],
        tiles=tiles,
    )
    return render_page(frame, sections)


def _evaluation(facts: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the link to the page of the best step's validation rows, or why it is not written."""
    if facts["evaluation"]:
        return "links", [(facts["evaluation"], "Which rows are wrong, and on which slices")]
    return "lines", [facts["no_evaluation"]] if facts["no_evaluation"] else []


def _curves(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return pictures of the loss and of the validations, by step and epoch; each direction has axes of its own."""
    validation, progress = facts["validations"], facts["progress"]
    scores = sorted({name for line in validation for name in line} - {"step", "loss", "log_loss"})
    loss = {"training": facts["losses"], "validation": _series(validation, "loss")}
    groups = {"Loss by step": {name: points for name, points in loss.items() if points}}
    for better in ("higher", "lower") if len(validation) > 1 else ():  # the numbers of one are in the table below
        named = [name for name in scores if DIRECTIONS.get(name, "higher") == better]
        groups[f"Validation, {better} is better"] = {name: _series(validation, name) for name in named}
    per_epoch = progress["steps"] / progress["epochs"] if progress["epochs"] > 1 else None
    drawn = []
    for title, series in groups.items():
        if any(series.values()):
            ends = [f"{name} from {line[0][1]:.4g} to {line[-1][1]:.4g}" for name, line in series.items() if line]
            draw = figures.lines(series, x="step", y="", per_epoch=per_epoch, smooth=True)
            drawn.append(figures.picture(title, "; ".join(ends), draw))
    return [one for one in drawn if one is not None]


def _of_job(job: Mapping[str, Any]) -> list[Section]:
    return [("", f"Job: {name}", "rows", given(section)) for name, section in job.items()]


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main numbers: metrics, steps, time and speed."""
    progress, metrics = facts["progress"], facts["metrics"]
    names = dict.fromkeys(name for name in (facts["metric"], *metrics) if name in metrics and name != "loss")
    tiles = [(name.replace("_", " "), f"{metrics[name]:.4f}") for name in names if metrics[name] is not None][:2]
    tiles += [
        ("steps", f"{progress['steps']:,}"),
        ("time in steps", duration(progress["seconds_in_steps"])),
        ("rows per second", f"{progress['rows_per_s'] or 0:,.0f}"),
        ("tokens per second", f"{progress['tokens_per_s'] or 0:,.0f}"),
    ]
    if progress["mfu"] is not None:
        tiles.append(("of the matrix rate", f"{progress['mfu']:.0%}"))
    if progress["peak_memory_bytes"] is not None:
        tiles.append(("peak memory", f"{progress['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return tiles


def _series(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
