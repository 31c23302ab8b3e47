"""Tables and outputs, one damage to one of their files, and everything that a user may do with them.

A damage is a file, a kind and two numbers, so a draw of it can be repeated. Whatever happens must be the right rows, or
an error of torchlake: exceptions of libraries do not reach users.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pyiceberg.catalog
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

import tiny
import torchlake as tl
from delta_vectors import delete_by_vector
from torchlake.errors import TorchlakeError
from torchlake.outputs.find import output_of
from torchlake.outputs.target import as_table, target_options
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources._find import source_of
from torchlake.tables.table import open_table

KINDS = (
    "delta",
    "vectors",
    "delta_output",
    "iceberg",
    "iceberg_output",
    "parquet",
    "folder_output",
    "arrow",
    "csv",
    "jsonl",
)
DAMAGES = (
    "delete", "empty", "cut", "flip", "noise", "folder", "twice", "value", "key", "line", "rename", "swap",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**70, 0.5, "", "x", "a.b", "../../etc/passwd", "é\0", [], {}, [None], {"a": None},
    "2024-01-01", "9999-99-99", "-", "%", "%zz", "x" * 5000,
)  # fmt: skip
"Values that take the place of one in a JSON file."
ROWS = pa.table(
    {
        "id": range(20),
        "a.b": [f"text {number}" for number in range(20)],
        "s": [{"x": number, "y": [number]} for number in range(20)],
        "p": ["a", "b é%"] * 10,
        "day": pa.array([19000, 19001] * 10, pa.int32()).cast(pa.date32()),
    }
)


class Damage(NamedTuple):
    """What is done to which file: numbers choose among its files, places and values."""

    kind: str
    file: int
    place: int
    value: int


def build(kind: str, root: Path) -> str:
    """Write a table or an output of a kind below `root`; return its name."""
    root.mkdir(parents=True)
    if kind == "parquet":
        pq.write_table(ROWS.slice(0, 12), root / "a.parquet", row_group_size=5, write_page_checksum=True)
        pq.write_table(ROWS.slice(12), root / "b.parquet")
        return str(root)
    if kind == "arrow":
        with (
            pa.ipc.new_file(root / "a.arrow", ROWS.schema) as file,
            pa.ipc.new_stream(root / "b.arrow", ROWS.schema) as stream,
        ):
            file.write_table(ROWS, 6)
            stream.write_table(ROWS, 6)
        return str(root)
    if kind == "csv":
        csv.write_csv(ROWS.drop_columns("s"), root / "a.csv")
        (root / "b.csv.gz").write_bytes(gzip.compress((root / "a.csv").read_bytes()))
        return str(root)
    if kind == "jsonl":
        lines = "".join(json.dumps(row, default=str) + "\n" for row in ROWS.to_pylist())
        (root / "a.jsonl").write_text(lines)
        (root / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return str(root)
    if kind == "iceberg":
        return _iceberg(root)
    if kind == "delta":
        config = {"delta.enableChangeDataFeed": "true"}
        write_deltalake(root / "t", ROWS.slice(0, 8), partition_by=["p", "day"], configuration=config)
        write_deltalake(root / "t", ROWS.slice(8, 6), mode="append")
        DeltaTable(root / "t").create_checkpoint()
        write_deltalake(root / "t", ROWS.slice(14), mode="append")
        DeltaTable(root / "t").delete("id = 3")
        return str(root / "t")
    if kind == "vectors":
        write_deltalake(root / "t", ROWS, configuration={"delta.enableDeletionVectors": "true"})
        for rows, inline in (([3], False), ([3, 4, 19], True)):
            (path,) = pa.table(DeltaTable(root / "t").get_add_actions())["path"].to_pylist()
            delete_by_vector(root / "t", path, rows, inline=inline)
        return str(root / "t")
    if kind == "iceberg_output":
        os.environ["PYICEBERG_CATALOG__DAMAGED__URI"] = f"sqlite:///{root}/catalog.db"
        os.environ["PYICEBERG_CATALOG__DAMAGED__WAREHOUSE"] = f"file://{root}/warehouse"
        pyiceberg.catalog._ENV_CONFIG = Config()  # it is read once, when pyiceberg is imported
        with pyiceberg.catalog.load_catalog("damaged") as catalog:
            catalog.create_namespace("db")
    output = "iceberg:damaged.db.t" if kind == "iceberg_output" else str(root / "t")
    written = [("create", ROWS), ("append", ROWS.set_column(0, "id", [range(20, 40)]))]
    for mode, rows in written[:1] if kind == "folder_output" else written:
        tl.map(
            _ones, rows, output, schema={"n": pa.int64()}, key="id", version="1", mode=mode, engine=tiny.Here(),
            format="delta" if kind == "delta_output" else None, chunk_rows=8,
        )  # fmt: skip
    return output


def _ones() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"n": pa.array([1] * len(batch), pa.int64())})


def _iceberg(root: Path) -> str:
    """Two snapshots of a table; its name is the path of its newest metadata file, which needs no catalog."""
    catalog = SqlCatalog("lake", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}/warehouse")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", ROWS.schema)
    with table.update_spec() as update:
        update.add_identity("p")
    table.append(ROWS.slice(0, 10))
    table.append(ROWS.slice(10))
    catalog.close()
    return str(table.metadata_location).removeprefix("file://")


def files_of(root: Path) -> list[Path]:
    """The files that can be damaged, in the order of their names."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "catalog.db")


