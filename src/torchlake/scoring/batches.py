"""Score the batches of a Spark stream, each exactly once, even if Spark repeats one.

    batch of the stream -> Parquet files, by Spark's tasks -> predict with the batch's name as the name of its commit

Spark repeats the last batch after a failure: its rows are the same, but may come in another order, and everything that
the function did may have been done. A commit that is named by query and batch is made once. Cost: one copy of a batch.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torchlake import atomic_io
from torchlake.config.options import PredictOptions
from torchlake.engines import Engine, make_engine
from torchlake.errors import UsageError
from torchlake.jobs.options import output_options
from torchlake.outputs.find import Output, output_of
from torchlake.outputs.staging.state import make_temporary_root
from torchlake.scoring.predict import predict
from torchlake.scoring.rows import Runtime
from torchlake.storage.urls import is_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUERY_ID = "sql.streaming.queryId"
"Spark's name of the id of a query, which stays the same when the query is started again from its checkpoint."
REFUSED = ("incremental", "overwrite", "commit_id", "accept_new_input", "accept_removed_input", "sample", "limit")


def for_each_batch(
    model: str | Path,
    output: str | Path,
    *,
    key: str,
    query: str | None = None,
    batches: str | Path | None = None,
    runtime: Runtime | None = None,
    **options: Unpack[PredictOptions],
) -> Callable[["DataFrame", int], None]:
    """Return a function for `writeStream.foreachBatch` that scores each batch into `output`, exactly once.

        stream = spark.readStream.schema("id long, text string").parquet("incoming/")
        write = tl.for_each_batch("runs/reviews/model", "scored", key="id", format="delta")
        stream.writeStream.foreachBatch(write).option("checkpointLocation", "checkpoint/").start()

    `output` is a Delta or Iceberg table, to which each batch is one commit: its rows are appended, or with
    mode="replace-where" replace those with the same `key`. A Parquet folder, local or by URL, gets a folder for each
    batch: "batch=12". A batch that Spark repeats after a failure, in any order of its rows, is written once.

    Commits are named by the query's id, which Spark keeps in the checkpoint, and the batch's number. A query with a new
    checkpoint is another query. `query` is a name in place of the id; Spark Connect needs one. `batches` is a folder
    that the driver and all executors can access, for the rows of the batch that is scored (default: beside a local
    output, else a temporary folder, which is enough for Spark on one machine). The other options are those of `predict`
    for stored tables; the engine is the batch's Spark session.

    Raises UsageError for options that make no sense for a batch, and the errors of `predict` in the query.
    """
    refused = [name for name in REFUSED if name in options]
    if refused:
        raise UsageError(f"{', '.join(refused)}: not for the batches of a stream; leave it out of for_each_batch.")
    whole = output_of(output, output_options(dict(options)).target).target.reusable
    chosen: Any = options if whole else {"mode": "append", **options}
    kind = output_options(chosen).target

    def write(frame: "DataFrame", batch: int) -> None:
        name = f"{query or _query_of(frame)}-{batch}"
        place = f"{os.fspath(output).rstrip('/')}/batch={batch}" if whole else output
        engine = make_engine("spark", None, session=frame.sparkSession)
        stored = _stored(frame, name, output_of(place, kind), batches, engine)
        predict(model, stored, place, key=key, runtime=runtime, engine=engine, commit_id=name, **chosen)
        atomic_io.remove([stored])

    return write


def _query_of(frame: "DataFrame") -> str:
    """Return the id of the query that the batch belongs to. Raises UsageError if Spark does not say it."""
    found = None
    if not type(frame).__module__.startswith("pyspark.sql.connect"):
        found = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    if not found:
        raise UsageError("The id of the query is not known here: name the query, for_each_batch(..., query='labels').")
    return str(found)


def _stored(frame: "DataFrame", name: str, output: Output, batches: str | Path | None, engine: Engine) -> Path:
    """Return a folder with the rows of a batch: those that an attempt before this one stored, if it stored all."""
    place = output.place
    parent = Path(batches) if batches is not None else place.parent
    if is_url(os.fspath(parent)):
        raise UsageError("batches: expected the path of a folder that the driver and the executors share, not a URL.")
    make_temporary_root(place)
    folder = parent / f".{place.name}.batch-{atomic_io.digest(name)[:16]}"
    # Spark writes the mark last. The rows of a batch are the same in each attempt; with these files, also their order
    # is, so that chunks that are finished need not be scored again.
    if not (folder / "_SUCCESS").exists():
        atomic_io.remove([folder])
        parent.mkdir(parents=True, exist_ok=True)
        engine.materialize(frame, str(folder))
    return folder
