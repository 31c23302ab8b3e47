"""What pyarrow and json write is read back, equal in type and value, however the file is laid out and cut."""

import datetime
import decimal
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sweeps import examples
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

quick = settings(
    max_examples=examples(40, quick=20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\",\n\r\t 'é🙂\0"), max_size=6)
NAMES = st.lists(
    st.text(st.sampled_from("ab._ -é🙂"), min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=4, unique=True
)


def signed(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def floats(width: Any) -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, width=width)  # pyarrow compares a NaN as different from itself


def decimals(digits: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    limit = 10**digits - 1
    return st.integers(-limit, limit).map(lambda number: decimal.Decimal((number < 0, _digits(number), -scale)))


def _digits(number: int) -> tuple[int, ...]:
    return tuple(map(int, str(abs(number))))


Typed = tuple[pa.DataType, st.SearchStrategy[Any]]
"A type and the values, without null, of which `pa.array` makes it."

SCALARS: list[Typed] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    *((pa.type_for_alias(f"int{bits}"), signed(bits)) for bits in (8, 16, 32, 64)),
    *((pa.type_for_alias(f"uint{bits}"), st.integers(0, 2**bits - 1)) for bits in (8, 16, 32, 64)),
    *((kind, floats(width)) for kind, width in ((pa.float16(), 16), (pa.float32(), 32), (pa.float64(), 64))),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.binary(), st.binary(max_size=6)),
    (pa.large_binary(), st.binary(max_size=6)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), signed(32)),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    (pa.time64("us"), st.integers(0, 86_399_999_999)),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    *((pa.timestamp(unit), signed(64)) for unit in ("ms", "us", "ns")),
    *((pa.timestamp(unit, zone), signed(64)) for unit in ("ms", "us", "ns") for zone in ("UTC", "Europe/Zurich")),
    *((pa.duration(unit), signed(64)) for unit in ("s", "ms", "us", "ns")),
    (pa.decimal128(9, 2), decimals(9, 2)),
    (pa.decimal128(38, 38), decimals(38, 38)),
    (pa.decimal256(76, 5), decimals(76, 5)),
]
"Of every format. Parquet itself has no seconds and no 64-bit dates."
DICTIONARY: Typed = pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["", "red", "grün"])
IPC_SCALARS: list[Typed] = [
    DICTIONARY,
    (pa.time32("s"), st.integers(0, 86_399)),
    (pa.timestamp("s"), signed(40)),
    (pa.timestamp("s", "UTC"), signed(40)),
    (pa.date64(), st.dates(datetime.date(1900, 1, 1))),
    (pa.dictionary(pa.int32(), pa.int64()), st.integers(0, 3)),
    (pa.dictionary(pa.uint16(), pa.large_string(), True), st.sampled_from(["a", "b"])),
]


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def lists(item: Typed) -> st.SearchStrategy[Typed]:
    kind, values = item
    some = st.lists(maybe(values), max_size=3)
    return st.sampled_from([(pa.list_(kind), some), (pa.large_list(kind), some)])


def fixed_lists(item: Typed) -> st.SearchStrategy[Typed]:
    return st.just((pa.list_(item[0], 2), st.lists(maybe(item[1]), min_size=2, max_size=2)))


def structs(fields: list[Typed]) -> Typed:
    kind = pa.struct([(f"f{place}", one) for place, (one, _) in enumerate(fields)])
    return kind, st.fixed_dictionaries({f"f{place}": maybe(values) for place, (_, values) in enumerate(fields)})


def maps(item: Typed) -> Typed:
    pairs = st.dictionaries(TEXT, maybe(item[1]), max_size=3).map(lambda found: list(found.items()))
    return pa.map_(pa.string(), item[0]), pairs


