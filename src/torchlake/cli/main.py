"""The command line: parse the arguments, run the command, print its result and return an exit status.

Results go to standard output, everything else to standard error. With --json, standard output is exactly one JSON
object, also for errors ({"error": {...}}). The exit status of an error is that of its class (`torchlake.errors`); a
fault in torchlake itself exits with 70 and a traceback. `console.py` explains errors of the operating system.
"""

import gc
import json
import logging
import os
import signal
import sys
import traceback
from ast import literal_eval
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import typer

from torchlake.cli.app import program
from torchlake.cli.console import (
    PIPE_CLOSED,
    error_outcome,
    explain_os_error,
    interruptible,
    lost_reader,
    stop_in_parsing,
    stop_outcome,
)
from torchlake.cli.display import Outcome
from torchlake.cli.streams import open_missing, print_error, print_result, result_stream, silence_closed, silence_full
from torchlake.display import plain
from torchlake.errors import Interrupted, StorageError, Terminated, TorchlakeError, UsageError
from torchlake.logs import log_level
from torchlake.redaction import redacted

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    try:
        open_missing()
        code = _main(arguments)
        silence_full()
    except (BrokenPipeError, SystemExit, Terminated):  # typer exits if it cannot print a help text
        if not silence_closed():
            raise
        return PIPE_CLOSED
    return PIPE_CLOSED if lost_reader() else code


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words[: words.index("--")] if "--" in words else words
    words = ["version" if word == "--version" else word for word in words[:1]] + words[1:]
    as_json, quiet, verbose = (flag in ours for flag in ("--json", "--quiet", "--verbose"))
    with (
        log_level(quiet=quiet, verbose=verbose and not quiet),
        interruptible(watched=not quiet),
        result_stream(as_json) as out,
    ):
        outcome = _run(words)
        text = json.dumps(plain(outcome.values)) if as_json else "\n".join(outcome.lines)
        if text:
            outcome = _printed(text, out, outcome)
    if arguments is None:
        gc.freeze()  # the process ends: collecting torch's objects once more would take 0.3 s
    return outcome.exit_code


def _printed(text: str, out: TextIO, outcome: Outcome) -> Outcome:
    """Print the result, and return the outcome: that of a full disk if the command itself has succeeded."""
    try:
        print_result(text, out)
    except StorageError as error:
        failed = error_outcome(error, str(error), error.exit_code, shown=f"error: {error}")
        return outcome if outcome.exit_code else failed
    return outcome


def _run(words: list[str]) -> Outcome:
    """Parse and run; turn every exception into an outcome."""
    try:
        # Not standalone: errors are raised, --help returns an exit status, and a command returns its work.
        work = program.main(words, prog_name="torchlake", standalone_mode=False)
        if work == 128 + signal.SIGINT:
            raise stop_in_parsing()
        if not callable(work):
            return Outcome(values={}, lines=(), exit_code=int(work or 0))
        if words[:1] not in (["version"], ["schema"]):
            _check_current_folder()
        outcome: Outcome = work()
        return outcome
    except typer.TyperException as error:
        refused = _wrong_value(error)
        if refused is not None:
            return error_outcome(refused, str(refused), refused.exit_code, shown=f"error: {refused}")
        hint = _setting_hint(words, getattr(error, "option_name", None))
        if hint:
            error.message = f"{error.message.rstrip('.')}.{hint}"
        show = getattr(error, "show", None)
        if callable(show):
            with suppress(OSError):
                show(file=sys.stderr)
        return error_outcome(error, error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, Interrupted) as error:
        return stop_outcome(error, words)
    except TorchlakeError as error:
        log.debug("%s", type(error).__name__, exc_info=True)
        return error_outcome(error, str(error), error.exit_code, shown=f"error: {error}")
    except Exception as error:
        if isinstance(error, BrokenPipeError) and silence_closed():
            return Outcome(values={}, lines=(), exit_code=PIPE_CLOSED)
        known = explain_os_error(error, words) if isinstance(error, OSError) else None
        if known is not None:
            log.debug("%s", type(error).__name__, exc_info=True)
            return error_outcome(known, str(known), known.exit_code, shown=f"error: {known}")
        print_error(redacted(traceback.format_exc()))
        message = (
            f"{type(error).__name__}: {error}\nThis is a fault in torchlake, not in your input. Please report it with "
            "the traceback above and the output of `torchlake doctor`."
        )
        return error_outcome(error, message, TorchlakeError.exit_code, shown=f"error: {message}")


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed. Change to another one, and run it again.") from None


def _wrong_value(error: typer.TyperException) -> UsageError | None:
    """Return the error in torchlake's words for a value that typer refuses in those of pydantic; else None."""
    problems, param = getattr(error.__cause__, "errors", None), getattr(error, "param", None)
    if problems is None or param is None:
        return None
    from torchlake.config.messages import explanation, one_of

    problem = problems(include_url=False)[0]
    choices = error.message.partition(" is not one of ")[2].rstrip(".")
    words = one_of(literal_eval(f"[{choices}]"), problem["input"]) if choices else explanation(problem)
    name = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
    return UsageError(f"{name}: {words}")


def _setting_hint(words: Sequence[str], option: str | None) -> str:
    """Return a hint to use --set, for an unknown option that is a setting of the job or the engine."""
    takes_job, takes_engine = words[:1] in (["train"], ["tune"], ["plan"]), words[:1] in (["predict"], ["evaluate"])
    if option is None or not (takes_job or takes_engine or words[:1] == ["launch"]):
        return ""
    from torchlake.config.job import SECTIONS
    from torchlake.config.messages import TRAINER_NAMES, nearest_settings

    sections = SECTIONS if takes_job else {"engine": SECTIONS["engine"]}
    name = option.lstrip("-").replace("-", "_")
    found = nearest_settings(name, sections)
    meant = TRAINER_NAMES.get(name) if takes_job else None
    if meant is not None and found != [meant]:  # the Trainer's value would mean something else there
        return f" Here it is {meant}.{' To change a setting of the job, write --set NAME=VALUE.' * bool(found)}"
    value = _value_after(words, option)
    shown = " or ".join(f"--set {name}={value}" for name in found)
    return f" To change a setting of the {'job' if takes_job else 'engine'}, write {shown}." if found else ""


def _value_after(words: Sequence[str], option: str) -> str:
    """Return the value that follows an option; VALUE if there is none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return after if after and not after.startswith("--") else "VALUE"
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return "VALUE"
