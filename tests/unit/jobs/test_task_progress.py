"""Rows of unfinished chunks are counted as their workers' journals tell."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
import torchlake as tl
from torchlake.jobs import table_job
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.jobs.worker.task_progress import TaskProgress
from torchlake.progress import progress


@given(
    batches=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), max_size=12),
    looks=st.sets(st.integers(0, 12)),
)
def test_a_batch_counts_once_the_next_note_is_there(
    tmp_path_factory: pytest.TempPathFactory, batches: Sequence[list[int]], looks: set[int]
) -> None:
    """However often it is looked at; a row that is tried again, as in a halved batch, counts once."""
    journal = tmp_path_factory.mktemp("staging") / "journal"
    counted = TaskProgress(journal)
    assert counted.rows() == 0, "there is no journal yet"
    strikes = Attempt(journal, 3, 100, 60.0)
    try:
        with strikes.running("read"):
            pass
        with strikes.running("tokenize"):
            pass
        for number, batch in enumerate(batches):
            with strikes.running("score", batch):
                if number in looks:
                    assert counted.rows() == len({row for one in batches[:number] for row in one})
        strikes.idle()
        assert counted.rows() == len({row for batch in batches for row in batch})
    finally:
        strikes.close()
    assert counted.rows() == 0, "the chunk is finished: its result is counted"


def test_of_several_attempts_the_furthest_counts_and_older_ones_not(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    old = Attempt(journal, 0, 10, 60.0)
    with old.running("score", [0, 1, 2, 3]):
        pass
    old.idle()
    counted = TaskProgress(journal)
    attempts = [Attempt(journal, chunk, 10, 60.0) for chunk in (1, 1, 2)]
    for strikes, rows in zip(attempts, ([0, 1, 2], [4], [5, 6]), strict=True):
        with strikes.running("score", rows):
            pass
        strikes.idle()
    assert counted.rows() == 3 + 2
    (journal / "2-torn.json").write_bytes(b'{"suspects": {}}\n["score", [1, 2')
    assert counted.rows() == 5, "a line that is being written is read later"
    for strikes in (old, *attempts):
        strikes.close()


def test_predict_shows_every_batch_of_a_chunk(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small table is one chunk: its progress would be 0, and then all of it."""
    seen: list[int] = []
    asks: list[Callable[[], int]] = []

    @contextmanager
    def watched(*args: Any, ahead: Callable[[], int], **options: Any) -> Any:
        asks.append(ahead)
        with progress(*args, ahead=ahead, **options) as advance:
            yield advance

    def load(folder: Path, spec: Any, *, device: str) -> Any:
        def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
            seen.append(asks[0]())
            return np.zeros((len(input_ids), len(spec.labels)), dtype=np.float32)

        return forward

    monkeypatch.setattr(table_job, "progress", watched)
    pq.write_table(tiny.reviews(200), tmp_path / "rows.parquet")
    tl.predict(tiny_model, tmp_path / "rows.parquet", tmp_path / "out", runtime=load, engine=tiny.Here())
    assert len(seen) > 3
    assert seen == sorted(set(seen))
    assert seen[0] == 0
    assert seen[-1] > 100
