"""What the Ray engine does beyond the promise of every engine: Datasets, stages, refusals, output."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray as ray_library
import ray.data
from transformers import AutoTokenizer

import engine_work
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from pids import wait_for
from torchlake.errors import TableError, UsageError

pytestmark = pytest.mark.usefixtures("ray")
TEXTS = ["good movie", None, "a bad plot", "", "good good film", "stale"] * 5


@pytest.fixture
def table() -> pa.Table:
    rows = {"id": range(len(TEXTS)), "text": pa.array(TEXTS, pa.string()), "tags": [["a"], None, []] * 10}
    return pa.table({**rows, "day": pa.array(range(len(TEXTS)), pa.date32())})


@pytest.fixture
def dataset(table: pa.Table) -> Any:
    return ray_library.data.from_arrow(table).repartition(3)


def by_id(rows: list[dict[str, Any]], column: str) -> dict[int, Any]:
    return {row["id"]: row[column] for row in rows}


def test_a_dataset_comes_back_lazily_with_its_own_columns(tiny_model: Path, table: pa.Table, dataset: Any) -> None:
    scored = tl.predict(tiny_model, dataset)
    rows = scored.take_all()
    expected = tl.predict(tiny_model, table, engine=tiny.Here()).to_pylist()
    for column in ("text", "tags", "day", "label", "error"):
        assert by_id(rows, column) == by_id(expected, column)
    assert by_id(rows, "score") == pytest.approx(by_id(expected, "score"), abs=1e-6)


@pytest.mark.slow
def test_stages_with_steps_of_ones_own_between_them(tiny_model: Path, table: pa.Table, dataset: Any) -> None:
    def count_tokens(batch: pa.Table) -> pa.Table:
        import pyarrow.compute as pc

        return batch.append_column("tokens", pc.list_value_length(batch["input_ids"]))

    tokenize, score = tl.ray_stages(tiny_model, prefix="is_", all_probabilities=True)
    tokens = tokenize(dataset)
    assert set(tokens.schema().names) == {*table.column_names, "input_ids", "truncated", "error"}
    longer = tokens.map_batches(count_tokens, batch_format="pyarrow")
    rows = score(longer).take_all()
    expected = tl.predict(tiny_model, table, engine=tiny.Here(), prefix="is_", all_probabilities=True).to_pylist()
    assert by_id(rows, "tokens")[0] == 4
    assert by_id(rows, "tokens")[1] is None
    for column in ("is_label", "error", "truncated"):
        assert by_id(rows, column) == by_id(expected, column)
    assert set(rows[0]) == {*expected[0], "tokens"}
    with pytest.raises(UsageError, match="'error'"):
        tokenize(tokens)


@pytest.mark.slow
def test_stages_of_pairs(tmp_path: Path) -> None:
    spec = replace(tiny.SPEC, text="question", text_pair="answer", labels=("False", "True"))
    folder = tiny.build_model(tmp_path / "model", encoder=tiny.build_pair_encoder(tmp_path / "encoder"), spec=spec)
    rows = task_cases.pairs(12).drop_columns("label").rename_columns({"answer": "reply"})
    tokenize, score = tl.ray_stages(folder, text_pair="reply")
    tokens = tokenize(ray_library.data.from_arrow(rows))
    assert "token_type_ids" in tokens.schema().names
    expected = tl.predict(folder, rows, text_pair="reply", engine=tiny.Here()).to_pylist()
    assert by_id(score(tokens).take_all(), "label") == by_id(expected, "label")


@pytest.mark.slow
def test_the_first_stage_takes_conversations_as_predict_does(tiny_gpt2: Path) -> None:
    texts = ["a good film", "the plot was"]
    chats = pa.table({"id": range(2), "text": [[{"role": "user", "content": text}] for text in texts]})
    tokenize, _ = tl.ray_stages(tiny_gpt2)
    tokens = by_id(tokenize(ray_library.data.from_arrow(chats)).take_all(), "input_ids")
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2)
    asked = tokenizer([f"<user> {text} <assistant>" for text in texts])["input_ids"]
    assert [list(tokens[row]) for row in range(2)] == asked


@pytest.mark.slow
def test_a_dataset_is_trained_on_once_spooled(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"] = {"train": ray_library.data.from_arrow(tiny.reviews(48)), "validation": None}
    done = tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert pq.read_table(tmp_path / "run" / "input" / "train.parquet").num_rows == 48
    again = tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections)
    assert again.complete
    assert again.steps == 0 < done.steps


def test_what_cannot_be_had_is_refused_before_any_work(tiny_model: Path, dataset: Any) -> None:
    with pytest.raises(UsageError, match="A ray frame is scored by the engine ray"):
        tl.predict(tiny_model, dataset, engine=tl.Local())
    with pytest.raises(TableError, match="there is no text column 'review'"):
        tl.predict(tiny_model, dataset, text="review")
    with pytest.raises(UsageError, match="Ray has room for 2 of 9 ranks that run at the same time and need 1 CPU each"):
        tl.Ray(processes=9).launch(os.getpid)
    with pytest.raises(UsageError, match="Ray has room for 0 of 2 ranks .* need 1 CPU, 1 GPU each"):
        tl.Ray(processes=2, gpus_per_process=1).launch(os.getpid)
    with pytest.raises(UsageError, match="a rank needs whole GPUs"):
        tl.Ray(gpus_per_process=0.5).launch(os.getpid)
    with pytest.raises(UsageError, match="room for 1 of 2 ranks"):
        tl.Ray(processes=2, placement_strategy="STRICT_SPREAD").launch(os.getpid)
    with pytest.raises(UsageError, match="'STRICT_PACK': chunks run as DEFAULT, SPREAD"):
        tl.Ray(placement_strategy="STRICT_PACK").run_chunks(engine_work.own_pid, [0])
    with pytest.raises(UsageError, match="'DEFAULT': ranks are placed by PACK"):
        tl.Ray(placement_strategy="DEFAULT").launch(os.getpid)
    with pytest.raises(UsageError, match="'horovod'"):
        tl.Ray(launcher="horovod")


@pytest.mark.slow
def test_every_chunk_is_a_named_call_with_its_time() -> None:
    """Ray's timeline is made of the events that `ray list tasks` and the dashboard show."""
    engine = tl.Ray(processes=2)
    list(
        engine.run_chunks(
            engine_work.own_pid, range(50), name="predict reviews", label=lambda chunk: f"part-{chunk}.parquet"
        )
    )
    wanted = {f"task::predict reviews: part-{chunk}.parquet" for chunk in range(50)}

    def found() -> bool:
        events = [event for event in ray_library.timeline() if event["cat"] in wanted]
        return {event["cat"] for event in events if event["dur"] > 0} == wanted

    wait_for(found)


