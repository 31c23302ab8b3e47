"""The process of an engine, from torchlake's side: an interpreter that is checked, started with two pipes, and ended.

Nothing here blocks: bytes go out and come in as the pipes allow (`exchange`), so a process that hangs is noticed. What
it prints, to stdout or stderr, goes to the log of the worker, and its end is kept for messages.

The process leads a group, because engines start processes of their own. The group is ended with it; if the worker is
killed, by the watchdog of `processes/`, and by PR_SET_PDEATHSIG, which is tied to the thread that starts the process:
so that is a thread that lives as long as it.
"""

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from torchlake.errors import UsageError
from torchlake.processes.children import kill_group, start_watchdog, wait_for_end
from torchlake.processes.environment import child_environment
from torchlake.processes.serialization import describe_exit
from torchlake.runtimes._foreign import protocol

LOAD_S = 3600.0
"The longest time until an engine is ready: it may download, compile and read weights from a slow disk."
CHECK_S = 300.0
POLL_S = 0.5
LOG_S = 10.0
"Seconds to read what an ended process has printed; a descendant outside its group may keep the pipe open."
TAIL_BYTES, TAIL_LINES = 16 << 10, 12
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"Nothing but torchlake opens connections, and the model is a folder."


class EngineDied(Exception):
    """The process of an engine has ended, or was ended; the message says how."""


