"""Tunings for tests in a process of their own, which may be killed; see `training_runs.py`, whose server forks them."""

import os
from pathlib import Path
from typing import Any

import training_runs as runs


def attempt(
    run: Path, sections: dict[str, Any], space: dict[str, Any], *, failpoint: str | None, **options: Any
) -> int:
    """`tl.tune` with one rank in a fresh process; its exit code, negative for a signal."""
    variables = dict(runs.ALONE)
    if failpoint is not None:
        variables["TORCHLAKE_FAILPOINT"] = failpoint
    process = runs._context().Process(target=_tune, args=(str(run), sections, space, options, variables))
    process.start()
    process.join(runs.DEADLINE_S)
    assert process.exitcode is not None, f"{run}: the tuning hung for {runs.DEADLINE_S} s"
    return int(process.exitcode)


def _tune(
    run: str, sections: dict[str, Any], space: dict[str, Any], options: dict[str, Any], variables: dict[str, str]
) -> None:
    os.environ.update(variables)
    import torchlake as tl
    from torchlake.config.job import load_job

    tl.tune(load_job(None, **sections), space=space, run=run, engine=runs.Inline(), **options)
