"""What names a table, and what is refused before any work: drift, missing columns, damaged and unsafe files."""

import io
import json
from pathlib import Path
from typing import Any, ClassVar

import deltalake
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchlake.errors import TableError, TorchlakeError, UnsafeError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.formats.extensions import CANONICAL, check_parquet
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources import streams
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return path


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/z.parquet", "_tmp/x.parquet", ".hidden.parquet", "_SUCCESS.parquet", ".c=1/x.parquet"):
        parquet(tmp_path / name, a=[1])
    (tmp_path / "README.md").write_text("not a table")
    assert open_table(tmp_path).names == ("a/z.parquet", "b.parquet")


def test_the_folder_of_a_partition_column_is_not_hidden(tmp_path: Path) -> None:
    parquet(tmp_path / "_day=1" / "x.parquet", a=[1])
    table = open_table(tmp_path)
    assert (table.names, table.schema.names) == (("_day=1/x.parquet",), ["a", "_day"])


def test_globs_and_lists_have_names_that_do_not_depend_on_what_they_match(tmp_path: Path) -> None:
    parquet(tmp_path / "x" / "a.parquet", a=[1])
    assert open_table(f"{tmp_path}/x/*.parquet").names == ("a.parquet",)
    assert open_table(f"{tmp_path}/*/*.parquet").names == ("x/a.parquet",)
    assert open_table(tmp_path / "x" / "a.parquet").names == ("a.parquet",)
    parquet(tmp_path / "y" / "b.parquet", a=[1])
    table = open_table([tmp_path / "y", tmp_path / "x" / "a.parquet"])
    assert table.names == ("y/b.parquet", "x/a.parquet")
    assert table.source == f"{tmp_path / 'y'}, {tmp_path / 'x' / 'a.parquet'}"


def test_inputs_are_read_in_the_order_given(tmp_path: Path) -> None:
    files = [parquet(tmp_path / f"{name}.parquet", a=[name]) for name in "dcba"]
    parquet(tmp_path / "folder" / "2.parquet", a=["f2"])
    parquet(tmp_path / "folder" / "1.parquet", a=["f1"])
    deltalake.write_deltalake(tmp_path / "delta", pa.table({"a": ["t"]}))
    streams.store(pa.table({"a": ["s"]}), tmp_path / "input.parquet")
    stored = streams.Stored(tmp_path / "input.parquet", "Table")
    given = [stored, files[0], files[2], tmp_path / "delta", tmp_path / "folder", files[1]]
    plan = plan_chunks(open_table(given), columns=["a"])
    reader = ChunkReader(["a"])
    assert [reader.read(chunk)[0]["a"][0].as_py() for chunk in plan.chunks] == ["s", "d", "b", "t", "f1", "f2", "c"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a[1].parquet", a=[1])
    assert open_table(path).names == ("a[1].parquet",)


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("x")
    with pytest.raises(TableError, match=r"has no table files \(.parquet, .csv"):
        open_table(tmp_path)
    with pytest.raises(TableError, match="has no table files"):
        open_table(f"{tmp_path}/*.parquet")
    parquet(tmp_path / "reviews.parquet", a=[1])
    with pytest.raises(TableError, match=r"no such file or folder. Did you mean 'reviews.parquet'"):
        open_table(tmp_path / "review.parquet")
    with pytest.raises(TableError, match="name of an input is empty"):
        open_table("")
    with pytest.raises(TableError, match="list of inputs is empty"):
        open_table([])


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1])
    with pytest.raises(TableError, match="named twice"):
        open_table([path, tmp_path])


@pytest.mark.parametrize(
    ("mark", "given"),
    [
        (";", """--csv 'delimiter=;', in a job data.csv: {delimiter: ";"}. It has: id;text;label."""),
        ("|", """--csv 'delimiter=|', in a job data.csv: {delimiter: "|"}. It has: id|text|label."""),
        ("\t", """--csv delimiter=$'\\t', in a job data.csv: {delimiter: "\\t"}. It has: id\ttext\tlabel."""),
    ],
)
def test_a_header_that_was_not_split_names_the_delimiter(tmp_path: Path, mark: str, given: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"id{mark}text{mark}label\n1{mark}fine{mark}good\n")
    with pytest.raises(TableError) as error:
        open_table(path, columns=("text",))
    assert str(error.value).endswith(f"Its fields seem to be separated by {mark!r}: give {given}")
    path.write_text("id\n1\n")
    with pytest.raises(TableError) as error:
        open_table(path, columns=("text",))
    assert "delimiter" not in str(error.value)


def test_a_missing_column_names_file_nearest_and_all(tmp_path: Path) -> None:
    parquet(tmp_path / "1.parquet", text=["x"], n=[1])
    parquet(tmp_path / "2.parquet", txet=["x"], n=[1])
    with pytest.raises(
        TableError, match=r"2.parquet: there is no column 'text'. Did you mean 'txet'\? It has: txet, n"
    ):
        open_table(tmp_path, columns=["text"])
    with pytest.raises(TableError, match=r"2.parquet: there is no column 'text'"):
        open_table(tmp_path)
    assert open_table(tmp_path, columns=["n"]).files


