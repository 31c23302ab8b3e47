"""Read what is committed to an output: its records, for `verify`, and its rows, for `open`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import TableError
from torchlake.tables.record import PLAN, output_path, read_commit, recorded_arrow_schema
from torchlake.tables.sinks._find import output_of, output_text, sink_of
from torchlake.tables.sinks._records import read_record


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The rows of one commit of an output."""

    record: dict[str, Any]
    plan: dict[str, Any]
    "The commit record, as JSON."
    folder: str
    "The path or URL where the parts in the record are."
    live: frozenset[str] | None
    "Names of the parts that a table still has; None if the output must have all parts and nothing else."


class CommittedRows(NamedTuple):
    """What torchlake committed to an output."""

    commits: list[Committed]
    notes: list[str]


def committed(output: str | Path) -> CommittedRows:
    """Return what torchlake committed to an output. Raises TableError when there is nothing."""
    place = output_of(output)
    if place.target is None:
        folder = output_path(output)
        own = Committed(
            record=read_commit(folder), plan=atomic_io.read_json(folder / PLAN), folder=str(folder), live=None
        )
        return CommittedRows([own], [])
    target, notes, found = place.target, [], []
    snapshot = target.snapshot()
    for name in target.commits(snapshot):
        record, plan = read_record(target, name), read_record(target, name, plan=True)
        if record is None or plan is None:
            continue
        live = frozenset(target.live(snapshot, record))
        if live or not record["parts"]:
            parts = target.part_folder(name, recorded_arrow_schema(record)).location
            found.append(Committed(record=record, plan=plan, folder=parts, live=live))
        else:
            notes.append(f"commit {name[:16]}: the table no longer has any of its files.")
    if not found and not notes:
        raise TableError(f"{output}: has no commit of torchlake, or its records were deleted.")
    return CommittedRows(found, notes)


def open(output: str | Path) -> Any:
    """Return the committed rows of an output as a `pyarrow.dataset.Dataset`, and no others.

        tl.open("scored/").to_table(filter=pc.field("label") == "good")

    `output` is a Parquet folder, local or in an object store, a Delta table or an Iceberg table's name. Raises
    TableError or OutputError when nothing is committed there.
    """
    return sink_of(output).open_dataset(output_text(output))
