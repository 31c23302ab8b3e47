"""Follow a run from another thread: the lines of its metrics.jsonl, each once, as they are written.

Rank 0 writes all metrics to that file. Consumers (pruning, MLflow, TensorBoard) read it in a thread of the launching
process: this works with every engine, costs the ranks nothing, and a consumer that fails or hangs does not affect the
run. Cost: one `open` per half second, which is also the delay.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchlake.runs import metrics_log

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
JOIN_TIMEOUT_S = 120.0
"Seconds that a watcher has to finish after the run has ended."

Watch = Callable[[Iterator[list[metrics_log.Line]]], None]


@contextmanager
def follow_metrics(path: Path, watch: Watch, name: str) -> Iterator[None]:
    """Run `watch` in a thread, on the existing and then the new lines of a metrics file, until the block ends.

    It gets lists of lines, each step and validation once, even if the run restarts and truncates the file. An exception
    in `watch` becomes a warning that begins with `name`.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(path, watch, name, over), name=f"torchlake-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_TIMEOUT_S)
        if thread.is_alive():
            log.warning("%s: still running %.0f s after the end of the run; no longer waiting", name, JOIN_TIMEOUT_S)


def _watch(path: Path, watch: Watch, name: str, over: threading.Event) -> None:
    try:
        watch(_new_lines(path, over))
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("%s: %s: %s; the run continues without it", name, type(error).__name__, cause)


def _new_lines(path: Path, over: threading.Event) -> Iterator[list[metrics_log.Line]]:
    """Yield lists of lines until `over`, then the rest. A restarted run replaces the file by a truncated one."""
    newest = {True: 0, False: 0}  # the last step seen, by whether it is a validation
    file_id, offset = -1, 0
    ending = False
    while not ending:
        ending = over.wait(POLL_INTERVAL_S)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != file_id or status.st_size < offset:
                    file_id, offset = status.st_ino, 0
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:
            continue
        whole = content[: content.rfind(b"\n") + 1]
        offset += len(whole)
        lines = []
        for line in map(metrics_log.parse_line, whole.splitlines()):
            kind = metrics_log.is_validation(line)
            if line["step"] > newest[kind]:
                newest[kind] = line["step"]
                lines.append(line)
        if lines:
            yield lines
