"""Named places where a test can make the process fail: tests kill it at each of them and check the result.

Every durable step calls `failpoint("commit.rename")` or similar. The environment variable TORCHLAKE_FAILPOINT arms one:

    TORCHLAKE_FAILPOINT=site:nth:action     action: kill9 | stop | raise | enospc

`nth` counts from 1 within the process. With TORCHLAKE_FAILPOINT_ONCE=FILE only the first process of those with the same
FILE acts, so that a replaced worker does not fail again. With TORCHLAKE_FAILPOINT_LOG=FILE every hit is appended to
FILE, so that a test can first list a job's sites, and then run it once per hit. An unarmed failpoint costs two
dictionary look-ups.
"""

import errno
import os
import signal

_hits: dict[str, int] = {}


def failpoint(site: str) -> None:
    """Fail here if armed. Raises OSError (enospc) or RuntimeError (raise); kill9 does not return."""
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
    """Return whether no process has acted before; always true without TORCHLAKE_FAILPOINT_ONCE."""
    once = os.environ.get("TORCHLAKE_FAILPOINT_ONCE")
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
