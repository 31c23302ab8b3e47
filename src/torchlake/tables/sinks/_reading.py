"""What is committed to an output: its records, for `verify`, and its rows, for `open`."""

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
    "As JSON."
    folder: str
    "The path or URL that the parts in the record are in."
    live: frozenset[str] | None
    "Of a table, the names of its parts that are rows now; None if all of them must be, and nothing else."


class CommittedRows(NamedTuple):
    """What torchlake committed to an output."""

    commits: list[Committed]
    notes: list[str]


def committed(output: str | Path) -> CommittedRows:
    """What torchlake committed to an output. Raises TableError when that is nothing."""
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
            notes.append(f"commit {name[:16]}: none of its files is in the table any more.")
    if not found and not notes:
        raise TableError(f"{output}: torchlake has committed nothing there, or its records were deleted.")
    return CommittedRows(found, notes)


def open(output: str | Path) -> Any:
    """The committed rows of an output as a `pyarrow.dataset.Dataset`, and no others.

        tl.open("scored/").to_table(filter=pc.field("label") == "good")

    `output` is a Parquet folder, local or in an object store, a Delta table or an Iceberg table's name. Raises
    TableError or OutputError when nothing is committed there.
    """
    return sink_of(output).open_dataset(output_text(output))
