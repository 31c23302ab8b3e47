"""The other commands: launch, export, report, doctor, runtime-env, version."""

import logging
import threading
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal

from torchlake.cli.command import ModelFolder, argument, command
from torchlake.cli.display import Outcome, fact_lines
from torchlake.cli.options import Given
from torchlake.config.options import Option
from torchlake.display import plain
from torchlake.errors import TorchlakeError, UsageError

log = logging.getLogger(__name__)

_execution = partial(Option, "Execution")
_output = partial(Option, "Output")


class LaunchFlags:
    """Options of `launch`."""

    processes: Annotated[int, _execution("N", "Number of ranks (default: 1).", min=1)]
    gpus_per_process: Annotated[int, _execution("N", "GPUs of each rank (default: 0).", min=0)]


@command("launch train.py --processes 2 -- --lr 0.1", LaunchFlags, "engine set")
def launch(
    target: Annotated[str, argument("SCRIPT|MODULE:FUNCTION", "What each rank runs.")],
    given: Given,
    arguments: Annotated[list[str] | None, argument("-- ARGS...", "Arguments for the script, after --.")] = None,
) -> Outcome:
    """Run a script or function as ranks. Sets the environment variables that torchrun sets."""
    engine, gpus = given.engine, given["gpus_per_process"] or 0
    from torchlake.launching.launch import launch_script

    processes = 1 if engine is None else engine.num_ranks(None, gpus)
    value = launch_script(
        target,
        arguments or [],
        engine=engine,
        processes=processes,
        gpus_per_process=gpus,
        stdout_to_stderr=given.as_json,
    )
    return Outcome(values={"value": value, "processes": processes}, lines=[] if value is None else [str(value)])


class ExportFlags:
    """Options of `export`."""

    format: Annotated[
        Literal["onnx", "openvino", "sentence-transformers", "transformers"],
        _output(
            "FORMAT", "Layout: onnx, openvino, transformers (whole weights) or sentence-transformers.", required=True
        ),
    ]
    pooling: Annotated[
        Literal["mean", "cls", "max", "lasttoken"],
        _output("MODE", "From token states to one vector: mean, cls, max or lasttoken (default: the model's own)."),
    ]


@command("export runs/reviews/model reviews-onnx --format onnx", ExportFlags)
def export(
    model: ModelFolder,
    folder: Annotated[str, argument("FOLDER", "New folder, or an earlier export.")],
    given: Given,
) -> Outcome:
    """Write a model for another tool. Layouts of ONNX Runtime, OpenVINO and sentence-transformers."""
    from torchlake.exporting.export import export

    path = export(model, folder, **given.options)
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return Outcome(values={"path": path, "files": files}, lines=[f"{path}: {', '.join(files)}"])


class ReportFlags:
    """Options of `report`."""

    watch: Annotated[bool, _output(None, "Write the page again every 10 seconds until the run is complete.")]
    serve: Annotated[bool, _output(None, "Show the page on 127.0.0.1 until Ctrl-C; implies --watch.")]
    port: Annotated[int, _output("N", "Port of --serve (default: any that is free).", min=1, max=65535)]


@command("report runs/reviews", ReportFlags)
def report(run: Annotated[str, argument("RUN", "Run folder.")], given: Given) -> Outcome:
    """Write report.html and report.json of a run. Shows curves, data, metrics, checkpoints and machine."""
    if given["port"] is not None and not given["serve"]:
        raise UsageError("--port is for --serve.")
    from torchlake.reporting import live
    from torchlake.reporting.report import report

    path = report(run)
    if given["serve"]:
        with live.served(run, given["port"] or 0) as address, suppress(KeyboardInterrupt):
            log.warning("The report is at %s until Ctrl-C.", address)
            live.watch(run)
            threading.Event().wait()
    elif given["watch"]:
        path = live.watch(run)
    return Outcome(values={"report": path}, lines=[str(path)])


class DoctorFlags:
    """Options of `doctor`."""

    runtime: Annotated[str, _execution("NAME", "Check a runtime that has a Python of its own: vllm.")]


@command("doctor", DoctorFlags, "runtime_python")
def doctor(given: Given) -> Outcome:
    """Show what this machine can run. Lists versions, cores, memory, devices, disk space and problems."""
    from torchlake.reporting.doctor import check_runtime

    if versions := check_runtime(given["runtime"], given["runtime_python"]):
        return Outcome(values={"runtime": given["runtime"], **versions}, lines=fact_lines(versions))
    from torchlake.reporting.doctor import doctor

    found = doctor()
    lines = []
    for section, facts in found.facts.items():
        lines += [section, *(f"  {line}" for line in fact_lines(facts)), ""]
    lines += [f"problem: {problem}" for problem in found.problems] or ["No problems found."]
    return Outcome(values=plain(found), lines=lines, exit_code=TorchlakeError.exit_code if found.broken else 0)


@command("runtime-env vllm requirements-vllm.txt", name="runtime-env")
def runtime_env(
    runtime: Annotated[str, argument("RUNTIME", "Runtime with an interpreter of its own: vllm.")],
    path: Annotated[str, argument("FILE", "Requirements file to write.")],
) -> Outcome:
    """Write the requirements of a runtime's own environment. Prints the commands that install it."""
    from torchlake.reporting.doctor import write_requirements

    done = write_requirements(runtime, path)
    shown = [f"{done.file}: {', '.join(done.requirements)}", "To install it, for example:"]
    return Outcome(values=plain(done), lines=[*shown, *(f"  {one}" for one in done.commands)])


@command("version")
def version() -> Outcome:
    """Print the version."""
    from torchlake import __version__

    return Outcome(values={"version": __version__}, lines=[__version__])
