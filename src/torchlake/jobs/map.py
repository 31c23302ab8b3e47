"""`map`: any function of record batches over a table, exactly once.

It is the chunk job of `predict` with a function in place of the model: the same plan, poison rows, resume and commit,
on every engine.
"""

import platform
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, Unpack

import pyarrow as pa

from torchlake.config.arguments import column_names, refuse_unknown
from torchlake.config.messages import expected
from torchlake.config.options import JobArguments, Option
from torchlake.display import Shown, shown
from torchlake.engines import Engine, Resources, as_engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.jobs.code_identity import check_takes_nothing, code_identity, function_name
from torchlake.jobs.map_worker import MakeWorker, MappedChunk, MapSettings, make_map_worker, output_schema
from torchlake.jobs.options import output_options
from torchlake.jobs.table_job import shown_outcome, table_job, workspace_of
from torchlake.outputs.find import output_of
from torchlake.outputs.transaction import Transaction
from torchlake.tables.plan import Chunk, chunk_label
from torchlake.tables.sources._options import refuse_seed_alone
from torchlake.tables.sources.frames import engine_of
from torchlake.tables.sources.streams import Input
from torchlake.tables.table import Table, check_columns

BATCH_ROWS = 1024
_execution = partial(Option, "Execution")


class MapOptions(JobArguments, total=False):
    """The options of `map` besides columns and engine; documented there."""

    batch_rows: Annotated[int, _execution("N", "Rows of a batch (default: 1024).", min=1)]
    gpus_per_process: Annotated[int, _execution("N", "GPUs of each process (default: 0).", min=0)]


@shown
@dataclass(frozen=True, kw_only=True)
class Mapped:
    """The output of `map`: `rows_out` always equals `rows_in`; `rows_failed` of them have an `error`."""

    path: Path | str
    "The output: a folder's path, a URL or the name of a table."
    rows_in: int
    rows_out: int
    rows_failed: int
    seconds: float
    rows_per_s: float
    "Rows that this call mapped, per second of the whole call."
    record: dict[str, Any]
    "The commit record, with the provenance."
    quarantined: tuple[tuple[str, str], ...] = ()
    'Skipped files, each with the reason (`on_bad_file="quarantine"`); their rows are not counted.'
    errors: dict[str, int] = field(default_factory=dict)
    "Rows that failed, by reason."
    example: str | None = None
    "File and row of the first failed row, and its error."

    def _shown(self) -> Shown:
        return shown_outcome(self)


def map(
    make_worker: MakeWorker,
    table: Input,
    output: str | Path,
    *,
    schema: pa.Schema | Mapping[str, pa.DataType],
    columns: Sequence[str] = (),
    key: str | None = None,
    version: str | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[MapOptions],
) -> Mapped:
    """Apply a function of record batches to every row of `table`, exactly once, and write `output`.

        def make_worker():
            import re                                   # once per process: imports, models, connections
            word = re.compile(r"\\w+")

            def count(batch: pa.Table) -> pa.Table:     # many times: a batch in, as many rows out
                return pa.table({"words": [len(word.findall(text or "")) for text in batch["text"].to_pylist()]})

            return count

        tl.map(make_worker, "reviews.parquet", "counted", schema={"words": pa.int64()}, columns=["text"], key="id")

    `make_worker()` runs once in each process and returns the function: from a pyarrow Table of `columns` (default: all
    of the table) to a Table or RecordBatch with the columns of `schema`, one row for each row, in their order. A batch
    has up to `batch_rows` rows (default: 1024), and the function must not depend on which rows share it. The output has
    `key` (a column of unique values without nulls; else a generated `row_id`), the columns of `schema`, and `error`.

    A batch that raises is halved until the failing row is alone: that row has null values and the exception as its
    `error`. A row that kills its process, or takes longer than `row_timeout_s` seconds, becomes an error row the second
    time. A call with a whole batch has the same time, so give a slow function a smaller `batch_rows`. A result with
    other columns, types or another number of rows ends the job.

    The same call after a kill continues where it stopped, if the function is the same: by its name, and by its code
    with everything of your own code that it reads (functions, classes, constants; not installed libraries). With a
    `version`, only name and version count: change it with every change of the function's results.

    `engine` is where the processes run (default: one per core of this machine); `gpus_per_process` GPUs are for each of
    them (default: 0). `where`, `sample`, `limit`, `seed`, `csv`, `chunk_rows`, `overwrite`, `accept_new_input`,
    `accept_removed_input`, `on_bad_file` and `max_error_rate` are those of `predict`, as are the kinds of `table` and
    `output` (Parquet folders, Delta and Iceberg tables) and their `format`, `mode`, `incremental`, `commit_id`,
    `partition_by`, `add_columns` and `target_file_size`.

    Raises TooManyErrors when more than `max_error_rate` (default: 0.5) of the rows fail (nothing is published, finished
    chunks are kept), FingerprintError when `output` belongs to another job, Locked when another writer holds it,
    TableError and UsageError for mistakes.
    """
    refuse_unknown("map", options, MapOptions.__annotations__)
    refuse_seed_alone(options)
    check_takes_nothing(make_worker, "map: make_worker", "def make_worker(): return function")
    native = engine_of(table)
    if native is not None:
        raise UsageError(
            f"A {native} frame has its own methods to apply a function (mapInArrow, map_batches). Save the frame as "
            "Parquet, and give map the path."
        )
    settings = MapSettings(
        make_worker=make_worker,
        name=function_name(make_worker),
        columns=column_names("columns", columns),
        key=None if key is None else column_names("key", [key])[0],
        schema=_promised(schema, key),
        batch_rows=int(options.get("batch_rows", BATCH_ROWS)),
        row_timeout_s=options.get("row_timeout_s", 600.0),
    )
    identity = code_identity(make_worker, version)
    own, engine = output_options(options), as_engine(engine) or Local()
    work = _Mapping(settings=settings, identity=identity, engine=engine, gpus=options.get("gpus_per_process", 0))
    return Mapped(**table_job(work, table, output_of(output, own.target), own, engine).outcome._asdict())


