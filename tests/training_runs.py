"""Training runs for tests, each in a process of its own: a fork (forked.py), which may be killed at a failpoint."""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import forked
from recovery_times import mark
from torchlake import errors
from torchlake.engines import Engine
from torchlake.errors import RankFailed, TorchlakeError

DEADLINE_S = 120.0
RUN = "TORCHLAKE_TEST_RUN"
"Names the run folder in the process of an attempt."


class Inline(Engine):
    """An engine for tests: chunks and a single rank run in the caller's process, several ranks are forks of it.

    A fork has torch at once, where a fresh process needs seconds to import it. The caller must not have computed
    anything with torch before: threads do not survive a fork.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes

    def run_chunks(self, make_worker: Callable[[], Any], chunks: Any, **_: Any) -> Iterator[Any]:
        return iter(make_worker()(iter(chunks)))

    def launch(self, fn: Callable[..., Any], *args: Any, processes: int = 1, **_: Any) -> Any:
        if processes == 1:
            return fn(*args)
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            ranks = [_fork_rank(rank, processes, held, fn, args) for rank in range(processes)]
            return _gather(ranks)

    def map_frame(self, frame: Any, make_worker: Callable[[], Any], schema: Any) -> Any:
        return make_worker()(frame)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How a process ended: `exit_code` as a shell counts it, negative for a signal."""

    exit_code: int
    error: str = ""
    "The error's class and message, empty without one."
    steps: int = 0
    metrics: dict[str, float] | None = None
    complete: bool = False


def _fork_rank(rank: int, processes: int, held: socket.socket, fn: Any, args: Any) -> tuple[int, Any]:
    """Fork one rank; its process id and the connection that its value, or its error, comes over."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])})
        os.environ.update({"TORCHLAKE_MASTER_FD": str(held.fileno()), "GLOO_SOCKET_IFNAME": "lo"})
        theirs.send(("value", fn(*args)))
    except TorchlakeError as error:
        theirs.send((type(error).__name__, str(error)))
    except BaseException:
        theirs.send(("RankFailed", traceback.format_exc()))
    finally:
        theirs.close()
        os._exit(0)


def _gather(ranks: list[tuple[int, Any]]) -> Any:
    """Rank 0's value, or the error of the rank that failed first; every rank is gone afterwards."""
    values = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    try:
        while waiting:
            for connection in wait(list(waiting)):
                rank = waiting.pop(connection)
                try:
                    kind, values[rank] = connection.recv()
                except EOFError:
                    raise RankFailed(f"rank {rank} was killed", rank=rank) from None
                if kind == "RankFailed":
                    raise RankFailed(f"rank {rank} failed", rank=rank, traceback=values[rank])
                if kind != "value":
                    raise getattr(errors, kind)(values[rank])
        return values[0]
    finally:
        for pid, _ in ranks:
            if waiting:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def job(folder: Path, encoder: Path, *, rows: int = 96, **train: Any) -> dict[str, Any]:
    """Sections of a job over `rows` generated reviews in `folder`: short steps in fp32, but for what `train` says."""
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "reviews.parquet"
    if not table.exists():
        pq.write_table(tiny.reviews(rows), table)
    recipe = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": "3steps"}
    # So that tests can say which steps a killed run has kept.
    recipe |= {"checkpoint_in_background": False, "precision": "fp32", **train}
    return {
        "data": {"train": str(table), "validation": {"fraction": 0.25}},
        "model": {"base": str(encoder)},
        "train": recipe,
    }


