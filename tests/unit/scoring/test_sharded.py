"""A model over several ranks of a process: the same answers, one process for the engine, no rank left behind."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import families
import pids
import tiny
import torchlake as tl
from torchlake.errors import UsageError
from torchlake.models import load
from torchlake.runtimes import _sharded
from torchlake.tables.verification.verify import verify

ROWS = 60
ROUNDING = 1e-5
"Of a probability: the ranks' parts of a sum are added in another order."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    return tiny.build_model(folder / "model", encoder=tiny.build_language_model(folder / "base", kind="llama"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(tiny.reviews(ROWS), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def score(model: Path, table: Path, output: Path, gpus_per_process: int = 2, **options: Any) -> pa.Table:
    """Score on CPUs in processes of that many ranks; the output, which `verify` has found whole."""
    job = {"chunk_rows": 20, "engine": tl.Local(processes=1), "runtime": "eager", "columns": ["id"], **options}
    done = tl.predict(model, table, output, gpus_per_process=gpus_per_process, **job)
    assert done.rows_failed == 0
    verify(output)
    rows = pq.read_table(output)
    assert rows["id"].to_pylist() == list(range(ROWS))
    return rows


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The answers of one rank."""
    folder = tmp_path_factory.mktemp("expected")
    pq.write_table(tiny.reviews(ROWS), folder / "in.parquet")
    return score(model, folder / "in.parquet", folder / "out", gpus_per_process=1)


def assert_equal(found: pa.Table, expected: pa.Table) -> None:
    assert found["label"].equals(expected["label"])
    assert np.abs(found["score"].to_numpy() - expected["score"].to_numpy()).max() <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_no_row(
    rank: int, model: Path, table: Path, tmp_path: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second batch, of the middle chunk; the job's own restart scores it again."""
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", f"forward.rank{rank}:2:kill9")
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_LOG", str(tmp_path / "hits"))
    found = score(model, table, tmp_path / "out")
    assert (tmp_path / "once").exists()
    assert_equal(found, expected)
    assert "forward.rank1:1" in (tmp_path / "hits").read_text()


@pytest.mark.slow
def test_an_error_of_all_ranks_is_one_of_the_batch(
    model: Path, table: Path, tmp_path: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is halved, as in a process without followers, which goes on."""
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "forward:1:raise")
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_LOG", str(tmp_path / "hits"))
    assert_equal(score(model, table, tmp_path / "out"), expected)
    hits = (tmp_path / "hits").read_text().split()
    assert hits.count("forward:1") == hits.count("forward:5") == 2  # two halves, two more chunks, in the same processes


@pytest.mark.slow
def test_an_error_of_one_rank_restarts_the_group(
    model: Path, table: Path, tmp_path: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one waits in a collective that never ends."""
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "forward.rank1:1:raise")
    monkeypatch.setenv("TORCHLAKE_FAILPOINT_ONCE", str(tmp_path / "once"))
    assert_equal(score(model, table, tmp_path / "out"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_texts_are_generated(temperature: float, table: Path, tmp_path: Path, tiny_llama: Path) -> None:
    options = {"max_new_tokens": 8, "temperature": temperature, "chunk_rows": 60}
    one, two = (
        score(tiny_llama, table, tmp_path / f"out-{number}", gpus_per_process=number, **options) for number in (1, 2)
    )
    assert two["generated_text"].equals(one["generated_text"])


class Noting(tl.Local):
    """Two local processes, which leave their pids and their children's in `folder` with their first chunk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(processes=1)
        self.folder = folder

    def run_chunks(self, make_worker: Callable[[], Any], chunks: Any, **options: Any) -> Any:
        return super().run_chunks(partial(_make_noting, make_worker, self.folder), chunks, **options)


def _make_noting(make_worker: Callable[[], Any], folder: Path) -> Any:
    worker = make_worker()
    ranks = [child for child in psutil.Process().children() if "torchlake.processes.child" in " ".join(child.cmdline())]
    for number, child in enumerate(ranks, start=1):
        (folder / f"rank{number}.pid").write_text(str(child.pid))
    pids.note(folder, "rank0")

    def run(chunks: Iterator[Any]) -> Iterator[Any]:
        return worker(chunks)

    return run


@pytest.mark.slow
@pytest.mark.real_starts
def test_no_rank_outlives_its_job(model: Path, table: Path, tmp_path: Path, expected: pa.Table) -> None:
    assert_equal(score(model, table, tmp_path / "out", engine=Noting(tmp_path)), expected)
    ranks = [pids.pid(tmp_path, f"rank{rank}", seconds=1) for rank in (0, 1)]
    assert os.getpid() not in ranks
    pids.wait_for(lambda: all(map(pids.gone, ranks)), seconds=10)


def refused(model: Path, table: Any, output: Path | None, gpus: int, **options: Any) -> str:
    """The error, before any file of the output is written."""
    with pytest.raises(UsageError) as caught:
        tl.predict(model, table, *([] if output is None else [output]), gpus_per_process=gpus, **options)
    assert output is None or not output.exists()
    return str(caught.value)


def test_a_model_that_cannot_be_divided_is_refused(
    model: Path, table: Path, tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "its 4 attention heads cannot be divided among 3 ranks" in refused(model, table, tmp_path / "out", 3)
    assert "its 2 key value heads cannot be divided among 4 ranks" in refused(model, table, tmp_path / "out", 4)
    encoder = tiny.build_model(tmp_path / "bert", encoder=tiny_bert)
    message = refused(encoder, table, tmp_path / "out", 2)
    assert "no plan for tensor parallelism of models of type 'bert'" in message
    assert "layers are placed over GPUs only" in message


def test_layers_outside_gpus_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    """accelerate places what does not fit on GPUs in main memory; here that is everything."""
    encoder = tiny.build_model(tmp_path / "bert", encoder=tiny_bert)
    placed = load.load_model(
        encoder, auto_class="AutoModelForSequenceClassification", placement=_sharded.layer_by_layer()
    )
    with pytest.raises(UsageError, match="does not fit into the memory of the process's GPUs"):
        _sharded.check_on_gpus(placed, encoder)


def test_more_gpus_than_there_are_are_refused(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match="1 processes with 2 GPUs each need 2 GPUs, but 1 were found"):
        tl.predict(model, table, tmp_path / "out", gpus_per_process=2)


def test_other_runtimes_and_frames_are_refused(model: Path, table: Path, tmp_path: Path) -> None:
    assert "needs the runtime 'eager'" in refused(model, table, tmp_path / "out", 2, runtime="compiled")
    assert "needs an output folder" in refused(model, pq.read_table(table), None, 2)
    assert "gpus_per_process: must be at least 1, got 0" in refused(model, table, tmp_path / "out", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "gemma2", "phi3"])
def test_other_families_have_the_same_answers(kind: str, table: Path, tmp_path: Path) -> None:
    base = families.build(tmp_path / "base", kind, kind="classifier", dropout=False)
    folder = tiny.build_model(tmp_path / "model", encoder=base)
    one, two = (
        score(folder, table, tmp_path / f"out-{number}", gpus_per_process=number, chunk_rows=60) for number in (1, 2)
    )
    assert_equal(two, one)