@dataclass(kw_only=True)
class _Mapping:
    """The work of `map`; see `jobs/work.py`. Without `columns` the function reads those of the input."""

    settings: MapSettings
    identity: Mapping[str, str]
    engine: Engine
    gpus: int
    name: str = "map"

    @property
    def key(self) -> str | None:
        return self.settings.key

    @property
    def columns(self) -> tuple[str, ...]:
        if not self.settings.columns:
            return ()
        return tuple(dict.fromkeys((*([self.key] if self.key else []), *self.settings.columns)))

    @property
    def environment(self) -> dict[str, str]:
        """The versions of the libraries that every function uses."""
        versions = {name: version_of(name) for name in ("torchlake", "pyarrow", "numpy")}
        return {**versions, "python": platform.python_version()}

    def fit(self, source: Table) -> pa.Schema:
        check_columns(source.source, (*([self.key] if self.key else []), *self.settings.columns), source.schema)
        self.settings = replace(self.settings, columns=self.settings.columns or tuple(source.schema.names))
        return output_schema(self.settings, source.schema)

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": 1,
            "job": "map",
            **self.identity,
            "columns": list(self.settings.columns),
            "key": self.key,
            "schema": {column.name: str(column.type) for column in self.settings.schema},
            "batch_rows": self.settings.batch_rows,
        }

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[MappedChunk, None, None]:
        return self.engine.run_chunks(
            partial(make_map_worker, replace(self.settings, workspace=workspace_of(out))),
            items,
            resources=Resources(gpus=self.gpus),
            name=f"map {out.title}",
            label=chunk_label,
        )

    def provenance(self, out: Transaction, made: Sequence[MappedChunk], seconds: float) -> dict[str, Any]:
        return {
            **self.identity,
            "engine": type(self.engine).__name__.lower(),
            **self.environment,
            "rows_mapped": sum(chunk.rows for chunk in out.pending),
            "seconds": round(seconds, 3),
            "function_seconds": round(sum(chunk.seconds for chunk in made), 3),
            "errors": [example for chunk in made for example in chunk.examples][:20],
        }


def _promised(schema: pa.Schema | Mapping[str, pa.DataType], key: str | None) -> pa.Schema:
    """Return the columns that the function returns. Raises UsageError."""
    if not isinstance(schema, pa.Schema):
        if not isinstance(schema, Mapping):
            raise UsageError(f"schema: {expected('a schema of pyarrow, or a mapping of names to types', schema)}")
        kinds = [name for name, kind in schema.items() if not isinstance(kind, pa.DataType)]
        if kinds:
            raise UsageError(f"schema: {kinds[0]!r} is a {type(schema[kinds[0]]).__name__}; give a type: pa.int64().")
        schema = pa.schema(list(schema.items()))
    if not schema.names:
        raise UsageError("schema has no columns; give those that the function returns, such as {'words': pa.int64()}.")
    folded = [name.casefold() for name in schema.names]  # Spark and Hive ignore case in names
    twice = next((name for name in schema.names if folded.count(name.casefold()) > 1), None)
    if twice is not None:
        raise UsageError(f"schema has two columns {twice!r}; rename one.")
    own = next((name for name in ("row_id" if key is None else key, "error") if name.casefold() in folded), None)
    if own is not None:
        raise UsageError(f"schema: torchlake writes the column {own!r} itself; leave it out of the function's result.")
    return pa.schema([column.remove_metadata().with_nullable(True) for column in schema])
