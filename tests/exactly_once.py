"""A model of exactly-once writing: inputs that change, writers that are killed, stopped and doubled, clocks that jump.

Hypothesis drives real writers, each a process of its own, through `writing`. After every step the output has to be
what one state of the input gives, a state in which all its files lay there at the same time, or there is none.
Run as a script this file is the server that forks writers from a process which has imported everything.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyarrow import csv

from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.output import lease
from torchlake.tables.output.commit import write_transaction
from torchlake.tables.output.compatibility import AllowedChanges, planned_inputs
from torchlake.tables.output.parts import part_name
from torchlake.tables.output.staging import staging_of
from torchlake.tables.reading import ChunkReader, row_ids
from torchlake.tables.record import COMMIT, committed_files
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify

LIMIT_S = 60.0
FORMATS = ("csv", "jsonl", "parquet", "arrow")
SITES = [
    *(
        f"{name}.{step}"
        for name in ("plan", "lease", "part", "commit.plan", "commit")
        for step in ("write", "rename", "done")
    ),
    *(f"commit.{step}" for step in ("fence", "before_publish", "swap", "publish", "after_publish", "cleanup", "trash")),
    "test.planned",
    "test.read",
]
NAME, HOW = st.sampled_from("ab"), st.sampled_from(["rewrite", "replace", "same time"])
ALLOWED = st.builds(AllowedChanges, overwrite=st.booleans(), new_input=st.booleans(), removed_input=st.booleans())


def write_table(path: Path, texts: list[str]) -> None:
    """A file of the format that its name says."""
    table = pa.table({"t": texts})
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)


def job(source: Path, out: Path, allowed: AllowedChanges) -> None:
    """Read and write every row, as `predict` does."""
    table = open_table(source, columns=["t"])
    plan = plan_chunks(table, columns=["t"], chunk_rows=2, cached=planned_inputs(out))
    failpoint("test.planned")
    with write_transaction(out, plan=plan, fingerprint={"version": 1}, schema=_SCHEMA, allowed=allowed) as write:
        if write.complete:
            return
        reader, parts = ChunkReader(["t"]), []
        for chunk in write.pending:
            rows, _ = reader.read(chunk)
            failpoint("test.read")
            columns = [row_ids(chunk), pc.utf8_upper(rows["t"].combine_chunks()), pa.nulls(chunk.rows, pa.string())]
            name = part_name(write.plan, chunk, write.job.fingerprint)
            parts.append(write.parts.write(name, pa.table(columns, schema=_SCHEMA), chunk=chunk.index))
        write.commit([*write.done, *parts], {})


_SCHEMA = pa.schema([(name, pa.string()) for name in ("row_id", "t", "error")])


def serve() -> None:
    """Fork a writer for each line of stdin; its pid goes to stdout, how it ends into a file of that name."""
    lease.LOCK_WAIT_S = 0.2  # a stopped writer may hold the lock; no test waits half a minute to hear of it
    for line in sys.stdin:
        value = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(value["environment"])
            said = "done"
            try:
                job(Path(value["source"]), Path(value["out"]), AllowedChanges(**value["allowed"]))
            except TorchlakeError as error:
                said = f"{type(error).__name__}: {error}"
            except BaseException as error:
                said = f"UNEXPECTED {error!r}"
            Path(value["folder"], f"said-{os.getpid()}").write_text(said)
            os._exit(0)
        print(pid, flush=True)


class Server:
    """The server, as the test knows it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **job: Any) -> int:
        """The pid of a writer that has been started."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def state_of(pid: int) -> str:
    """What the kernel says of a process: T for stopped, Z for ended (the server does not wait for its writers)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "a writer hangs"
        time.sleep(0.002)


