"""What the Spark engine does beyond the promise of every engine: frames, SQL, streams, refusals, output."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import engine_work
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from torchlake.engines._spark_session import Session
from torchlake.engines.spark import Spark
from torchlake.errors import TableError, UsageError
from torchlake.launching import launch

TEXTS = ["good movie", None, "a bad plot", "", "good good film", "stale"]


def test_a_master_that_does_not_answer_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Session, "_running", lambda session: None)  # another test's session may be running
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        port = closed.getsockname()[1]
        with pytest.raises(UsageError) as error:
            Spark(master=f"spark://localhost:1,127.0.0.1:{port}").session.get()
    said = str(error.value)
    assert f"cannot be reached (localhost:1: Connection refused; 127.0.0.1:{port}: Connection refused)" in said
    assert "\n" not in said
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("master", ["spark://", "spark://host", "spark://:7077", "spark://host:port"])
def test_a_master_without_host_and_port_is_refused(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_running", lambda session: None)
    with pytest.raises(UsageError, match="is not spark://HOST:PORT"):
        Spark(master=master).session.get()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six rows with columns of many types, two of them without text."""
    path = tmp_path / "rows.parquet"
    rows = {
        "id": pa.array(range(6), pa.int64()),
        "text": TEXTS,
        "day": pa.array([19000 + n for n in range(6)], pa.date32()),
        "price": pa.array([None, 1, 2, 3, 4, 5], pa.decimal128(9, 2)),
        "words": [["a"], [], None, ["b", "c"], ["d"], []],
        "small": pa.array(range(6), pa.int16()),
    }
    pq.write_table(pa.table(rows), path)
    return path


@pytest.fixture
def frame(spark: SparkSession, table: Path) -> DataFrame:
    return spark.read.parquet(str(table))


def expected(model: Path, table: Path) -> dict[int, Any]:
    scored = tl.predict(model, pq.read_table(table), engine=tiny.Here())
    return dict(zip(scored["id"].to_pylist(), scored["label"].to_pylist(), strict=True))


def test_a_frame_comes_back_lazily_with_its_own_columns_as_they_were(
    tiny_model: Path, table: Path, frame: DataFrame
) -> None:
    scored = tl.predict(tiny_model, frame)
    assert scored.schema.fields[: len(frame.columns)] == frame.schema.fields
    assert scored.columns[len(frame.columns) :] == ["label", "score", "truncated", "error"]
    rows = {row["id"]: row for row in scored.collect()}
    assert {number: row["label"] for number, row in rows.items()} == expected(tiny_model, table)
    assert {number: row["error"] for number, row in rows.items() if row["error"]} == {1: "null_input", 3: "null_input"}
    assert {row["id"]: row.asDict() for row in frame.collect()} == {
        number: {name: row[name] for name in frame.columns} for number, row in rows.items()
    }


@pytest.mark.slow
def test_a_frame_with_empty_partitions_is_scored(tiny_model: Path, frame: DataFrame) -> None:
    assert tl.predict(tiny_model, frame.repartition(8)).count() == 6
    assert tl.predict(tiny_model, frame.limit(0)).collect() == []


@pytest.mark.slow
def test_frames_are_joined_and_asked_in_sql(
    tiny_model: Path, table: Path, spark: SparkSession, frame: DataFrame
) -> None:
    scored = tl.predict(tiny_model, frame.select("id", "text"), prefix="is_")
    assert scored.join(frame, "id").filter("is_label is not null and small < 5").count() == 3
    classify = tl.spark_udf(tiny_model, spark, name="classify", all_probabilities=True)
    frame.createOrReplaceTempView("reviews")
    rows = spark.sql("SELECT id, p.* FROM (SELECT id, classify(text) AS p FROM reviews)").collect()
    assert {row["id"]: row["label"] for row in rows} == expected(tiny_model, table)
    assert {row["id"] for row in rows if row["error"] == "null_input"} == {1, 3}
    assert frame.select(classify("text").getField("score").alias("s")).filter(F.col("s") > 1).count() == 0


@pytest.mark.slow
def test_a_function_of_pairs_takes_both_columns(spark: SparkSession, tmp_path: Path) -> None:
    spec = replace(tiny.SPEC, text="question", text_pair="answer", labels=("False", "True"))
    folder = tiny.build_model(tmp_path / "model", encoder=tiny.build_pair_encoder(tmp_path / "encoder"), spec=spec)
    rows = task_cases.pairs(12)
    tl.spark_udf(folder, spark, name="compare")
    spark.createDataFrame(rows.to_pandas()).createOrReplaceTempView("pairs")
    found = spark.sql("SELECT id, compare(question, answer).label AS same FROM pairs ORDER BY id").collect()
    expected = tl.predict(folder, rows.drop_columns("label"), engine=tiny.Here())
    assert [row["same"] for row in found] == expected["label"].to_pylist()


@pytest.mark.slow
def test_a_stream_is_scored(tiny_model: Path, tmp_path: Path, spark: SparkSession, frame: DataFrame) -> None:
    source, sink = tmp_path / "source", tmp_path / "sink"
    source.mkdir()
    (tmp_path / "rows.parquet").rename(source / "rows.parquet")
    stream = spark.readStream.schema(frame.schema).parquet(str(source))
    mapped = tl.predict(tiny_model, stream)
    assert mapped.isStreaming

    def write(batch: DataFrame, number: int) -> None:
        tl.predict(tiny_model, batch).write.mode("append").parquet(str(sink))

    for query in (
        mapped.writeStream.format("parquet").option("path", str(tmp_path / "direct")),
        stream.writeStream.foreachBatch(write),
    ):
        checkpoint = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()
    assert spark.read.parquet(str(sink)).count() == spark.read.parquet(str(tmp_path / "direct")).count() == 6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("delta", {"format": "delta"}), ("folder", {})])
