"""The rules of a Delta table: those that a new file keeps by itself are listed, a table with any other is refused.

Legacy protocols (writer versions 1 to 6) have no list of features, so rules are also found where they are stated: in
the table's properties and in the metadata of columns and of fields inside them.
"""

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from torchlake.errors import OutputError
from torchlake.outputs.target import CommitUnknown, Conflict
from torchlake.storage.errors import first_line
from torchlake.tables.formats.types import children

WRITABLE = frozenset(
    {"appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "columnMapping",
     "deletionVectors", "timestampNtz", "v2Checkpoint", "variantType", "variantType-preview"}
)  # fmt: skip
"Writer features that deltalake commits to, and that need no work, or none unless a property or a column uses them."
_VERSIONS = (1, 2, 3, 4, 5, 7)
"Version 7 lists its features; version 6 has identity columns, which deltalake refuses."
_OF_COLUMNS = {
    "delta.invariants": "has an invariant",
    "delta.generationExpression": "is generated from other columns",
    "delta.identity.": "is an identity column",
    "CURRENT_DEFAULT": "has a default value",
    "__CHAR_VARCHAR_TYPE_STRING": "takes texts of a limited length",
}
_ADVICE = "Score into another table, and insert its rows with an engine that supports this, such as Spark."
_CONFLICT = re.compile(r"Failed to commit transaction|Tried committing existing table version")
_UNCLEAR = re.compile(r"Log storage error|Transaction failed|Delta transaction failed")
_PERMANENT = re.compile(r"does not support|Unsupported|is corrupted|Error evaluating predicate|No metadata found")


def check_rules(shown: str, table: Any, mode: str) -> None:
    """Raise OutputError for a table with a rule that new files would break, or that deltalake does not commit to."""
    protocol, configuration = table.protocol(), table.metadata().configuration
    version, features = protocol.min_writer_version, {*(protocol.writer_features or ())}
    found = [f"uses the Delta writer feature {name}" for name in sorted(features - WRITABLE)]
    if version not in _VERSIONS:
        found.append(f"needs Delta writer version {version} (identity columns)")
    found += [f"has constraints ({name})" for name in configuration if name.startswith("delta.constraints.")]
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        found.append("maps the names of its columns (delta.columnMapping.mode)")
    if "delta.setTransactionRetentionDuration" in configuration:
        found.append("forgets the ids of commits, so rows could be added twice (delta.setTransactionRetentionDuration)")
    for column, key, value in _rules(pa.schema(table.schema().to_arrow())):
        rules = (rule for name, rule in _OF_COLUMNS.items() if key.startswith(name))
        found += [f"has a column {column!r} that {rule} ({key}: {value})" for rule in rules]
    if found:
        raise OutputError(f"{shown}: {', '.join(found)}, which is not supported. {_ADVICE}")
    if configuration.get("delta.appendOnly", "").lower() == "true" and mode not in ("create", "append"):
        raise OutputError(f"{shown}: is append-only (delta.appendOnly); use mode append.")


def _rules(fields: Any, above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield column, key and value of the metadata of all fields, at every depth."""
    for field in fields:
        for key, value in (field.metadata or {}).items():
            yield f"{above}{field.name}", key.decode(), value.decode()
        yield from _rules(children(field.type), f"{above}{field.name}.")


def commit_error(shown: str, error: Exception) -> Exception:
    """Return what an error of deltalake at a commit means: Conflict, CommitUnknown, or one that no retry changes.

    `CommitFailedError` is raised for all of them, so their texts say which it is.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, SchemaMismatchError

    text, final = str(error), isinstance(error, DeltaProtocolError | SchemaMismatchError)
    if isinstance(error, CommitFailedError):
        final = not _UNCLEAR.search(text)
        if _CONFLICT.search(text) and not _PERMANENT.search(text):
            return Conflict(text)
    if isinstance(error, DeltaError | OSError) and not final:
        # The entry of the log may have been written before the error. The next attempt looks for the transaction.
        return CommitUnknown(text)
    return OutputError(
        f"{shown}: the Delta table refuses the rows: {first_line(error)}. {_ADVICE} Finished work is kept."
    )