def typed(scalars: list[Typed], *more: Callable[[Typed], st.SearchStrategy[Typed]]) -> st.SearchStrategy[Typed]:
    def nested(item: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
        kinds = [item.flatmap(lists), st.lists(item, min_size=1, max_size=3).map(structs), item.map(maps)]
        return st.one_of(*kinds, *(item.flatmap(one) for one in more))

    return st.recursive(st.sampled_from(scalars), nested, max_leaves=3)


@st.composite
def tables(draw: st.DrawFn, columns: st.SearchStrategy[Typed]) -> pa.Table:
    """Up to 60 rows."""
    count = draw(st.integers(0, 60))
    made = {}
    for name in draw(NAMES):
        kind, values = draw(columns)
        few = draw(st.lists(maybe(values), min_size=min(1, count), max_size=6))
        made[name] = pa.array([few[row * 7 % len(few)] for row in range(count)], kind)
    table = pa.table(made)
    assume(is_valid(table))
    return table


def is_valid(table: pa.Table) -> bool:
    """pyarrow gives a null struct with an empty dictionary in it an index into that, and cannot write it."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def read_all(path: Path, columns: list[str], chunk_rows: int | None) -> pa.Table:
    table = open_table(path, columns=columns)
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows, hashed=False)
    reader, pieces = ChunkReader(columns), [plan.schema.empty_table()]
    for chunk in plan.chunks:
        piece, errors = reader.read(chunk)
        assert errors == {}
        pieces.append(piece)
    reader.close()
    return pa.concat_tables(pieces)


def check_equal(path: Path, table: pa.Table, chunk_rows: int | None) -> None:
    """Dictionaries are read as the values that they encode, lists of a fixed size as lists."""
    got = read_all(path, table.column_names, chunk_rows)
    for name in table.column_names:
        read, written = got[name].combine_chunks(), table[name].combine_chunks()
        assert read.type.equals(storage_type(written.type)), path
        if pa.types.is_fixed_size_list(written.type):
            assert read.is_valid().equals(written.is_valid()), path
            pairs = zip(read, written, strict=True)
            assert all(one.values.equals(other.values) for one, other in pairs if one.is_valid), path
            continue
        if pa.types.is_dictionary(written.type):
            written = written.cast(written.type.value_type)
        assert read.equals(written), path


def write_ipc(path: Path, table: pa.Table, rows: int, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas="stream" in path.name)
    with (pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file)(path, table.schema, options=options) as out:
        out.write_table(table.unify_dictionaries(), max_chunksize=rows)


@quick
@given(
    table=tables(typed(SCALARS) | st.just(DICTIONARY)),  # pyarrow reads nested ones of one row group only
    rows=st.integers(1, 30),
    chunk_rows=st.integers(1, 25) | st.none(),
    compression=st.sampled_from(["none", "snappy", "zstd", "gzip"]),
    dictionaries=st.booleans(),
    version=st.sampled_from(["1.0", "2.0"]),
    checksums=st.booleans(),
    small_pages=st.booleans(),
)
def test_parquet(
    tmp_path: Path,
    table: pa.Table,
    rows: int,
    chunk_rows: int | None,
    compression: str,
    dictionaries: bool,
    version: str,
    checksums: bool,
    small_pages: bool,
) -> None:
    pq.write_table(
        table,
        tmp_path / "t.parquet",
        row_group_size=rows,
        compression=compression,
        use_dictionary=dictionaries,
        data_page_version=version,
        write_page_checksum=checksums,
        data_page_size=16 if small_pages else None,
        write_batch_size=3,
    )
    assume(pyarrow_reads(tmp_path / "t.parquet", len(table)))
    check_equal(tmp_path / "t.parquet", table, chunk_rows)


def pyarrow_reads(path: Path, rows: int) -> bool:
    """Whether pyarrow reads back the file that it wrote: not so for lists and maps of bools in tiny pages."""
    try:
        return len(pq.read_table(path)) == rows
    except pa.ArrowInvalid:
        return False


@quick
@given(
    table=tables(typed(SCALARS + IPC_SCALARS, fixed_lists)),
    rows=st.integers(1, 30),
    chunk_rows=st.integers(1, 25) | st.none(),
    compression=st.sampled_from([None, "lz4", "zstd"]),
)
def test_arrow_files_and_streams(
    tmp_path: Path, table: pa.Table, rows: int, chunk_rows: int | None, compression: str | None
) -> None:
    for name in ("file.arrow", "stream.arrow"):
        write_ipc(tmp_path / name, table, rows, compression)
    for name in ("file.arrow", "stream.arrow"):
        check_equal(tmp_path / name, table, chunk_rows)


JSON_SCALARS: list[Typed] = [
    (pa.bool_(), st.booleans()),
    (pa.int64(), signed(64)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.string(), TEXT),
]


def json_typed() -> st.SearchStrategy[Typed]:
    def nested(item: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
        one_list = item.map(lambda one: (pa.list_(one[0]), st.lists(maybe(one[1]), max_size=3)))
        return st.one_of(one_list, st.lists(item, min_size=1, max_size=3).map(structs))

    return st.recursive(st.sampled_from(JSON_SCALARS), nested, max_leaves=3)


def full(kind: pa.DataType) -> Any:
    """A value that shows all of a type."""
    if pa.types.is_list(kind):
        return [full(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: full(field.type) for field in kind}
    return {pa.bool_(): True, pa.int64(): 7, pa.float64(): 0.5, pa.string(): "é"}[kind]


@quick
@given(
    table=tables(json_typed()),
    chunk_rows=st.integers(1, 25) | st.none(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    ascii_only=st.booleans(),
    where=st.integers(0, 60),
    gaps=st.booleans(),
)
def test_json_lines(
    tmp_path: Path, table: pa.Table, chunk_rows: int | None, end: str, ascii_only: bool, where: int, gaps: bool
) -> None:
    one = pa.table({field.name: pa.array([full(field.type)], field.type) for field in table.schema})
    table = pa.concat_tables([table.slice(0, where), one, table.slice(where)])
    rows = table.to_pylist()
    if gaps:
        rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows)
    (tmp_path / "t.jsonl").write_bytes(text.encode())
    got = read_all(tmp_path / "t.jsonl", table.column_names, chunk_rows)
    assert got.schema.equals(table.schema)
    assert got.equals(table)


CSV_SCALARS: list[Typed] = [
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.bool_(), st.booleans()),
    (pa.int64(), signed(64)),
    (pa.uint8(), st.integers(0, 255)),
    (pa.date32(), st.integers(-100_000, 100_000)),
    (pa.timestamp("ms"), st.integers(0, 10**12)),
    (pa.decimal128(9, 2), decimals(9, 2)),
]


@quick
@given(
    table=tables(st.sampled_from(CSV_SCALARS)),
    chunk_rows=st.integers(1, 25) | st.none(),
    delimiter=st.sampled_from([",", "\t"]),
    batch_rows=st.integers(1, 30),
)
def test_csv(tmp_path: Path, table: pa.Table, chunk_rows: int | None, delimiter: str, batch_rows: int) -> None:
    path = tmp_path / ("t.csv" if delimiter == "," else "t.TSV")
    options = pa.csv.WriteOptions(delimiter=delimiter, batch_size=batch_rows)
    pa.csv.write_csv(table, os.fspath(path), options)
    texts = [pa.compute.fill_null(column.cast(pa.string()), "") for column in table.columns]
    got = read_all(path, table.column_names, chunk_rows)
    assert got.equals(pa.table(texts, names=table.column_names))
