"""Named places where a test may break the process: the proof behind "whatever is killed when".

Every durable step calls `failpoint("commit.rename")`. The environment variable TORCHLAKE_FAILPOINT arms one of them:

    TORCHLAKE_FAILPOINT=site:nth:action     action: kill9 | stop | raise | enospc

`nth` counts from 1 within the process. With TORCHLAKE_FAILPOINT_ONCE=FILE the action happens once among all processes
that name the same file (a replaced worker would else die again and again). With TORCHLAKE_FAILPOINT_LOG=FILE every hit
is appended to FILE, so that a sweep can first list the sites of a job and then run the job once per hit. Unarmed, a
failpoint costs two dictionary look-ups.
"""

import errno
import os
import signal

_hits: dict[str, int] = {}


def failpoint(site: str) -> None:
    """Break here if the environment says so. Raises OSError (enospc) or RuntimeError (raise); kill9 does not return."""
    armed = os.environ.get("TORCHLAKE_FAILPOINT")
    log = os.environ.get("TORCHLAKE_FAILPOINT_LOG")
    if armed is None and log is None:
        return
    _hits[site] = _hits.get(site, 0) + 1
    if log is not None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{site}:{_hits[site]}\n")
    if armed is None:
        return
    name, nth, action = armed.rsplit(":", 2)
    if name != site or int(nth) != _hits[site] or not _is_first():
        return
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), site)
    elif action == "raise":
        raise RuntimeError(f"failpoint {site}")
    else:
        raise AssertionError(f"unknown failpoint action {action!r}")


def _is_first() -> bool:
    """Whether no process acted before; true where TORCHLAKE_FAILPOINT_ONCE names no file."""
    once = os.environ.get("TORCHLAKE_FAILPOINT_ONCE")
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
