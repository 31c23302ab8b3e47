"""The rows of several evaluations in one order. Different rows, or labels, are refused."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import DataError, UsageError
from torchlake.evaluation.report import FACTS
from torchlake.evaluation.sections.judged import JudgedRows
from torchlake.evaluation.sections.rows import FILE


def aligned(folders: Sequence[Path], names: Sequence[str]) -> list[JudgedRows]:
    """Return the rows of all evaluations in the order of the first. Raises DataError if they are not the same."""
    facts = [atomic_io.read_json(folder / FACTS) for folder in folders]
    for one, name in zip(facts, names, strict=True):
        if FILE not in one["files"]:
            raise UsageError(f"{name}: its evaluation has no rows; {one['made']['task']} is not compared row by row.")
    tables = [_read(folder / FILE) for folder in folders]
    first, ids = tables[0], tables[0].column_names[0]
    sides = []
    for at, (one, table) in enumerate(zip(facts, tables, strict=True)):
        _refuse_other_rows(facts[0], one, first, table, (names[0], names[at]))
        if not table[ids].equals(first[ids]):
            table = table.take(pc.index_in(first[ids].combine_chunks(), table[ids].combine_chunks()))
        labels = tuple(one["labels"])
        places = np.arange(len(table))
        sides.append(JudgedRows(folders[at], one["kind"], labels, table, places))
    usable = np.ones(len(first), dtype=bool)
    for side in sides:
        usable &= side.table["loss"].is_valid().to_numpy()
    kept = pa.array(usable)
    places = np.flatnonzero(usable)
    return [JudgedRows(one.path, one.kind, one.labels, one.table.filter(kept), places) for one in sides]


def _read(file: Path) -> pa.Table:
    with pq.ParquetFile(file, page_checksum_verification=True) as rows:
        fixed = ("label", "prediction", "score", "loss", "right", "probabilities")
        names = [rows.schema_arrow.names[0], *(name for name in fixed if name in rows.schema_arrow.names)]
        return rows.read(columns=names)


def _refuse_other_rows(
    one: Mapping[str, Any], other: Mapping[str, Any], rows: pa.Table, others: pa.Table, names: tuple[str, str]
) -> None:
    """Raise DataError unless two evaluations have the same rows with the same labels."""
    where = f"{names[0]} and {names[1]}"
    if (one["kind"], sorted(map(str, one["labels"]))) != (other["kind"], sorted(map(str, other["labels"]))):
        raise DataError(f"{where}: predict different things ({one['kind']} and {other['kind']}, or other classes).")
    ids = rows.column_names[0]
    if ids != others.column_names[0]:
        raise DataError(f"{where}: their rows have different keys, {ids} and {others.column_names[0]}.")
    mine, theirs = rows[ids].combine_chunks(), others[ids].combine_chunks()
    if mine.type != theirs.type:
        mine, theirs = mine.cast(pa.string()), theirs.cast(pa.string())
    place = pc.index_in(mine, theirs)
    common = place.is_valid()
    labels = [_comparable(rows["label"].filter(common)), _comparable(others["label"].take(place.drop_null()))]
    differ = sum(left != right for left, right in zip(*labels, strict=True)) if labels[0] != labels[1] else 0
    if len(mine) != len(theirs) or place.null_count or differ:
        raise DataError(
            f"{where}: have different rows: {len(mine):,} and {len(theirs):,} rows, {common.true_count:,} in both; "
            f"{differ:,} labels differ. Evaluate both on the same table."
        )


def _comparable(labels: pa.ChunkedArray) -> Any:
    """Return labels as something that `==` compares as a whole and by row."""
    return [str(one) for one in labels.to_pylist()] if pa.types.is_nested(labels.type) else labels.to_pylist()
