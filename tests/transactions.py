"""A model of writers of one output: jobs in threads of `interleaving.World`, and what has to be true after each stop.

Each writer writes as `predict` does: plan, begin, read chunks, write parts, commit. After each stop of any of them:

- the rows of the output are those from before, or what one whole job of this writer makes of them;
- a job that adds rows adds them once, however often it runs, until another job has removed all of them; one that
  replaces rows by key does so again if others have;
- a writer commits once;
- a writer that lost its lease before it last looked at the output changes nothing;
- a writer computes no chunk whose part was finished and kept, and one that succeeds has its rows in the output.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fake_target import FakeTarget
from interleaving import Fiber, World, Writer
from torchlake.errors import FingerprintError, LeaseLost, Locked, OutputError, StorageError
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.find import Output
from torchlake.outputs.parts import part_name
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.target import Mode, TargetOptions
from torchlake.outputs.targets import folder, object_folder
from torchlake.outputs.transaction import WriteRequest
from torchlake.storage.objects import ObjectFolder
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import Chunk, ChunkPlan
from torchlake.tables.record import COMMIT, PARTS
from torchlake.tables.table import open_table

LEASE_S = 60.0
SCHEMA = pa.schema([("id", pa.int64()), ("version", pa.int64()), ("error", pa.string())])
FILES = {"a": range(3), "b": range(3, 5), "c": range(5, 7)}
"The ids in each input file; a chunk has two rows."
SOURCES = ("a", "ab", "c")
TABLE_MODES: tuple[Mode, ...] = ("create", "append", "overwrite")
FOLDER_MODES: tuple[Mode, ...] = ("create", "overwrite")
MODES: dict[str, tuple[Mode, ...]] = {
    "table in a store": TABLE_MODES,
    "local table": (*TABLE_MODES, "replace-where"),
    "folder in a store": FOLDER_MODES,
    "folder": FOLDER_MODES,
    "folder without exchange": FOLDER_MODES,
}
"By kind of output."

Rows = tuple[tuple[int, int], ...]
"Ids and versions, sorted."


@dataclass(frozen=True)
class Job:
    """What a writer is asked to write; the version stands for all settings that change rows."""

    source: str
    version: int = 1
    mode: Mode = "create"
    new_input: bool = False
    discard: bool = False
    "Another job's interrupted write may be discarded."
    grouped: bool = False

    @property
    def rows(self) -> Rows:
        return tuple((one, self.version) for name in self.source for one in FILES[name])

    @property
    def same(self) -> tuple[str, int]:
        """Equal for jobs that add the same rows."""
        return self.source, self.version


class Planned(NamedTuple):
    """A source's plan and the rows of its chunks."""

    plan: ChunkPlan
    ids: dict[tuple[str, int], pa.Array]

    def read(self, chunk: Chunk, version: int) -> pa.Table:
        ids = self.ids[chunk.name, chunk.first_row]
        columns = [ids, pa.array([version] * len(ids), pa.int64()), pa.nulls(len(ids), pa.string())]
        return pa.table(columns, schema=SCHEMA)


def make_sources(folder: Path) -> dict[str, Planned]:
    """Every source, planned once: no test here changes an input."""
    planned = {}
    for source in SOURCES:
        (folder / source).mkdir()
        for name in source:
            pq.write_table(pa.table({"id": [*FILES[name]]}), folder / source / f"{name}.parquet")
        plan = plan_chunks(open_table(folder / source), columns=["id"], chunk_rows=2)
        ids = {}
        for one in plan.chunks:
            file = pq.read_table(one.file)["id"].combine_chunks()
            ids[one.name, one.first_row] = file.slice(one.first_row, one.rows)
        planned[source] = Planned(plan, ids)
    return planned


class Writing:
    """What the model knows of a writer."""

    def __init__(self, writer: Writer, job: Job, states: int) -> None:
        self.writer, self.job = writer, job
        self.first = states
        "The number of states of the output when it started."
        self.finished: frozenset[str] = frozenset()
        "Parts of this job that were finished and kept when it began."
        self.computed: list[str] = []
        self.commits = 0
        self.lost = False
        "Another writer holds its lease."
        self.looked_after = False
        "It has looked at the output since."


