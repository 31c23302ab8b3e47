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
from torchlake import plugins
from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.output import lease
from torchlake.tables.output.compatibility import AllowedChanges
from torchlake.tables.output.parts import part_name
from torchlake.tables.reading import ChunkReader, row_ids
from torchlake.tables.sinks import _write
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
    _write.ATTEMPTS = 12
    objects.RETRIES = 3
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


def source_rows(count: int, *, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    columns = [[*numbers], [f"text {one}" for one in numbers], [f"p{one % 2}" for one in numbers]]
    return pa.table(columns, schema=pa.schema([("id", pa.int64()), ("t", pa.string()), ("p", pa.string())]))


def write_source(path: Path, rows: pa.Table) -> Path:
    pq.write_table(rows, path)
    return path


if __name__ == "__main__":
    serve()
