"""Texts are kept as they end: a job that was interrupted writes only the others, with the same bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

import misbehaving
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.data.batching import Ragged
from torchlake.data.features import Features
from torchlake.errors import StorageError
from torchlake.jobs.worker import writing
from torchlake.jobs.worker.journal import Journal
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.outputs.staging.folders import ROWS, staging_of
from torchlake.runtimes import Text
from torchlake.tables.chunks import CHUNK_S, RowCost, plan_chunks
from torchlake.tables.table import open_table

SAMPLED = {"max_new_tokens": 10, "temperature": 1.0, "seed": 5, "stop": "o"}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    table = tiny.reviews(24)
    pq.write_table(table, tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def interrupted(
    monkeypatch: pytest.MonkeyPatch, site: str, model: Path, prompts: Path, output: Path, **options: Any
) -> None:
    """Write until the disk is full."""
    with monkeypatch.context() as context:
        context.setenv("TORCHLAKE_FAILPOINT", site)
        context.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(StorageError, match="No space left"):
            written(model, prompts, output, **options)


def written(model: Path, prompts: Path, output: Path, **options: Any) -> list[Any]:
    tl.predict(model, prompts, output, key="id", engine=tiny.Here(), **{"chunk_rows": 12, **SAMPLED, **options})
    return pq.read_table(output).to_pylist()


@pytest.mark.parametrize(("kind", "pieces"), sweep(product(["gpt2", "t5"], [False, True]), quick={("gpt2", False)}))
def test_an_interrupted_job_goes_on_with_the_texts_that_it_has(
    tmp_path: Path, tiny_gpt2: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pieces: bool
) -> None:
    """`pieces`: also with those that have not ended, which are continued where they stopped."""
    model = tiny_gpt2 if kind == "gpt2" else tiny.build_encoder_decoder(tmp_path / "t5")
    monkeypatch.setenv("SCORED_LOG", str(tmp_path / "log"))
    whole = written(model, prompts, tmp_path / "whole")
    assert len({row["generated_tokens"] for row in whole}) > 3, "texts end at different times"
    monkeypatch.setattr(writing, "PIECE_S", 0.0 if pieces else 1e6)
    log_texts = misbehaving.log_texts
    interrupted(
        monkeypatch,
        "journal.write:30:enospc" if pieces else "journal.write:9:enospc",
        model,
        prompts,
        tmp_path / "out",
        runtime=log_texts,
    )
    journals = len(list((staging_of(tmp_path / "out") / ROWS).iterdir()))
    assert journals in (1, 2), "of the first chunk, and of the second if its rows have taken places"
    before = (tmp_path / "log").read_text().split()
    assert written(model, prompts, tmp_path / "out", runtime=log_texts) == whole
    lines = (tmp_path / "log").read_text().split()[len(before) :]
    if pieces:
        assert any(int(line) > 0 for line in lines), "a text is continued"
    else:
        assert len(lines) == 24 - 8, "those that had ended are not written again"
    assert not staging_of(tmp_path / "out").exists()


@pytest.mark.parametrize("change", sweep(["seed", "model", "row"], quick={"model"}))
def test_a_text_of_another_job_is_not_used(
    tmp_path: Path, tiny_gpt2: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    interrupted(monkeypatch, "journal.write:9:enospc", tiny_gpt2, prompts, tmp_path / "out")
    options: dict[str, Any] = {"seed": 6} if change == "seed" else {}
    model = tiny.build_language_model(tmp_path / "other", seed=3) if change == "model" else tiny_gpt2
    if change == "row":
        pq.write_table(tiny.reviews(48).slice(24), prompts)
    expected = written(model, prompts, tmp_path / "whole", **options)
    assert written(model, prompts, tmp_path / "out", overwrite=True, **options) == expected


@pytest.mark.slow
def test_a_row_has_its_time_from_token_to_token(tmp_path: Path, tiny_gpt2: Path, prompts: Path) -> None:
    """A batch may take longer than the limit, as long as its rows advance."""
    options: dict[str, Any] = {"runtime": misbehaving.slow_texts, "row_timeout_s": 1.0, "max_new_tokens": 30}
    done = tl.predict(
        tiny_gpt2, prompts, tmp_path / "out", key="id", engine=tl.Local(processes=1), **{**SAMPLED, **options}
    )
    assert done.rows_failed == 0


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_slow_rows_are_in_small_chunks(tmp_path: Path, format: str) -> None:
    rows = tiny.reviews(1000).select(["text"])
    if format == "parquet":
        pq.write_table(rows, tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in rows["text"].to_pylist()))
    table = open_table(tmp_path / f"rows.{format}", columns=["text"])

    def sizes(**cost: float) -> list[int]:
        return [chunk.rows for chunk in plan_chunks(table, columns=["text"], chunk_rows=RowCost(**cost)).chunks]

    assert sum(sizes()) == 1000
    assert 64 <= len(sizes()) <= 100, "eight for each of eight processes"
    assert max(sizes(row_s=CHUNK_S / 6)) <= 6
    assert set(sizes(row_s=2 * CHUNK_S)) == {1}
    assert max(sizes(byte_s=1.0)) < 15
    assert sizes(row_s=3.0) == sizes(row_s=3.0)


def test_the_cost_of_rows_bounds_a_chunk() -> None:
    assert RowCost().limits(100_000, 0)[0] == 1024
    assert RowCost(row_s=1.0).limits(100_000, 0)[0] == 300
    assert RowCost(row_s=100.0).limits(100_000, 0)[0] == 24, "no more than 4,096 files"
    assert RowCost(row_s=0.001, byte_s=1.0).limits(100, 10_000) == (2, 400)


def test_every_row_has_a_mark_of_its_own() -> None:
    tokens = Ragged(np.array([1, 2, 1, 2, 3, 1, 2], np.int32), np.array([0, 2, 5, 7]))
    one, other, same = writing.marks(
        Features(arrays={"input_ids": tokens}, lengths=np.array([2, 3, 2]), cut=np.zeros(3, np.int64))
    )
    assert one == same != other
    assert len(one) == 8


@dataclass
class OneRow:
    """A chunk of a row, which is in a writer."""

    tokens: Sequence[int] = ()
    rows: Any = field(default_factory=lambda: np.zeros(1, np.int64))
    features: Features = field(
        default_factory=lambda: Features(
            arrays={"input_ids": Ragged(np.array([5], np.int32), np.array([0, 1]))},
            lengths=np.ones(1, np.int64),
            cut=np.zeros(1, np.int64),
        )
    )

    def text(self, row: int) -> Text:
        return Text(tokens=np.array(self.tokens, np.int32))


def test_a_text_that_is_written_again_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lack of memory it may become another one: what is kept is never the beginning of one and the end of the
    other."""
    monkeypatch.setattr(writing, "PIECE_S", -1.0)
    attempt, row = Attempt(tmp_path / "log", 0, 1, 60.0), OneRow()
    one = writing.Writing(str(tmp_path / "rows"), Attempts([attempt]), logprobs=False)
    one.enter(0, "part-0", row.rows, row.features)
    marks = dict(enumerate(writing.marks(row.features)))
    written = [(1, 2), (1, 2, 3), (1,), (1, 2), (1, 4), (1, 4, 3, 5)]
    for tokens, kept in zip(written, [*written[:2], written[1], written[1], *written[4:]], strict=True):
        row.tokens = tokens
        one.report(row, [])
        journal = Journal(str(tmp_path / "rows"), "part-0", marks)
        journal.close()
        assert np.frombuffer(journal.begun[0], "<i4").tolist() == list(kept)
    one.close()
    attempt.close()


def test_an_interrupted_increment_goes_on_with_its_texts(
    tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own: rows that were added meanwhile are of the next increment."""
    monkeypatch.setenv("SCORED_LOG", str(tmp_path / "log"))
    source, out = tmp_path / "in", tmp_path / "out"
    options: dict[str, Any] = {"runtime": misbehaving.log_texts, "format": "delta", "incremental": True}
    options |= {"engine": tiny.Here(), "key": "id", "max_new_tokens": 3}
    write_deltalake(source, tiny.reviews(6).select(["id", "text"]))
    with monkeypatch.context() as context:
        context.setenv("TORCHLAKE_FAILPOINT", "journal.write:5:enospc")
        context.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(StorageError, match="No space left"):
            tl.predict(tiny_gpt2, source, out, **options)
    write_deltalake(source, tiny.reviews(8).select(["id", "text"]).slice(6), mode="append")
    (tmp_path / "log").unlink()
    tl.predict(tiny_gpt2, source, out, **options)
    assert len((tmp_path / "log").read_text().split()) == 8 - 4
    assert sorted(tl.open(out).to_table()["id"].to_pylist()) == sorted(tiny.reviews(8)["id"].to_pylist())
    assert not (staging_of(out) / ROWS).exists()