def test_drift_names_file_column_and_types(tmp_path: Path) -> None:
    parquet(tmp_path / "1.parquet", n=[1])
    parquet(tmp_path / "2.parquet", n=[2])
    parquet(tmp_path / "3.parquet", n=["three"])
    with pytest.raises(TableError, match=r"3.parquet: the column 'n' is string, but int64 in .*1.parquet"):
        open_table(tmp_path, columns=["n"])


@pytest.mark.parametrize("wide_first", [False, True])
def test_integers_and_floats_of_several_widths_are_read_as_the_widest(tmp_path: Path, wide_first: bool) -> None:
    narrow, wide = ("b", "a") if wide_first else ("a", "b")
    parquet(tmp_path / f"{narrow}.parquet", n=pa.array([-1, None], pa.int32()), f=pa.array([0.1, None], pa.float32()))
    parquet(tmp_path / f"{wide}.parquet", n=pa.array([2**40, 0], pa.int64()), f=pa.array([0.1, 0], pa.float64()))
    table = open_table(tmp_path, columns=["n", "f"])
    assert table.schema.types == [pa.int64(), pa.float64()]
    reader = ChunkReader(["n", "f"])
    rows = pa.concat_tables([reader.read(chunk)[0] for chunk in plan_chunks(table, columns=["n", "f"]).chunks])
    assert sorted(rows["n"].drop_null().to_pylist()) == [-1, 0, 2**40]
    assert sorted(rows["f"].drop_null().to_pylist()) == [0, 0.1, pa.scalar(0.1, pa.float32()).as_py()]


def test_nulls_encodings_and_extra_columns_are_no_drift(tmp_path: Path) -> None:
    parquet(tmp_path / "1.parquet", t=pa.nulls(2), extra=[1, 2])
    parquet(tmp_path / "2.parquet", t=["a", "b"])
    parquet(tmp_path / "3.parquet", t=pa.array(["c", "d"]).dictionary_encode())
    parquet(tmp_path / "4.parquet", t=pa.array(["e", None], pa.large_string()))
    table = open_table(tmp_path, columns=["t"])
    assert table.schema.field("t").type == pa.large_string()
    reader = ChunkReader(["t"])
    texts = [
        text for chunk in plan_chunks(table, columns=["t"]).chunks for text in reader.read(chunk)[0]["t"].to_pylist()
    ]
    assert texts == [None, None, "a", "b", "c", "d", "e", None]


@pytest.mark.parametrize("damage", ["truncated", "footer", "empty", "text", "lying length"])
def test_a_damaged_file_is_named_or_quarantined(tmp_path: Path, damage: str) -> None:
    parquet(tmp_path / "good.parquet", a=[1, 2])
    bad = parquet(tmp_path / "bad.parquet", a=[3])
    content = bad.read_bytes()
    bad.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "footer": content[:-60] + b"\xff" * 52 + content[-8:],
            "empty": b"",
            "text": b"a,b\n1,2\n" * 9,
            "lying length": content[:-8] + b"\xff\xff\xff\x7fPAR1",
        }[damage]
    )
    with pytest.raises(TableError, match=r"bad.parquet: "):
        open_table(tmp_path, columns=["a"])
    table = open_table(tmp_path, columns=["a"], on_bad_file="quarantine")
    assert table.names == ("good.parquet",)
    assert [file for file, _ in table.quarantined] == [str(bad)]
    (tmp_path / "good.parquet").unlink()
    with pytest.raises(TableError, match="every file is bad"):
        open_table(tmp_path, columns=["a"], on_bad_file="quarantine")


def test_no_byte_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """pyarrow ended it for sizes of levels, and for the statistics of a column whose type is another one."""
    content = parquet(tmp_path / "a.parquet", n=[1, None, 3]).read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    named = content.index(b"ARROW:schema", start) - 2  # this copy of the schema is not about columns
    options, said = ReadOptions(selection=Selection(where="n > 1")), []
    for place in range(start, named):
        damaged = bytearray(content)
        damaged[place] = (damaged[place] + 1) % 256
        (tmp_path / "a.parquet").write_bytes(damaged)
        try:
            open_table(tmp_path, columns=["n"], options=options)
        except TorchlakeError as error:
            said.append(str(error))
    assert any("level histogram size mismatch" in one for one in said)
    assert len(said) < named - start


def test_reading_footers_keeps_no_memory(tmp_path: Path) -> None:
    """Arrow never frees an exception that a Python file raises: 6 to 20 KB, and 64 bytes of its own memory, a file."""
    for number in range(20):
        parquet(tmp_path / f"{number}.parquet", a=[number])
    open_table(tmp_path, columns=["a"])
    before = pa.total_allocated_bytes()
    open_table(tmp_path, columns=["a"])
    assert pa.total_allocated_bytes() == before


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", a=["1"])
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(TableError, match="several formats"):
        open_table(tmp_path)