def checked_versions(python: str, server: Path, *, imported: bool = False) -> dict[str, str]:
    """Return the versions of an engine under an interpreter of this machine.

    `imported`: after the engine was imported, which takes seconds, and finds libraries that are missing. Raises
    UsageError with the path, this machine and what it printed.
    """
    where = f"runtime_python: {python} on {gethostname()}"
    if not Path(python).is_file():
        raise UsageError(
            f"{where}: there is no such file. Name the interpreter that has the engine (--runtime-python)."
        )
    command = [python, "-I", str(server), "--import" if imported else "--versions"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_S,
            env=child_environment(QUIET),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{where}: it gave no answer in {CHECK_S:g} s.") from None
    except OSError as error:  # not executable, or of another architecture
        raise UsageError(f"{where}: it cannot be started: {error.strerror or error}.") from error
    found = None
    with suppress(ValueError, IndexError):
        found = json.loads(done.stdout.splitlines()[-1])
    if isinstance(found, dict) and isinstance(found.get("versions"), dict):
        check_protocol(found.get("protocol"), where)
        return {str(name): str(one) for name, one in found["versions"].items()}
    printed = last_lines(done.stdout + done.stderr) or "nothing"
    raise UsageError(f"{where}: the engine is not installed there, or does not load. It printed:\n{printed}")


def check_protocol(found: Any, where: str) -> None:
    """Raise UsageError if the other side speaks another version of the protocol."""
    ours = protocol.VERSION
    if found != ours:
        older = "the engine's server" if not isinstance(found, int) or found < ours else "torchlake"
        raise UsageError(f"{where}: it speaks protocol {found}, and torchlake speaks protocol {ours}. Update {older}.")


def last_lines(content: bytes) -> str:
    """Return the last lines of what a process printed."""
    lines = content[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return "\n".join(line[:500] for line in lines[-TAIL_LINES:])


class EngineProcess:
    """A running server; `hello` is the first frame that it gets."""

    _failed: OSError | None = None
    "Why it could not be started."

    def __init__(self, python: str, server: Path, hello: Mapping[str, Any]) -> None:
        self.where = f"{python} on {gethostname()}"
        self.code: int | None = None
        self._tail = b""
        self._frames = protocol.Frames()
        self._out = bytearray(protocol.pack({"type": "hello", "protocol": protocol.VERSION, **hello}))
        self._pipes: list[int] = []
        started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog = start_watchdog(0.0)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._pipes = [ours_in, ours_out]
        run = partial(self._run, python, server, started, (theirs_in, theirs_out))
        self._running = threading.Thread(target=run, name="engine", daemon=True)
        self._logging = threading.Thread(target=self._log, name="engine's log", daemon=True)
        self._running.start()
        started.wait()
        if self._failed is not None:
            self.end()
            raise UsageError(f"{self.where}: it cannot be started: {self._failed.strerror}.") from self._failed

    def _run(self, python: str, server: Path, started: threading.Event, theirs: tuple[int, int]) -> None:
        """Start the process with its ends of the pipes, wait for its end, and end its group."""
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(server), *map(str, theirs), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                env=child_environment(QUIET),
                start_new_session=True,
            )
            self._watch("+")
            for number in self._pipes:
                os.set_blocking(number, False)
            self._logging.start()
        except OSError as error:
            self._failed = error
            return
        finally:
            for number in theirs:
                os.close(number)
            started.set()
        wait_for_end(self._process)
        kill_group(self._process.pid)
        self._watch("-")
        self.code = self._process.wait()

    def _watch(self, sign: str) -> None:
        assert self._process is not None
        assert self._watchdog.stdin is not None
        with suppress(OSError):  # without the watchdog there is still PR_SET_PDEATHSIG
            self._watchdog.stdin.write(f"{sign}{self._process.pid}\n".encode())
            self._watchdog.stdin.flush()

    def _log(self) -> None:
        """Pass on what the process prints, and keep the end of it."""
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        while content := stream.read1(1 << 16):  # type: ignore[attr-defined]
            self._tail = (self._tail + content)[-TAIL_BYTES:]
            with suppress(OSError):
                os.write(2, content)
        stream.close()

    @property
    def printed(self) -> str:
        """The last lines that the process printed."""
        return last_lines(self._tail)

    def send(self, frame: bytes) -> None:
        """Send a frame with the next exchanges."""
        self._out += frame

    def exchange(self, wait_s: float) -> list[protocol.Frame]:
        """Send what the pipe takes, and return the frames that have come, waiting up to `wait_s` seconds for one.

        Raises EngineDied and BrokenFrame.
        """
        until = time.monotonic() + wait_s
        incoming, outgoing = self._pipes
        while True:
            ended = self.code is not None  # before reading: all that it has sent is in the pipe
            waited = 0.0 if ended else max(0.0, min(POLL_S, until - time.monotonic()))
            readable, writable, _ = select.select([incoming], [outgoing] if self._out else [], [], waited)
            with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe is also found by reading
                if writable:
                    del self._out[: os.write(outgoing, self._out[: protocol.READ_BYTES])]
            if readable:
                content = os.read(incoming, protocol.READ_BYTES)
                if found := self._frames.feed(content):
                    return found
                ended |= not content
            if ended:
                self._running.join(POLL_S * 10)
                raise EngineDied("has closed its pipe" if self.code is None else describe_exit(self.code))
            if time.monotonic() >= until:
                return []

    def ready(self) -> dict[str, Any]:
        """Wait for the frame `ready`, and return it. Raises EngineDied, BrokenFrame, and UsageError if the engine
        refuses the model."""
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            for header, _, _ in self.exchange(POLL_S):
                if header["type"] not in ("ready", "refused"):
                    raise protocol.BrokenFrame(f"a frame {header['type']!r} before it was ready")
                check_protocol(header.get("protocol"), self.where)
                if header["type"] == "refused":
                    raise UsageError(f"{self.where}: the engine refuses the model: {header.get('reason')}")
                return header
        raise EngineDied(f"was not ready after {LOAD_S:g} s")

    def end(self) -> None:
        """End the process and its group; what it has not answered is lost."""
        if self._process is not None and self.code is None:
            kill_group(self._process.pid)
        self._running.join(POLL_S * 10)
        if self._logging.ident is not None:  # what it printed last says why it died
            self._logging.join(LOG_S)
        for number in self._pipes:
            os.close(number)
        self._pipes = []
        self._watchdog.kill()
        self._watchdog.communicate()


Launch = Callable[[int], EngineProcess]
"Starts an engine for rows of at most this number of tokens, prompt and answer together."
