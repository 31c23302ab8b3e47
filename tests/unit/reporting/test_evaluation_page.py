"""The page of an evaluation: any text, one row, many classes, spans and answers marked; in a browser, no overflow."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import judged_rows as made
import tiny
from html_page import Page
from torchlake.evaluation.labeled import measured
from torchlake.evaluation.sections.judged import read_judged
from torchlake.evaluation.sections.spans import entities
from torchlake.reporting import page as frame

ATTACK = made.ATTACK
NAMES = (ATTACK, 'a.b."c"\'d', "🐈" * 60, "שלום עולם " * 8, "x" * 300, "a\nb\tc", "")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    made.page_of(folder, 300, 3, [ATTACK, "שלום עולם", "🐈" * 50, "long " * 20_000, "unbroken" * 500, "plain"])
    return folder


def test_every_text_is_escaped_and_long_ones_are_cut(written: Path) -> None:
    content = (written / "eval.html").read_text()
    page = Page(content)
    assert page.tags.count("script") == 1
    assert content.count(ATTACK) == 0
    assert page.text.count(ATTACK) > 10
    assert "(100,000 characters)" in page.text
    assert len(content) < 400_000
    assert 'dir="auto"' in content


def test_the_only_script_is_that_of_the_filter_box(written: Path) -> None:
    content = (written / "eval.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", content, re.DOTALL)
    assert script == frame.FILTER
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'" in content.replace(
        "&#39;", "'"
    )
    assert not re.search(r"https?:|@import", content)


def test_each_cell_of_the_matrix_leads_to_its_rows(written: Path) -> None:
    content = (written / "eval.html").read_text()
    links = re.findall(r'href="#(cell-\d+)"', content)
    assert len(links) == 6
    assert sorted(links) == sorted(re.findall(r'id="(cell-\d+)"', content))


def test_one_row_and_many_classes(tmp_path: Path) -> None:
    assert "1 rows measured" in Page(made.page_of(tmp_path / "one", 1, 2)).text
    many = made.page_of(tmp_path / "many", 3000, 150)
    assert len(many) < 2_000_000
    assert '<table class="matrix">' not in many
    assert many.count("predicted as") == 20
    most = made.page_of(tmp_path / "most", 1000, 250)
    assert "The 200 with the lowest F1 of 250; eval.json has all." in most
    assert len(json.loads((tmp_path / "most" / "eval.json").read_text())["sections"]["classes"]) == 250


def test_the_page_does_not_grow_with_the_table(tmp_path: Path) -> None:
    small, large = (made.page_of(tmp_path / f"{rows}", rows, 3) for rows in (1_000, 50_000))
    assert len(large) < 1.05 * len(small)


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    content = made.page_of(tmp_path, 40, 3)
    assert "Threshold" not in content
    assert "Predicted against true" not in content
    assert "If the least sure rows go to a person" in content


def test_slices_of_any_name_and_of_many_values(tmp_path: Path) -> None:
    columns = {name: [*NAMES, "long " * 20_000] for name in NAMES} | {"many": [f"value {at}" for at in range(300)]}
    content = made.page_of(tmp_path, 300, 2, slices=columns)
    page = Page(content)
    assert "Only the most frequent of 300 values of many were looked at." in page.text
    assert all(name in page.text for name in NAMES)
    assert content.count(ATTACK) == 0
    assert len(content) < 400_000


@pytest.mark.usefixtures("page_libraries")
def test_pictures_have_their_numbers_in_a_table(tmp_path: Path) -> None:
    content = made.page_of(tmp_path, 200, 2)
    page, ids = Page(content), re.findall(r'\sid="([^"]+)"', content)
    assert len(ids) == len(set(ids))
    assert page.tags.count("figure") >= 5
    assert page.attributes.count(("role", "img")) == page.tags.count("figure")
    assert page.tags.count("details") > 4


def test_spans_are_counted_with_missed_and_spurious_and_marked(tmp_path: Path) -> None:
    scored, spec = made.spans_table()
    sections = made.evaluated(tmp_path, scored, spec)["sections"]
    found = sections["entities"]
    assert sections["baseline"]["answer"] == "no span at all, which is right in 25.0% of the rows"
    types = {one["label"]: one for one in found["types"]}
    assert (types["PER"]["rows"], types["PER"]["predicted"], types["PER"]["recall"][0]) == (2, 2, 0.5)
    assert (types["LOC"]["rows"], types["LOC"]["predicted"], types["LOC"]["partial"]) == (2, 2, 1)
    cells = {(pair["label"], pair["predicted"]): pair["rows"] for pair in found["pairs"]}
    assert cells == {("PER", "LOC"): 1, ("LOC", "missed"): 2, ("spurious", "LOC"): 1, ("spurious", "PER"): 1}
    content = (tmp_path / "eval.html").read_text()
    assert "<mark>Anna</mark>" in content
    assert "2 spans: LOC predicted as missed" in content
    for texts in (("text",), ()):  # a slice is not marked, also without the text
        other = scored.append_column("kind", pa.array(["a slice that is long"] * 4))
        made.evaluated(tmp_path / f"{len(texts)}", other, spec, slices=["kind"], texts=texts)
        assert ("<mark>" in (tmp_path / f"{len(texts)}" / "eval.html").read_text()) == bool(texts)
    assert entities(read_judged(tmp_path / "rows.parquet", "spans", spec.labels)) == found


def test_answers_by_answerable_or_not(tmp_path: Path) -> None:
    answer = pa.struct({"text": pa.list_(pa.string()), "answer_start": pa.list_(pa.int32())})
    labels = [
        {"text": ["Rome"], "answer_start": [11]},
        {"text": ["the cat"], "answer_start": [0]},
        {"text": ["a black cat"], "answer_start": [0]},
        {"text": [], "answer_start": []},
    ]
    scored = pa.table(
        {
            "id": range(4),
            "label": pa.array(labels, answer),
            "p_answer": ["Rome", "cat", "cat", None],
            "p_score": pa.array([0.9, 0.5, 0.4, 0.8], pa.float32()),
            "truncated": [False] * 4,
            "error": pa.nulls(4, pa.string()),
            "context": ["Anna is in Rome", "the cat sat", "a black cat", "nothing"],
        }
    )
    spec = replace(tiny.SPEC, task="question_answering", problem="answers", labels=(), options={"no_answer": True})
    found = made.evaluated(tmp_path, scored, spec, texts=["context"])["sections"]
    by_kind = {one["kind"]: one for one in found["answerable"]}
    assert by_kind["with an answer"]["mean"] == pytest.approx(2 / 3)  # without articles, as SQuAD compares
    assert by_kind["with an answer"]["f1"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert by_kind["without an answer"]["mean"] == 1.0
    content = (tmp_path / "eval.html").read_text()
    assert "<mark>cat</mark>" in content
    assert "<i>label</i> the cat</span>" in content
    known = pa.table({"label": scored["label"], "unreadable": pa.nulls(4, pa.string())})
    named = {f"p_{name}": f"predicted_{name}" for name in ("answer", "score")}
    whole = measured([scored.rename_columns(named)], known, spec).metrics
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert whole["exact_match"].value == np.mean(rows["right"].to_pylist())
    assert whole["f1"].value == pytest.approx(1 - np.mean(rows["loss"].to_pylist()))
