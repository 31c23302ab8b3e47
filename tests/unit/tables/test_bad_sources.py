"""Sources that cannot be read, or change while a job reads them: an error before any row is scored, or one version."""

from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.utils.config import Config

import tiny
import torchlake as tl
from torchlake.cli.main import main
from torchlake.errors import DataError
from torchlake.tables.sources._find import pinned


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("iceberg:nowhere.db.t", 65, "the catalog 'nowhere' cannot be read"),
        ("iceberg:db", 65, "write a table as iceberg:catalog.namespace.table"),
        ("iceberg:{}/none.metadata.json", 65, "write a table as iceberg:catalog.namespace.table"),
        ("{}/none.metadata.json", 65, "the metadata file cannot be read"),
        ("{}/delta@v9", 65, "Check that version 9 exists"),
        ("{}/none", 65, "there is no such file or folder"),
        ("{}/dangling", 65, "is a link to gone.parquet, which does not exist"),
        ("", 64, "INPUT: is empty. Give one"),
        ("file://data/rows.parquet", 65, "names the host 'data'"),
        ("{}/words", 65, "there is no column 'text'"),
        ("s3://", 65, "s3://: names no bucket or container. Write s3://BUCKET/PATH."),
        ("ftp://host/rows.parquet", 65, "the protocol 'ftp' is refused"),
    ],
)
def test_what_cannot_be_read_ends_the_command_before_any_row_is_scored(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    source: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    deltalake.write_deltalake(tmp_path / "delta", tiny.reviews(3))
    deltalake.write_deltalake(tmp_path / "words", pa.table({"word": ["a"]}))
    (tmp_path / "dangling").symlink_to("gone.parquet")
    output = tmp_path / "scored"
    assert main(["predict", str(tiny_model), source.format(tmp_path), str(output)]) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


class Changing(tiny.Here):
    """Runs chunks in this process, and changes the table after the first one."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        for number, result in enumerate(super().run_chunks(*args, **options)):
            if number == 0:
                self.change()
            yield result


def compact(table: Path, *, vacuum: bool) -> None:
    """Replace the small files of the table by one, and remove them."""
    deltalake.DeltaTable(table).optimize.compact()
    if vacuum:
        deltalake.DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four files of ten rows."""
    for first in range(0, 40, 10):
        deltalake.write_deltalake(tmp_path / "reviews", tiny.reviews(40).slice(first, 10), mode="append")
    return tmp_path / "reviews"


def test_a_table_that_is_compacted_during_the_job_is_read_at_its_version(
    tmp_path: Path, table: Path, tiny_model: Path
) -> None:
    engine = Changing(lambda: compact(table, vacuum=False))
    done = tl.predict(tiny_model, table, tmp_path / "out", key="id", chunk_rows=10, engine=engine)
    assert done.record["sources"][0]["version"] == 3
    assert deltalake.DeltaTable(table).version() == 4
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == list(range(40))
    assert len(done.record["parts"]) == 4


def test_a_table_that_is_vacuumed_during_the_job_is_refused(tmp_path: Path, table: Path, tiny_model: Path) -> None:
    engine = Changing(lambda: compact(table, vacuum=True))
    with pytest.raises(DataError, match=r"\.parquet.*(no longer be read|No such file)"):
        tl.predict(tiny_model, table, tmp_path / "out", key="id", chunk_rows=10, engine=engine)
    assert not (tmp_path / "out").exists()


def test_a_job_that_was_stopped_never_continues_with_another_version(
    tmp_path: Path, table: Path, tiny_model: Path
) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    source, output = pinned(table), tmp_path / "out"
    with pytest.raises(Stopped):
        tl.predict(tiny_model, table, output, key="id", chunk_rows=10, engine=Changing(stop))
    compact(table, vacuum=False)
    with pytest.raises(DataError, match="--accept-new-input"):
        tl.predict(tiny_model, table, output, key="id", chunk_rows=10, engine=tiny.Here())
    done = tl.predict(tiny_model, source, output, key="id", chunk_rows=10, engine=tiny.Here())
    assert done.record["sources"][0]["version"] == 3
    assert sorted(pq.read_table(output)["id"].to_pylist()) == list(range(40))