def attempt(
    run: Path,
    sections: dict[str, Any],
    *,
    failpoint: str | None = None,
    sigterm_at: str | None = None,
    stub: Callable[[], None] | None = None,
    ranks: int = 1,
    local: bool = False,
    overrides: tuple[str, ...] = (),
    folds: int | None = None,
    task: Any = None,
    on_step: Callable[[dict[str, Any]], Any] | None = None,
    page: bool = False,
    **environment: str,
) -> Attempt:
    """`tl.train` with so many ranks in a fresh process, on the engine above or (`local`, slow) on the local one.

    `task` and `on_step`, of modules that can be imported, are those of `train`. `failpoint` ("site:nth:action") breaks
    it, `sigterm_at` ("site:nth") sends it SIGTERM there, `stub`, a module-level function, is called first. Only with
    `page` do the rows of the validation get a page, a seventh of the time of such runs.
    """
    out = run.with_name(f"{run.name}.attempt.json")
    out.unlink(missing_ok=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    variables = {**forked.ALONE, RUN: str(run), **environment}
    if failpoint is not None:
        variables["TORCHLAKE_FAILPOINT"] = failpoint
        variables.setdefault("TORCHLAKE_FAILPOINT_ONCE", str(run.with_name(f"{run.name}.{failpoint}.once")))
    given = {"overrides": overrides, "folds": folds, "task": task, "on_step": on_step, "page": page}
    arguments = (str(run), sections, sigterm_at, stub, ranks, local, given, str(out))
    process = forked.start(_train, *arguments, environment={**os.environ, **variables})
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{run}: the training hung for {DEADLINE_S} s") from None
    mark(run, "ended")
    told = json.loads(out.read_text()) if out.exists() else {}
    return Attempt(exit_code=code, **told)


def mark_fault() -> None:
    """For stubs: note that the run of this process is being broken now."""
    mark(Path(os.environ[RUN]), "fault")


def small_chunks() -> None:
    """For stubs: the loss of a language model in chunks of 7 tokens or so."""
    from torchlake.tasks import _chunked_loss

    _chunked_loss.CHUNK_BYTES = 7 * 4 * 400


def succeed(run: Path, sections: dict[str, Any], **options: Any) -> Attempt:
    """`attempt`, which must end well."""
    done = attempt(run, sections, **options)
    assert done.exit_code == 0, done.error
    return done


def losses(run: Path) -> list[float]:
    """The loss of every step, in order; that each is there once is asserted."""
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [float(line["loss"]) for line in lines]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_sha256(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def _train(
    run: str,
    sections: dict[str, Any],
    sigterm_at: str | None,
    stub: Callable[[], None] | None,
    ranks: int,
    local: bool,
    given: dict[str, Any],
    out: str,
) -> None:
    import torchlake as tl
    from torchlake.evaluation import held_out

    if not given.pop("page"):
        held_out.write_page = lambda *_: {}
    if sigterm_at is not None:
        _send_sigterm_at(*sigterm_at.split(":"))
    if stub is not None:
        stub()
    engine = tl.Local(processes=ranks) if local else Inline(ranks)
    try:
        done = tl.train(run=run, engine=engine, **given, **sections)  # type: ignore[call-overload]
    except TorchlakeError as error:
        Path(out).write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        os._exit(error.exit_code)
    except BaseException:
        Path(out).write_text(json.dumps({"error": traceback.format_exc()}))
        os._exit(70)
    if given["folds"] is not None:
        os._exit(0)
    told = {"steps": done.steps, "metrics": done.metrics, "complete": done.complete}
    Path(out).write_text(json.dumps(told))


def _send_sigterm_at(site: str, nth: str) -> None:
    """Send this process SIGTERM when it comes to a failpoint for the nth time."""
    from torchlake import atomic_io, failpoints
    from torchlake.checkpoints import format
    from torchlake.training import restarts, validation
    from torchlake.training import step as steps

    hits = 0

    def failpoint(name: str) -> None:
        nonlocal hits
        hits += name == site
        if name == site and hits == int(nth):
            mark_fault()
            os.kill(os.getpid(), signal.SIGTERM)

    for module in (restarts, format, atomic_io, failpoints, validation, steps):
        module.failpoint = failpoint  # type: ignore[attr-defined]
