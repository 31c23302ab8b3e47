"""Spark DataFrames of every type and with odd names, as scored with any version of pyspark (`make engines`)."""

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark import SparkContext
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.errors import TableError

VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
SEEN = "timestamp'2024-01-02 03:04:05.678901'"
TYPES = {
    "bool": "true",
    "byte": "1Y",
    "short": "1S",
    "int": "cast(null as int)",
    "long": "9007199254740993L",
    "float": "cast(0.1 as float)",
    "double": "0.1D",
    "decimal": "cast(1.5 as decimal(38,10))",
    "binary": "X'00ff'",
    "date": "date'0001-01-01'",
    "timestamp": SEEN,
    "timestamp_ntz": "timestamp_ntz'1600-01-02 03:04:05'",
    "nothing": "null",
    "days": "interval 3 days",
    "day_time": "interval '3 04:05:06.7' day to second",
    "map": f"map('a', {SEEN}, 'b', null)",
    "map_of_structs": "map(1, named_struct('x', array(1, null)))",
    "array": "array(null)",
    "struct": f"named_struct('a b.c', {SEEN}, 'd', array(timestamp_ntz'2024-01-01 00:00:00'))",
}
NEWER = {
    (4, 0): {
        "variant": """parse_json('{"a": [1, "x"]}')""",
        "variants": "array(parse_json('1'))",
        "collated": "'X' collate utf8_lcase",
        "map_of_collated": "map('a' collate utf8_lcase, 1)",
        "no_fields": "struct()",
    },
    (4, 1): {"time": "time'12:01:02.123456'"},
    (4, 3): {
        "geography": "st_geogfromwkb(X'0101000000000000000000F03F0000000000000040')",
        "geometry": "st_geomfromwkb(X'0101000000000000000000F03F0000000000000040')",
    },
}
ALL = TYPES | {name: value for since, some in NEWER.items() if since <= VERSION for name, value in some.items()}
REFUSED = {
    "year_month": ("interval '1-2' year to month", "interval year to month, which Spark cannot pass to Python"),
    "months": ("array(interval 3 months)", "interval month, which Spark cannot pass to Python. Cast it"),
    "calendar": ("make_interval(1, 2, 3, 4, 5, 6, 7.5)", "interval"),
    "twice_inside": ("named_struct('a', 1, 'a', 2)", "in the column 'twice_inside' has two columns named 'a'; rename"),
}


ADD_SIZE = partial(
    eval, "lambda t: t.append_column('size', __import__('pyarrow').array([t.num_columns] * len(t), 'int64'))"
)
"A worker without a model; Spark's Python processes do not import this module for it."


def sized(frame: DataFrame) -> DataFrame:
    engine = tl.Spark(frame.sparkSession)
    schema = engine.frame_schema(frame).append(pa.field("size", pa.int64()))
    return engine.map_frame(frame, ADD_SIZE, schema)  # type: ignore[no-any-return]


def of_types(spark: SparkSession, types: dict[str, str]) -> DataFrame:
    columns = ", ".join(f"{value} as `{name}`" for name, value in types.items())
    return spark.sql(f"select 1 id, 'a good film' text, {columns}")


def assert_kept(frame: DataFrame, found: DataFrame) -> None:
    """The columns of the frame are as they were, types and values."""
    count = len(frame.schema.fields)
    assert found.schema.fields[:count] == frame.schema.fields
    before, after = frame.collect(), found.collect()
    assert sorted(repr(tuple(row)[:count]) for row in after) == sorted(repr(tuple(row)) for row in before)


def test_columns_of_every_type_stay_as_they_are(tiny_model: Path, spark: SparkSession) -> None:
    frame = of_types(spark, ALL)
    scored = tl.predict(tiny_model, frame)
    assert_kept(frame, scored)
    assert [row["label"] in ("good", "bad") for row in scored.collect()] == [True]