@pytest.mark.parametrize(
    ("marker", "message"),
    [("_delta_log/0.json", "Delta table cannot be read"), ("metadata/v1.metadata.json", "deleted rows")],
)
def test_a_lakehouse_table_is_not_read_as_loose_files(tmp_path: Path, marker: str, message: str) -> None:
    parquet(tmp_path / "a.parquet", a=[1])
    (tmp_path / marker).parent.mkdir()
    (tmp_path / marker).write_text("{}")
    with pytest.raises(TableError, match=message):
        open_table(tmp_path)


def test_an_unknown_format_is_refused_and_a_known_one_recognized(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", a=[1]).rename(tmp_path / "data")
    assert open_table(tmp_path / "data").format == "parquet"
    (tmp_path / "data").write_text("hello")
    with pytest.raises(TableError, match="name does not show its format"):
        open_table(tmp_path / "data")


def test_urls_are_read_and_renamed_files_are_seen() -> None:
    memory = fsspec.filesystem("memory")
    for name, numbers in (
        ("renamed/a.parquet", [1, 2]),
        ("renamed/sub/b.parquet", [3]),
        ("renamed/_x/c.parquet", [9]),
        ("r[1]*/d.parquet", [5]),
    ):
        sink = io.BytesIO()
        pq.write_table(pa.table({"n": numbers}), sink)
        memory.pipe(f"/{name}", sink.getvalue())
    memory.pipe("/csv/t.csv", b"n\n1\n2\n")
    table = open_table("memory://renamed", columns=["n"])
    assert table.names == ("a.parquet", "sub/b.parquet")
    plan = plan_chunks(table, columns=["n"])
    reader = ChunkReader(["n"])
    assert [reader.read(chunk)[0]["n"].to_pylist() for chunk in plan.chunks] == [[1, 2], [3]]
    assert open_table("memory://renamed/*.parquet").names == ("a.parquet",)
    assert open_table("memory://r[1]*").names == ("d.parquet",)
    plan = plan_chunks(open_table("memory://csv/t.csv"), columns=["n"])
    assert ChunkReader(["n"]).read(plan.chunks[0])[0]["n"].to_pylist() == ["1", "2"]
    memory.pipe("/csv/t.csv", b"n\n1\n3\n")
    assert plan_chunks(open_table("memory://csv/t.csv"), columns=["n"]).id != plan.id
    with pytest.raises(TableError, match="has no table files"):
        open_table("memory://nowhere")


class Canary(pa.ExtensionType):  # type: ignore[misc]
    """Registered under a foreign name; says when pyarrow hands it metadata from a file."""

    heard: ClassVar[list[bytes]] = []

    def __init__(self, name: str = "torchlake.tests.canary") -> None:
        super().__init__(pa.string(), name)

    def __arrow_ext_serialize__(self) -> bytes:
        return b"payload"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> "Canary":
        cls.heard.append(serialized)
        return cls()


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_registered_extension_type_is_refused_before_it_hears_of_the_file(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    storage = pa.ExtensionArray.from_storage(Canary(), pa.array(["x"]))
    column = pa.StructArray.from_arrays([storage], fields=[pa.field("in", Canary())]) if nested else storage
    table = pa.table({"a": pa.array(["y"]), "t": column})
    path = tmp_path / f"t.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table)
    pa.register_extension_type(Canary())
    Canary.heard.clear()
    try:
        with pytest.raises(
            UnsafeError,
            match=r"extension type 'torchlake.tests.canary'. Only Arrow's canonical extension types are read",
        ):
            open_table(path, columns=["a"])
    finally:
        pa.unregister_extension_type("torchlake.tests.canary")
    assert Canary.heard == []


def test_every_alignment_of_the_metadata_is_found(tmp_path: Path) -> None:
    for length in range(1, 13):
        field = pa.field("c" * length, pa.string(), metadata={"ARROW:extension:name": "arrow.py_extension_type"})
        pq.write_table(pa.table([["x"]], schema=pa.schema([field])), tmp_path / "t.parquet")
        with (
            pytest.raises(UnsafeError, match=r"arrow.py_extension_type"),
            pa.OSFile(str(tmp_path / "t.parquet")) as file,
        ):
            check_parquet("t.parquet", file)


def test_canonical_extension_types_are_read_as_their_storage(tmp_path: Path) -> None:
    assert "arrow.uuid" in CANONICAL
    table = pa.table({"u": pa.array([b"0" * 16], pa.uuid()), "j": pa.array([json.dumps({"a": 1})], pa.json_())})
    pq.write_table(table, tmp_path / "t.parquet")
    for path, write in ((tmp_path / "t.arrow", pa.ipc.new_file), (tmp_path / "s.arrow", pa.ipc.new_stream)):
        with write(path, table.schema) as writer:
            writer.write_table(table)
    for name in ("t.parquet", "t.arrow", "s.arrow"):
        plan = plan_chunks(open_table(tmp_path / name), columns=["u", "j"])
        rows, errors = ChunkReader(["u", "j"]).read(plan.chunks[0])
        assert errors == {}
        assert rows.to_pylist() == [{"u": b"0" * 16, "j": '{"a": 1}'}]
