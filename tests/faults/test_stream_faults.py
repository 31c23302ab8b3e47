"""Spark streams into outputs of every kind: killed after a commit and before Spark's checkpoint, and inside a batch."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest

import tiny
import torchlake as tl

QUERY = """
import os, signal, sys
import torchlake as tl
from pyspark.sql import SparkSession

model, folder, output, kind, kill = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
score = tl.for_each_batch(model, output, key="id", **({"format": "delta"} if kind == "delta" else {}))

def write(batch, number):
    if kill == "inside" and number == 2:
        os.environ["TORCHLAKE_FAILPOINT"] = "commit.ready:1:kill9"
    score(batch, number)
    if kill == "after" and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)

stream = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1).parquet(folder + "/in")
query = stream.writeStream.foreachBatch(write).option("checkpointLocation", folder + "/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "iceberg", "folder"])
def test_a_stream_that_is_killed_loses_and_doubles_nothing(
    kind: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    properties = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    lake = pyiceberg.catalog.load_catalog("lake", **properties)
    lake.create_namespace("films")
    (tmp_path / "in").mkdir()
    for number in range(4):
        ids = range(number * 10, number * 10 + 10)
        table = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"a film {one}" for one in ids]})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    output = "iceberg:lake.films.scored" if kind == "iceberg" else str(tmp_path / "out")
    for kill in ("after", "inside", ""):
        done = subprocess.run(
            [sys.executable, "-c", QUERY, model, tmp_path, output, kind, kill],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=240,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if kill else 0), kill
    if kind == "folder":
        found = [tl.open(tmp_path / "out" / f"batch={number}").to_table() for number in range(4)]
        ids = Counter(one for table in found for one in table["id"].to_pylist())
    elif kind == "delta":
        ids = Counter(tl.open(output).to_table()["id"].to_pylist())
    else:
        ids = Counter(lake.load_table("films.scored").scan().to_arrow()["id"].to_pylist())
    assert ids == Counter(range(40))
    lake.close()
