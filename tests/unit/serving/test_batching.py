"""Callers share batches: first come, first served, within the budget; a call never harms another one."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
import torchlake as tl
from torchlake.errors import UsageError
from torchlake.scoring import in_process
from torchlake.scoring.options.call import AS_LOADED, CallOptions
from torchlake.scoring.workers import calls
from torchlake.scoring.workers.calls import Answered
from torchlake.serving.batching import Batcher, Call, Part, RowTimeout

LARGE = pa.schema([("text", pa.large_string())])
TEXTS = [*tiny.reviews(40)["text"].to_pylist(), None, "", "\ud800", "good " * 200]


class Gated:
    """A computation that waits for a permit, and notes what it computed."""

    def __init__(self, budget: int = 10) -> None:
        self.batches: list[list[tuple[Any, list[int]]]] = []
        self.entered, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.batcher = Batcher(self.compute, lambda: budget, lost=lambda error: isinstance(error, OSError))

    def compute(self, parts: Sequence[Part]) -> list[list[Any]]:
        self.batches.append([(call.work, rows.tolist()) for call, rows in parts])
        self.entered.release()
        self.permits.acquire()
        if any(call.work == "raises" for call, _ in parts):
            raise ValueError("a row of this call")
        if any(call.work == "device" for call, _ in parts):
            raise OSError("lost")
        return [[(call.work, row) for row in rows] for call, rows in parts]

    def submit(self, name: str, *costs: int, kind: str = "") -> Call:
        call = Call(name, np.array(costs, dtype=np.int64), kind)
        self.batcher.submit(call)
        return call


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.permits.release(1000)
    made.batcher.close()


def busy(gated: Gated) -> Call:
    """The thread computes a first call, so that what follows has to wait."""
    first = gated.submit("first", 1)
    gated.entered.acquire()
    return first


def finish(gated: Gated, *calls: Call) -> None:
    gated.permits.release(1000)
    for call in calls:
        call.future.exception(timeout=30)


def test_what_arrives_meanwhile_is_the_next_batch(gated: Gated) -> None:
    busy(gated)
    calls = [gated.submit("a", 4), gated.submit("b", 1, 5), gated.submit("c", 1), gated.submit("d", 2)]
    assert (gated.batcher.queued, gated.batcher.queued_tokens) == (4, 13)
    finish(gated, *calls)
    assert gated.batches == [[("first", [0])], [("a", [0]), ("b", [0, 1])], [("c", [0]), ("d", [0])]]
    assert (gated.batcher.queued, gated.batcher.queued_tokens) == (0, 0)


def test_a_long_call_is_served_in_its_turn_and_in_parts(gated: Gated) -> None:
    busy(gated)
    calls = [gated.submit("long", 4, 6, 5, 0, 9), gated.submit("row", 99), gated.submit("last", 1)]
    finish(gated, *calls)
    rows = list(gated.batches[1:])
    assert rows == [[("long", [4])], [("long", [1])], [("long", [2, 0, 3]), *rows[2][1:]], *rows[3:]]
    assert [name for batch in rows for name, _ in batch if name != "long"] == ["row", "last"]
    pieces = calls[0].future.result()
    assert sorted(int(row) for each, _ in pieces for row in each) == [0, 1, 2, 3, 4]


def test_calls_of_other_kinds_do_not_share(gated: Gated) -> None:
    busy(gated)
    calls = [gated.submit("a", 1, kind="x"), gated.submit("b", 1, kind="y"), gated.submit("c", 1, kind="y")]
    finish(gated, *calls)
    assert gated.batches[1:] == [[("a", [0])], [("b", [0]), ("c", [0])]]


def test_a_call_that_nobody_waits_for_is_not_computed(gated: Gated) -> None:
    busy(gated)
    gone, other = gated.submit("gone", 3), gated.submit("other", 3)
    assert gone.future.cancel()
    finish(gated, other)
    assert gated.batches[1:] == [[("other", [0])]]
    assert gated.batcher.queued_tokens == 0


def test_what_a_call_raises_is_its_own(gated: Gated) -> None:
    busy(gated)
    calls = [gated.submit("a", 1), gated.submit("raises", 1), gated.submit("b", 1)]
    finish(gated, *calls)
    assert [type(call.future.exception()) for call in calls] == [type(None), ValueError, type(None)]


def test_a_batch_that_hangs_is_given_up_with_all_that_waits(gated: Gated) -> None:
    first = busy(gated)
    waiting = gated.submit("waiting", 1)
    assert not gated.batcher.abandon(1000)
    assert gated.batcher.abandon(0)
    assert type(first.future.exception(timeout=30)) is RowTimeout
    assert type(waiting.future.exception(timeout=30)) is TimeoutError
    with pytest.raises(UsageError, match="more than 0 seconds"):
        gated.submit("later", 1)


def test_a_lost_device_ends_all_calls_and_is_said(gated: Gated) -> None:
    busy(gated)
    calls = [gated.submit("a", 4), gated.submit("device", 4), gated.submit("waiting", 9)]
    finish(gated, *calls)
    assert [type(call.future.exception()) for call in calls] == [OSError, OSError, TimeoutError]
    assert gated.batches[1:] == [[("a", [0]), ("device", [0])]]  # not one by one
    assert gated.batcher.broken == "The device is lost (OSError): start again."
    with pytest.raises(UsageError, match="device is lost"):
        gated.submit("later", 1)


def test_a_large_call_counts_as_queued_until_its_last_row_is_taken(gated: Gated) -> None:
    busy(gated)
    call, tokens = gated.submit("large", 9, 9, 9), []
    for _ in call.costs:
        gated.permits.release()
        gated.entered.acquire()
        tokens.append(gated.batcher.queued_tokens)
    assert tokens == [18, 9, 0]
    gone = gated.submit("gone", 9, 9)
    gated.permits.release()
    gated.entered.acquire()
    assert gone.future.cancel()
    finish(gated, call, gated.submit("last", 1))
    assert gated.batcher.queued_tokens == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 15), max_size=6), st.sampled_from("xy")), max_size=8))
def test_every_row_is_computed_once_in_the_order_of_calls(given_calls: list[tuple[list[int], str]]) -> None:
    gated = Gated()
    busy(gated)
    calls = [gated.submit(str(at), *costs, kind=kind) for at, (costs, kind) in enumerate(given_calls)]
    finish(gated, *calls)
    gated.batcher.close()
    firsts = list(dict.fromkeys(name for batch in gated.batches[1:] for name, _ in batch))
    assert firsts == [str(at) for at in range(len(calls))]
    for call in calls:
        found = [
            (int(row), answer) for rows, part in call.future.result() for row, answer in zip(rows, part, strict=True)
        ]
        assert sorted(found) == [(row, (call.work, row)) for row in range(len(call.costs))]
    for batch in gated.batches[1:]:
        costs = [int(calls[int(name)].costs[rows].sum()) for name, rows in batch]
        assert sum(costs) <= 10 or next(len(rows) for _, rows in batch) == 1


def same(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """The company of a row changes the rounding of its score only."""
    assert [{**one, "score": one["score"] and pytest.approx(one["score"], abs=1e-5)} for one in answers] == others
    return True


def test_threads_and_coroutines_get_the_answers_of_predict(tiny_model: Path) -> None:
    rows = tl.predict(tiny_model, pa.table({"text": ["" if text == "\ud800" else text for text in TEXTS]}))
    expected = rows.drop_columns("text").to_pylist()
    expected[TEXTS.index("\ud800")]["error"] = "bad_utf8"
    cuts = [slice(at, at + size) for at, size in zip(range(40), [1, 2, 3, 40, 1, 9, 1, 1] * 5, strict=True)]
    classify = tl.load(tiny_model)
    with ThreadPoolExecutor(16) as threads:
        for cut, answers in zip(cuts, threads.map(lambda cut: classify(TEXTS[cut]), cuts), strict=True):
            assert same(answers, expected[cut])

    async def together() -> list[Any]:
        doomed = asyncio.create_task(classify.acall(TEXTS))  # type: ignore[arg-type]
        others = [asyncio.create_task(classify.acall(TEXTS[cut])) for cut in cuts]
        await asyncio.sleep(0)
        doomed.cancel()
        one = await classify.acall("good film")
        assert same([one], classify(["good film"]))
        return await asyncio.gather(*others)

    for cut, answers in zip(cuts, asyncio.run(together()), strict=True):
        assert same(answers, expected[cut])


def test_calls_that_are_read_together_have_their_own_options_and_errors(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with equal options and types of columns are tokenized at once, others apart."""
    sizes, read = [], calls.read
    monkeypatch.setattr(in_process, "read", lambda scorer, given: sizes.append(len(given)) or read(scorer, given))
    loaded = tl.load(tiny_model)
    views = [AS_LOADED, CallOptions(truncate=False), CallOptions(truncation_side="left"), CallOptions(raw=True)]
    tables = [(loaded.to_table(TEXTS[at : at + 4]), view) for view in views for at in range(len(TEXTS))]
    large = [((table.cast(LARGE), errors), view) for (table, errors), view in tables]

    async def together() -> list[Answered]:
        return await asyncio.gather(*(loaded.ascore(*rows, view) for rows, view in [*tables, *large]))

    found = [answer.table.to_pylist() for answer in asyncio.run(together())]
    assert max(sizes) > 1
    for rows, ((table, errors), view) in zip(found, [*tables, *large], strict=True):
        assert same(rows, loaded.score(table, errors, view).table.to_pylist())


