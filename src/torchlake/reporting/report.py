"""`report`: write the facts of a run to report.html (by `run.py`) and report.json, without secrets.

A report can be written while the run is training. It takes one pass over metrics.jsonl.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.checkpoints import location
from torchlake.config.job import load_job
from torchlake.display import plain
from torchlake.errors import DataError, StorageError, UsageError
from torchlake.models.folders import ADAPTER_TENSORS, WEIGHTS
from torchlake.preparation import summary
from torchlake.redaction import redacted
from torchlake.reporting.doctor import doctor
from torchlake.reporting.run import Point, render, render_folds
from torchlake.runs import metrics_log
from torchlake.runs.folder import FOLDS, WRITTEN
from torchlake.tables.record import local_output

log = logging.getLogger(__name__)

CURVE_POINTS = 200
WARNINGS_SHOWN = 20


def report(run: str | Path) -> Path:
    """Write report.html and report.json into the run folder `run`; return the path of the page.

    Raises DataError if `run` is not a run folder, UsageError for a URL, StorageError if the files cannot be written.
    """
    folder = local_output(run)
    if (folder / FOLDS).is_file():
        return _write(folder, *_of_folds(folder))
    if not (folder / "job.yaml").is_file():
        raise DataError(
            f"{folder}: not a run folder (it has no job.yaml). Name the folder that `torchlake train` printed."
        )
    facts = redacted(collect(folder))
    return _write(folder, facts, render(facts))


def _write(folder: Path, facts: Mapping[str, Any], text: str) -> Path:
    page = folder / "report.html"
    atomic_io.write_json(folder / "report.json", facts, site="report.json")
    atomic_io.write_bytes(page, text.encode(), site="report.html")
    return page


def _of_folds(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the facts of a cross-validation, and its page; without metrics until every fold is trained."""
    settings = atomic_io.read_json(folder / FOLDS)
    result = atomic_io.read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    facts: dict[str, Any] = plain(
        redacted(
            {
                "run": folder.resolve().name,
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
                "complete": bool(result),
                "number_of_folds": settings["folds"],
                "job": settings["job"],
                "pages": [
                    f"fold_{fold}/eval/eval.html"
                    for fold in range(1, settings["folds"] + 1)
                    if (folder / f"fold_{fold}" / "eval" / "eval.json").is_file()
                ],
                **result,
            }
        )
    )
    return facts, render_folds(facts)


def collect(folder: Path) -> dict[str, Any]:
    """Return the facts of a run, as plain JSON values."""
    lines = metrics_log.read_metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    validations = [
        {name.removeprefix(metrics_log.VALIDATION): value for name, value in line.items()}
        for line in lines
        if any(name.startswith(metrics_log.VALIDATION) for name in line)
    ]
    job = load_job(folder / "job.yaml")
    checkpoints = _checkpoints(job.train.checkpoint_folder, folder)
    best = next((entry["best"] for entry in reversed(checkpoints) if entry["best"]), None)
    result = atomic_io.read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    prepared = atomic_io.read_json(folder / summary.FILE) if (folder / summary.FILE).is_file() else {}
    found = doctor().facts
    installed = {name: value for name, value in found["optional"].items() if not value.startswith("missing")}
    facts: dict[str, Any] = plain(
        {
            "run": folder.resolve().name,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": bool(result),
            "progress": _progress(steps),
            "metric": result.get("metric"),
            "metrics": best["metrics"] if best else result.get("metrics", {}),
            "best_step": best["step"] if best else None,
            "data": {**_data(steps), **({"summary": summary.summary_lines(prepared)} if prepared else {})},
            "findings": prepared.get("findings", []),
            "job": job.model_dump(mode="json"),
            "model": _model(folder / "model"),
            "losses": _thinned([(line["step"], line["loss"]) for line in steps]),
            "validations": validations,
            "texts": _written(folder),
            "evaluation": "eval/eval.html" if (folder / "eval" / "eval.json").is_file() else None,
            "no_evaluation": result.get("page"),
            "checkpoints": [{key: entry[key] for key in ("step", "bytes", "world_size")} for entry in checkpoints],
            "warnings": _warnings(folder / "logs"),
            "machine": {**found["machine"], **found["devices"]},
            "versions": {**found["versions"], **installed},
        }
    )
    return facts


