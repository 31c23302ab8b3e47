"""Selected rows and several inputs in every verb: the rows of a filtered table, and nothing else."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.config.job import load_job
from torchlake.errors import ConfigError, FingerprintError, TableError, UsageError
from torchlake.planning.plan import plan
from torchlake.preparation.first_job import write_first_job

WHERE = "id >= 10 and id < 90"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(tiny.reviews(120), tmp_path / "reviews.parquet", row_group_size=32)
    return tmp_path / "reviews.parquet"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """The rows that `WHERE` selects, as a table."""
    pq.write_table(tiny.reviews(120).slice(10, 80), tmp_path / "part.parquet")
    return tmp_path / "part.parquet"


def test_predict_scores_the_selected_rows_once(table: Path, part: Path, tiny_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"key": "id", "engine": tl.Local(processes=1)}
    scored = tl.predict(tiny_model, table, tmp_path / "out", where=WHERE, limit=50, **options)
    assert (scored.rows_in, scored.rows_out) == (50, 50)
    assert scored.record["selection"] == {"where": WHERE, "limit": 50, "left_out": {"where": 40, "limit": 30}}
    assert tl.verify(scored.path).problems == []
    tl.predict(tiny_model, part, tmp_path / "other", **options)
    # Scores differ in the last digit: batches of 50 rows are other batches than those of 80.
    found, others = pq.read_table(scored.path), pq.read_table(tmp_path / "other").slice(0, 50)
    assert found.select(["id", "label"]).equals(others.select(["id", "label"]))
    with pytest.raises(FingerprintError, match="where: 'id >= 10 and id < 90' -> None"):
        tl.predict(tiny_model, table, tmp_path / "out", limit=50, **options)


def test_a_seed_is_that_of_the_sample(table: Path, tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((0, 0, 1)):
        out = tmp_path / f"out-{number}"
        tl.predict(tiny_model, table, out, key="id", sample=0.5, seed=seed)
        found.append(pq.read_table(out)["id"].to_pylist())
    assert found[0] == found[1] != found[2]
    assert 40 < len(found[0]) < 80


def test_a_frame_selects_its_own_rows(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="where: only for stored tables; select the rows of a frame"):
        tl.predict(tiny_model, tiny.reviews(4), where="id = 1")
    with pytest.raises(UsageError, match="limit: only for stored tables"):
        tl.evaluate(tiny_model, tiny.reviews(4), limit=2)


def test_evaluate_measures_the_selected_rows(table: Path, part: Path, tiny_model: Path) -> None:
    selected, alone = tl.evaluate(tiny_model, table, where=WHERE), tl.evaluate(tiny_model, part)
    assert selected.rows == 80
    assert selected.to_json() == alone.to_json()


def test_several_inputs_are_one_table_and_none_is_read_twice(table: Path, tiny_model: Path, tmp_path: Path) -> None:
    rest = tmp_path / "rest.parquet"
    pq.write_table(tiny.reviews(130).slice(120), rest)
    scored = tl.predict(tiny_model, [table, rest], tmp_path / "out", key="id")
    assert sorted(pq.read_table(scored.path)["id"].to_pylist()) == [*range(130)]
    with pytest.raises(TableError, match="named twice"):
        tl.predict(tiny_model, [table, rest, table], tmp_path / "twice")


def test_training_reads_the_selected_rows(table: Path, part: Path, tiny_bert: Path, tmp_path: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, batch_size=16, max_steps=2)
    data = sections["data"] | {"train": str(table), "where": WHERE, "key": "id"}
    run = tl.train(run=tmp_path / "selected", **{**sections, "data": data})
    tokens = pq.read_table(run.path / "prepared" / "train")
    assert len(tokens) == 80
    alone = tl.train(run=tmp_path / "alone", **{**sections, "data": {**data, "train": str(part), "where": None}})
    assert runs.losses(run.path) == runs.losses(alone.path)
    assert tl.train(run=tmp_path / "selected", **{**sections, "data": data}).complete
    with pytest.raises(FingerprintError, match=r"data\.where"):
        tl.train(run=tmp_path / "selected", **{**sections, "data": {**data, "where": "id >= 11"}})


def test_plan_and_init_see_the_selected_rows(table: Path, tiny_bert: Path, tmp_path: Path) -> None:
    job = load_job(None, data={"train": str(table), "where": WHERE, "limit": 60}, model={"base": str(tiny_bert)})
    assert plan(job).rows == 60
    found = write_first_job(str(table), output=tmp_path / "job.yaml", where=WHERE, limit=70, sample=1.0)
    assert found.rows == 70
    written = load_job(found.path).data
    assert (written.where, written.limit, written.sample) == (WHERE, 70, 1.0)


def test_a_condition_in_a_job_file_is_checked_with_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('data:\n  train: t.parquet\n  where: "stars >"\nmodel: {base: m}\n')
    with pytest.raises(ConfigError, match=r"job\.yaml:3: data\.where: .*expected a number"):
        load_job(path)


@pytest.mark.slow
def test_a_language_model_is_measured_on_the_selected_texts(table: Path, part: Path, tiny_gpt2: Path) -> None:
    selected, alone = tl.evaluate(tiny_gpt2, table, text="text", where=WHERE), tl.evaluate(tiny_gpt2, part, text="text")
    assert (selected.rows, selected.tokens) == (alone.rows, alone.tokens) == (80, selected.tokens)
    assert selected.metrics == alone.metrics


def test_the_sample_of_optimize_is_drawn_from_the_selected_rows(table: Path, tiny_model: Path) -> None:
    from torchlake.models.spec import load_spec
    from torchlake.optimization.sample import draw_sample
    from torchlake.tables.sources._options import read_options

    drawn = draw_sample(
        str(table), load_spec(tiny_model), label=None, rows=500, options=read_options({"where": "id < 5"})
    )
    texts = tiny.reviews(120)["text"].slice(0, 5)
    assert len(drawn.rows) + len(drawn.calibration) == 5
    assert pc.all(pc.is_in(drawn.rows["text"], pa.array(texts.to_pylist()))).as_py()
