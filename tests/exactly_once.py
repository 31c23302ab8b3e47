"""A model of exactly-once writing: inputs that change, writers that are killed, stopped and doubled, clocks that jump.

Hypothesis drives real writers, each a process of its own, through `writing`. After every step the output has to be
what one state of the input gives, a state in which all its files lay there at the same time, or there is none."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyarrow import csv

import forked
from folder_writes import planned_inputs, write_transaction
from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.parts import part_name
from torchlake.outputs.staging.folders import staging_of
from torchlake.storage import lease
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.reading import ChunkReader
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


def write(source: str, out: str, allowed: dict[str, bool], folder: str) -> None:
    """In a fork: run the job, and write how it ended into a file of `folder` that has its process id."""
    lease.LOCK_WAIT_S = 0.2  # a stopped writer may hold the lock; no test waits half a minute to hear of it
    said = "done"
    try:
        job(Path(source), Path(out), AllowedChanges(**allowed))
    except TorchlakeError as error:
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said = f"UNEXPECTED {error!r}"
    Path(folder, f"said-{os.getpid()}").write_text(said)


def state_of(pid: int) -> str:
    """What the kernel says of a process: T for stopped, Z for ended (until its caller has waited for it)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "a writer hangs"
        time.sleep(0.002)


class ExactlyOnce(RuleBasedStateMachine):
    """The machine."""

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
        self.stopped: list[forked.Process] = []

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
        writer = self._start(allowed, f"{site}:{nth}:stop")
        until(lambda: state_of(writer.pid) in "TZ")
        name = data.draw(st.sampled_from(sorted(self.files)))
        before = self.files[name]
        self.put(name, len(self.rows[before]), how)
        if back == "at once":
            self._place(name, before, how)
        if state_of(writer.pid) == "T":
            os.kill(writer.pid, signal.SIGCONT)
        self._finished(writer)
        if back == "later":
            self._place(name, before, how)
            self.run(allowed)

    @precondition(lambda self: len(self.stopped) < 3)
    @rule(allowed=ALLOWED, site=st.sampled_from(SITES), nth=st.integers(1, 4))
    def stop(self, allowed: AllowedChanges, site: str, nth: int) -> None:
        """A writer that is stopped in the middle, to wake up later (or it ends before it gets there)."""
        writer = self._start(allowed, f"{site}:{nth}:stop")
        until(lambda: state_of(writer.pid) in "TZ")
        if state_of(writer.pid) == "T":
            self.stopped.append(writer)

    @precondition(lambda self: self.stopped)
    @rule()
    def wake(self) -> None:
        """All stopped writers go on: one may hold the lock that another waits for."""
        writers, self.stopped = self.stopped, []
        for writer in writers:
            os.kill(writer.pid, signal.SIGCONT)
        for writer in writers:
            self._finished(writer)

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
        for writer in self.stopped:
            writer.kill()
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

    def _start(self, allowed: AllowedChanges, armed: str = "") -> forked.Process:
        environment = {**os.environ, **({"TORCHLAKE_FAILPOINT": armed} if armed else {})}
        return forked.start(
            write, str(self.source), str(self.out), vars(allowed), str(self.folder), environment=environment
        )

    def _finished(self, writer: forked.Process) -> str:
        """What a writer said in the end; empty for one that was killed."""
        writer.wait(LIMIT_S)
        path = self.folder / f"said-{writer.pid}"
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
