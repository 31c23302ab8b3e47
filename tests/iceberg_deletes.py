"""Delete files for Iceberg tables, made by the specification: pyiceberg writes none."""

import time
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import manifest
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, AssertRefSnapshotId, SetSnapshotRefUpdate

POSITIONS = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "2147483545"}),
    ]
)


def delete_rows(table: Any, path: str, places: list[int], *, equality: bool = False) -> None:
    """Commit a snapshot with a delete file for one data file."""
    io, metadata, current = table.io, table.metadata, table.current_snapshot()
    snapshot_id, location = metadata.new_snapshot_id(), f"{table.location()}/{{}}/{uuid.uuid4()}"
    deletes = location.format("data") + "-deletes.parquet"
    content = pa.table({"file_path": [path] * len(places), "pos": places}, schema=POSITIONS)
    with io.new_output(deletes).create() as stream:
        pq.write_table(content, stream)
    data_file = manifest.DataFile.from_args(
        content=manifest.DataFileContent.EQUALITY_DELETES if equality else manifest.DataFileContent.POSITION_DELETES,
        file_path=deletes,
        file_format=manifest.FileFormat.PARQUET,
        partition=next(iter(table.scan().plan_files())).file.partition,
        record_count=len(places),
        file_size_in_bytes=len(io.new_input(deletes)),
        equality_ids=[1] if equality else None,
    )
    data_file.spec_id = table.spec().spec_id

    class Deletes(manifest.ManifestWriterV2):
        def content(self) -> manifest.ManifestContent:
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    output = io.new_output(location.format("metadata") + "-deletes.avro")
    with Deletes(table.spec(), table.schema(), output, snapshot_id, "null") as writer:
        writer.add_entry(
            manifest.ManifestEntry.from_args(
                status=manifest.ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, data_file=data_file
            )
        )
    listed = location.format("metadata") + "-list.avro"
    number = metadata.last_sequence_number + 1
    with manifest.write_manifest_list(
        2, io.new_output(listed), snapshot_id, current.snapshot_id, number, "null"
    ) as listing:
        listing.add_manifests([*current.manifests(io), writer.to_manifest_file()])
    snapshot = Snapshot(
        snapshot_id=snapshot_id,
        parent_snapshot_id=current.snapshot_id,
        sequence_number=number,
        timestamp_ms=max(time.time_ns() // 10**6, metadata.last_updated_ms + 1),
        manifest_list=listed,
        summary=Summary(Operation.DELETE),
        schema_id=metadata.current_schema_id,
    )
    with table.transaction() as transaction:
        transaction._apply(
            (
                AddSnapshotUpdate(snapshot=snapshot),
                SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot_id),
            ),
            (AssertRefSnapshotId(ref="main", snapshot_id=current.snapshot_id),),
        )
