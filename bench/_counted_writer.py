"""`eager` as a runtime that notes what it writes, for `many_prompts.py`; workers on every engine import this file."""

import os
import resource
from pathlib import Path
from typing import Any

from torchlake.runtimes import eager

NOTES = "TORCHLAKE_BENCH_NOTES"
"Names the file: a line for each step, `<tokens> <peak memory of this process in KiB>`."


def counted(folder: Path, spec: Any, *, device: str, options: Any) -> Any:
    """`eager`, each step of which notes how many rows get a token."""
    writer: Any = eager.open_writer(folder, spec, device=device, options=options)
    step, notes = writer.step, os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noted(report: Any) -> None:
        rows = len(writer.rows)
        step(report)
        os.write(notes, f"{rows} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n".encode())

    writer.step = noted
    return writer
