"""What a kind of output provides: a target to which the files of a job are committed, all at once and exactly once.

Each kind is a file in `targets/`, with these functions:

    recognizes(output, format)      whether a path, URL or name is an output of this kind; cheap, imports no library
    open_target(output, options)    its `Target`; raises OutputError, UsageError or MissingExtra
    open_dataset(output)            a pyarrow dataset of exactly the committed rows

The engines' workers write the parts themselves, into a folder that no reader lists. `begin.py` and `transaction.py` do
the rest in the same way for every target: plan and lease first, then parts, then one commit. A commit has an id, made
from the plan and the settings. A target commits an id only once, and only on top of its newest version.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import pyarrow as pa

from torchlake.amounts import size_in_bytes
from torchlake.errors import OutputError, UsageError
from torchlake.outputs.parts import Part, PartFolder
from torchlake.outputs.rewrite import LiveFile
from torchlake.storage.errors import library_errors
from torchlake.storage.objects import ObjectFolder
from torchlake.storage.urls import is_url

Mode = Literal["create", "append", "overwrite", "replace-where"]
STATE = "_torchlake"
"The folder of a target with records, plans and the state of a job; readers of tables ignore the name."


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How rows are written to the output. No option changes a row."""

    format: str | None = None
    "None: the format of the existing table, else Parquet."
    mode: Mode = "create"
    partition_by: tuple[str, ...] = ()
    add_columns: bool = False
    "Whether columns that the table lacks are added to it."
    target_file_size: int | None = None
    "Bytes; the rows of several chunks are written to one file. None: a file for each chunk."