class Model:
    """One output of a kind, its writers, and the checks."""

    def __init__(self, kind: str, sources: dict[str, Planned]) -> None:
        self.kind, self.sources = kind, sources
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="transactions-", dir=shared))
        self.world = World(self.folder)
        if kind == "folder without exchange":
            self.world._set(staging, exchange=lambda one, other: False)
        self.local, self.table = "store" not in kind, "table" in kind
        self.root = str(self.folder / "out") if self.local else "s3://bucket/out"
        self.state = str(staging.staging_of(Path(self.root))) if self.local else f"{self.root}/_torchlake/staging"
        self.target = FakeTarget(world=self.world, root=self.root, options=TargetOptions())
        self.states: list[Rows | None] = [None]
        "Of the output, in their order."
        self.version = 0
        self.added: set[tuple[str, int]] = set()
        "The jobs whose rows were added to a table."
        self.running: dict[Writer, Writing] = {}
        self.kept: tuple[Job, set[str]] | None = None
        "The parts that the last job has finished."
        self._parsed: dict[bytes, Rows] = {}
        self._seen: Any = None

    def close(self) -> None:
        self.world.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, job: Job, *, machine: str = "one") -> Writing:
        """A writer that stands before its first line."""
        writer = self.world.start(self._write, machine=machine)
        self.running[writer] = Writing(writer, job, len(self.states))
        return self.running[writer]

    def step(self, fiber: Fiber, fault: str = "") -> None:
        """One step of one thread, and every check."""
        writing = self.running[fiber.writer]
        site, before = fiber.site, self._job_state() if self.local and writing.lost else None
        held = fiber.writer.lease
        self.world.step(fiber, fault)
        if fiber.writer.lease is not held:
            self._begun(writing)
        self._watch_lease(writing, looked=site == "target.snapshot" or site.startswith("get commit"))
        self._check_rows(writing)
        if self.local and before is not None:
            assert self._job_state() == before, "a writer that lost its lease changes neither plan nor lease"
        if writing.writer.ended:
            self._check_end(writing)

    def advance(self, writer: Writer, stops: int) -> None:
        """Several steps; fewer if it ends, or waits for another writer."""
        for _ in range(stops):
            if not writer.active or (writer.main.blocked and writer.next is writer.main and _ > 1):
                return
            self.step(writer.next)

    def finish(self, writer: Writer) -> None:
        """Until it ends, or waits for another writer."""
        waits = 0
        while writer.active and waits < 4:
            self.step(writer.next)
            waits = waits + 1 if writer.next.blocked else 0

    def expire(self) -> None:
        """Every lease ends: all writers were paused for longer."""
        self.world.pass_time(LEASE_S + 1)

    def run(self, job: Job) -> Writing:
        """A writer that runs alone to its end."""
        writing = self.start(job)
        self.finish(writing.writer)
        assert writing.writer.ended, f"it waits at {writing.writer.main.site}"
        return writing

    def settle(self, job: Job, *, dead: bool) -> None:
        """Check that a job completes after anything at all, and does nothing the second time.

        Other writers are dead, or wake after it.
        """
        for writer in self.running:
            if writer.active and (dead or writer.descriptors):
                self.world.kill(writer)
        self.expire()
        last = self.run(job)
        if isinstance(last.writer.refused, FingerprintError):
            permitted = job.discard or (job.mode == "overwrite" and not self.table)
            assert not permitted, last.writer.refused
            job = replace(job, discard=True, mode=job.mode if self.table else "overwrite")
            last = self.run(job)
        if isinstance(last.writer.refused, OutputError) and self.table and job.mode == "create":
            assert self.states[-1], "it is refused because of other rows"
            return
        assert last.writer.refused is None, f"alone and without a fault: {last.writer.refused!r}"
        state = self.states[-1]
        assert self.run(job).writer.result == 0
        assert self.states[-1] == state, "the second time nothing is done"
        for writer in [one for one in self.running if one.active]:
            self.finish(writer)

    def _write(self, writer: Writer) -> int:
        """What a writer does; returns how many chunks it computed."""
        writing = self.running[writer]
        job, (plan, _) = writing.job, self.sources[writing.job.source]
        output = self._output(job)
        output.earlier()
        allowed = AllowedChanges(overwrite=job.discard, new_input=job.new_input)
        request = WriteRequest(
            plan=plan,
            fingerprint={"version": job.version},
            schema=SCHEMA,
            key="id" if job.mode == "replace-where" else None,
            lease_s=LEASE_S,
            allowed=allowed,
        )
        self.world.stop("test.planned")
        if self.kept is not None and self._continues(self.kept[0], job):
            writing.finished = frozenset(self.kept[1])
        with output.begin(request) as write:
            if write.complete:
                return 0
            parts = []
            for chunk in write.pending:
                self.world.stop("test.read")
                name = part_name(write.plan, chunk, write.job.fingerprint)
                assert writing.lost or name not in writing.finished, (
                    "a part that was finished and kept is not computed again"
                )
                writing.computed.append(name)
                rows = self.sources[job.source].read(chunk, job.version)
                parts.append(write.parts.write(name, rows, chunk=chunk.index))
                if self.kept is not None and self._continues(self.kept[0], job) and not writing.lost:
                    self.kept[1].add(name)
            write.commit([*write.done, *parts], {})
            return len(parts)

    def _continues(self, earlier: Job, job: Job) -> bool:
        return replace(earlier, discard=job.discard) == job

    def _begun(self, writing: Writing) -> None:
        """It has the lease, so it may have discarded the work of other jobs."""
        if self.kept is None or not self._continues(self.kept[0], writing.job):
            self.kept = (writing.job, set())

    def _output(self, job: Job) -> Output:
        options = TargetOptions(mode=job.mode, target_file_size=1 << 20 if job.grouped else None)
        if self.table:
            return Output(text=self.root, target=replace(self.target, options=options))
        if self.local:
            target = folder.LocalFolderTarget(root=self.root, options=options)
            return Output(text=self.root, target=target)
        stored = object_folder.FolderTarget(
            shown=self.root, root=self.root, options=options, objects=ObjectFolder(self.root)
        )
        return Output(text=self.root, target=stored)

    def _watch_lease(self, writing: Writing, *, looked: bool) -> None:
        """Note who holds the lease now."""
        token = self._lease_token()
        for one in self.running.values():
            if one.writer.lease is not None:
                own = one.writer.lease.mine["token"]
                one.lost = one.lost or (token is not None and token != own)
        if looked and writing.lost:
            writing.looked_after = True

    def _check_rows(self, writing: Writing) -> None:
        (version, state), before = self._output_now(), self.states[-1]
        if version == self.version:
            assert state == before, "rows change by a commit"
            return
        self.version = version
        assert state == self._after(before, writing.job), f"{before} became {state}: no whole job of its writer"
        assert not (writing.lost and (self.local or writing.looked_after)), "a writer that lost its lease changed rows"
        writing.commits += 1
        assert writing.commits == 1, "a writer commits once"
        adds = writing.job.mode not in ("overwrite", "replace-where")
        if self.table and (adds or len(self.states) == 1):  # to overwrite a table without a version is to add to it
            there = {one for one, _ in before or ()} & {one for one, _ in writing.job.rows}
            assert not adds or not there or writing.job.same not in self.added, "rows are added once"
            self.added.add(writing.job.same)
        self.states.append(state)
        self.kept = None
        for one in self.running.values():
            one.finished = frozenset()

    def _after(self, rows: Rows | None, job: Job) -> Rows:
        before, new = rows or (), job.rows
        if not self.table:
            assert self._may_replace(before, job), "another job's output is not replaced"
            return new
        if job.mode == "create":
            assert not before, "a table with rows is not created"
        if job.mode == "overwrite":
            before = ()
        if job.mode == "replace-where":
            ids = {one for one, _ in new}
            before = tuple(row for row in before if row[0] not in ids)
        return tuple(sorted((*before, *new)))

    def _may_replace(self, before: Rows, job: Job) -> bool:
        return not before or job.mode == "overwrite" or job.discard or (job.new_input and {*before} <= {*job.rows})

    def _check_end(self, writing: Writing) -> None:
        writer, job = writing.writer, writing.job
        if writer.refused is None:
            since = self.states[writing.first - 1 :]
            found = job.same in self.added and job.mode != "replace-where"
            found = found or any({*job.rows} <= {*(state or ())} for state in since)
            assert found, "a job that succeeds has its rows in the output"
            assert self.table or any(state == job.rows for state in since), "and no others"
        elif isinstance(writer.refused, LeaseLost):
            assert writing.lost, writer.refused
        elif isinstance(writer.refused, StorageError):
            others = len(self.states) > writing.first  # a commit may delete parts that it made files of
            assert writing.lost or writer.faults or others, writer.refused
        else:
            assert isinstance(writer.refused, Locked | FingerprintError | OutputError), repr(writer.refused)

    # The output and the job's state as a reader sees them, without a request of a writer.

    def _output_now(self) -> tuple[int, Rows | None]:
        """A number that every commit changes, and the rows."""
        if self.table:
            versions = self.target.versions
            return len(versions) - 1, self._rows_of([f"{self.root}/{path}" for path in versions[-1].files])
        place = self.root
        if self.local and not os.path.exists(place):  # between two renames, where folders cannot be exchanged
            place = f"{self.state}/{staging.OLD}"
        record = self._content(f"{place}/{COMMIT}")
        if record is None:
            return 0, None
        parts = place if self.local else f"{place}/{PARTS}"
        rows = self._rows_of([f"{parts}/{part['name']}" for part in json.loads(record)["parts"]])
        return os.stat(f"{place}/{COMMIT}").st_ino if self.local else self._stored(f"{place}/{COMMIT}").version, rows

    def _rows_of(self, files: list[str]) -> Rows | None:
        rows: list[tuple[int, int]] = []
        for file in files:
            content = self._content(file)
            assert content is not None, f"{file}: committed and not there"
            if content not in _PARSED:
                table = pq.read_table(pa.BufferReader(content))
                _PARSED[content] = tuple(zip(table["id"].to_pylist(), table["version"].to_pylist(), strict=True))
            rows += _PARSED[content]
        return tuple(sorted(rows)) or None

    def _content(self, path: str) -> bytes | None:
        if not self.local:
            found = self._stored(path)
            return None if found is None else found.content
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _stored(self, path: str) -> Any:
        return self.world.store.objects.get(path.removeprefix("s3://bucket/"))

    def _lease_token(self) -> str | None:
        content = self._content(f"{self.state}/lease.json")
        return None if content is None else json.loads(content)["token"]

    def _job_state(self) -> list[bytes | None]:
        return [self._content(f"{self.state}/{name}") for name in ("plan.json", "lease.json")]


_PARSED: dict[bytes, Rows] = {}
"The rows of files by their content: jobs write the same few again and again."