def _progress(steps: Sequence[metrics_log.Line]) -> dict[str, Any]:
    seconds = sum(line["seconds"] for line in steps)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": steps[-1]["epoch"] if steps else 0,
        "seconds_in_steps": round(seconds, 3),
        "rows_per_s": round(sum(line["rows"] for line in steps) / seconds, 1) if seconds else None,
        "tokens_per_s": round(sum(line["tokens"] for line in steps) / seconds, 1) if seconds else None,
        "mfu": _mean([line["mfu"] for line in steps if "mfu" in line]),
        "seconds_in_data": round(sum(line.get("data_seconds", 0.0) for line in steps), 3),
        "seconds_waited": round(sum(line.get("wait_seconds", 0.0) for line in steps), 3),
        "peak_memory_bytes": max((line.get("peak_memory_bytes", 0) for line in steps), default=0) or None,
        "steps_not_applied": sum(not math.isfinite(line["loss"]) for line in steps),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _data(steps: Sequence[metrics_log.Line]) -> dict[str, Any]:
    """Return what the first epoch read; padding is None if the steps have no padded_tokens."""
    first = [line for line in steps if line["epoch"] == 1]
    rows, tokens = (sum(line[name] for line in first) for name in ("rows", "tokens"))
    padded = sum(line.get("padded_tokens", 0) for line in first)
    return {
        "rows_in_epoch_1": rows,
        "tokens_in_epoch_1": tokens,
        "tokens_per_row": round(tokens / rows, 1) if rows else None,
        "padding_percent": round(100 * (1 - tokens / padded), 1) if padded else None,
    }


def _checkpoints(kept_in: str | None, folder: Path) -> list[dict[str, Any]]:
    """Return the complete checkpoints, oldest first; none if their storage cannot be reached."""
    found = []
    try:
        store = location.find_store(kept_in, folder)
        stored = [(store.read_state(name), store.read_manifest(name)) for name in store.list_complete()]
    except (DataError, StorageError, UsageError) as error:
        log.warning("the report has no checkpoints: %s", error)
        return []
    for state, manifest in stored:
        size = sum(file["bytes"] for file in manifest["files"].values())
        entry = {"step": state["step"], "bytes": size, "world_size": state.get("world_size"), "best": state.get("best")}
        found.append(entry)
    return found


def _model(folder: Path) -> dict[str, Any]:
    if not (folder / "task.json").is_file():
        return {}
    weights = folder / (ADAPTER_TENSORS if (folder / ADAPTER_TENSORS).is_file() else WEIGHTS)
    return {
        **atomic_io.read_json(folder / "task.json"),
        "folder": str(folder),
        "weights_bytes": weights.stat().st_size if weights.is_file() else None,
    }


def _written(folder: Path) -> list[dict[str, Any]]:
    """Return the texts that the last validation wrote; none if validations write nothing."""
    found = sorted((folder / WRITTEN).glob("step_*.json"))
    texts: list[dict[str, Any]] = atomic_io.read_json(found[-1])["texts"] if found else []
    return texts


def _warnings(folder: Path) -> list[str]:
    """Return the last warnings and errors in the logs of all ranks, by time."""
    found = []
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a line may be incomplete after a kill
            if entry.get("level") in ("WARNING", "ERROR", "CRITICAL"):
                found.append(f"{entry.get('time')} rank {entry.get('rank')}: {entry.get('message')}")
    return sorted(found)[-WARNINGS_SHOWN:]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most CURVE_POINTS points, each the mean of neighboring ones; points that are not finite are dropped."""
    finite = [point for point in points if math.isfinite(point[1])]
    width = max(1, math.ceil(len(finite) / CURVE_POINTS))
    groups = [finite[start : start + width] for start in range(0, len(finite), width)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
