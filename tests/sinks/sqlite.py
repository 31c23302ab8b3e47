"""A sink in one file, outside of torchlake: `sqlite:///PATH`, a database whose rows are Parquet files.

    parts     the files of the last commit: name and content
    commits   the ids of all commits

Parts wait beside the database, in `PATH.files`, which also has the records. A commit is one SQL transaction on top of
the newest version: it replaces all files and adds the id.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from torchlake.errors import OutputError
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.target import Change, CommitUnknown, Conflict, TargetOptions, refuse_table_options

TABLES = (
    "CREATE TABLE IF NOT EXISTS parts (name TEXT PRIMARY KEY, content BLOB)",
    "CREATE TABLE IF NOT EXISTS commits (number INTEGER PRIMARY KEY, id TEXT)",
)
LAST = "SELECT number, id FROM commits ORDER BY number DESC LIMIT 1"
PREFIX = "sqlite://"


@dataclass(frozen=True, kw_only=True)
class SqliteSnapshot:
    """A database at one version."""

    version: str
    latest: str | None
    sizes: Mapping[str, int]
    "Of its files, by name."


@dataclass(frozen=True, kw_only=True)
class SqliteTarget:
    """A database as an output."""

    path: Path
    options: TargetOptions
    partition_by: tuple[str, ...] = ()
    reusable: bool = False
    staged: bool = False

    @property
    def shown(self) -> str:
        return f"{PREFIX}{self.path}"

    @property
    def root(self) -> str:
        return f"{self.path}.files"

    def snapshot(self) -> SqliteSnapshot:
        if not self.path.exists():
            return SqliteSnapshot(version="", latest=None, sizes={})
        with opened(self.path) as database:
            database.execute("BEGIN")
            number, latest = database.execute(LAST).fetchone() or ("", None)
            sizes = dict(database.execute("SELECT name, length(content) FROM parts"))
        return SqliteSnapshot(version=str(number), latest=latest, sizes=sizes)

    def check(self, snapshot: SqliteSnapshot, schema: pa.Schema, key: str | None) -> None:
        if self.options.mode == "create" and snapshot.sizes:
            raise OutputError(f"{self.shown}: has rows that this job did not write. Replace them with mode overwrite.")

    def has(self, snapshot: SqliteSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        if snapshot.latest != commit:
            return False
        return record is None or snapshot.sizes == {part["name"]: part["bytes"] for part in record["parts"]}

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        return PartFolder(location=f"{self.root}/{commit[:16]}")

    def live(self, snapshot: SqliteSnapshot, record: Mapping[str, Any]) -> set[str]:
        return {part["name"] for part in record["parts"] if part["name"] in snapshot.sizes}

    def commit(self, snapshot: SqliteSnapshot, change: Change) -> Mapping[str, Any]:
        folder = Path(self.part_folder(change.id, change.schema).location)
        try:
            with opened(self.path) as database:
                database.execute("BEGIN IMMEDIATE")
                number, _ = database.execute(LAST).fetchone() or ("", None)
                if str(number) != snapshot.version:
                    raise Conflict("another commit was made")
                database.execute("DELETE FROM parts")
                for part in change.files:
                    content = (folder / part.name).read_bytes()
                    database.execute("INSERT INTO parts VALUES (?, ?)", (part.name, content))
                database.execute("INSERT INTO commits (id) VALUES (?)", (change.id,))
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise CommitUnknown(str(error)) from error
        return change.record


def recognizes(output: str, format: str | None) -> bool:
    return format in (None, "parquet") and output.startswith(PREFIX)


def open_target(output: str, options: TargetOptions) -> SqliteTarget:
    refuse_table_options(output, options, kind="a database")
    return SqliteTarget(path=Path(output.removeprefix(PREFIX)), options=options)


def open_dataset(output: str) -> Any:
    with opened(Path(output.removeprefix(PREFIX))) as database:
        contents = [content for (content,) in database.execute("SELECT content FROM parts ORDER BY name")]
    return ds.dataset(pa.concat_tables([pq.read_table(pa.BufferReader(content)) for content in contents]))


def opened(path: Path) -> closing[sqlite3.Connection]:
    """A connection without transactions of its own, to a database with the tables."""
    database = sqlite3.connect(path, isolation_level=None, timeout=1)
    for statement in TABLES:
        database.execute(statement)
    return closing(database)