class ExactlyOnce(RuleBasedStateMachine):
    """The machine; `server` is set by the test."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="exactly-once-"))
        self.source, self.out = self.folder / "in", self.folder / "out"
        self.source.mkdir()
        self.files: dict[str, str] = {}
        "What lies in the input now: each file's version."
        self.states: list[dict[str, str]] = [{}]
        "All that lay there at the same time."
        self.rows: dict[str, list[str]] = {}
        "The texts of each version."
        self.stopped: list[int] = []

    @initialize(format=st.sampled_from(FORMATS))
    def begin(self, format: str) -> None:
        self.format = format
        self.put("a", 5, "rewrite")

    @rule(name=NAME, rows=st.sampled_from([1, 5]), how=HOW)
    def put(self, name: str, rows: int, how: str) -> None:
        """A new version of a file: written over the old one, or put in its place, perhaps with its time."""
        version = f"{name}{len(self.rows):04d}"  # equal rows, equal size
        self.rows[version] = [f"{version} {row}" for row in range(rows)]
        self._place(name, version, how)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data(), how=HOW)
    def restore(self, data: st.DataObject, how: str) -> None:
        """An old version comes back."""
        version = data.draw(st.sampled_from(sorted(self.rows)))
        self._place(version[0], version, how)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self._path(name).unlink()
        del self.files[name]
        self.states.append(dict(self.files))

    @rule(allowed=ALLOWED)
    def run(self, allowed: AllowedChanges) -> None:
        said = self._finished(self._start(allowed))
        if said == "done":
            assert self._published() == self.files, "a job that succeeds gives what lies there"

    @rule(allowed=ALLOWED, site=st.sampled_from(SITES), nth=st.integers(1, 4))
    def killed(self, allowed: AllowedChanges, site: str, nth: int) -> None:
        self._finished(self._start(allowed, f"{site}:{nth}:kill9"))

    @rule(allowed=ALLOWED, site=st.sampled_from(SITES), nth=st.integers(1, 4))
    def full_disk(self, allowed: AllowedChanges, site: str, nth: int) -> None:
        if site.endswith(".write") and not site.startswith("lease."):
            self._finished(self._start(allowed, f"{site}:{nth}:enospc"))

    @precondition(lambda self: self.files and not self.stopped)
    @rule(
        allowed=ALLOWED,
        site=st.sampled_from(["test.planned", "test.read", "part.done"]),
        nth=st.integers(1, 4),
        how=HOW,
        back=st.sampled_from(["at once", "later", "never"]),
        data=st.data(),
    )
    def changed_while_it_is_read(
        self, allowed: AllowedChanges, site: str, nth: int, how: str, back: str, data: st.DataObject
    ) -> None:
        """A file gets another version, of as many rows and bytes, under a writer, and perhaps the old one again."""
        pid = self._start(allowed, f"{site}:{nth}:stop")
        until(lambda: state_of(pid) in "TZ")
        name = data.draw(st.sampled_from(sorted(self.files)))
        before = self.files[name]
        self.put(name, len(self.rows[before]), how)
        if back == "at once":
            self._place(name, before, how)
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGCONT)
        self._finished(pid)
        if back == "later":
            self._place(name, before, how)
            self.run(allowed)

    @precondition(lambda self: len(self.stopped) < 3)
    @rule(allowed=ALLOWED, site=st.sampled_from(SITES), nth=st.integers(1, 4))
    def stop(self, allowed: AllowedChanges, site: str, nth: int) -> None:
        """A writer that is stopped in the middle, to wake up later (or it ends before it gets there)."""
        pid = self._start(allowed, f"{site}:{nth}:stop")
        until(lambda: state_of(pid) in "TZ")
        if state_of(pid) == "T":
            self.stopped.append(pid)

    @precondition(lambda self: self.stopped)
    @rule()
    def wake(self) -> None:
        """All stopped writers go on: one may hold the lock that another waits for."""
        pids, self.stopped = self.stopped, []
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for pid in pids:
            self._finished(pid)

    @precondition(lambda self: (staging_of(self.out) / "lease.json").exists())
    @rule(seconds=st.sampled_from([-86_400, -30, 61, 86_400]))
    def clock(self, seconds: int) -> None:
        """The clock of the storage jumps: the lease is so much older."""
        path = staging_of(self.out) / "lease.json"
        written = path.stat().st_mtime - seconds
        os.utime(path, (written, written))

    @precondition(lambda self: (self.out / COMMIT).exists())
    @rule()
    def verified(self) -> None:
        assert verify(self.out).problems == []

    @invariant()
    def output_is_of_one_state(self) -> None:
        published = self._published()
        assert published is None or published in self.states

    def teardown(self) -> None:
        for pid in self.stopped:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.source / f"{name}.{self.format}"

    def _place(self, name: str, version: str, how: str) -> None:
        path, new = self._path(name), self.folder / f"new.{self.format}"
        before = path.stat() if path.exists() else None
        write_table(new, self.rows[version])
        if how == "rewrite" and before is not None:
            path.write_bytes(new.read_bytes())
        else:
            new.rename(path)
        if how == "same time" and before is not None:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.files[name] = version
        self.states.append(dict(self.files))

    def _start(self, allowed: AllowedChanges, armed: str = "") -> int:
        environment = {"TORCHLAKE_FAILPOINT": armed} if armed else {}
        return self.server.start(
            folder=str(self.folder),
            source=str(self.source),
            out=str(self.out),
            allowed=vars(allowed),
            environment=environment,
        )

    def _finished(self, pid: int) -> str:
        """What a writer said in the end; empty for one that was killed."""
        until(lambda: state_of(pid) == "Z")
        path = self.folder / f"said-{pid}"
        said = path.read_text() if path.exists() else ""
        assert not said.startswith("UNEXPECTED"), said
        return said

    def _published(self) -> dict[str, str] | None:
        """The version of each file whose rows are in the output, each row once and in order; None without output."""
        if not (self.out / COMMIT).exists():
            return None
        found: dict[str, list[str]] = {}
        for path in committed_files(self.out):
            for row in pq.read_table(path, partitioning=None).to_pylist():
                name, _, number = row["row_id"].rpartition(":")
                texts = found.setdefault(name.partition(".")[0], [])
                assert int(number) == len(texts), "each row once, in the file's order"
                texts.append(row["t"].lower())
        versions = {name: texts[0].partition(" ")[0] for name, texts in found.items()}
        for name, version in versions.items():
            assert found[name] == self.rows[version], "all rows of a file are of one version"
        return versions


if __name__ == "__main__":
    serve()
