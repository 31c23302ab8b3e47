"""`map` under faults, with real kills: each row once, bounded rework, poison rows, the same bytes on every engine."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import mapping
import scoring_runs
import torchlake as tl
from sweeps import sweep
from torchlake import plugins

TEXTS = [f"a text of row {row}" for row in range(60)]
CHUNK_ROWS = 15
MAP = """
import json, sys
import mapping
import torchlake as tl

options = json.loads(sys.argv[1])
mapped = tl.map(mapping.logging_to(options.pop("log")), schema=mapping.SCHEMA, columns=["text"], key="id",
                engine=tl.Local(processes=1), **options)
print(json.dumps({"rows_out": mapped.rows_out, "mapped": mapped.record["provenance"]["rows_mapped"]}))
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", TEXTS)
    return {"table": source, "output": tmp_path / "out", "log": tmp_path / "log", "chunk_rows": CHUNK_ROWS}


def run(job: dict[str, Any], *, failpoint: str | None = None, once: Path | None = None, **variables: str) -> Any:
    return scoring_runs.run(MAP, [json.dumps(job, default=str)], failpoint=failpoint, once=once, **variables)


def assert_exactly_once(output: Path, texts: list[str]) -> None:
    table = pq.read_table(output)
    assert table["id"].to_pylist() == list(range(len(texts)))
    for text, upper, reason in zip(texts, *(table[name].to_pylist() for name in ("upper", "error")), strict=True):
        assert upper == (text.upper() if reason is None else None)


def succeed(job: dict[str, Any], **variables: str) -> dict[str, Any]:
    done = run(job, **variables)
    assert done.returncode == 0, done.stderr
    assert_exactly_once(job["output"], TEXTS)
    assert [path.name for path in job["output"].parent.glob(".*")] == []
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hits(job: dict[str, Any], tmp_path: Path) -> list[str]:
    """Every failpoint that an undisturbed job passes, as site:nth."""
    log = tmp_path / "hits"
    succeed({**job, "output": tmp_path / "whole"}, TORCHLAKE_FAILPOINT_LOG=str(log))
    return list(dict.fromkeys(log.read_text().splitlines()))


def kill_at(job: dict[str, Any], tmp_path: Path, points: list[str]) -> None:
    for number, point in enumerate(points):
        one = {**job, "output": tmp_path / f"out-{number}", "log": tmp_path / f"log-{number}"}
        once = tmp_path / f"once-{number}"
        run(one, failpoint=f"{point}:kill9", once=once)
        assert once.exists(), f"{point} was not reached"
        if one["output"].exists():
            assert_exactly_once(one["output"], TEXTS)
        succeed(one)
        assert one["log"].read_text().count("row\n") <= len(TEXTS) + CHUNK_ROWS, point


def test_killed_at_the_decisive_points(job: dict[str, Any], tmp_path: Path) -> None:
    """The same call in another process continues: it finds the same function."""
    points = [point for point in hits(job, tmp_path) if point.split(":")[0] in ("part.rename", "commit.publish")]
    assert len(points) >= 2, points
    kill_at(job, tmp_path, [points[0], points[-1]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_point(job: dict[str, Any], tmp_path: Path) -> None:
    points = hits(job, tmp_path)
    assert len(points) >= 10, points
    kill_at(job, tmp_path, points)


def test_a_killed_driver_leaves_what_is_finished(job: dict[str, Any], tmp_path: Path) -> None:
    """Killed after its second part, the next call maps the other chunks only."""
    done = run(job, failpoint="part.done:2:kill9", once=tmp_path / "once")
    assert (tmp_path / "once").exists()
    if done.returncode == 0:  # the worker was killed and replaced
        assert_exactly_once(job["output"], TEXTS)
    assert succeed(job)["mapped"] <= len(TEXTS)
    assert job["log"].read_text().count("row\n") <= len(TEXTS) + CHUNK_ROWS


@pytest.mark.parametrize("name", sweep(plugins.names("engines"), quick={"local"}))
def test_poison_rows_become_error_rows_and_no_other_row_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    """A row that kills its process, one that hangs it, one that raises; the bytes are those of the local engine."""
    if name != "local":
        request.getfixturevalue(name)
    texts = [*TEXTS[:7], mapping.KILLER, *TEXTS[8:33], mapping.SLEEPER, *TEXTS[34:50], mapping.RAISER, *TEXTS[51:]]
    source = scoring_runs.write_rows(tmp_path / "in.parquet", texts)
    make = partial(mapping.make_misbehaving, tmp_path / "log")
    job = {"schema": mapping.SCHEMA, "columns": ["text"], "key": "id", "chunk_rows": CHUNK_ROWS, "row_timeout_s": 1.0}
    for output, engine in ((name, getattr(tl, name.title())(processes=2)), ("again", tl.Local(processes=1))):
        mapped = tl.map(make, source, tmp_path / output, engine=engine, **job)
        assert mapped.errors == {"killed_process": 1, "timeout": 1, "ValueError": 1}
        assert_exactly_once(tmp_path / output, texts)
        assert sorted(scoring_runs.errors(tmp_path / output)) == [7, 33, 50]
    parts = [{path.name: path.read_bytes() for path in (tmp_path / one).glob("*.parquet")} for one in (name, "again")]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 4


def test_a_script_killed_while_it_runs_continues(tmp_path: Path) -> None:
    """The driver is killed once two chunks are done; the function of a script is the same in the next process."""
    source = scoring_runs.write_rows(tmp_path / "in.parquet", TEXTS)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, pyarrow as pa, torchlake as tl\n"
        "def make_worker():\n"
        "    def slow(batch):\n"
        f"        with open({str(tmp_path / 'log')!r}, 'a') as log:\n"
        "            log.write('row\\n' * len(batch))\n"
        "        if 'FAST' not in os.environ and batch['id'][0].as_py() >= 30:\n"
        "            time.sleep(3600)\n"
        "        return pa.table({'upper': pa.array([text.upper() for text in batch['text'].to_pylist()])})\n"
        "    return slow\n"
        f"tl.map(make_worker, {str(source)!r}, {str(tmp_path / 'out')!r}, schema={{'upper': pa.string()}}, key='id',\n"
        f"       chunk_rows={CHUNK_ROWS}, engine=tl.Local(processes=1))\n"
    )
    process = subprocess.Popen([sys.executable, script], env=scoring_runs.environment(None, None, {}))
    parts = tmp_path / ".out.staging" / "table"
    try:
        scoring_runs.wait_for(lambda: len(list(parts.glob("part-*.parquet"))) == 2)
    finally:
        process.kill()
        process.wait()
    subprocess.run([sys.executable, script], env=scoring_runs.environment(None, None, {"FAST": "1"}), check=True)
    assert_exactly_once(tmp_path / "out", TEXTS)
    assert (tmp_path / "log").read_text().count("row\n") <= len(TEXTS) + 2 * CHUNK_ROWS
    assert os.listdir(tmp_path).count("out") == 1
