"""The rows of calls of a loaded model: those of several are read and computed together; each gets its own answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.scoring.options.call import AS_LOADED, CallOptions, reader_of, scorer_of
from torchlake.scoring.rows import ReadyRows
from torchlake.scoring.scorer import Scorer
from torchlake.scoring.workers.output import joined
from torchlake.serving.batching import Call, Part


@dataclass(frozen=True)
class GivenRows:
    """The rows of a call as they were given: the model's columns, errors of invalid rows, and how they are scored."""

    table: pa.Table
    unreadable: dict[int, str]
    view: CallOptions


@dataclass(frozen=True)
class Answered:
    """The answer to a call: the columns of `predict`, and what it cost."""

    table: pa.Table
    tokens: int
    reading_s: float
    queued_s: float
    computed_s: float


def read(scorer: Scorer, given: Sequence[GivenRows]) -> list[Call]:
    """Tokenize the rows of calls with equal options and schemas; return for each the call that is computed.

    Beside the tokenizer, reading a call costs 0.1 ms of CPU, and reading several together costs no more.
    """
    view = given[0].view
    reader = scorer.reader if view is AS_LOADED else reader_of(scorer.reader, view)
    starts = np.cumsum([0, *(len(each.table) for each in given)]).tolist()
    unreadable = {
        start + row: why for start, each in zip(starts, given, strict=False) for row, why in each.unreadable.items()
    }
    work = reader.read(pa.concat_tables([each.table for each in given]), unreadable)
    if not view.truncate:
        for at in np.flatnonzero(work.features.cut).tolist():
            more = f"{work.features.cut[at]:,} tokens more than the {reader.spec.max_length:,} that the model reads"
            work.errors.setdefault(int(work.rows[at]), f"too_long: {more}")
    if len(given) == 1:  # of a model that writes, a row has a place for each of its answers
        return [_call(scorer, work, view)]
    return [_call(scorer, _some(work, np.arange(*ends)), view) for ends in pairwise(starts)]


def _call(scorer: Scorer, work: ReadyRows, view: CallOptions) -> Call:
    costs = np.zeros(work.count, dtype=np.int64)
    if scorer.settings.generation is not None:  # its rows are computed in the order and company of `predict`
        return Call((work, view), costs, kind=object())
    costs[work.rows] = work.features.lengths
    costs[[row for row in work.errors if row < work.count]] = 0
    return Call((work, view), costs, kind=view.kind)


def compute(scorer: Scorer, parts: Sequence[Part]) -> list[pa.Table]:
    """Return the answers of the rows of each call, computed together."""
    view: CallOptions = parts[0][0].work[1]
    works = [_some(call.work[0], rows) for call, rows in parts]
    used = scorer if view is AS_LOADED else scorer_of(scorer, view)
    table = used.score(joined(works))
    scorer.batch_tokens = min(scorer.batch_tokens, used.batch_tokens)  # less after memory ran out
    starts = np.cumsum([0, *(work.count for work in works)])
    return [table.slice(start, work.count) for start, work in zip(starts, works, strict=False)]


def _some(work: ReadyRows, rows: np.ndarray) -> ReadyRows:
    """Return some of the rows (B,) of a call."""
    if len(rows) == work.count:  # all, in their order
        return work
    place = np.full(work.count, -1, dtype=np.int64)
    place[work.rows] = np.arange(len(work.rows))
    found = place[rows]
    errors = {at: work.errors[row] for at, row in enumerate(rows.tolist()) if row in work.errors}
    return ReadyRows(len(rows), np.flatnonzero(found >= 0), work.features.take(found[found >= 0]), errors)


def answered(read: Call, call: Call, pieces: list[tuple[np.ndarray, Any]]) -> Answered:
    """Return the pieces of a call's answer as one table, in the order of its rows."""
    table = pieces[0][1]
    if len(pieces) > 1:
        order = np.argsort(np.concatenate([rows for rows, _ in pieces]))
        table = pa.concat_tables([each for _, each in pieces]).take(pa.array(order))
    queued_s = read.started - read.arrived + call.started - call.arrived
    return Answered(table, call.tokens, read.ended - read.started, queued_s, call.ended - call.started)
