"""rank: documents in the order of their scores within each query, every row once, also after a kill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from scoring_runs import run
from sweeps import sweep
from torchlake.errors import UsageError
from torchlake.scoring.rank import ranks_of

HERE = tiny.Here()
KILLED = """
import sys
import torchlake as tl
tl.rank(*sys.argv[1:4], key="id", columns=["passage"], query="query", document="passage", chunk_rows=7)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    spec = replace(tiny.SPEC, text="question", text_pair="answer", labels=(0, 1))
    return tiny.build_model(folder / "model", encoder=tiny.build_pair_encoder(folder / "encoder"), spec=spec)


def candidates(queries: int = 4, documents: int = 6) -> pa.Table:
    """The documents of all queries in turn; the last one cannot be scored."""
    texts = tiny.reviews(queries * documents, seed=5)["text"].to_pylist()
    asked = [f"which film is number {row % queries}" for row in range(queries * documents)]
    return pa.table({"id": range(len(texts)), "query": asked, "passage": [*texts[:-1], None]})


def check(ranked: pa.Table, table: pa.Table, scores: np.ndarray) -> None:
    assert ranked["id"].to_pylist() == table["id"].to_pylist()
    assert ranked["rank"].to_pylist()[-1] is None
    assert ranked["error"].to_pylist()[-1] == "null_input"
    for query in set(table["query"].to_pylist()):
        rows = [row for row, one in enumerate(table["query"].to_pylist()) if one == query and row != len(table) - 1]
        wanted = sorted(rows, key=lambda row: -scores[row])
        assert [ranked["rank"][row].as_py() for row in wanted] == list(range(1, len(rows) + 1))


def test_documents_are_ranked_by_the_second_class(model: Path, tmp_path: Path) -> None:
    table = candidates()
    pq.write_table(table, tmp_path / "in.parquet")
    scores = np.asarray(
        tl.predict(model, table, text="query", text_pair="passage", all_probabilities=True, engine=HERE)["prob_1"]
    )
    given = {"query": "query", "document": "passage", "engine": HERE}
    check(tl.rank(model, table, **given, prefix=""), table, scores)  # as by default
    done = tl.rank(model, tmp_path / "in.parquet", tmp_path / "out", key="id", columns=["passage"], **given)
    assert (done.rows_in, done.rows_out, done.rows_failed) == (24, 24, 1)
    ranked = pq.read_table(tmp_path / "out")
    assert ranked.column_names == ["id", "query", "passage", "score", "rank", "truncated", "error"]
    check(ranked, table, scores)
    assert not tl.verify(tmp_path / "out").problems
    other = tl.rank(model, table, relevant=0, **given)
    assert other["rank"].to_pylist() != ranked["rank"].to_pylist()


