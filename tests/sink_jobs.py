"""Jobs that write to a sink in processes of their own, to be killed and stopped; and what has to be in the output then.

Run as a script this file is the server that forks writers from a process which has imported everything.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import huggingface_hub
import huggingface_hub.hf_api
import obstore.store
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog.sql
import pyiceberg.io.pyarrow
import s3fs
from pyiceberg.utils.config import Config

import hub_repositories
from exactly_once import state_of, until
from sink_kinds import Place, SinkKind
from torchlake import plugins
from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.output import lease
from torchlake.tables.output.compatibility import AllowedChanges
from torchlake.tables.output.parts import part_name
from torchlake.tables.reading import ChunkReader, row_ids
from torchlake.tables.sinks import delta
from torchlake.tables.sinks._find import output_of
from torchlake.tables.sinks._interface import sink_options
from torchlake.tables.sinks._write import WriteRequest
from torchlake.tables.storage import objects
from torchlake.tables.table import open_table

IMPORTED = (deltalake, obstore.store, s3fs, pyiceberg.catalog.sql, pyiceberg.io.pyarrow, huggingface_hub.hf_api)
"Before the fork, but not used: their threads would not be in the child."


def job(
    source: Path,
    output: str,
    *,
    version: int = 1,
    chunk_rows: int = 2,
    failing: str = "",
    lease_s: float = 60.0,
    accept_new_input: bool = False,
    **options: Any,
) -> int:
    """Write every row of a Parquet file, as `predict` does; returns how many chunks were computed.

    Rows whose column `t` has the text `failing` have an error.
    """
    table = open_table(source)
    columns = table.schema.names
    place = output_of(output, sink_options(options))
    place.refuse_input(table.files)
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows, cached=place.earlier().inputs)
    schema = pa.schema([pa.field("row_id", pa.string()), *plan.schema, pa.field("error", pa.string())])
    request = WriteRequest(
        plan=plan,
        fingerprint={"version": version, "failing": failing},
        schema=schema,
        lease_s=lease_s,
        allowed=AllowedChanges(new_input=accept_new_input),
    )
    failpoint("test.planned")
    with place.begin(request) as write:
        if write.complete:
            return 0
        failpoint("test.begun")
        reader, parts = ChunkReader(columns), []
        for chunk in write.pending:
            rows, _ = reader.read(chunk)
            failpoint("test.read")
            errors = ["failed: asked for" if failing and text == failing else None for text in rows["t"].to_pylist()]
            found = pa.table([row_ids(chunk), *rows.columns, pa.array(errors, pa.string())], schema=schema)
            name = part_name(write.plan, chunk, write.job.fingerprint)
            parts.append(write.parts.write(name, found, chunk=chunk.index))
        write.commit([*write.done, *parts], {})
        return len(parts)


def read_variables() -> None:
    """Make pyiceberg and huggingface_hub read their variables, which they do when they are imported."""
    pyiceberg.catalog._ENV_CONFIG = Config()
    address, home = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_HOME")
    if address is not None and home is not None:
        for name, value in hub_repositories.client_settings(address, home).items():
            setattr(huggingface_hub.constants, name, value)


def serve() -> None:
    """Fork a writer for each line of stdin; its pid goes to stdout, how it ends into a file of that name."""
    lease.LOCK_WAIT_S = 0.2  # a stopped writer may hold the lock; no test waits half a minute to hear of it
    objects.RETRIES = delta.RETRIES = 3
    for kind in ("sinks", "sources"):
        for name in plugins.names(kind):
            plugins.load(kind, name)
    for line in sys.stdin:
        value = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(value["environment"])
            read_variables()
            try:
                said = {"computed": job(**value["job"])}
            except TorchlakeError as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            except BaseException as error:
                said = {"unexpected": repr(error)}
            Path(value["said"]).write_text(json.dumps(said))
            os._exit(0)
        print(pid, flush=True)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A writer's process."""

    pid: int
    said: Path

    def stopped(self) -> bool:
        """Wait until it is stopped or has ended; whether it is stopped."""
        until(lambda: state_of(self.pid) in "TZ")
        return state_of(self.pid) == "T"

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> dict[str, Any] | None:
        """Wait for it, and what it said: `computed` or `error`; None if it was killed."""
        until(lambda: state_of(self.pid) == "Z")
        said = json.loads(self.said.read_text()) if self.said.exists() else None
        assert said is None or "unexpected" not in said, said
        return said


class Writers:
    """The server that forks writers, as the test knows it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, environment: dict[str, str], **job: Any) -> Writer:
        """A writer that has been started; `job` are arguments of the function `job`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        said = folder / f"said-{secrets.token_hex(4)}"
        value = {"said": str(said), "environment": environment, "job": job}
        self.process.stdin.write(json.dumps(value, default=str) + "\n")
        self.process.stdin.flush()
        return Writer(pid=int(self.process.stdout.readline()), said=said)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a kind, in a place of its own."""

    kind: SinkKind
    place: Place
    writers: Writers

    def start(self, source: Path, *, armed: str = "", log: Path | None = None, **options: Any) -> Writer:
        """A writer of every row of `source`, in a process of its own."""
        variables = {**self.place.server.environment, **self.kind.environment(self.place), **self.place.variables}
        variables |= {"TORCHLAKE_FAILPOINT": armed} if armed else {}
        variables |= {"TORCHLAKE_FAILPOINT_LOG": str(log)} if log else {}
        given = {**self.kind.options, **options}
        return self.writers.start(
            self.place.folder, variables, source=str(source), output=self.kind.output(self.place), **given
        )

    def run(self, source: Path, **options: Any) -> dict[str, Any] | None:
        """What a writer says; None if it was killed."""
        return self.start(source, **options).end()

    def computed(self, source: Path, **options: Any) -> int:
        """How many chunks a writer that succeeds computes."""
        said = self.run(source, **options)
        assert said is not None
        assert "computed" in said, said
        return int(said["computed"])

    def takes_over(self, source: Path, **options: Any) -> dict[str, Any]:
        """What the first writer says that does not find the output locked by a lease that is about to end."""
        while True:
            said = self.run(source, **options)
            assert said is not None
            if "Locked: " not in said.get("error", "") or "locked for" in said["error"]:
                return said

    def ids(self) -> list[int]:
        """The ids of all committed rows, sorted."""
        rows = self.kind.read(self.place)
        return [] if rows is None or not rows.num_rows else sorted(rows["id"].to_pylist())

    def at(self, name: str) -> "Output":
        """Another output of the same kind."""
        folder = self.place.folder / name
        folder.mkdir()
        return Output(kind=self.kind, writers=self.writers, place=Place(folder=folder, server=self.place.server))


def source_rows(count: int, *, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    columns = [[*numbers], [f"text {one}" for one in numbers], [f"p{one % 2}" for one in numbers]]
    return pa.table(columns, schema=pa.schema([("id", pa.int64()), ("t", pa.string()), ("p", pa.string())]))


def write_source(path: Path, rows: pa.Table) -> Path:
    pq.write_table(rows, path)
    return path


if __name__ == "__main__":
    serve()
