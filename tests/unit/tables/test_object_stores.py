"""Tables in object stores, on servers that speak S3 and Google Cloud Storage: files, Delta, Iceberg, and their errors.

Each job is a process of its own, because the storages' libraries keep connections and settings for the life of one.
"""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError
from pyiceberg.catalog.sql import SqlCatalog

import azure_server
import forked
import gcs_server
import hub_server
import s3_server
import tiny
from s3_server import BUCKET, S3Server
from torchlake.errors import Unavailable
from torchlake.storage import access, errors

READ = """
import json, sys
import pyarrow as pa
from torchlake.errors import TorchlakeError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

for source in sys.argv[1:]:
    try:
        table = open_table(source)
        plan = plan_chunks(table, columns=table.schema.names, chunk_rows=3)
        reader = ChunkReader(table.schema.names)
        rows = pa.concat_tables([reader.read(chunk)[0] for chunk in plan.chunks]).to_pylist()
        print(json.dumps({"rows": rows, "sources": plan.sources}))
    except TorchlakeError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""
ROWS = pa.table({"x": range(8), "part": ["a b", "c%", "a b", None, "c%", "é/ü", "c%", "a b"]})


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server.serving() as server:
        yield server


@pytest.fixture(scope="module")
def gcs() -> Iterator[dict[str, str]]:
    with gcs_server.serving() as environment:
        yield environment


def read(*sources: str, home: Path, **environment: str) -> list[dict[str, Any]]:
    """The rows of each source as a new process reads them, or its error; there are no credentials but those given."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK"))}
    variables = {**ours, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", **environment}
    if "HF_ENDPOINT" in environment:  # huggingface_hub reads it when it is imported
        command = [sys.executable, "-c", READ, *sources]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    else:
        done = forked.run_script(READ, sources, environment=variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_delta(s3: S3Server, name: str) -> str:
    url = f"s3://{BUCKET}/{name}"
    options = {**s3.environment, "AWS_ALLOW_HTTP": "true", "aws_conditional_put": "etag"}
    deltalake.write_deltalake(url, ROWS, partition_by=["part"], storage_options=options)
    deltalake.DeltaTable(url, storage_options=options).delete("x = 4")
    return url


def test_delta_tables_of_s3_are_read_at_any_version(s3: S3Server, tmp_path: Path) -> None:
    url = write_delta(s3, "delta")
    spellings = (url, f"{url}/", url.replace("s3:", "s3a:"), f"{url}@v1")
    *current, first = read(*spellings, f"{url}@v0", home=tmp_path, **s3.environment)
    for found in current:
        assert sorted(found["rows"], key=lambda row: row["x"]) == [row for row in ROWS.to_pylist() if row["x"] != 4]
        assert found["sources"][0]["version"] == 1
    assert sorted(first["rows"], key=lambda row: row["x"]) == ROWS.to_pylist()


@pytest.mark.slow
def test_iceberg_tables_of_s3_are_read_by_catalog_and_by_metadata(s3: S3Server, tmp_path: Path) -> None:
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"s3://{BUCKET}/{tmp_path.name}"
    keys = {"s3.access-key-id": "testing", "s3.secret-access-key": "testing", "s3.region": "us-east-1"}
    catalog = SqlCatalog("lake", uri=uri, warehouse=warehouse, **{"s3.endpoint": s3.address, **keys})
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", ROWS.schema)
    table.append(ROWS)
    catalog.close()
    names = {"PYICEBERG_CATALOG__LAKE__URI": uri, "PYICEBERG_CATALOG__LAKE__WAREHOUSE": warehouse}
    found = read("iceberg:lake.db.t", table.metadata_location, home=tmp_path, **s3.environment, **names)
    assert [one["rows"] for one in found] == [ROWS.to_pylist()] * 2
    loose, missing = read(f"{warehouse}/db/t", "iceberg:lake.db.none", home=tmp_path, **s3.environment, **names)
    assert "is a table in Iceberg format; read as loose files it includes deleted rows" in loose["error"]
    assert "the catalog 'lake' has no such table" in missing["error"]


def test_a_delta_table_of_s3_is_scored_like_a_local_one(s3: S3Server, tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(40)
    options = {**s3.environment, "AWS_ALLOW_HTTP": "true", "aws_conditional_put": "etag"}
    deltalake.write_deltalake(f"s3://{BUCKET}/reviews", rows, storage_options=options)
    deltalake.write_deltalake(tmp_path / "reviews", rows)
    outputs = []
    for table in (f"s3://{BUCKET}/reviews", str(tmp_path / "reviews")):
        outputs.append(tmp_path / f"scored-{len(outputs)}")
        command = ["predict", str(tiny_model), table, str(outputs[-1]), "--key=id"]
        done = forked.run_script(forked.MAIN, command, environment={**os.environ, **s3.environment})
        assert done.returncode == 0, done.stderr
    remote, local = (pq.read_table(output, columns=["id", "label", "error"]) for output in outputs)
    assert remote.equals(local)
    assert sorted(remote["id"].to_pylist()) == list(range(40))


@pytest.mark.slow
def test_files_of_google_cloud_storage_are_read(gcs: dict[str, str], tmp_path: Path) -> None:
    write = (
        "import sys, fsspec, pyarrow as pa, pyarrow.parquet as pq\n"
        "for name, ids in (('a', [1, 2]), ('b', [3])):\n"
        f"    with fsspec.open(f'gs://{gcs_server.BUCKET}/in/{{name}}.parquet', 'wb') as file:\n"
        "        pq.write_table(pa.table({'x': ids}), file)\n"
    )
    assert forked.run_script(write, environment={**os.environ, **gcs}).returncode == 0
    bucket = f"gs://{gcs_server.BUCKET}"
    *found, missing = read(f"{bucket}/in", f"{bucket}/in/*.parquet", f"{bucket}/in/a.parquet", "gs://none/in",
                           home=tmp_path, **gcs)  # fmt: skip
    assert [[row["x"] for row in one["rows"]] for one in found] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    assert "gs://none/in: there is no bucket or repository 'none'" in missing["error"]


@pytest.mark.skipif(not azure_server.is_installed(), reason="needs azurite: npm install --global azurite")
def test_files_and_delta_tables_of_azure_are_read(tmp_path: Path) -> None:
    pytest.importorskip("adlfs")
    write = (
        "import fsspec, deltalake, pyarrow as pa, pyarrow.parquet as pq\n"
        "fsspec.filesystem('abfs').mkdir('lake')\n"
        "for name, ids in (('a', [1, 2]), ('b', [3])):\n"
        "    with fsspec.open(f'abfs://lake/in/{name}.parquet', 'wb') as file:\n"
        "        pq.write_table(pa.table({'x': ids}), file)\n"
        "deltalake.write_deltalake('abfs://lake/delta', pa.table({'x': [7, 8]}))\n"
    )
    with azure_server.serving(tmp_path) as azure:
        subprocess.run([sys.executable, "-c", write], env={**os.environ, **azure}, check=True, timeout=120)
        whole = f"abfss://lake@{azure_server.ACCOUNT}.dfs.core.windows.net/in"
        *found, missing = read("abfs://lake/in", "az://lake/in/*.parquet", whole, "abfs://lake/delta", "abfs://none/in",
                               home=tmp_path, **azure)  # fmt: skip
        (refused,) = read("abfs://lake/in", home=tmp_path)
    assert [[row["x"] for row in one["rows"]] for one in found] == [[1, 2, 3]] * 3 + [[7, 8]]
    assert found[3]["sources"][0]["version"] == 0
    assert "abfs://none/in: there is no bucket or repository 'none'" in missing["error"]
    assert "Credentials come from AZURE_STORAGE_ACCOUNT_NAME" in refused["error"]


def parquet(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=3)
    return sink.getvalue().to_pybytes()


@pytest.mark.slow
def test_files_of_the_hub_are_read_and_scored(tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(40)
    files = {
        "lake/reviews/data/a.parquet": parquet(rows.slice(0, 25)),
        "lake/reviews/data/b.parquet": parquet(rows.slice(25)),
        "lake/reviews/README.md": b"#",
        "lake/gated/data/a.parquet": parquet(rows),
        "lake/private/data/a.parquet": parquet(rows),
    }
    with hub_server.serving(files) as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": hub_server.TOKEN}
        dataset = "hf://datasets/lake/reviews"
        spellings = (dataset, f"{dataset}/data", f"{dataset}/data/*.parquet", f"{dataset}@main/data")
        secret = ("hf://datasets/lake/gated/data", "hf://datasets/lake/private/data")
        for found in read(*spellings, *secret, home=tmp_path, **hub):
            assert found.get("rows") == rows.to_pylist(), found
        wrong = {**hub, "HF_TOKEN": "another"}
        file, *unknown = read(f"{dataset}/data/c.parquet", "hf://datasets/lake/none", *secret, home=tmp_path, **wrong)
        assert "has no table files" in file["error"]
        for found in unknown:
            assert found["error"].startswith("Unavailable: hf://datasets/lake/")
            assert (
                "private or gated repository needs credentials, which come from HF_TOKEN, or `hf auth login`"
                in found["error"]
            )
        command = [
            sys.executable,
            "-m",
            "torchlake",
            "predict",
            str(tiny_model),
            dataset,
            str(tmp_path / "out"),
            "--key=id",
        ]
        scored = subprocess.run(
            command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=240, check=False
        )
        assert scored.returncode == 0, scored.stderr
        assert pq.read_table(tmp_path / "out")["id"].to_pylist() == list(range(40))
        files["lake/reviews/data/b.parquet"] = parquet(tiny.reviews(15, seed=1))
        changed = subprocess.run(
            command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=240, check=False
        )
        assert changed.returncode == 65, changed.stderr
        assert "b.parquet" in changed.stderr


SOURCES = [f"s3://{BUCKET}/delta2", f"s3://{BUCKET}/folder", f"s3://{BUCKET}/x.parquet", f"s3://{BUCKET}/*.csv"]


def test_what_is_missing_is_named(s3: S3Server, tmp_path: Path) -> None:
    none = read("s3://none/folder", "s3://none/x.parquet", f"s3://{BUCKET}/none", home=tmp_path, **s3.environment)
    assert ["no bucket or repository 'none'" in one["error"] for one in none] == [True, True, False]
    assert "has no table files" in none[2]["error"]
    (tmp_path / "adlfs.py").write_text("raise ImportError('as if it were not installed')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    azure, hub = read("abfss://c@account.dfs.core.windows.net/t", "hf://datasets/a/b", home=tmp_path,
                      HF_HUB_OFFLINE="1", PYTHONPATH=path)  # fmt: skip
    assert "MissingExtra" in azure["error"]
    assert "pip install 'torchlake[azure]'" in azure["error"]
    assert "offline mode is enabled" in hub["error"]


def test_without_credentials_the_error_says_where_they_come_from(s3: S3Server, tmp_path: Path) -> None:
    write_delta(s3, "delta2")
    variables = {name: value for name, value in s3.environment.items() if "ACCESS_KEY" not in name}
    for found in read(*SOURCES, home=tmp_path, **variables):
        assert found["error"].startswith("Unavailable: s3://")
        assert "Unable to locate credentials. Credentials come from AWS_ACCESS_KEY_ID and" in found["error"]


def test_a_server_that_does_not_answer_is_named(s3: S3Server, tmp_path: Path) -> None:
    for found in read(SOURCES[1], home=tmp_path, **{**s3.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}):
        assert found["error"].startswith("Unavailable: s3://lake/folder: Could not connect to the endpoint URL")


def test_a_bucket_of_another_region_is_an_error_that_says_so(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    with s3_server.of_another_region() as address:
        for found in read(*SOURCES, home=tmp_path, AWS_ENDPOINT_URL=address, **keys):
            assert found["error"].startswith("Unavailable: s3://")
            assert "The bucket is in another region: set AWS_DEFAULT_REGION to its region." in found["error"]


@pytest.mark.parametrize(
    ("url", "error", "advice"),
    [
        ("s3://b/x", OSError(errno.EREMCHG, "Moved"), "another region: set AWS_DEFAULT_REGION"),
        (
            "s3://b/x",
            PermissionError(errno.EACCES, "Access Denied"),
            "have no access. Credentials come from AWS_ACCESS_KEY",
        ),
        ("gs://b/x", PermissionError("Forbidden"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfss://c@a/x", PermissionError("No"), "AZURE_STORAGE_ACCOUNT_NAME"),
        ("hf://datasets/a/b", PermissionError("gated"), "HF_TOKEN"),
        ("hdfs://host/x", PermissionError("No"), "fsspec's settings for hdfs://"),
    ],
)
def test_an_error_says_what_to_do(url: str, error: OSError, advice: str) -> None:
    assert advice in str(errors.unavailable(url, error))


def test_a_connection_that_ends_in_the_middle_of_an_object_is_named() -> None:
    class Ending(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise EndpointConnectionError(endpoint_url="https://s3.example.com")
            return super().read(size)

    opened = access._Object("s3://b/x", Ending(bytes(100)))
    assert opened.readinto(bytearray(10)) == 10
    for read in (opened.read, opened.readall, lambda: opened.readinto(bytearray(10))):
        with pytest.raises(Unavailable, match=r"s3://b/x: Could not connect to the endpoint URL"):
            read()
