"""Exactly once: whatever is killed when, a reader sees the old table or the whole new one, and no debris stays.

The job of the sweeps reads 2 CSV files, writes every row's text in capitals with its row id, and needs no model.
"""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from folder_writes import planned_inputs, write_transaction
from sweeps import sweep
from torchlake.errors import FingerprintError, LeaseLost, Locked, OutputError, StorageError, TableError, UsageError
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.parts import Part, part_name
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.transaction import Transaction
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import ChunkPlan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import COMMIT, committed_files, read_commit
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify

JOB = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_commit import run
if {failpoint!r}:
    os.environ["TORCHLAKE_FAILPOINT"] = {failpoint!r}
run(Path({source!r}), Path({out!r}))
"""
FORKS = """
import json, os, sys, traceback
from pathlib import Path
sys.path.insert(0, {here!r})
from test_commit import run, staging
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(job["words"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        os.environ.update(job["env"])
        if job["no_exchange"]:
            staging.exchange = lambda one, other: False
        try:
            run(Path(job["source"]), Path(job["out"]), **job["options"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """Runs jobs in processes forked from one that has imported everything: a job takes a fraction of a second."""

    def __init__(self, folder: Path) -> None:
        self.words = folder / "words"
        self.process = spawn(
            FORKS.format(here=str(Path(__file__).parent)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(
        self, source: Path, out: Path, failpoint: str = "", *, log: str = "", no_exchange: bool = False, **options: Any
    ) -> tuple[int, str]:
        """The exit status (minus the signal's number) and what was written to stderr."""
        env = {"TORCHLAKE_FAILPOINT": failpoint} if failpoint else {}
        env |= {"TORCHLAKE_FAILPOINT_LOG": log} if log else {}
        job = {"source": str(source), "out": str(out), "options": options, "no_exchange": no_exchange}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job | {"env": env, "words": str(self.words)}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), self.words.read_text()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks"))
    with forks.process:
        yield forks


def spawn(script: str, **pipes: Any) -> "subprocess.Popen[str]":
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-c", script], env=env, text=True, **pipes)


def plan_of(source: Path) -> ChunkPlan:
    return plan_chunks(open_table(source, columns=["t"]), columns=["t"], chunk_rows=4)


def score(write: Transaction, suffix: str = "") -> list[Part]:
    reader, parts = ChunkReader(["t"]), []
    for chunk in write.pending:
        rows, _ = reader.read(chunk)
        texts = pc.binary_join_element_wise(pc.utf8_upper(rows["t"].combine_chunks()), suffix, "")
        table = pa.table({"row_id": row_ids(chunk), "t": texts, "error": pa.nulls(len(texts), pa.string())})
        name = part_name(write.plan, chunk, write.job.fingerprint)
        parts.append(write.parts.write(name, table, chunk=chunk.index))
    return parts


def run(source: Path, out: Path, suffix: str = "", **options: Any) -> tuple[int, dict[str, Any]]:
    """The whole job; returns how many chunks it had to do, and the record."""
    schema = pa.schema([(name, pa.string()) for name in ("row_id", "t", "error")])
    names = {"overwrite": "overwrite", "accept_new_input": "new_input", "accept_removed_input": "removed_input"}
    allowed = AllowedChanges(**{name: options.pop(option) for option, name in names.items() if option in options})
    job = {"fingerprint": {"suffix": suffix}, "schema": schema, "allowed": allowed, **options}
    with write_transaction(out, plan=plan_of(source), **job) as write:
        if write.complete:
            assert write.record is not None
            return 0, write.record
        return len(write.pending), write.commit([*write.done, *score(write, suffix)], {"by": "test"})


def rows_of(out: Path) -> list[tuple[str, str]]:
    tables = [pq.read_table(path, partitioning=None) for path in sorted(out.glob("*.parquet"))]
    return [(row["row_id"], row["t"]) for row in pa.concat_tables(tables).to_pylist()]


def expected(suffix: str = "") -> list[tuple[str, str]]:
    return [(f"{name}.csv:{n}", f"{name.upper()}{n}{suffix}") for name in "ab" for n in range(6)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.csv").write_text("t\n" + "".join(f"{name}{n}\n" for n in range(6)))
    return folder


def is_clean(out: Path) -> bool:
    """Nothing beside the output and the input, nothing in the output that the record does not know."""
    verification = verify(out)
    assert verification.problems == []
    assert verification.notes == []
    return sorted(path.name for path in out.parent.iterdir()) == ["in", out.name]


@contextmanager
def watched(out: Path, *allowed: list[tuple[str, str]] | None) -> Iterator[None]:
    """A reader that polls `out` all the while, as any reader would, and sees nothing but what is `allowed`."""
    stop, seen, looks = threading.Event(), [], [0]

    def poll() -> None:
        while not stop.wait(0.001):
            looks[0] += 1
            try:
                descriptor = os.open(out, os.O_RDONLY)  # one version, whatever is renamed meanwhile
            except FileNotFoundError:
                rows = None
            else:
                names = sorted(name for name in os.listdir(descriptor) if name.endswith(".parquet"))
                try:
                    folder = Path(f"/proc/self/fd/{descriptor}")
                    rows = [
                        (row["row_id"], row["t"])
                        for name in names
                        for row in pq.ParquetFile(folder / name).read().to_pylist()
                    ]
                except FileNotFoundError:
                    continue  # the old version was removed while it was being read; its names were complete
                finally:
                    os.close(descriptor)
            if rows not in allowed:
                seen.append(rows)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert looks[0] > 0
    assert seen == []


def child(source: Path, out: Path, failpoint: str = "") -> "subprocess.Popen[str]":
    """The whole job in a process of its own."""
    script = JOB.format(here=str(Path(__file__).parent), source=str(source), out=str(out), failpoint=failpoint)
    return spawn(script, stderr=subprocess.PIPE)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, words = process.communicate(timeout=60)
    return process.returncode, words


def sites(forks: Forks, source: Path, tmp_path: Path, **options: Any) -> list[str]:
    """The failpoints that a job passes, found by running it once."""
    log = tmp_path / "log"
    copy = tmp_path / "first"
    if options.get("overwrite"):
        run(source, copy)
    code, words = forks.run(source, copy, log=str(log), **options)
    assert code == 0, words
    found = log.read_text().split()
    log.unlink()
    for path in sorted(copy.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    copy.rmdir()
    return found


def test_a_job_is_written_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with watched(out, None, expected()):
        assert run(source, out)[0] == 4
    assert rows_of(out) == expected()
    assert is_clean(out)
    record = read_commit(out)
    assert (record["rows"], record["failed"], record["provenance"]) == (12, 0, {"by": "test"})
    assert [path.parent for path in committed_files(out)] == [out] * 4
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(source, out) == (0, record)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert open_table(out).names == tuple(path.name for path in committed_files(out))


@pytest.mark.parametrize("every", sweep([1, 4], quick={4}))
def test_a_kill_at_every_step_of_a_new_output_is_resumed(
    forks: Forks, source: Path, tmp_path: Path, every: int
) -> None:
    found = sites(forks, source, tmp_path)
    assert {site.split(":")[0].split(".")[0] for site in found} == {"lease", "plan", "part", "commit"}
    assert {"commit.before_publish:1", "commit.publish:1", "commit.after_publish:1", "commit.cleanup:1"} <= set(found)
    for site in found[::every]:
        out = tmp_path / f"out-{site.replace(':', '-')}" / "table"
        with watched(out, None, expected()):
            code, _ = forks.run(source, out, f"{site}:kill9")
            assert code == -signal.SIGKILL, site
            done, _ = run(source, out)
        assert done <= 4
        assert rows_of(out) == expected(), site
        assert verify(out).problems == [], site
        assert os.listdir(out.parent) == ["table"], site


@pytest.mark.slow  # test_transactions.py ends writers at every step, in this process
@pytest.mark.parametrize("no_exchange", [False, True])
def test_a_kill_at_every_step_of_a_replacement_is_resumed(
    forks: Forks, source: Path, tmp_path: Path, no_exchange: bool
) -> None:
    found = sites(forks, source, tmp_path, overwrite=True, suffix="!", no_exchange=no_exchange)
    assert ("commit.swap:1" in found) == no_exchange
    for site in [site for site in found if site.startswith(("commit", "plan"))]:
        out = tmp_path / f"out-{site.replace(':', '-')}" / "table"
        run(source, out)
        allowed = (expected(), expected("!")) + ((None,) if no_exchange else ())
        with watched(out, *allowed):
            code, _ = forks.run(source, out, f"{site}:kill9", overwrite=True, suffix="!", no_exchange=no_exchange)
            assert code == -signal.SIGKILL, site
            run(source, out, suffix="!", overwrite=True)
        assert rows_of(out) == expected("!"), site
        assert verify(out).problems == [], site
        assert os.listdir(out.parent) == ["table"], site


def test_a_kill_between_the_two_renames_brings_the_old_output_back(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    code, _ = forks.run(source, out, "commit.swap:1:kill9", overwrite=True, suffix="!", no_exchange=True)
    assert code == -signal.SIGKILL
    assert not out.exists()
    assert run(source, out)[0] == 0
    assert rows_of(out) == expected()
    assert run(source, out, suffix="!", overwrite=True)[0] == 0
    assert rows_of(out) == expected("!")
    assert is_clean(out)


def test_earlier_plans_say_what_need_not_be_hashed_again(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert planned_inputs(out) == []
    forks.run(source, out, "part.done:1:kill9")
    assert planned_inputs(out) == list(plan_of(source).inputs)
    run(source, out)
    assert planned_inputs(out) == list(plan_of(source).inputs)


def test_a_finished_chunk_is_not_done_again(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for kill in (2, 1, 1):  # killed again during the resume
        forks.run(source, out, f"part.done:{kill}:kill9")
        assert not out.exists()
    assert run(source, out)[0] == 0
    assert rows_of(out) == expected()


def test_debris_is_removed_and_counted(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    forks.run(source, out, "part.done:2:kill9")
    table = staging.staging_of(out) / "table"
    (table / ".part.parquet.77.tmp").write_bytes(b"torn")
    (table / "part-00000-alien.parquet").write_bytes(b"alien")
    (staging.staging_of(out) / "journal").mkdir(exist_ok=True)
    (staging.staging_of(out) / "journal" / "0.json").write_text("[]")
    sound = sorted(table.glob("part-*.parquet"))
    sound[-1].write_bytes(sound[-1].read_bytes()[:-9])
    with write_transaction(out, plan=plan_of(source), fingerprint={"suffix": ""}) as write:
        assert write.removed == 3
        assert (len(write.done), len(write.pending)) == (1, 3)
        assert list((write.staging / "journal").iterdir()) == []
        (write.staging / "journal" / "0.json").write_text("[]")
        (table / "late.parquet").write_bytes(b"a zombie's")
        write.commit([*write.done, *score(write)], {})
    assert rows_of(out) == expected()
    assert is_clean(out)


def test_another_job_is_refused_with_what_differs(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    with pytest.raises(FingerprintError, match=r"suffix: '' -> '!'\n--overwrite replaces it"):
        run(source, out, suffix="!")
    assert is_clean(out)
    other = tmp_path / "other"
    forks.run(source, other, "part.done:2:kill9")
    with pytest.raises(FingerprintError, match=r"interrupted write: belongs to another job:\n  suffix: '' -> '!'"):
        run(source, other, suffix="!")
    assert run(source, other, suffix="!", overwrite=True)[0] == 4
    assert rows_of(other) == expected("!")


def test_an_interrupted_replacement_survives_a_look_at_the_old_output(
    forks: Forks, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(source, out)
    forks.run(source, out, "part.done:2:kill9", suffix="!", overwrite=True)
    assert run(source, out)[0] == 0, "the old output is complete"
    assert run(source, out, suffix="!", overwrite=True)[0] == 2, "and what was done of the new one is kept"
    assert rows_of(out) == expected("!")
    assert is_clean(out)


@pytest.mark.slow
def test_a_killed_overwrite_can_be_given_again(forks: Forks, source: Path, tmp_path: Path) -> None:
    for site in [site for site in sites(forks, source, tmp_path) if site.startswith(("plan", "part.done", "commit"))]:
        out = tmp_path / f"out-{site.replace(':', '-')}" / "table"
        for kill in (site, "part.done:1"):  # killed again while it starts anew
            forks.run(source, out, f"{kill}:kill9", overwrite=True)
        run(source, out, overwrite=True)
        assert rows_of(out) == expected(), site
        assert verify(out).problems == [], site
        assert os.listdir(out.parent) == ["table"], site


def test_a_changed_input_is_refused_then_accepted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    kept = {path.name for path in out.glob("part-*") if pq.read_table(path)["row_id"][0].as_py().startswith("a")}
    (source / "b.csv").write_text("t\nnew\n")
    (source / "c.csv").write_text("t\n" + "x\n" * 5)
    with pytest.raises(FingerprintError, match=r"c.csv: new \(5 rows\)\n  .*b.csv: rewritten \(6 rows -> 1 rows\)"):
        run(source, out)
    rows = expected()[:6] + [("b.csv:0", "NEW")] + [(f"c.csv:{n}", "X") for n in range(5)]
    with watched(out, expected(), rows):
        done, record = run(source, out, accept_new_input=True)
    assert done == 3
    assert rows_of(out) == rows
    assert kept < {part["name"] for part in record["parts"]}
    assert is_clean(out)
    assert run(source, out)[0] == 0
    assert run(source, out, accept_new_input=True)[0] == 0
    (source / "a.csv").unlink()
    with pytest.raises(FingerprintError, match=r"a.csv: removed \(6 rows\)\n--accept-removed-input drops"):
        run(source, out, accept_new_input=True)
    assert rows_of(out) == rows
    assert run(source, out, accept_removed_input=True)[0] == 0
    assert rows_of(out) == rows[6:]
    assert is_clean(out)


def test_an_increment_does_not_read_what_it_keeps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(source, out)
    (source / "c.csv").write_text("t\nc0\n")
    read: list[str] = []
    original = io.open

    def opened(path: Any, *rest: Any, **options: Any) -> Any:
        read.append(os.path.basename(str(path)))
        return original(path, *rest, **options)

    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("io.open", opened)  # of pathlib
    assert run(source, out, accept_new_input=True)[0] == 1
    monkeypatch.undo()
    assert "c.csv" in read
    assert [name for name in read if name.startswith("part-")] == []
    assert rows_of(out) == [*expected(), ("c.csv:0", "C0")]
    assert verify(out).problems == []


def test_an_increment_copies_what_it_keeps_where_there_are_no_hard_links(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(source, out)
    (source / "c.csv").write_text("t\nc0\n")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("torchlake.outputs.staging.kept.os.link", refuse)
    with write_transaction(
        out, plan=plan_of(source), fingerprint={"suffix": ""}, allowed=AllowedChanges(new_input=True)
    ) as write:
        monkeypatch.undo()  # new parts are written by links
        assert len(write.pending) == 1
        write.commit([*write.done, *score(write)], {})
    assert rows_of(out) == [*expected(), ("c.csv:0", "C0")]
    assert verify(out).problems == []


def test_a_published_part_that_is_cut_short_is_made_again_by_an_increment(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    part = min(out.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    (source / "c.csv").write_text("t\nc0\n")
    assert run(source, out, accept_new_input=True)[0] == 2
    assert rows_of(out) == [*expected(), ("c.csv:0", "C0")]
    assert verify(out).problems == []


def test_an_interrupted_write_accepts_new_input_too(forks: Forks, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    forks.run(source, out, "part.done:3:kill9")
    (source / "c.csv").write_text("t\nc0\n")
    with pytest.raises(FingerprintError, match=r"interrupted write: the input has changed since:\n  .*c.csv: new"):
        run(source, out)
    assert run(source, out, accept_new_input=True)[0] == 2
    assert rows_of(out) == [*expected(), ("c.csv:0", "C0")]


def test_an_input_that_changes_while_it_is_read_is_not_published(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with write_transaction(out, plan=plan_of(source), fingerprint={}) as write:
        parts = score(write)
        (source / "b.csv").write_text("t\nother\n")
        with pytest.raises(FingerprintError, match=r"b.csv: changed while it was being read"):
            write.commit(parts, {})
    assert not out.exists()


def test_two_writers_at_once_one_wins(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with write_transaction(out, plan=plan_of(source), fingerprint={"suffix": ""}) as write:
        with pytest.raises(Locked, match=rf"pid {os.getpid()} on .* since 20"):
            run(source, out)
        code, words = finish(child(source, out))
        assert code == 1
        assert "Locked" in words
        write.commit(score(write), {})
    assert rows_of(out) == expected()
    assert is_clean(out)


def test_many_racing_writers_leave_one_table(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with watched(out, None, expected()):
        results = [finish(process) for process in [child(source, out) for _ in range(3)]]
    assert any(code == 0 for code, _ in results)
    assert all(code == 0 or "Locked" in words for code, words in results)
    assert rows_of(out) == expected()
    assert is_clean(out)


def test_a_zombie_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    zombie = child(source, out, "part.done:4:stop")
    os.waitpid(zombie.pid, os.WUNTRACED)
    with pytest.raises(Locked):
        run(source, out)  # stopped, but its lease has not run out: nobody can tell it from a slow one
    lease = staging.staging_of(out) / "lease.json"
    os.utime(lease, (0, 0))
    with write_transaction(out, plan=plan_of(source), fingerprint={"suffix": ""}) as write:
        os.kill(zombie.pid, signal.SIGCONT)
        code, words = finish(zombie)
        assert code == 1
        assert "LeaseLost" in words
        assert f"pid {os.getpid()}" in words
        assert not out.exists()
        assert json.loads(lease.read_text())["epoch"] == 2
        write.commit([*write.done, *score(write)], {})
    assert rows_of(out) == expected()
    assert is_clean(out)


def test_a_table_without_rows_keeps_its_schema(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("t\n")
    out = tmp_path / "out"
    assert run(tmp_path / "in", out)[1]["rows"] == 0
    (path,) = committed_files(out)
    assert pq.read_schema(path).names == ["row_id", "t", "error"]
    assert is_clean(out)
    assert run(tmp_path / "in", out)[0] == 0


def test_an_output_that_is_not_ours_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="holds files that torchlake did not write"):
            run(source, out, overwrite=overwrite)
    with pytest.raises(OutputError, match="is a file"):
        run(source, out / "thesis.txt")
    assert (out / "thesis.txt").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    (out / "thesis.txt").unlink()
    run(source, out)
    assert rows_of(out) == expected()


def test_urls_and_parents_that_cannot_be_written_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has to be a local path"):
        run(source, "s3://bucket/out")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be created"):
        run(source, tmp_path / "file" / "out")
    with pytest.raises(OutputError, match="cannot be created"):
        run(source, Path("/proc/torchlake/out"))


def test_a_damaged_output_is_named_and_written_anew_on_demand(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, record = run(source, out)
    (out / record["parts"][1]["name"]).unlink()
    with pytest.raises(OutputError, match=rf"damaged: {record['parts'][1]['name']} is missing"):
        run(source, out)
    assert run(source, out, overwrite=True)[0] == 1
    path = out / record["parts"][2]["name"]
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    assert run(source, out, overwrite=True)[0] == 1
    assert rows_of(out) == expected()
    assert is_clean(out)


def test_a_full_disk_leaves_finished_chunks_and_the_old_output(
    forks: Forks, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    out = tmp_path / "out"
    run(source, out)
    for site in ("part.write:3", "commit.write:1", "commit.plan.write:1"):
        code, words = forks.run(source, out, f"{site}:enospc", suffix="!", overwrite=True)
        assert code == 1
        assert "StorageError" in words
        assert "bytes are free" in words
        assert rows_of(out) == expected()
    assert run(source, out, suffix="!", overwrite=True)[0] == 0
    assert rows_of(out) == expected("!")
    assert is_clean(out)


def test_a_staging_folder_that_was_deleted_is_an_error(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with write_transaction(out, plan=plan_of(source), fingerprint={}) as write:
        parts = score(write)
        staging.remove_staging(write.staging)
        with pytest.raises(StorageError):
            score(write)
        with pytest.raises(StorageError, match="run the same command again"):
            write.commit(parts, {})
    assert os.listdir(tmp_path) == ["in"]


def test_what_holds_no_commit_is_not_read(source: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="not a finished torchlake output"):
        read_commit(tmp_path)
    run(source, tmp_path / "out")
    (tmp_path / "out" / COMMIT).write_text('{"format": 1, "parts": [1]}')
    with pytest.raises(TableError, match="not a commit record"):
        read_commit(tmp_path / "out")


def test_an_output_in_a_folder_that_cannot_be_listed_is_an_output_error(source: Path) -> None:
    plan, user = plan_of(source), os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to everybody else
        Path(folder).chmod(0o333)
        try:
            if user == 0:
                os.seteuid(65534)  # root may list every folder
            with (
                pytest.raises(OutputError, match=r"out: cannot be read: Permission denied: .* Give an output in"),
                write_transaction(Path(folder) / "out", plan=plan, fingerprint={}),
            ):
                pass
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o700)


def test_an_error_in_the_job_lets_the_next_writer_in_at_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(LeaseLost), write_transaction(out, plan=plan_of(source), fingerprint={"suffix": ""}) as write:
        score(write)
        raise LeaseLost("as if")
    assert run(source, out)[0] == 0
    assert rows_of(out) == expected()