@pytest.mark.parametrize("commit", sweep([1, 2], quick=[2]))
def test_a_killed_job_continues_and_is_complete_then(model: Path, tmp_path: Path, commit: int) -> None:
    """Killed before the first commit, of the scores, or the second, of the ranks."""
    pq.write_table(candidates(), tmp_path / "in.parquet")
    arguments = [str(model), str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    assert run(KILLED, arguments, failpoint=f"commit.write:{commit}:kill9", once=tmp_path / "once").returncode == -9
    assert (tmp_path / "out.scores" / "_torchlake" / "commit.json").exists() == (commit == 2)
    assert not (tmp_path / "out" / "_torchlake" / "commit.json").exists()
    given = {"key": "id", "columns": ["passage"], "query": "query", "document": "passage", "chunk_rows": 7}
    tl.rank(*arguments, **given, engine=HERE)
    ranked = pq.read_table(tmp_path / "out")
    assert sorted(ranked["id"].to_pylist()) == list(range(24))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")}
    assert tl.rank(*arguments, **given, engine=HERE).rows_out == 24
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")} == before


@pytest.mark.parametrize(
    ("option", "killed"),
    [("accept_new_input", False), ("accept_new_input", True), ("accept_removed_input", False), ("overwrite", False)],
)
def test_ranks_are_those_of_all_files_of_now(model: Path, tmp_path: Path, option: str, killed: bool) -> None:
    """Also those of files that did not change, whether the ranks before were committed or only finished."""
    table, source = candidates(), tmp_path / "in"
    source.mkdir()
    files = {source / "a.parquet": table.slice(0, 12), source / "b.parquet": table.slice(12)}
    for file, some in files.items():
        if option == "accept_removed_input" or file.name == "a.parquet":
            pq.write_table(some, file)
    arguments = [str(model), str(source), str(tmp_path / "out")]
    given = {"key": "id", "columns": ["passage"], "query": "query", "document": "passage", "engine": HERE}
    if killed:
        assert run(KILLED, arguments, failpoint="commit.write:2:kill9", once=tmp_path / "once").returncode == -9
    else:
        tl.rank(*arguments, **given, chunk_rows=7)
    if option == "accept_removed_input":
        (source / "a.parquet").unlink()
    else:
        pq.write_table(files[source / "b.parquet"], source / "b.parquet")
    tl.rank(*arguments, **given, chunk_rows=7, **{option: True})
    tl.rank(model, source, tmp_path / "whole", **given)
    found, wanted = (pq.read_table(tmp_path / name).sort_by("id") for name in ("out", "whole"))
    assert found["rank"].to_pylist() == wanted["rank"].to_pylist()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")}
    tl.rank(*arguments, **given, chunk_rows=7, overwrite=True)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")} == before


def test_ranks_of_equal_and_missing_scores() -> None:
    queries = pa.chunked_array([["b", "a", "b"], ["a", None, "b"]])
    scores = np.array([0.5, 0.1, 0.5, 0.9, 0.3, np.nan], dtype=np.float32)
    assert ranks_of(queries, scores).tolist() == [1, 2, 2, 1, 1, 0]
    assert ranks_of(queries.slice(0, 0), scores[:0]).tolist() == []


@pytest.mark.parametrize("index", [pa.int32(), pa.uint32()], ids=["int32", "uint32"])
def test_queries_of_a_dictionary_are_compared_by_their_values(index: pa.DataType) -> None:
    """A dictionary may have a value twice; the categories of polars have unsigned indices."""
    queries = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 1], index), pa.array(["a", "b", "a"]))
    scores = np.array([0.1, 0.2, 0.3, 0.4, 0.5], dtype=np.float32)
    assert ranks_of(pa.chunked_array([queries]), scores).tolist() == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("own", ["rank", "Score"])
def test_columns_with_the_names_of_its_own_are_refused(model: Path, tmp_path: Path, own: str) -> None:
    """The output had two columns `rank`; the advice was an option that rank does not have."""
    table = candidates().append_column(own, pa.array(range(24)))
    pq.write_table(table, tmp_path / "in.parquet")
    given = {"query": "query", "document": "passage", "engine": HERE}
    for arguments in ({"key": own}, {"columns": [own]}):
        with pytest.raises(UsageError, match=f"rank adds the columns .* rename the input's column '{own}'"):
            tl.rank(model, tmp_path / "in.parquet", tmp_path / "out", **given, **arguments)
    with pytest.raises(UsageError, match=f"rename the input's column '{own}'"):
        tl.rank(model, table, **given)


def test_a_frame_may_have_columns_with_the_names_of_predictions(model: Path) -> None:
    table, given = candidates(), {"query": "query", "document": "passage", "engine": HERE}
    judged = table.append_column("label", pa.array(range(24))).append_column("prob_1", pa.array(range(24)))
    ranked = tl.rank(model, judged, **given)
    assert ranked["label"].to_pylist() == ranked["prob_1"].to_pylist() == list(range(24))
    assert ranked["rank"].equals(tl.rank(model, table, **given)["rank"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"relevant": "good"}, "relevant='good': .* has no such class. It has: 0, 1"),
        (lambda: {"mode": "append"}, "mode: not for rank, which writes a Parquet folder"),
    ],
)
def test_mistakes(model: Path, tmp_path: Path, change: Callable[[], dict[str, str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tl.rank(model, tmp_path / "none.parquet", tmp_path / "out", **change())  # type: ignore[arg-type]


def test_a_model_of_single_texts_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was trained on single texts; rank needs a cross-encoder"):
        tl.rank(tiny_model, tmp_path / "none.parquet", tmp_path / "out")
