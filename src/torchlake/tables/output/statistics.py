"""Statistics of a part's columns, as the log of a Delta table keeps them: rows, lowest and highest value, nulls.

They are computed while a chunk's rows are in memory, so that a commit reads no part. The protocol is in the section
"Per-file Statistics" of Delta's specification (github.com/delta-io/delta, PROTOCOL.md).
"""

import datetime
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LENGTH = 32
"Of the texts whose bounds are kept. A lowest value may be cut off; a highest one that is longer has no bound."


def delta_statistics(table: pa.Table) -> str:
    """The statistics of a file with these rows, as JSON."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls = {}
    for field in table.schema:
        if pa.types.is_nested(field.type):  # statistics of structs are by field; none are kept
            continue
        column = table[field.name]
        nulls[field.name] = column.null_count
        bounds = _bounds(column) if column.null_count < len(column) else None
        if bounds is not None:
            low[field.name], high[field.name] = bounds
    low = {name: value for name, value in low.items() if value is not None}
    high = {name: value for name, value in high.items() if value is not None}
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The lowest and highest value as in a log; None for types that have none."""
    kind = column.type
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_large_string)
    times = (pa.types.is_date32, pa.types.is_timestamp, pa.types.is_decimal)
    if not any(is_kind(kind) for is_kind in (*known, *times)):
        return None
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        return None
    found = pc.min_max(column).as_py()
    return _text(found["min"], lowest=True), _text(found["max"], lowest=False)


def _text(value: Any, *, lowest: bool) -> Any:
    """A bound as JSON; None if it has none."""
    if isinstance(value, str):
        return value[:LENGTH] if lowest or len(value) <= LENGTH else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return float(value) if Decimal(float(value)) == value else None
    if isinstance(value, datetime.datetime):
        # Logs have milliseconds: the lowest is rounded down, the highest up.
        cut = value.replace(microsecond=value.microsecond // 1000 * 1000)
        if not lowest and cut != value:
            cut += datetime.timedelta(milliseconds=1)
        return (
            cut.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            if (value.tzinfo)
            else cut.isoformat(timespec="milliseconds")
        )
    return value.isoformat() if isinstance(value, datetime.date) else value
