"""Change an Iceberg table through its catalog, trying each change once; check which partitions can be written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from torchlake.errors import OutputError, StorageError
from torchlake.outputs.target import CommitUnknown, Conflict
from torchlake.outputs.targets._iceberg_files import is_identity
from torchlake.redaction import redacted
from torchlake.storage.errors import access_advice, first_line
from torchlake.tables.sources._catalogs import TableName

_PERMANENT = NotImplementedError | TypeError | LookupError | AttributeError
CODE = "write.py-location-provider.impl"
"The property with the import path of a class that names a table's files; pyiceberg runs it when it writes."


@dataclass(kw_only=True)
class CommitAttempt:
    """One attempt to change a table."""

    written: Any = None
    "The snapshot that it would add."

    def discard(self, table: Any) -> None:
        """Delete the manifests of a refused attempt once it is certain that it was not made and cannot be made later.

        `table` is the table as it is now; None if it is gone.
        """
        # While the parent is still current, a copy of the request that a proxy sent twice could yet succeed. Once
        # another snapshot is on top of the parent, the catalog refuses every copy.
        written = self.written
        if written is None or table is None or table.metadata.current_snapshot_id == written.parent_snapshot_id:
            return
        # A refusal may be the answer to the second copy of a request whose first copy succeeded.
        if table.metadata.snapshot_by_id(written.snapshot_id) is not None:
            return
        for manifest in written.manifests(table.io):
            if manifest.added_snapshot_id == written.snapshot_id:
                table.io.delete(manifest.manifest_path)
        table.io.delete(written.manifest_list)


def single_attempt(catalog: Any, table: Any) -> tuple[CommitAttempt, Any]:
    """Return an attempt and its pyiceberg transaction, on top of `table` as it was loaded.

    pyiceberg repeats a refused transaction on a newer snapshot and, when it gives up, deletes its manifests. But a
    refusal may be the answer to a request that a client or proxy sent twice, the first time with success. So a refusal
    becomes Conflict here, and any unclear answer CommitUnknown; pyiceberg passes both on.
    """
    from pyiceberg import exceptions
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.table import Table
    from pyiceberg.table.update import AddSnapshotUpdate

    attempt = CommitAttempt()
    denied = (exceptions.ForbiddenError, exceptions.UnauthorizedError, exceptions.BadRequestError)

    class Once(NoopCatalog):
        def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
            added = (one.snapshot for one in updates if isinstance(one, AddSnapshotUpdate))
            attempt.written = next(added, None)
            try:
                return catalog.commit_table(table, requirements, updates)
            except exceptions.CommitFailedException as error:
                raise Conflict(first_line(error)) from error
            except denied as error:
                raise StorageError(
                    f"{'.'.join(table.name())}: the catalog refused the change: {first_line(error)}."
                ) from error
            except Exception as error:  # from many libraries; the request may have been processed
                if isinstance(error, exceptions.NoSuchTableError | exceptions.ValidationException | _PERMANENT):
                    raise refusal(".".join(table.name()), error) from error
                raise CommitUnknown(first_line(error)) from error

    once = Table(
        identifier=table.name(),
        metadata=table.metadata,
        metadata_location=table.metadata_location,
        io=table.io,
        catalog=Once(catalog.name),
        config=table.config,
    )
    return attempt, once.transaction()


def create_table(catalog: Any, name: TableName, schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Create an empty table. Raises Conflict if it exists."""
    from pyiceberg import exceptions
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.schema import assign_fresh_schema_ids
    from pyiceberg.transforms import IdentityTransform

    columns = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(schema))
    fields = [
        PartitionField(
            source_id=columns.find_field(column).field_id,
            field_id=PARTITION_FIELD_ID_START + place,
            transform=IdentityTransform(),
            name=column,
        )
        for place, column in enumerate(partition_by)
    ]
    try:
        catalog.create_table(name.table, columns, partition_spec=PartitionSpec(*fields))
    except exceptions.TableAlreadyExistsError as error:
        raise Conflict(first_line(error)) from error
    except Exception as error:  # from many libraries
        warehouse = str(catalog.properties.get("warehouse", ""))
        advice = access_advice(warehouse, str(error)) or "Create it with another tool, or give another output."
        raise OutputError(
            f"{name.name}: the table cannot be created: {redacted(first_line(error))}. {advice}"
        ) from error


def add_columns(catalog: Any, table: Any, columns: pa.Schema) -> None:
    """Add columns to a table. Raises Conflict if it changed meanwhile."""
    _, transaction = single_attempt(catalog, table)
    try:
        with transaction.update_schema() as update:
            update.union_by_name(columns)
    except Exception as error:  # nothing was sent to the catalog yet
        raise refusal(".".join(table.name()), error) from error
    transaction.commit_transaction()


def refusal(shown: str, error: Exception) -> OutputError:
    """Return the error for a change that pyiceberg refuses, however often it is tried."""
    why = redacted(first_line(error))
    return OutputError(f"{shown}: the table refuses the rows or columns: {why}. Score into another table.")


def checked_spec(shown: str, table: Any) -> tuple[str, ...]:
    """Return the columns that a table is partitioned by. Raises OutputError for partitions computed from columns."""
    from pyiceberg.transforms import VoidTransform

    fields = [field for field in table.spec().fields if not isinstance(field.transform, VoidTransform)]
    for field in fields:
        if not is_identity(field):
            raise OutputError(
                f"{shown}: is partitioned by {field.transform}({table.schema().find_column_name(field.source_id)}), "
                "which is not supported. Score into another table, and insert its rows with Spark."
            )
    return tuple(table.schema().find_column_name(field.source_id) for field in fields)


def check_features(shown: str, table: Any) -> None:
    """Raise OutputError for a table that pyiceberg cannot write to safely."""
    if table.format_version > 2:
        raise OutputError(
            f"{shown}: has format version {table.format_version}; pyiceberg writes versions 1 and 2. Score into "
            "another table, and insert its rows with Spark."
        )
    if CODE in table.properties:
        raise OutputError(
            f"{shown}: refused, because a table property names code that pyiceberg would run ({CODE} = "
            f"{redacted(table.properties[CODE])}). Remove the property."
        )