@pytest.mark.slow
def test_user_defined_types_stay_as_they_are(spark: SparkSession) -> None:
    rows = [(1, Vectors.dense(1.0, 2.0), [Vectors.sparse(3, {1: 0.5})]), (2, None, [])]
    fields = [StructField("v", VectorUDT()), StructField("several", ArrayType(VectorUDT()))]
    frame = spark.createDataFrame(rows, StructType([StructField("id", LongType()), *fields]))
    assert_kept(frame, sized(frame))


@pytest.mark.parametrize("column", REFUSED)
def test_a_type_that_cannot_pass_is_named_with_the_way_out(column: str, tiny_model: Path, spark: SparkSession) -> None:
    value, said = REFUSED[column]
    frame = of_types(spark, {column: value})
    with pytest.raises(TableError, match=re.escape(said)) as error:
        tl.predict(tiny_model, frame)
    assert "\n" not in str(error.value)
    assert_kept(frame.drop(column), sized(frame.drop(column)))


def test_columns_are_found_whatever_their_names(tiny_model: Path, spark: SparkSession) -> None:
    frame = spark.sql(
        "select 'a good film' `the.text`, 2 `user.age`, named_struct('age', 3) user, 4 `a b`, 5 `back``tick`, "
        "6 `Id`, 7 `id`, 8 `,;{}()=`, 9 `c1`, 10 `é`, 11 `*`"
    )
    scored = tl.predict(tiny_model, frame, text="the.text")
    assert_kept(frame, scored)
    assert [row["error"] for row in scored.collect()] == [None]
    with pytest.raises(TableError, match="the DataFrame has two columns named 'id'; rename one"):
        tl.predict(tiny_model, spark.sql("select 1 id, 'a film' text, 2 id"))


def test_frames_without_rows_cached_ones_and_large_strings_are_mapped(spark: SparkSession) -> None:
    frame = of_types(spark, ALL).drop(*NEWER[4, 3])  # Spark itself cannot cache these
    assert sized(frame.limit(0)).collect() == []
    assert_kept(frame, sized(frame.filter("id = 1").cache()))
    assert_kept(frame, sized(frame.union(frame).repartition(5).dropDuplicates(["id"])))
    name = "spark.sql.execution.arrow.useLargeVarTypes"
    if VERSION >= (4, 0):
        spark.conf.set(name, "true")
        try:
            assert_kept(frame.select("id", "text", "binary"), sized(frame.select("id", "text", "binary")))
        finally:
            spark.conf.unset(name)


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_both_kinds_of_sql_give_the_same_rows(ansi: str, tiny_model: Path, spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.ansi.enabled", "false")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = spark.sql("select 1 id, 'a good film' text union all select 2, null")
        rows = tl.predict(tiny_model, frame).orderBy("id").collect()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", before or "false")
    assert [row["error"] for row in rows] == [None, "null_input"]


def test_a_streaming_frame_keeps_its_types(spark: SparkSession, tmp_path: Path) -> None:
    frame = of_types(spark, {name: value for name, value in TYPES.items() if name not in ("nothing", "array")})
    frame = frame.drop("days", "day_time", "date", "timestamp_ntz").withColumnRenamed("int", "an.int")
    frame.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "in"))
    query = sized(stream).writeStream.format("memory").queryName("typed").trigger(availableNow=True).start()
    query.awaitTermination()
    assert spark.table("typed").select("size").collect()[0][0] == len(frame.columns)


def test_the_frames_own_session_is_used_in_any_thread(spark: SparkSession) -> None:
    found: list[Any] = []
    frame = spark.newSession().sql("select 1 id, 'a film' text")
    schema = pa.schema([("id", pa.int32()), ("text", pa.string()), ("size", pa.int64())])
    call = threading.Thread(target=lambda: found.extend(tl.Spark().map_frame(frame, ADD_SIZE, schema).collect()))
    call.start()
    call.join()
    assert [row["size"] for row in found] == [2]


