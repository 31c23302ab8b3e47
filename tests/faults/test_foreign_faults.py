"""Engines in an interpreter of their own: server, worker and driver are killed, and every row comes out once."""

import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import fake_engine
import scoring_runs
import tiny
from torchlake.outputs.staging.folders import staging_of
from torchlake.runtimes import vllm

ROWS = 48


@pytest.fixture
def job(tiny_gpt2: Path, tmp_path: Path) -> dict[str, Any]:
    pq.write_table(tiny.reviews(ROWS), tmp_path / "in.parquet")
    return {
        "model": tiny_gpt2, "table": tmp_path / "in.parquet", "runtime": "vllm", "max_new_tokens": 8,
        "chunk_rows": 6, "key": "id", "row_timeout_s": 60.0,
    }  # fmt: skip


def rows_of(output: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(output).to_pylist(), key=lambda row: row["id"])


def written(job: dict[str, Any], output: Path, **variables: Any) -> list[dict[str, Any]]:
    done = scoring_runs.predict({**job, "output": output}, **variables)
    assert done.returncode == 0, done.stderr
    assert not staging_of(output).exists()
    return rows_of(output)


def expected(job: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    found = written({**job, "runtime_python": fake_engine.interpreter(tmp_path)}, tmp_path / "whole")
    assert [row["id"] for row in found] == list(range(ROWS))
    return found


def test_killed_between_done_and_the_journal(job: dict[str, Any], tmp_path: Path) -> None:
    """The server dies after it has sent an answer; then the worker, before and after it is kept."""
    whole = expected(job, tmp_path)
    sound, torn = fake_engine.interpreter(tmp_path), fake_engine.interpreter(tmp_path, fault="sent:9")
    assert written({**job, "runtime_python": torn}, tmp_path / "server") == whole
    for point in ("journal.write:5:kill9", "journal.done:5:kill9"):
        once, output = tmp_path / f"once-{point}", tmp_path / f"out-{point}"
        assert written({**job, "runtime_python": sound}, output, failpoint=point, once=once) == whole
        assert once.exists()


@pytest.mark.slow
def test_a_row_that_kills_the_engine_is_an_error_row_of_the_table(job: dict[str, Any], tmp_path: Path) -> None:
    from torchlake.models.load import load_tokenizer

    whole, texts = expected(job, tmp_path), pq.read_table(job["table"])["text"].to_pylist()
    tokenizer = load_tokenizer(job["model"])
    rows = Counter(chain.from_iterable({*ids} for ids in tokenizer(texts)["input_ids"]))
    killer = min(rows, key=lambda token: (rows[token], token))  # of few rows
    found = written({**job, "runtime_python": fake_engine.interpreter(tmp_path, killer=killer)}, tmp_path / "out")
    bad = {row["id"] for row in found if row["error"] is not None}
    assert {row["error"] for row in found if row["id"] in bad} == {"killed_process: twice"}
    assert 0 < len(bad) < ROWS
    assert [row for row in found if row["id"] not in bad] == [row for row in whole if row["id"] not in bad]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(5))
@pytest.mark.parametrize("engine", ["local", "spark", "ray"])
def test_fifty_kills_of_server_worker_and_driver(job: dict[str, Any], tmp_path: Path, engine: str, piece: int) -> None:
    whole = expected(job, tmp_path)
    chance, output, pids = random.Random(5 + piece), tmp_path / "out", tmp_path / "pids"
    python = fake_engine.interpreter(tmp_path, slow=0.3, starts=pids, open=4)
    options = {**job, "runtime_python": python, "engine": engine, "processes": 2, "output": output}
    for number in range(10 * piece, 10 * (piece + 1)):
        process = scoring_runs.start_predict(options)
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(4.0, 15.0))
        kind = number % 3
        servers = [int(line.split()[0]) for line in pids.read_text().splitlines()[-2:]] if pids.exists() else []
        with suppress(ProcessLookupError):
            if kind == 0:
                process.kill()
            elif servers:
                server = servers[-1]
                os.kill(server if kind == 1 else _parent(server), signal.SIGKILL)
        if kind:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
        process.communicate()
    found = written({**options, "runtime_python": fake_engine.interpreter(tmp_path)}, output)
    assert [row["id"] for row in found] == list(range(ROWS))
    errors = {row["error"] for row in found} - {None}
    assert errors <= {"killed_process: twice"}, "an engine that is killed from outside twice accuses the row it had"
    good = [row for row in found if row["error"] is None]
    assert good == [whole[row["id"]] for row in good]


def _parent(pid: int) -> int:
    """The process that started another one; the other one itself if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


@pytest.mark.slow
def test_the_variable_names_the_interpreter(job: dict[str, Any], tmp_path: Path) -> None:
    """On each machine, so that a cluster may have it in several places."""
    python = fake_engine.interpreter(tmp_path)
    assert len(written(job, tmp_path / "out", **{vllm.PYTHON: python})) == ROWS