def test_each_batch_of_a_stream_is_written_once_also_if_it_is_repeated(
    tiny_model: Path, tmp_path: Path, spark: SparkSession, name: str, options: dict[str, Any]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in range(2):
        pq.write_table(
            tiny.reviews(6).set_column(0, "id", [range(number * 6, number * 6 + 6)]), source / f"{number}.parquet"
        )
    stream = spark.readStream.schema("id long, text string, label string").option("maxFilesPerTrigger", 1)
    write = tl.for_each_batch(tiny_model, tmp_path / name, key="id", **options)

    def twice(batch: DataFrame, number: int) -> None:
        write(batch, number)
        write(batch.orderBy(F.col("id").desc()), number)

    query = stream.parquet(str(source)).writeStream.foreachBatch(twice).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / f"checkpoint-{name}")).start().awaitTermination()
    if name == "delta":
        ids = tl.open(tmp_path / name).to_table()["id"].to_pylist()
    else:
        ids = [row["id"] for row in spark.read.parquet(str(tmp_path / name)).collect()]
    assert sorted(ids) == list(range(12))
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith(".")) == [], "nothing is left"
    for option in ("incremental", "commit_id", "limit"):
        with pytest.raises(UsageError, match=f"{option}: not for the batches of a stream"):
            tl.for_each_batch(tiny_model, tmp_path / name, key="id", **{option: 1})


def test_what_a_frame_cannot_be_asked_is_refused_before_any_work(tiny_model: Path, frame: DataFrame) -> None:
    with pytest.raises(UsageError, match="predict returns a spark frame with predictions"):
        tl.predict(tiny_model, frame, "out")
    with pytest.raises(UsageError, match="A spark frame is scored by the engine spark"):
        tl.predict(tiny_model, frame, engine=tl.Local())
    with pytest.raises(TableError, match="there is no text column 'review'"):
        tl.predict(tiny_model, frame, text="review")
    with pytest.raises(UsageError, match="'label'"):
        tl.predict(tiny_model, frame.withColumn("label", F.lit("x")))


def test_a_frame_is_trained_on_once_spooled(tmp_path: Path, tiny_bert: Path, spark: SparkSession) -> None:
    rows = spark.createDataFrame(tiny.reviews(48).to_pandas())
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"] = {"train": rows, "validation": None}
    done = tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    spooled = tmp_path / "run" / "input" / "train.parquet"
    before = sorted(path.name for path in spooled.iterdir())
    assert pq.read_table(spooled).num_rows == 48
    again = tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert again.complete
    assert again.steps == 0 < done.steps
    assert sorted(path.name for path in spooled.iterdir()) == before, "what the run began with stays"


def test_more_ranks_than_slots_are_refused(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match=r"3 ranks have to run at the same time, but Spark has 2 task slots"):
        tl.Spark(spark, processes=3).launch(os.getpid)


def test_more_workers_than_slots_do_with_the_slots(spark: SparkSession) -> None:
    pids = set(tl.Spark(spark, processes=5).run_chunks(engine_work.own_pid, range(12)))
    assert len(pids) <= 2


def test_gpus_that_spark_does_not_have_are_refused(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="2 GPUs each need 4 GPUs"):
        tl.Spark(spark, processes=2).launch(os.getpid, gpus_per_process=2)


def test_a_session_is_used_as_it_runs(spark: SparkSession) -> None:
    assert tl.Spark().session.get() is spark
    with pytest.raises(UsageError, match=r"local\[2,4\] is running, but local\[1\] was requested"):
        tl.Spark(master="local[1]").session.get()
    with pytest.raises(UsageError, match="already has a master and conf"):
        tl.Spark(spark, conf={"spark.ui.enabled": "false"})


@pytest.mark.slow
def test_what_processes_print_comes_to_the_driver(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert tl.Spark(spark, processes=2).launch(engine_work.print_bytes) == "0"
    seen = capsys.readouterr()
    assert sorted(line for line in seen.out.splitlines() if "rank" in line) == [
        "rank 0 \ufffd\ufffd",
        "rank 1 \ufffd\ufffd",
    ]
    assert seen.err.count("last words without an end") == 2
    assert tl.Spark(spark, processes=2, stdout_to_stderr=True).launch(engine_work.print_bytes) == "0"
    seen = capsys.readouterr()
    assert "rank" not in seen.out
    assert seen.err.count("rank") == 2


@pytest.mark.slow
def test_a_script_is_launched(spark: SparkSession, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, pathlib, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(float(dist.get_rank() + 1)); dist.all_reduce(total)\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(total.item()))\n"
        "dist.destroy_process_group()\n"
    )
    launch.launch_script(str(script), [str(tmp_path)], engine=tl.Spark(spark, processes=2), processes=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3.0", "3.0"]


def test_local_mode_launches_beside_the_driver(spark: SparkSession) -> None:
    assert tl.Spark(spark, processes=3, local_mode=True).launch(os.getenv, "WORLD_SIZE") == "3"
