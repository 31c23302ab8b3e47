"""The demo: its reviews are repeatable, distinct and hard for word counts; the commands that it prints work."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchlake.cli.commands import demo
from torchlake.cli.demo import LINES, MAX_WORDS, MIN_WORDS, write_questions, write_reviews
from torchlake.cli.main import main


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, pa.Table]:
    train, test = write_reviews(tmp_path_factory.mktemp("reviews"))
    return pq.read_table(train), pq.read_table(test)


def test_columns_and_sizes(tables: tuple[pa.Table, pa.Table]) -> None:
    train, test = tables
    assert (train.num_rows, test.num_rows) == (2000, 400)
    for table in tables:
        assert table.schema.names == ["id", "text", "label"]
        assert set(table["label"].to_pylist()) == {"positive", "negative"}
        assert table.schema.types == [pa.string()] * 3
    ids = train["id"].to_pylist() + test["id"].to_pylist()
    assert len(set(ids)) == 2400


def test_texts_are_distinct_and_of_many_lengths(tables: tuple[pa.Table, pa.Table]) -> None:
    texts = [text for table in tables for text in table["text"].to_pylist()]
    assert len(set(texts)) == len(texts)
    words = np.array([len(text.split()) for text in texts])
    assert words.min() >= MIN_WORDS
    assert words.max() <= MAX_WORDS
    assert np.median(words) * 2.5 < np.quantile(words, 0.97)
    assert not any("{" in text or "  " in text or " a a" in text or " a e" in text for text in texts)


def test_classes_are_balanced(tables: tuple[pa.Table, pa.Table]) -> None:
    for table in tables:
        assert 0.45 < np.mean(np.array(table["label"].to_pylist()) == "positive") < 0.55


def test_some_words_of_the_test_are_new(tables: tuple[pa.Table, pa.Table]) -> None:
    train, test = ({word for text in table["text"].to_pylist() for word in text.lower().split()} for table in tables)
    assert len(test - train) >= 10
    assert len(test & train) > len(test - train)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    once = write_reviews(tmp_path / "a", rows=60, seed=3)
    again = write_reviews(tmp_path / "b", rows=60, seed=3)
    other = write_reviews(tmp_path / "c", rows=60, seed=4)
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    assert once[0].read_bytes() != other[0].read_bytes()


def test_counting_words_does_badly(tables: tuple[pa.Table, pa.Table]) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    train, test = tables
    vectors = CountVectorizer()
    counts = vectors.fit_transform(train["text"].to_pylist())
    model = LogisticRegression(max_iter=2000).fit(counts, train["label"].to_pylist())
    accuracy = model.score(vectors.transform(test["text"].to_pylist()), test["label"].to_pylist())
    assert 0.5 < accuracy < 0.75


def test_answers_to_questions_are_computed(tmp_path: Path) -> None:
    written = [write_questions(tmp_path / name, 400) for name in ("one", "two")]
    assert [path.read_bytes() for path in written[0].values()] == [path.read_bytes() for path in written[1].values()]
    train, test, pairs = (pq.read_table(written[0][name]).to_pylist() for name in ("train", "test", "pairs"))
    assert (len(train), len(test), len(pairs)) == (400, 40, 100)
    said = {speech: speaker for speaker, speech in LINES}
    asked = {json.loads(row["messages"])[0]["content"] for row in train}
    for row in [*test, *pairs]:
        question = json.loads(row["messages"])[0]["content"]
        kind, _, part = question.partition(": ")
        if kind == "Who says":
            assert any(speaker == row["answer"] and part[:-1] in speech for speech, speaker in said.items())
        elif kind == "Continue":
            assert any(f"{part} {row['answer']}" in speech for speech in said)
        elif kind == "How many words":
            assert row["answer"] == str(len(part.split()))
        else:
            assert json.loads(row["answer"].partition(" ")[2])["speaker"] in question
            assert row["tools"] is not None
    assert not asked & {json.loads(row["messages"])[0]["content"] for row in test if "Find what" not in row["messages"]}
    assert all(row["right"] != row["wrong"] for row in pairs)


@pytest.mark.slow  # two trainings
@pytest.mark.timeout(900)
def test_the_demo_of_answers_counts_exact_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "chat", "--rows", "40", "--folder", str(tmp_path / "demo"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found["exact_match"]) == ["untrained", "after the answers", "after the preferences"]
    assert found["rows"] == 4


@pytest.mark.slow  # a training
@pytest.mark.timeout(900)
def test_the_demo_of_writing_answers_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "write", "--rows", "50", "--folder", str(tmp_path / "demo"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["rows"], found["problems"]) == (40, [])
    assert set(found["tokens_per_s"]) == {"eager", "ctranslate2"}
    typed = pq.read_table(found["paths"]["typed"])
    assert typed.schema.field("speaker").type == pa.dictionary(pa.int32(), pa.string())
    assert set(typed["speaker"].to_pylist()) <= {speaker for speaker, _ in LINES}
    free, again = (pq.read_table(found["paths"][name])["generated_text"] for name in ("free", "eager"))
    assert free == again, "as without a kill"


@pytest.mark.slow  # two trainings
@pytest.mark.timeout(900)
def test_the_commands_at_the_end_work_as_they_are_printed(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_demo_model", lambda: tiny_bert)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--folder", "my demo", "--rows", "120"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = printed[printed.index("Next, also with a table of yours:") + 1 :]
    assert [line.startswith("# ") for line in lines] == [True, False] * 3
    for line in lines[1::2]:
        program, *words = shlex.split(line)
        assert shutil.which(program) is not None
        assert main(words) == 0, line
    assert pq.read_table("my demo/again").num_rows == 20
    result = json.loads(Path("my demo/run/result.json").read_text())
    assert result["steps"] == 9  # three epochs of 90 rows
