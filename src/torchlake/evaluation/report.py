"""The folder of an evaluation: rows.parquet, eval.html and, last, eval.json.

eval.json makes the others valid: it is removed before they are replaced and has the hash of rows.parquet. Until the
folder is complete, the scored rows are a table of `predict` in `.evaluating`, so a killed evaluation scores only what
is missing. The folder belongs to one model and table.
"""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from torchlake import atomic_io, plugins
from torchlake.config.measuring import EvaluateOptions
from torchlake.display import plain
from torchlake.engines import Engine
from torchlake.errors import FingerprintError, OutputError, UsageError
from torchlake.evaluation.sections.facts import sections_of
from torchlake.evaluation.sections.judged import read_judged
from torchlake.evaluation.sections.rows import FILE
from torchlake.outputs.staging.folders import remove_leased
from torchlake.redaction import redacted
from torchlake.reporting.evaluation import write_page
from torchlake.storage.lease import acquire
from torchlake.tables.record import output_path, read_commit

FACTS, PAGE, STAGING = "eval.json", "eval.html", ".evaluating"
OF_REPORT = ("key", "slices", "no_texts", "label_hints", "overwrite")
"Arguments of `evaluate` that need a report."
PLAIN_PAIRS = ("csv", "inputs")
"Pairs of texts; the values of others are YAML."
ESCAPED = ("prompt", "system", "stop")
"Texts in which the command line reads \\n as a line break."
LIBRARIES = ("torchlake", "torch", "transformers", "numpy", "pyarrow", "scikit-learn", "scipy")


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What is asked for with `report`."""

    folder: Path
    key: str | None = None
    slices: tuple[str, ...] = ()
    no_texts: bool = False
    label_hints: bool = False
    overwrite: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ReportRequest | None":
        """Return the request in the arguments of `evaluate`. Raises UsageError for options without a folder."""
        if given.get("report") is None:
            if alone := [name for name in OF_REPORT if given.get(name)]:
                raise UsageError(f"{', '.join(alone)}: for a report; name its folder with report (--report FOLDER).")
            return None
        slices = given.get("slices") or ()
        slices = (slices,) if isinstance(slices, str) else tuple(dict.fromkeys(slices))
        own = {name: given[name] for name in OF_REPORT if name != "slices" and given.get(name) is not None}
        return cls(folder=output_path(given["report"]), slices=slices, **own)


def as_command(asked: Mapping[str, Any]) -> str | None:
    """Return the command that makes this report again, from all arguments of `evaluate`; None if one of them, such as
    a table in memory, has no form there."""
    tables = asked["table"] if _several(asked["table"]) else [asked["table"]]
    words = ["torchlake", "evaluate", _word(asked["model"]), _word(tables[0])]
    given = {"input": tables[1:], **{name: value for name, value in asked.items() if name not in ("model", "table")}}
    if isinstance(engine := given.get("engine"), Engine):
        name = type(engine).__name__.lower()
        known = name in plugins.names("engines")
        given |= {"engine": name if known else None, "processes": engine.processes if known else None}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if isinstance(given.get("json_schema"), Mapping):
        return None
    hints = get_type_hints(EvaluateOptions, include_extras=True)
    for name, value in given.items():
        kind = hints.get(name)
        option = get_args(kind)[1] if get_origin(kind) is Annotated else None
        flag = (option and option.flag) or f"--{name.replace('_', '-')}"
        if option and option.value == "A,B" and _several(value) and any("," in str(one) for one in value):
            return None
        if isinstance(value, Mapping):
            pairs = [(key, one) for key, some in value.items() for one in (some if _several(some) else [some])]
            shown: list[str | None] = [f"{key}={one if name in PLAIN_PAIRS else json.dumps(one)}" for key, one in pairs]
        else:
            shown = [_word(one, escaped=name in ESCAPED) for one in (value if _several(value) else [value])]
        if value is True:
            words.append(flag)
            continue
        for one in shown:
            words += [f"{flag}={one}"] if one is not None and one.startswith("-") else [flag, one]
    return None if None in words else shlex.join(word for word in words if word is not None)


def _several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _word(value: Any, *, escaped: bool = False) -> str | None:
    """Return a value as the command line reads it; None if it has no form there."""
    text = str(value) if isinstance(value, str | int | float | Path) else None
    if text is None or not escaped:
        return text
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def provenance_of(scored: Path) -> dict[str, Any]:
    """Return where and how a scored table was made, from its record."""
    record = read_commit(scored)
    stored = [one for one in record.get("sources") or () if one.get("kind") != "stream"]
    found = {**record.get("provenance", {}), "versions of the table": stored or None}
    names = ("versions of the table", "engine", "runtime", "cpu", "seconds")
    return {name: found[name] for name in names if found.get(name) is not None}


@contextmanager
def evaluating(request: ReportRequest, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Become the only writer of the folder and yield a folder for scored rows, removed when the block succeeds.

    Raises FingerprintError if the folder belongs to another evaluation, OutputError if it has other files.
    """
    folder = request.folder
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder for the report.")
    stored = folder / FACTS
    strange = [one for one in folder.iterdir() if not one.name.startswith((FILE, PAGE, "."))] if folder.is_dir() else []
    if strange and not stored.is_file():
        raise OutputError(f"{folder}: has other files, such as {strange[0].name}; name an empty or new folder.")
    if stored.is_file() and not request.overwrite:
        before = atomic_io.read_json(stored).get("identity", {})
        if changed := [name for name, value in identity.items() if before.get(name) != value]:
            raise FingerprintError(
                f"{folder}: has the evaluation of another {', '.join(changed)}. Name another folder, or replace "
                "it with overwrite (--overwrite)."
            )
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / STAGING
    lease = acquire(staging, name=str(folder))
    try:
        if request.overwrite:
            for name in ("scored", "first", "second"):
                shutil.rmtree(staging / name, ignore_errors=True)
        yield staging
    except BaseException:
        lease.release()
        if not any("scored" in one.name for one in staging.iterdir()):  # refused before anything was scored
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()
        raise
    remove_leased(staging, lease)


def publish(
    folder: Path,
    evaluation: Mapping[str, Any],
    *,
    kind: str,
    identity: Mapping[str, Any],
    made: Mapping[str, Any],
    slices: Sequence[str] = (),
    hints: str | None = None,
    sections: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write eval.html and eval.json beside rows.parquet (if there is one); return the values of eval.json.

    `sections` are those that do not follow from the rows.
    """
    rows = folder / FILE
    for name in (FILE, PAGE, FACTS):
        atomic_io.remove(atomic_io.stale_temporaries(folder / name))  # of a killed process
    found, truncated = dict[str, Any](), None
    if rows.is_file():
        judged = read_judged(rows, kind, evaluation["labels"], slices)
        found, truncated = sections_of(judged, slices, hints), judged.truncated
    # Settings may have secrets. What comes from the rows stays: a class may be named "password: forgotten".
    facts: dict[str, Any] = plain(
        {
            "format": 1,
            "title": redacted(made["model"]),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "identity": redacted(identity),
            **evaluation,
            "truncated": truncated,
            "sections": {**found, **redacted(sections or {})},
            "made": redacted({**made, "versions": {name: version(name) for name in LIBRARIES}}),
            "files": {FILE: atomic_io.size_and_sha256(rows)} if rows.is_file() else {},
        }
    )
    write_page(folder, facts)
    atomic_io.write_json(folder / FACTS, facts, site="evaluation.facts")
    return facts