@pytest.mark.parametrize("problem", ["stream", "column", "query"])
def test_a_frame_that_cannot_be_trained_on_says_why(
    problem: str, tmp_path: Path, tiny_bert: Path, spark: SparkSession
) -> None:
    rows = spark.createDataFrame(tiny.reviews(8).to_pylist())
    if problem == "stream":
        rows.write.parquet(str(tmp_path / "in"))
        rows = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "in"))
    elif problem == "column":
        rows = rows.withColumn("again", F.lit(1)).withColumn("other", F.lit(2)).toDF(*rows.columns, "x", "x")
    else:
        rows = rows.withColumn("bad", F.expr("cast(raise_error('a stale view') as string)"))
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"] = {"train": rows, "validation": None}
    said = {"stream": "has no end", "column": "`?x`?", "query": "a stale view"}[problem]
    with pytest.raises(TableError, match=said) as error:
        tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert "Stacktrace" not in str(error.value)


def test_a_function_in_sql_has_the_same_types(tiny_model: Path, spark: SparkSession) -> None:
    classify = tl.spark_udf(tiny_model, spark)
    kind = spark.sql("select 'a film' text").select(classify("text").alias("p")).schema["p"].dataType
    assert kind.simpleString() == "struct<label:string,score:float,truncated:boolean,error:string>"


def test_the_private_names_of_pyspark_are_there(spark: SparkSession) -> None:
    """CONTRIBUTING.md lists them."""
    assert SparkContext._active_spark_context is spark.sparkContext
    scheduler = spark.sparkContext._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    assert int(scheduler.maxNumConcurrentTasks(profile)) == 2
    assert int(scheduler.getExecutorMemoryStatus().size()) == 1


@pytest.mark.slow  # processes that load torch and llguidance
def test_texts_are_written_into_frames(tiny_gpt2: Path, spark: SparkSession) -> None:
    """With options of rows, several answers, a row for each, and words of a schema."""
    frame = spark.sql(
        "select id, concat('a film ', id) text, case when id = 1 then named_struct('max_new_tokens', 2, 'seed', null) "
        "when id = 2 then named_struct('max_new_tokens', 0, 'seed', null) else named_struct('max_new_tokens', null, "
        "'seed', id) end options from range(5)"
    )
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "seed": 3}
    wanted = tl.predict(tiny_gpt2, pa.Table.from_pylist([row.asDict(True) for row in frame.collect()]), **options)
    assert_kept(frame, scored := tl.predict(tiny_gpt2, frame, **options))
    rows = sorted(scored.collect())
    assert [row["generated_text"] for row in rows] == wanted["generated_text"].to_pylist()
    assert [row["error"] for row in rows] == wanted["error"].to_pylist()
    assert rows[1]["generated_tokens"] == 2
    assert rows[2]["error"].startswith("bad_options: ")
    exploded = tl.predict(tiny_gpt2, frame.drop("options"), n=3, explode=True, **options)
    listed = {
        row["id"]: row["generated_text"]
        for row in tl.predict(tiny_gpt2, frame.drop("options"), n=3, **options).collect()
    }
    found = sorted((row["id"], row["sample"], row["generated_text"]) for row in exploded.collect())
    assert found == [(row, sample, text) for row in range(5) for sample, text in enumerate(listed[row])]
    word = {"enum": ["red", "green"]}
    schema = {
        "type": "object",
        "properties": {"color": word, "others": {"type": "array", "items": word, "minItems": 1, "maxItems": 2}},
        "required": ["color", "others"],
        "additionalProperties": False,
    }
    typed = tl.predict(tiny_gpt2, frame.drop("options"), json_schema=schema, json_columns=True, max_new_tokens=40)
    assert [typed.schema[name].dataType.simpleString() for name in ("color", "others")] == ["string", "array<string>"]
    assert all(row["color"] in ("red", "green") and {*row["others"]} <= {"red", "green"} for row in typed.collect())