def damage(root: Path, one: Damage) -> str:
    """Do it; return in words what was done."""
    files = files_of(root)
    path = files[one.file % len(files)]
    _DAMAGES.get(one.kind, _in_text)(path, one, files)
    return f"{one.kind} {one.place} {one.value} {path.relative_to(root)}"


def _bytes(path: Path, one: Damage, files: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    place = one.place % max(1, len(content))
    if one.kind == "flip" and content:
        content[place] ^= 1 << one.value % 8
    elif one.kind == "noise":
        content[place : place + 4] = one.value.to_bytes(8, "little")[:4]
    elif one.kind in ("cut", "empty"):
        content = content[: place if one.kind == "cut" else 0]
    path.write_bytes(content)


def _whole(path: Path, one: Damage, files: list[Path]) -> None:
    if one.kind == "swap":
        other = files[one.place % len(files)]
        shutil.copy(other, path) if other != path else None
    elif one.kind == "rename":
        path.rename(path.with_name(f"x{path.name}"))
    elif one.kind == "twice" and path.suffix == ".parquet" and "_delta_log" not in path.parts:
        rows = pq.ParquetFile(path).read()
        name = rows.column_names[one.place % rows.num_columns]
        pq.write_table(pa.Table.from_arrays([*rows.columns, rows[name]], [*rows.column_names, name]), path)
    else:
        path.unlink()
        if one.kind == "folder":
            path.mkdir()


def _in_text(path: Path, one: Damage, files: list[Path]) -> None:
    """Change a value, a key or a line of a JSON file."""
    if path.suffix != ".json":
        return
    lines = path.read_text().splitlines() if "_delta_log" in path.parts else [path.read_text()]
    place = one.place % len(lines)
    if one.kind == "line":
        lines = [*lines, lines[place]] if one.value % 2 else lines[:place] + lines[place + 1 :]
    else:
        found = json.loads(lines[place])
        places = [(holder, key) for holder, key in _places(found)]
        holder, key = places[(one.place // len(lines)) % len(places)]
        if one.kind == "key":
            del holder[key]
        else:
            holder[key] = ODD[one.value % len(ODD)]
        lines[place] = json.dumps(found)
    path.write_text("\n".join(lines))


_DAMAGES: dict[str, Callable[[Path, Damage, list[Path]], None]] = {
    **dict.fromkeys(("flip", "noise", "cut", "empty"), _bytes),
    **dict.fromkeys(("swap", "rename", "twice", "delete", "folder"), _whole),
}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every holder and key of a JSON value; strings that are JSON themselves are replaced as a whole."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in [*keys]:
        yield value, key
        yield from _places(value[key])


def _scan(name: str, source: Any, columns: tuple[str, ...] = ()) -> None:
    table = open_table(source, columns=columns)
    columns = columns or tuple(table.schema.names)
    reader = ChunkReader(columns)
    try:
        for chunk in plan_chunks(table, columns=columns, chunk_rows=6).chunks:
            reader.read(chunk)
    finally:
        reader.close()


def _follow(name: str) -> None:
    kind = source_of(name)
    followed = kind.follow(name) if kind is not None and hasattr(kind, "follow") else None
    if followed is not None and followed.position > 0:
        before = followed.position - 1
        _scan(name, followed.at(before))
        followed.has_changed(before, followed.position)
        followed.changed_rows(before, followed.position, "id")
        _scan(name, followed.added(before, followed.position))


def _append(name: str) -> None:
    rows = ROWS.set_column(0, "id", [range(100, 120)])
    tl.map(
        _ones, rows, name, schema={"n": pa.int64()}, key="id", version="1", mode="append", engine=tiny.Here(),
    )  # fmt: skip


def _target(name: str) -> None:
    target = output_of(name, target_options({})).target
    snapshot, table = target.snapshot(), as_table(target)
    _ = snapshot.latest
    if table is not None:
        for commit in table.commits(snapshot):
            target.has(snapshot, commit)
        table.live_files(snapshot)
        table.position(snapshot, "x")


USES: dict[str, tuple[Callable[[str], Any], ...]] = {
    "delta": (lambda name: _scan(name, name), lambda name: _scan(name, name, ("id", "a.b")), _follow, _target),
    **dict.fromkeys(
        ("delta_output", "iceberg_output"), (tl.verify, tl.open, _target, _append, lambda name: _scan(name, name))
    ),
    "vectors": (lambda name: _scan(name, name), _follow, _target, lambda name: _scan(name, f"{name}@v1")),
    "iceberg": (lambda name: _scan(name, name), lambda name: _scan(name, name, ("id",)), _follow),
    "parquet": (lambda name: _scan(name, name), lambda name: _scan(name, name, ("id", "a.b"))),
    **dict.fromkeys(
        ("arrow", "csv", "jsonl"), (lambda name: _scan(name, name), lambda name: _scan(name, name, ("id",)))
    ),
    "folder_output": (tl.verify, tl.open, _target, lambda name: _scan(name, name)),
}


class Tables:
    """The tables of each kind in a folder; every draw begins with undamaged files at the same paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {kind: build(kind, folder / "now" / kind) for kind in KINDS}
        shutil.copytree(folder / "now", folder / "kept")

    def raw_errors(self, kind: str, one: Damage) -> list[str]:
        """Return what reaches a user besides errors of torchlake, for one damage to a table of a kind."""
        found = []
        for use in USES[kind]:
            root = self.folder / "now" / kind
            shutil.rmtree(root)
            shutil.copytree(self.folder / "kept" / kind, root)
            said = damage(root, one)
            try:
                use(self.names[kind])
            except TorchlakeError:
                pass
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                found.append(f"{kind}: {said}: {type(error).__name__}: {error}")
        return found
