"""The rows of several evaluations in one order. Different rows, or labels, are refused; failed rows are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.display import Shown, shown
from torchlake.errors import DataError, UsageError
from torchlake.evaluation.report import FACTS
from torchlake.evaluation.sections.judged import JudgedRows
from torchlake.evaluation.sections.rows import FILE, stored_name
from torchlake.tables.failures import count_reasons, format_reasons
from torchlake.tables.formats.types import without_size
from torchlake.tables.hashes import column_hashes

LISTED = 50
SAID = 10
"Classes that a message names."
JUDGED = ("label", "prediction", "score", "loss", "right", "error")
"The columns of rows.parquet that are compared."


@shown
@dataclass(frozen=True, kw_only=True)
class FailedRows:
    """The rows that one model of a comparison failed on."""

    model: str
    rows: int
    errors: Mapping[str, int]
    "Their number for each reason."
    first: tuple[Mapping[str, Any], ...]
    "The `key` and the `error` of the first ones."

    def _shown(self) -> Shown:
        return f"{self.model}: {self.rows:,} rows ({', '.join(format_reasons(self.errors))})", []


def aligned(folders: Sequence[Path], names: Sequence[str]) -> tuple[list[JudgedRows], list[FailedRows]]:
    """Return the rows that all evaluations measured, in the order of the first, and those that a model failed on.

    Raises DataError if the evaluations have other rows.
    """
    facts = [facts_of(folder) for folder in folders]
    for one, folder, name in zip(facts, folders, names, strict=True):
        if FILE not in one["files"] or one["kind"] == "language":
            raise UsageError(f"{name}: {one['made']['task']} without labels is not compared row by row.")
        file = folder / FILE
        if not file.is_file() or atomic_io.size_and_sha256(file) != one["files"][FILE]:
            raise DataError(f"{file}: is missing, damaged or of another evaluation. Evaluate the model again.")
    tables = [_read(folder / FILE, one["made"]) for folder, one in zip(folders, facts, strict=True)]
    first, ids = tables[0], tables[0].column_names[0]
    usable, failed = np.ones(len(first), dtype=bool), list[FailedRows]()
    for at in range(len(tables)):
        _refuse_repeated_keys(tables[at][tables[at].column_names[0]], names[at])
        if at:
            _refuse_other_rows(facts[0], facts[at], first, tables[at], (names[0], names[at]))
        if not tables[at][ids].equals(first[ids]):
            tables[at] = tables[at].take(_places(first[ids], tables[at][ids]))
        measured = tables[at]["loss"].is_valid()
        usable &= measured.to_numpy()
        if rows := len(lost := tables[at].filter(pc.invert(measured))):
            errors = dict(count_reasons(lost["error"].drop_null()).most_common())
            some = lost.slice(0, LISTED)
            pairs = zip(some[ids].to_pylist(), some["error"].to_pylist(), strict=True)
            listed = tuple({"key": str(key), "error": error} for key, error in pairs)
            failed.append(FailedRows(model=names[at], rows=rows, errors=errors, first=listed))
    if not usable.any():
        reasons = "; ".join(f"{one.model}: {', '.join(format_reasons(one.errors))}" for one in failed)
        raise DataError(f"there is no row that all models have a prediction for. {reasons or 'The tables are empty'}.")
    places, kept = np.flatnonzero(usable), pa.array(usable)
    sides = [
        JudgedRows(folder, one["kind"], tuple(one["labels"]), table.select([ids, *JUDGED]).filter(kept), places)
        for folder, one, table in zip(folders, facts, tables, strict=True)
    ]
    return sides, failed


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the values of eval.json. Raises DataError for other JSON."""
    facts = atomic_io.read_json(folder / FACTS)
    if not isinstance(facts, dict) or facts.get("format") != 1:
        raise DataError(f"{folder / FACTS}: is not of an evaluation. Evaluate the model again.")
    return facts


def _read(file: Path, made: Mapping[str, Any]) -> pa.Table:
    """Return the columns that are compared, and hashes of the texts that the model was given, which may be long."""
    given = {stored_name(name) for name in made.get("columns", ())}
    with pq.ParquetFile(file, page_checksum_verification=True) as rows:
        key, *others = rows.schema_arrow
        found = rows.read(columns=[key.name, *JUDGED])
        for one in others:
            if one.name in given and without_size(one.type) == pa.string():
                parts = (batch.column(0).cast(pa.large_string()) for batch in rows.iter_batches(columns=[one.name]))
                hashes = np.concatenate([np.zeros(0, np.uint64), *map(column_hashes, parts)])
                found = found.append_column(one.name, pa.array(hashes))
        return found


def _places(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> pa.Array:
    """Return where the rows are among the others, null if they are not there."""
    mine, theirs = ids.combine_chunks(), others.combine_chunks()
    if mine.type != theirs.type:
        mine, theirs = mine.cast(pa.string()), theirs.cast(pa.string())
    return pc.index_in(mine, theirs)


def _refuse_repeated_keys(ids: pa.ChunkedArray, name: str) -> None:
    """Raise DataError if two rows have the same key, or none: which row is which is not known."""
    if (distinct := pc.count_distinct(ids).as_py()) == len(ids):
        return
    counts = pc.value_counts(ids.combine_chunks())
    some = counts.filter(pc.or_(pc.greater(counts.field(1), 1), pc.is_null(counts.field(0)))).field(0)[0].as_py()
    raise DataError(
        f"{name}: {len(ids):,} rows have {distinct:,} different keys; {some!r} is not of one row. Rows are matched by "
        "key: evaluate with a key of unique values, or without one."
    )


def _refuse_other_rows(
    one: Mapping[str, Any], other: Mapping[str, Any], rows: pa.Table, others: pa.Table, names: tuple[str, str]
) -> None:
    """Raise DataError unless two evaluations have the same rows with the same labels, where both have one."""
    where = f"{names[0]} and {names[1]}"
    if (one["kind"], sorted(map(repr, one["labels"]))) != (other["kind"], sorted(map(repr, other["labels"]))):
        said = (f"{side['kind']} {', '.join(map(repr, side['labels'][:SAID]))}".strip() for side in (one, other))
        raise DataError(f"{where}: predict different things: {'; '.join(said)}.")
    ids = rows.column_names[0]
    if ids != others.column_names[0]:
        raise DataError(f"{where}: their rows have different keys, {ids} and {others.column_names[0]}.")
    place = _places(rows[ids], others[ids])
    common = place.is_valid()
    mine, theirs = rows.filter(common), others.take(place.drop_null())
    both = pc.and_(mine["loss"].is_valid(), theirs["loss"].is_valid())
    for name in [each for each in mine.column_names[1 + len(JUDGED) :] if each in theirs.column_names]:
        if not mine[name].equals(theirs[name]):
            raise DataError(
                f"{where}: their rows have other values of {name!r} under the same keys; the table was replaced in "
                "between. Evaluate both on the same table."
            )
    labels = [side["label"].filter(both).to_pylist() for side in (mine, theirs)]
    differ = sum(str(left) != str(right) for left, right in zip(*labels, strict=True)) if labels[0] != labels[1] else 0
    if len(rows) != len(others) or place.null_count or differ:
        raise DataError(
            f"{where}: have different rows: {len(rows):,} and {len(others):,} rows, {common.true_count:,} in both; "
            f"{differ:,} labels differ. Evaluate both on the same table."
        )