@pytest.mark.slow
def test_many_chunks_travel_in_bundles() -> None:
    numbers = list(tl.Ray(processes=2).run_chunks(engine_work.same, range(3000), name="many"))
    assert sorted(numbers) == list(range(3000))


@pytest.mark.slow
def test_a_chunk_is_not_read_ahead_that_another_process_can_begin_with(tmp_path: Path) -> None:
    """Both chunks have to be worked on at the same time."""
    assert sorted(tl.Ray(processes=2).run_chunks(partial(engine_work.meeting_ahead, tmp_path), [0, 1])) == [0, 1]


RESERVED = """
import json, os, ray
from ray._private import ray_constants
from ray.util import placement_group_table
import pyarrow as pa
import ray.data
import torchlake as tl
from torchlake.engines import Resources

ray_constants.ENABLE_RAY_CLUSTER = False
ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
NAMES = ("LOCAL_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
see = lambda: {name: os.environ.get(name) for name in NAMES}
done = {"rank": tl.Ray(processes=2).launch(see, gpus_per_process=None)}
done["bundles"] = [list(group["bundles"].values()) for group in placement_group_table().values()]
make_worker = lambda: lambda chunks: (see() for _ in chunks)
done["chunks"] = list(tl.Ray(processes=2).run_chunks(make_worker, [0, 1], resources=Resources(gpus=None)))
several = Resources(gpus=None, devices=2, threads=2)
done["several"] = list(tl.Ray().run_chunks(make_worker, [0, 1], resources=several))
frame = ray.data.from_arrow(pa.table({"x": [1]}))
worker = lambda: lambda table: table.append_column("saw", pa.array([json.dumps(see())]))
done["frame"] = json.loads(tl.Ray().map_frame(frame, worker, None).take_all()[0]["saw"])
print(json.dumps(done))
"""


@pytest.mark.slow
def test_processes_reserve_the_gpus_and_cpus_that_they_use() -> None:
    """On a Ray that counts two GPUs, which nobody opens."""
    variables = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-c", RESERVED], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    saw = json.loads(done.stdout.splitlines()[-1])
    assert saw["rank"]["CUDA_VISIBLE_DEVICES"] in ("0,1", "1,0"), "as under torchrun: LOCAL_RANK is the device's number"
    assert saw["rank"]["OMP_NUM_THREADS"] == "2"
    assert saw["bundles"] == [[{"CPU": 2.0, "GPU": 1.0}] * 2]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in saw["chunks"]} <= {"0", "1"}
    assert {one["OMP_NUM_THREADS"] for one in saw["chunks"]} == {"2"}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in saw["several"]} <= {"0,1", "1,0"}
    assert saw["frame"]["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert saw["frame"]["OMP_NUM_THREADS"] == "1"


def test_what_processes_print_comes_to_the_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert tl.Ray(processes=2).launch(engine_work.print_bytes) == "0"
    out = capsys.readouterr().out
    assert sorted(line for line in out.splitlines() if "rank" in line) == ["rank 0 \ufffd\ufffd", "rank 1 \ufffd\ufffd"]


def test_ray_is_reached_from_this_machine_alone() -> None:
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    listening = [one.laddr.ip for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.pid in ours]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


JOINING = """
import os
import ray
from ray._private import ray_constants
import torchlake as tl

ray_constants.ENABLE_RAY_CLUSTER = False  # or 127.0.0.1 is taken for this machine's address in the network
tl.Ray(processes=1).join()
print(ray.get_runtime_context().gcs_address)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "joins"), [("RAY_ADDRESS", True), ("UNRELATED", False)])
def test_only_the_cluster_that_is_named_is_joined(variable: str, joins: bool) -> None:
    """As under `ray job submit`; another Ray on this machine, which Ray itself would find, is not meant."""
    ours = ray_library.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", JOINING],
        env={**os.environ, variable: ours},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split()[-1] == ours) == joins
