"""Tunings for tests in a process of their own, a fork (forked.py), which may be killed."""

import os
import subprocess
from pathlib import Path
from typing import Any

import forked
import training_runs as runs


def attempt(
    run: Path, sections: dict[str, Any], space: dict[str, Any], *, failpoint: str | None, **options: Any
) -> int:
    """`tl.tune` with one rank in a fresh process; its exit code, negative for a signal."""
    variables = {**os.environ, **forked.ALONE}
    if failpoint is not None:
        variables["TORCHLAKE_FAILPOINT"] = failpoint
    process = forked.start(_tune, str(run), sections, space, options, environment=variables)
    try:
        return process.wait(runs.DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{run}: the tuning hung for {runs.DEADLINE_S} s") from None


def _tune(run: str, sections: dict[str, Any], space: dict[str, Any], options: dict[str, Any]) -> None:
    import torchlake as tl
    from torchlake.config.job import load_job

    tl.tune(load_job(None, **sections), space=space, run=run, engine=runs.Inline(), **options)
