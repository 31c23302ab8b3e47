"""Local Parquet folders, published by one rename; `output/commit.py` writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchlake.errors import UsageError
from torchlake.outputs.commit import WriteTransaction, write_transaction
from torchlake.outputs.target import SinkOptions
from torchlake.outputs.write import WriteRequest
from torchlake.storage.urls import is_url
from torchlake.tables.record import committed_files, local_output, read_commit, recorded_schema


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is a local path."""
    return format in (None, "parquet") and not is_url(output)


@contextmanager
def begin(output: str, options: SinkOptions, request: WriteRequest) -> Iterator[WriteTransaction]:
    """Write to a folder; see `write_transaction`. Raises UsageError for options that a folder does not support."""
    if options.mode in ("append", "replace-where"):
        raise UsageError(
            f"{output}: a Parquet folder is written as a whole, so mode {options.mode} is for Delta and Iceberg "
            "tables. --accept-new-input adds the rows of new input files to a folder."
        )
    if options.partition_by or options.add_columns:
        raise UsageError(f"{output}: partition_by and add_columns are for Delta and Iceberg tables.")
    allowed = replace(request.allowed, overwrite=request.allowed.overwrite or options.mode == "overwrite")
    with write_transaction(
        local_output(output),
        plan=request.plan,
        fingerprint=request.fingerprint,
        schema=request.schema,
        quarantined=request.quarantined,
        environment=request.environment,
        allowed=allowed,
        lease_s=request.lease_s,
        spread=request.spread,
        target_file_size=options.target_file_size,
    ) as write:
        yield write


def open_dataset(output: str) -> Any:
    """Return the committed rows as a pyarrow dataset. Raises TableError when it is not a finished output."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    schema = recorded_schema(read_commit(output))
    files = [str(path) for path in committed_files(output)]
    return ds.dataset(files, schema=schema if isinstance(schema, pa.Schema) else None, format="parquet")