def test_a_model_that_is_dropped_is_freed(tiny_model: Path) -> None:
    model = tl.load(tiny_model)
    model("good film")
    batcher, thread = model.batcher, model.batcher._thread
    scorer = weakref.ref(batcher._compute.args[0])  # type: ignore[attr-defined]
    del model
    gc.collect()
    assert thread is not None
    thread.join(timeout=30)
    del batcher
    gc.collect()
    assert scorer() is None


def test_a_model_that_is_closed_is_freed(tiny_model: Path) -> None:
    model = tl.load(tiny_model)
    model("good film")
    scorer = weakref.ref(model.batcher._compute.args[0])  # type: ignore[attr-defined]
    model.close()
    gc.collect()
    assert scorer() is None
    with pytest.raises(UsageError, match="The model is closed"):
        model("good film")


def test_vectors_are_an_array(tmp_path: Path, tiny_model: Path) -> None:
    embed = tl.load(tiny.build_embedder(tmp_path / "embedder")).embed
    vectors = embed(["good film", None, "a bore"])
    assert (vectors.shape, vectors.dtype) == ((3, 16), np.float32)
    assert np.isnan(vectors[1]).all()
    assert np.isfinite(vectors[[0, 2]]).all()
    with pytest.raises(UsageError, match="task is text_classification"):
        tl.load(tiny_model).embed(["good"])
