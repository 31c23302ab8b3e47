"""prepare: token Parquet in which every input row keeps its place."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake import models
from torchlake.errors import DataError
from torchlake.preparing import prepare


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def test_tokens_and_targets_of_every_row(encoder: Path, tmp_path: Path) -> None:
    table = tiny.reviews(50)
    pq.write_table(table, tmp_path / "in.parquet")
    record = prepare(
        tmp_path / "in.parquet", tmp_path / "out", tokenizer=encoder, spec=tiny.SPEC, engine=tl.Local(processes=1)
    )
    assert (record["rows"], record["failed"]) == (50, 0)
    tokens = pq.read_table(tmp_path / "out")
    tokenizer = models.load_tokenizer(encoder)
    expected = tokenizer(table["text"].to_pylist(), truncation=True, max_length=tiny.SPEC.max_length)["input_ids"]
    assert tokens["input_ids"].to_pylist() == expected
    assert tokens["length"].to_pylist() == [len(ids) for ids in expected]
    assert tokens["target"].to_pylist() == [("bad", "good").index(label) for label in table["label"].to_pylist()]
    assert tokens["row_id"].to_pylist()[:2] == ["in.parquet:0", "in.parquet:1"]


def test_rows_without_text_or_label_stop_it_or_are_left_out(encoder: Path, tmp_path: Path) -> None:
    texts, labels = ["good film", None, "bad film", "good"], ["good", "good", None, "bad"]
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "in.parquet")
    engine = tl.Local(processes=1)
    with pytest.raises(DataError, match=r"row 1: null_input.*row 2: null_label.*bad_rows=drop"):
        prepare(tmp_path / "in.parquet", tmp_path / "out", tokenizer=encoder, spec=tiny.SPEC, engine=engine)
    record = prepare(
        tmp_path / "in.parquet",
        tmp_path / "out",
        tokenizer=encoder,
        spec=tiny.SPEC,
        engine=engine,
        bad_rows="drop",
        overwrite=True,
    )
    assert (record["rows"], record["failed"]) == (4, 2)
    tokens = pq.read_table(tmp_path / "out")
    assert tokens["error"].to_pylist() == [None, "null_input", "null_label", None]
    assert tokens["length"].to_pylist()[1:3] == [0, 0]
    assert tokens["target"].to_pylist() == [1, None, None, 0]
