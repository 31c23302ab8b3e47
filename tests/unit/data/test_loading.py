from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from torchlake.config.task_spec import TaskSpec
from torchlake.data import loading
from torchlake.errors import DataError
from torchlake.models.load import load_tokenizer
from torchlake.preparation import prepare as preparing
from training_runs import Inline


def prepare(table: pa.Table, output: Path, encoder: Path, spec: TaskSpec = tiny.SPEC, bad_rows: str = "error") -> Path:
    source = output.with_suffix(".parquet")
    pq.write_table(table, source)
    preparing.prepare(source, output, tokenizer=encoder, spec=spec, engine=Inline(), bad_rows=bad_rows)  # type: ignore[arg-type]
    return output


def load(prepared: Path) -> loading.TokenTable:
    cache = prepared.parent / "cache"
    loading.build_cache(prepared, cache)
    return loading.open_tokens(cache)


def test_every_row_comes_back_in_order(tmp_path: Path, tiny_bert: Path) -> None:
    table = tiny.reviews(2500, seed=1)  # more than one part
    prepared = prepare(table, tmp_path / "tokens", tiny_bert)
    assert len(list(prepared.glob("part-*.parquet"))) > 1
    loaded = load(prepared)
    assert len(loaded) == 2500
    assert loaded.targets.tolist() == [int(label == "good") for label in table["label"].to_pylist()]
    tokenizer = load_tokenizer(tiny_bert)
    texts = table["text"].to_pylist()
    for row in (0, 1, 1024, 2499):
        tokens = loaded.tokens.values[loaded.tokens.offsets[row] : loaded.tokens.offsets[row + 1]]
        assert tokens.tolist() == tokenizer(texts[row], truncation=True, max_length=64)["input_ids"]


def test_rows_that_cannot_be_trained_on_are_left_out(tmp_path: Path, tiny_bert: Path) -> None:
    table = pa.table({"text": ["good", None, "bad", "fine"], "label": ["good", "bad", "bad", None]})
    loaded = load(prepare(table, tmp_path / "tokens", tiny_bert, bad_rows="drop"))
    assert loaded.targets.tolist() == [1, 0]
    assert len(loaded.tokens) == 2


def test_no_row_at_all_is_an_error_in_words(tmp_path: Path, tiny_bert: Path) -> None:
    table = pa.table({"text": pa.array([None, None], pa.string()), "label": ["good", "bad"]})
    with pytest.raises(DataError, match="no row with both text and label"):
        load(prepare(table, tmp_path / "tokens", tiny_bert, bad_rows="drop"))


def test_several_labels_are_a_matrix_and_numbers_are_floats(tmp_path: Path, tiny_bert: Path) -> None:
    several = pa.table({"text": ["a", "b", "c"], "label": [["x"], [], ["x", "y"]]})
    loaded = load(prepare(several, tmp_path / "several", tiny_bert, tiny.spec_for("multi_label", ("x", "y"))))
    assert loaded.targets.dtype == np.float32
    assert loaded.targets.tolist() == [[1, 0], [0, 0], [1, 1]]
    numbers = pa.table({"text": ["a", "b"], "label": [0.5, -2.0]})
    loaded = load(prepare(numbers, tmp_path / "numbers", tiny_bert, tiny.spec_for("regression", ())))
    assert loaded.targets.dtype == np.float32
    assert loaded.targets.tolist() == [0.5, -2.0]


def test_the_cache_is_built_once_and_again_for_other_tokens(tmp_path: Path, tiny_bert: Path) -> None:
    first = prepare(tiny.reviews(20), tmp_path / "first", tiny_bert)
    second = prepare(tiny.reviews(30), tmp_path / "second", tiny_bert)
    cache = tmp_path / "cache"
    loading.build_cache(first, cache)
    before = (cache / "input_ids" / "values.bin").stat().st_ino
    loading.build_cache(first, cache)
    assert (cache / "input_ids" / "values.bin").stat().st_ino == before
    loading.build_cache(second, cache)
    assert len(loading.open_tokens(cache)) == 30
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_flipped_bit_in_a_part_is_found(tmp_path: Path, tiny_bert: Path) -> None:
    prepared = prepare(tiny.reviews(200), tmp_path / "tokens", tiny_bert)
    (part,) = prepared.glob("part-*.parquet")
    content = bytearray(part.read_bytes())
    start = pq.read_metadata(part).row_group(0).column(1).data_page_offset
    content[start + 200] ^= 4
    part.write_bytes(content)
    with pytest.raises(DataError, match=str(part)):
        loading.build_cache(prepared, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
