"""The engine that the command-line options or a job select."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlake import plugins
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from torchlake.config.sections.engine import EngineConfig
    from torchlake.engines import Engine


def make_engine(
    name: str | None, processes: int | None, overrides: Sequence[str] | None = None, *, as_json: bool
) -> "Engine | None":
    """Return the engine of --engine, --processes and --set; None without any of them, for the Python function's
    default.

    Under --json its child processes write their standard output to standard error. Raises UsageError for an unknown
    engine.
    """
    settings = [*(overrides or ()), *engine_settings(name, processes)]
    if not settings:
        return None
    from torchlake.config.job import load_engine

    return _from_config(load_engine(settings), as_json=as_json)


def engine_of_job(job: str | None, overrides: Sequence[str], *, as_json: bool) -> "Engine | None":
    """Return, under --json, the job's engine with its children's output on standard error; else None: the job
    decides."""
    if not as_json:
        return None
    from torchlake.config.job import load_job

    return _from_config(load_job(job, overrides).engine, as_json=as_json)


def engine_settings(name: str | None, processes: int | None) -> list[str]:
    """Return --engine and --processes as overrides of a job. Raises UsageError for an unknown engine."""
    problem = None if name is None else plugins.explain_unknown("engines", name)
    if problem is not None:
        raise UsageError(f"--engine: {problem}")
    given = {"engine.processes": processes, "engine.name": name}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _from_config(config: "EngineConfig", *, as_json: bool) -> "Engine":
    from torchlake import engines

    return engines.make_engine(config.name, config.processes, stdout_to_stderr=as_json, **config.options)