def target_options(given: Mapping[str, Any]) -> TargetOptions:
    """Return the options among the arguments of a function. Raises UsageError for a value out of range."""
    values = {name: value for name, value in given.items() if value is not None}
    columns, size = values.get("partition_by", ()), values.get("target_file_size")
    if isinstance(columns, str):
        columns = columns.split(",")
    if isinstance(size, str):
        size = int(size_in_bytes(size, "target_file_size"))
    options = TargetOptions(**{**values, "partition_by": tuple(columns), "target_file_size": size})
    if size is not None and size < 1:
        raise UsageError(f"target_file_size: expected 1 byte or more, got {size}.")
    return options


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a commit does to a table."""

    id: str
    files: Sequence[Part]
    schema: pa.Schema
    "The schema of the rows, with partition columns."
    mode: Mode
    record: Mapping[str, Any]
    "The commit record."
    removed: Sequence[str] = ()
    "Files of the table whose rows are replaced, as the table names them (replace-where)."
    kept: Sequence[Part] = ()
    "New files with the rows of the removed files that stay."
    positions: Mapping[str, int] = field(default_factory=dict)
    "How far each source was read, by name; positions only grow."
    discarded: Sequence[str] = ()
    "The ids of interrupted writes that this one replaces."


class Snapshot(Protocol):
    """A target at one version."""

    version: str
    "The version's name; empty before the first commit."
    latest: str | None
    "The id of torchlake's last commit, if the target names it."


class Target(Protocol):
    """An output as it was when it was opened. Errors of its storage are StorageError.

    A table has the methods of `TableTarget` besides.
    """

    shown: str
    "Its name in messages and records."
    root: str
    "The absolute path or URL of its folder; empty if only `TableTarget.prepare` finds it."
    options: TargetOptions
    partition_by: tuple[str, ...]
    reusable: bool
    "Whether a commit replaces all rows, and may keep parts of the one before (a folder); else rows are added."
    staged: bool
    "Whether parts wait in the staging folder until the commit moves them, with its record (a local folder)."

    def snapshot(self) -> Any:
        """Return the newest version, a `Snapshot`, read again at each call."""

    def check(self, snapshot: Any, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError or UsageError if rows of this schema cannot be written in the given mode."""

    def has(self, snapshot: Any, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether this commit was made and, with its record, whether its rows are all of the target's rows."""

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return where the workers of this commit write their parts."""

    def commit(self, snapshot: Any, change: Change) -> Mapping[str, Any]:
        """Make the change on top of this version, and return the record that is stored.

        Raises Conflict if there is a newer version, CommitUnknown without a clear answer.
        """

    def live(self, snapshot: Any, record: Mapping[str, Any]) -> set[str] | None:
        """Return the names of the parts of a recorded commit that are rows of the target now.

        None if the target must have all parts and nothing else.
        """


class Logged(NamedTuple):
    """What a table's log says about a file; readers skip it by these values, and find rows by them."""

    bytes: int
    rows: int | None
    partition: Mapping[str, str | None]
    nulls: Mapping[str, int | None]
    lowest: Mapping[str, Any]
    highest: Mapping[str, Any]
    deleted: int = 0
    "Rows of the file that readers leave out."


class TableTarget(Protocol):
    """What a target adds whose rows have several commits."""

    address: str
    "Its root; before there is one, its name with the address of its catalog, because two catalogs may have one name."

    def table_id(self, snapshot: Any) -> str:
        """Return the table's own id, another one if it was dropped and recreated; empty if there is no table yet."""

    def prepare(self, schema: pa.Schema) -> None:
        """Create what must exist before the first part is written; `check` has passed."""

    def commits(self, snapshot: Any) -> list[str]:
        """Return the ids of the commits that were made and whose records are kept, also of those that are `lost`."""

    def lost(self, snapshot: Any, commit: str) -> bool | None:
        """Return whether it is certain that no row of a commit that was made is in the table any more.

        Other programs roll a table back, replace or delete its rows. None: the commit has no file left, and the history
        does not say whether its rows were written to others, for example by a compaction.
        """

    def paths(self, snapshot: Any) -> Collection[str]:
        """Return the files with rows, as the table names them."""

    def position(self, snapshot: Any, name: str) -> int | None:
        """Return how far a source was read, by the commits that were made, also by those that are `lost`."""

    def logged(self, snapshot: Any) -> Mapping[str, Logged]:
        """Return what the log says about the files of the table, by their paths."""

    def live_files(self, snapshot: Any) -> Sequence[LiveFile]:
        """Return the files of the table. Raises OutputError if rows cannot be replaced in it."""


def files_of(logged: Mapping[str, Logged], file_at: Callable[[str], str]) -> list[LiveFile]:
    """Return the files of a table's log; `file_at` finds them by their paths."""
    return [
        LiveFile(path, file_at(path), one.bytes, tuple(one.partition.items()), one.lowest, one.highest)
        for path, one in logged.items()
    ]


FOLDER_HINT = " --accept-new-input adds the rows of new input files to a folder."


def refuse_table_options(output: str, options: TargetOptions, *, kind: str, hint: str = "") -> None:
    """Raise UsageError for options that an output which is written as a whole does not support."""
    if options.mode in ("append", "replace-where"):
        raise UsageError(
            f"{output}: {kind} is written as a whole, so mode {options.mode} is for Delta and Iceberg tables.{hint}"
        )
    if options.partition_by or options.add_columns:
        raise UsageError(f"{output}: partition_by and add_columns are for Delta and Iceberg tables.")


def check_partitions(
    shown: str,
    columns: Sequence[str],
    rows: pa.Schema,
    *,
    options: TargetOptions,
    key: str | None,
    cannot: Callable[[pa.DataType], bool],
) -> None:
    """Raise UsageError if rows cannot be partitioned by these columns of a table, or cannot be replaced by the key."""
    for name in columns:
        if name not in rows.names:
            raise UsageError(
                f"{shown}: is partitioned by {name!r}, which the output does not have; copy that column "
                f"(columns: {', '.join(rows.names)})."
            )
        kind = rows.field(name).type
        if cannot(kind):
            raise UsageError(f"{shown}: rows cannot be partitioned by {name!r}, which is {kind}.")
    if options.mode == "replace-where" and (key is None or key in columns):
        raise UsageError(
            f"{shown}: mode replace-where replaces the rows with the same key: give a key, and not a partition column."
        )


def check_existing(
    shown: str, partitions: Sequence[str], *, options: TargetOptions, has_rows: Callable[[], Any]
) -> None:
    """Raise OutputError if mode create finds a table with rows, UsageError for partitions other than the table's."""
    if options.mode == "create" and has_rows():
        raise OutputError(
            f"{shown}: the table has rows that this job did not write. Add to them with mode append, replace "
            "them with mode overwrite, or give another output."
        )
    refuse_other_partitions(shown, partitions, options)


def refuse_other_partitions(shown: str, partitions: Sequence[str], options: TargetOptions) -> None:
    """Raise UsageError if the options name other partition columns than those that the table has."""
    if options.partition_by and [*options.partition_by] != [*partitions]:
        raise UsageError(f"{shown}: is partitioned by {[*partitions] or 'nothing'}; leave partition_by out.")


def refuse_object(root: str) -> None:
    """Raise OutputError if a bucket has an object of the output's own name, which readers would read instead."""
    if is_url(root) and ObjectFolder(root).is_object():
        raise OutputError(f"{root}: is an object; an output is a folder. Give another output.")


def as_table(target: Target) -> TableTarget | None:
    """Return a target as a table; None if its rows have one commit."""
    return cast(TableTarget, target) if hasattr(target, "live_files") else None


_READING = ("check", "has", "commits", "live", "live_files", "logged", "position")

T = TypeVar("T")


def reads_log(kind: type[T]) -> type[T]:
    """Return the class of a target, whose methods raise nothing of the library that reads the table's log."""

    def translated(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with library_errors(self.shown):
                return method(self, *args, **options)

        return call

    for name in _READING:
        setattr(kind, name, translated(getattr(kind, name)))
    return kind


class Conflict(Exception):
    """Another writer has committed since the snapshot: read the target again."""


class CommitUnknown(Exception):
    """The storage gave no clear answer, so the commit may have been made: read the target again."""
