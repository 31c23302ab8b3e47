"""Ray Datasets as pipelines leave them, actors that die, and clusters that are too small."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray as ray_library
import ray.data
from ray._private import ray_constants
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

import engine_work
import torchlake as tl
import training_runs as runs
from torchlake.engines import _ray_chunks, _ray_launch
from torchlake.engines._ray_cluster import ProcessResources, missing_resources
from torchlake.errors import TableError, UsageError

pytestmark = [pytest.mark.usefixtures("ray"), pytest.mark.filterwarnings("ignore:Use 'expr' instead")]
ROWS = [{"id": number, "text": "a good film"} for number in range(6)]


def made(kind: str) -> Any:
    data = ray_library.data
    items = data.from_items(ROWS)
    if kind == "filtered":
        return items.filter(lambda row: row["id"] < 0)
    if kind == "tensors filtered":
        tensors = data.from_numpy(np.arange(24).reshape(6, 2, 2)).add_column("text", lambda batch: ["x"] * len(batch))
        return tensors.filter(lambda row: False)
    if kind == "no blocks":
        return data.from_items([])
    if kind == "empty blocks":
        return items.repartition(6).filter(lambda row: row["id"] % 2 == 0)
    if kind == "pandas":
        return data.from_pandas([pd.DataFrame(ROWS[:3]), pd.DataFrame({"id": [9], "text": [None]})])
    if kind == "pandas objects":
        columns = {"id": [1, 2], "text": ["a", "b"], "o": [{"a": 1}, [1, 2]], "c": pd.Categorical(["x", "y"])}
        return data.from_pandas(pd.DataFrame(columns))
    if kind == "tensors":
        return data.from_items([{**row, "v": np.ones((row["id"] + 1, 2))} for row in ROWS])
    types = [(pa.int32(), pa.null()), (pa.int64(), pa.string()), (pa.int64(), pa.large_string())]
    blocks = [pa.table({"id": pa.array([n], one), "text": pa.array([None], two)}) for n, (one, two) in enumerate(types)]
    return data.from_arrow(blocks)


COUNTS = {"filtered": 0, "tensors filtered": 0, "no blocks": 0, "empty blocks": 3, "pandas": 4, "pandas objects": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*COUNTS, "tensors", "drift"])
def test_every_row_is_scored(kind: str, tiny_model: Path) -> None:
    frame = made(kind)
    rows = tl.predict(tiny_model, frame).take_all()
    assert len(rows) == COUNTS.get(kind, frame.count())
    assert {row["error"] for row in rows} <= {None, "null_input"}
    if kind in ("tensors", "empty blocks"):
        assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in frame.take_all())
        assert {row["label"] for row in rows} <= {"good", "bad"}


def test_stages_take_a_dataset_without_rows(tiny_model: Path) -> None:
    tokenize, score = tl.ray_stages(tiny_model)
    assert score(tokenize(made("no blocks"))).count() == 0


@pytest.mark.parametrize("kind", ["no blocks", "fails"])
def test_a_dataset_that_cannot_be_trained_on_says_why(kind: str, tmp_path: Path, tiny_bert: Path) -> None:
    frame = made("no blocks") if kind == "no blocks" else ray_library.data.from_items(ROWS).map(lambda row: row["none"])
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"] = {"train": frame, "validation": None}
    said = "the Dataset has no rows" if kind == "no blocks" else "Ray could not write the Dataset as Parquet: .*none"
    with pytest.raises(TableError, match=said):
        tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)


@pytest.mark.slow  # actors that load torch and llguidance
def test_texts_are_written_into_datasets(tiny_gpt2: Path) -> None:
    """With options of rows, several answers, a row for each, and words of a schema; blocks are joined."""
    kind = pa.struct({"max_new_tokens": pa.int64(), "seed": pa.int64()})
    given = pa.array([{"seed": 0}, {"max_new_tokens": 2}, {"max_new_tokens": 0}, None, {"seed": 4}], kind)
    table = pa.table({"id": range(5), "text": [f"a film {row}" for row in range(5)], "options": given})
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "seed": 3}
    data, plain = ray_library.data.from_arrow([table[:2], table[2:]]), table.drop_columns(["options"])

    def rows(frame: Any) -> list[Any]:
        return sorted(frame.take_all(), key=lambda row: (row["id"], row.get("sample")))

    wanted = tl.predict(tiny_gpt2, table, max_error_rate=1.0, **options)
    found = rows(tl.predict(tiny_gpt2, data, **options))
    assert [row["generated_text"] for row in found] == wanted["generated_text"].to_pylist()
    assert [row["error"] for row in found] == wanted["error"].to_pylist()
    plain_data = ray_library.data.from_arrow([plain[:2], plain[2:]])
    wanted = tl.predict(tiny_gpt2, plain, n=3, explode=True, **options)
    found = rows(tl.predict(tiny_gpt2, plain_data, n=3, explode=True, **options))
    assert [row["generated_text"] for row in found] == wanted["generated_text"].to_pylist()
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    typed = tl.predict(tiny_gpt2, plain_data, json_schema=schema, json_columns=True, max_new_tokens=20).repartition(1)
    assert typed.schema().types[typed.schema().names.index("color")] == pa.string()
    assert {row["color"] for row in typed.take_all()} <= {"red", "green"}


DYING = "lambda t: t if {stays} else __import__('os')._exit(1)"


@pytest.mark.slow
def test_an_actor_that_dies_is_replaced_and_a_row_that_ends_every_actor_ends_the_job(tmp_path: Path) -> None:
    frame = ray_library.data.from_items(ROWS).repartition(3)
    once = f"__import__('os').path.exists('{tmp_path}/x') or __import__('os').mkdir('{tmp_path}/x')"
    assert tl.Ray().map_frame(frame, partial(eval, DYING.format(stays=once)), None).count() == 6
    always = partial(eval, DYING.format(stays="3 not in t['id'].to_pylist()"))
    with pytest.raises(RayError):
        tl.Ray().map_frame(frame, always, None).take_all()


@pytest.mark.slow
def test_rows_beyond_the_object_store_are_mapped() -> None:
    store = ray_library.cluster_resources()["object_store_memory"]
    each = 8 << 20
    rows = min(int(store * 1.2 / each), 200)
    big = ray_library.data.range(rows).map_batches(
        lambda batch: {"id": batch["id"], "blob": [os.urandom(each) for _ in batch["id"]]}, batch_size=4
    )
    assert tl.Ray().map_frame(big, partial(eval, "lambda t: t"), None).count() == rows


def test_what_is_missing_is_named_with_its_amount() -> None:
    nodes = [{"CPU": 2.0, "memory": 100.0}, {"CPU": 4.0}]
    share = ProcessResources(cpus=2, gpus=1, memory=80, resources={"special": 0.5})
    said = missing_resources(share, 2, nodes)
    assert said == "Missing: 2 GPUs, 60 memory, 1 special."
    said = missing_resources(ProcessResources(cpus=5), 1, nodes)
    assert said == "Enough in all, but no node has room: each process needs 5 CPUs on one node."


def test_a_cluster_of_this_process_that_is_too_small_is_refused_at_once(tiny_model: Path) -> None:
    engine = tl.Ray(resources={"special": 1})
    for call in (
        lambda: engine.run_chunks(engine_work.own_pid, [0]),
        lambda: engine.launch(os.getpid),
        lambda: tl.predict(tiny_model, made("drift"), engine=engine),
    ):
        with pytest.raises(UsageError, match="Missing: 1 special"):
            call()


@pytest.mark.slow
def test_a_cluster_that_may_grow_says_what_is_missing_then_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchlake.engines._ray_cluster._started", [])  # as if it were another one
    monkeypatch.setattr(_ray_chunks, "WARN_S", 0.5)
    monkeypatch.setattr(_ray_chunks, "GROW_S", 1.0)
    monkeypatch.setattr(_ray_launch, "GROW_S", 2.5)
    engine = tl.Ray(resources={"special": 2})
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UsageError, match="has waited . s for Ray to grow. Missing: 2"),
    ):
        list(engine.run_chunks(engine_work.own_pid, [0]))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UsageError, match="room for 0 of 1 ranks .* Missing: 2 special"),
    ):
        engine.launch(os.getpid)
    assert "No process fits on the Ray cluster yet. Missing: 2 special." in caplog.text
    assert "for a place on Ray. Each process asks for 1 CPU, 2 special;" in caplog.text
    assert "Missing: 2 special. Waiting since" in caplog.text


def test_the_private_names_of_ray_are_there() -> None:
    """CONTRIBUTING.md lists them."""
    assert isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool)
    (free,) = available_resources_per_node().values()
    assert free["memory"] > 0
    assert not ray_library.util.client.ray.is_connected()
    actor = ray_library.remote(dict).remote()
    assert hasattr(actor, "__ray_terminate__")
