"""Jobs that write to a sink, each in a fork that may be killed and stopped; and what has to be in the output then."""

import json
import os
import secrets
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
from pyiceberg.utils.config import Config

import forked
import hub_repositories
from exactly_once import LIMIT_S, state_of, until
from sink_kinds import Place, SinkKind
from torchlake import failpoints
from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.find import output_of
from torchlake.outputs.parts import part_name
from torchlake.outputs.target import target_options
from torchlake.outputs.targets import delta
from torchlake.outputs.transaction import WriteRequest
from torchlake.storage import lease, objects
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table


def job(
    source: Path,
    output: str,
    *,
    version: int = 1,
    chunk_rows: int = 2,
    failing: str = "",
    unlucky: str = "",
    lease_s: float = 60.0,
    accept_new_input: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Write every row of a Parquet file, as `predict` does; returns how many chunks were computed.

    Rows whose column `t` has the text `failing` have an error; so has `unlucky`, but for a passing reason: another call
    of the same job may do without.
    """
    table = open_table(source)
    columns = table.schema.names
    place = output_of(output, target_options(options))
    place.refuse_input(table.files)
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows, cached=place.earlier().inputs)
    schema = pa.schema([pa.field("row_id", pa.string()), *plan.schema, pa.field("error", pa.string())])
    request = WriteRequest(
        plan=plan,
        fingerprint={"version": version, "failing": failing},
        schema=schema,
        never_null="id",
        lease_s=lease_s,
        allowed=AllowedChanges(new_input=accept_new_input, overwrite=overwrite),
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
            bad = {failing, unlucky} - {""}
            errors = ["failed: asked for" if text in bad else None for text in rows["t"].to_pylist()]
            found = pa.table([row_ids(chunk), *rows.columns, pa.array(errors, pa.string())], schema=schema)
            name = part_name(write.plan, chunk, write.job.fingerprint)
            parts.append(write.parts.write(name, found, chunk=chunk.index))
        write.commit([*write.done, *parts], {})
        return len(parts)


def write(said: str, options: dict[str, Any]) -> None:
    """In a fork: run the job with `options`, and write how it ended into the file `said`."""
    Path(said).write_text(json.dumps(ended(options, dict(os.environ))))


def ended(options: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run the job with `options` and return how it ended: `computed`, `error` or `unexpected`."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch.dict(failpoints._hits, clear=True))
        # A stopped writer may hold the lock; no test waits half a minute to hear of it.
        stack.enter_context(patch.object(lease, "LOCK_WAIT_S", 0.2))
        stack.enter_context(patch.object(objects, "RETRIES", 3))
        stack.enter_context(patch.object(delta, "RETRIES", 3))
        # pyiceberg and huggingface_hub read their variables when they are imported.
        stack.enter_context(patch.object(pyiceberg.catalog, "_ENV_CONFIG", Config()))
        address, home = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_HOME")
        if address is not None and home is not None:
            settings = hub_repositories.client_settings(address, home)
            stack.enter_context(patch.multiple(huggingface_hub.constants, **settings))
        try:
            return {"computed": job(**options)}
        except TorchlakeError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        except BaseException as error:
            return {"unexpected": repr(error)}


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A writer's process."""

    process: forked.Process
    said: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stopped(self) -> bool:
        """Wait until it is stopped or has ended; whether it is stopped."""
        until(lambda: state_of(self.pid) in "TZ")
        return state_of(self.pid) == "T"

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> dict[str, Any] | None:
        """Wait for it, and what it said: `computed` or `error`; None if it was killed."""
        self.process.wait_for_end(LIMIT_S)
        said = json.loads(self.said.read_text()) if self.said.exists() else None
        assert said is None or "unexpected" not in said, said
        return said


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a kind, in a place of its own."""

    kind: SinkKind
    place: Place

    def start(self, source: Path, *, armed: str = "", log: Path | None = None, **options: Any) -> Writer:
        """A writer of every row of `source`, in a process of its own."""
        environment, job = self._job(source, armed, log, options)
        said = self.place.folder / f"said-{secrets.token_hex(4)}"
        return Writer(process=forked.start(write, str(said), job, environment={**os.environ, **environment}), said=said)

    def run(self, source: Path, *, armed: str = "", log: Path | None = None, **options: Any) -> dict[str, Any] | None:
        """What a writer says; None if it was killed. One that nothing happens to runs in this process.

        Uploads to the Hub have settings of their process, and threads; and a proxy of this process cannot answer a
        library that holds the interpreter's lock while it waits.
        """
        if armed or self.kind.sink == "hub" or self.place.variables:
            return self.start(source, armed=armed, log=log, **options).end()
        environment, job = self._job(source, armed, log, options)
        said = ended(job, environment)
        assert "unexpected" not in said, said
        return said

    def _job(
        self, source: Path, armed: str, log: Path | None, options: dict[str, Any]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """The variables and the arguments of `job` for a writer."""
        environment = {**self.place.server.environment, **self.kind.environment(self.place), **self.place.variables}
        environment |= {"TORCHLAKE_FAILPOINT": armed} if armed else {}
        environment |= {"TORCHLAKE_FAILPOINT_LOG": str(log)} if log else {}
        output = str(self.kind.output(self.place))
        return environment, {"source": str(source), "output": output, **self.kind.options, **options}

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
        return Output(kind=self.kind, place=Place(folder=folder, server=self.place.server))


def source_rows(count: int, *, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    columns = [[*numbers], [f"text {one}" for one in numbers], [f"p{one % 2}" for one in numbers]]
    return pa.table(columns, schema=pa.schema([("id", pa.int64()), ("t", pa.string()), ("p", pa.string())]))


def write_source(path: Path, rows: pa.Table) -> Path:
    pq.write_table(rows, path)
    return path
