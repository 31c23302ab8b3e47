"""Running a job in a process of its own, breaking it at a failpoint, and the oracles of the reliability contract."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked

TESTS = Path(__file__).parent

PREDICT = """
import json, sys
import misbehaving
import torchlake as tl
from torchlake.errors import TorchlakeError

options = json.loads(sys.argv[1])
runtime = options.pop("runtime")
runtime = getattr(misbehaving, runtime, runtime)
engine = getattr(tl, options.pop("engine", "local").title())
engine = engine(processes=options.pop("processes", 1), **options.pop("engine_options", {}))
try:
    scored = tl.predict(runtime=runtime, engine=engine, **options)
except TorchlakeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps({"rows_in": scored.rows_in, "rows_out": scored.rows_out, "rows_failed": scored.rows_failed,
                  "rows_scored": scored.record["provenance"]["rows_scored"]}))
"""


def predict(
    options: dict[str, Any], *, failpoint: str | None = None, once: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`tl.predict(**options)` in a fresh process; `runtime` names a function of misbehaving.py, or a runtime."""
    return run(PREDICT, [json.dumps(options, default=str)], failpoint=failpoint, once=once, **variables)


def run(
    script: str, arguments: list[str], *, failpoint: str | None = None, once: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return forked.run_script(script, arguments, environment=environment(failpoint, once, variables))


def start_predict(options: dict[str, Any], **variables: str) -> subprocess.Popen[str]:
    """The same, not waited for."""
    return subprocess.Popen(
        [sys.executable, "-c", PREDICT, json.dumps(options, default=str)],
        env=environment(None, None, variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(failpoint: str | None, once: Path | None, more: dict[str, str]) -> dict[str, str]:
    """The variables of a process that is to fail once at `failpoint`, which the file `once` then says."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **more, "TORCHLAKE_PROGRESS": "0"}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    if failpoint is not None:
        variables["TORCHLAKE_FAILPOINT"] = failpoint
        assert once is not None, "a failpoint needs a file that says it was hit"
        variables["TORCHLAKE_FAILPOINT_ONCE"] = str(once)
    return variables


def write_rows(path: Path, texts: list[str | None]) -> Path:
    """A Parquet table with `id` and `text`."""
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())}), path)
    return path


def errors(output: Path) -> dict[int, str]:
    """The error rows of an output: id to reason."""
    table = pq.read_table(output)
    return {
        row: reason
        for row, reason in zip(table["id"].to_pylist(), table["error"].to_pylist(), strict=True)
        if reason is not None
    }


def assert_exactly_once(source: Path, output: Path) -> None:
    """P1: the multiset of keys out is the multiset of keys in, and every row is a prediction or a named error."""
    table = pq.read_table(output)
    assert Counter(table["id"].to_pylist()) == Counter(pq.read_table(source)["id"].to_pylist())
    for label, reason in zip(table["label"].to_pylist(), table["error"].to_pylist(), strict=True):
        assert (label is None) == (reason is not None)


def wait_for(condition: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
    """Poll until the condition holds; fails after the deadline."""
    import time

    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true in time"
        time.sleep(0.02)


def near(found: Any, expected: Any, within: float = 1e-5) -> bool:
    """Whether answers are equal but for rounding: the company of a row changes that of its score."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[name], expected[name], within) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(near(*pair, within) for pair in zip(found, expected, strict=True))
    return bool(found == (pytest.approx(expected, abs=within) if isinstance(expected, float) else expected))
