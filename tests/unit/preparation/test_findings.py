"""The data checks: what `init` and a training say of a table, with counts and examples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import training_runs as runs
from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.config.task_spec import TaskSpec
from torchlake.preparation.findings import Finding
from torchlake.preparation.first_job import write_first_job
from torchlake.preparation.prepare import prepare
from torchlake.preparation.summary import findings_of, summarize

TEXTS = [f"ticket {number} is late" for number in range(60)]
LABELS = ["billing", "Billing", "delivery "] * 20
CLEAN = pa.table({"text": TEXTS, "label": ["billing", "delivery"] * 30})


def with_rows(texts: list[str], labels: list[str]) -> pa.Table:
    return pa.concat_tables([CLEAN, pa.table({"text": texts, "label": labels})])


def found_by_init(folder: Path, table: pa.Table) -> dict[str, Finding]:
    pa.csv.write_csv(table, folder / "in.csv")
    done = write_first_job(str(folder / "in.csv"), output=folder / "job.yaml", force=True)
    assert all(finding.line in done.warnings for finding in done.findings)
    return {finding.check: finding for finding in done.findings}


def found_by_training(folder: Path, encoder: Path, table: pa.Table, other: pa.Table | None, **data: Any) -> Any:
    task = plugins.load("tasks", "text_classification")
    labels = task.find_labels(iter([table["label"]]), None).labels
    spec = TaskSpec(task=task.name, problem="single_label", labels=labels, text="text", label="label", max_length=64)
    outputs = []
    for name, rows in (("in", table), ("other", other)):
        if rows is not None:
            pq.write_table(rows, folder / f"{name}.csv.parquet")
            outputs.append(folder / f"prepared-{name}")
            given = folder / f"{name}.csv.parquet"
            prepare(given, outputs[-1], tokenizer=encoder, spec=spec, engine=runs.Inline(), overwrite=True)
    job = load_job(None, data={"train": "in.csv", **data}, model={"base": "base"})
    facts = json.loads(json.dumps(summarize(job, spec, outputs)))
    return {finding.check: finding for finding in findings_of(facts)}, facts


CASES = {
    "clean": (CLEAN, {}),
    "classes": (pa.table({"text": TEXTS, "label": LABELS}), {"classes": (2, 3)}),
    "copies": (with_rows(TEXTS[:6], CLEAN["label"].to_pylist()[:6]), {"copies": (6, 66)}),
    "conflicts": (
        with_rows([TEXTS[0], TEXTS[2], TEXTS[2]], ["delivery"] * 3),
        {"copies": (1, 63), "conflicts": (5, 63)},
    ),
    "markup": (with_rows(["<p class='x'><b>late</b></p>"] * 1, ["billing"]), {"markup": (1, 61)}),
    "some tags": (with_rows(["it is <b>late</b> as ever, 1 < 2 and 3 > 2"], ["billing"]), {}),
    "leak of all": (
        pa.table({"text": [f"[{label}] {text}" for text, label in zip(TEXTS, LABELS, strict=True)], "label": LABELS}),
        {"classes": (2, 3), "leak": (60, 60)},
    ),
    "leak of a class": (with_rows([f"a Spam: {n}" for n in range(12)], ["spam"] * 12), {"leak": (12, 72)}),
    "part of a word": (with_rows([f"spammer {n}" for n in range(12)], ["spam"] * 12), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_found_with_its_count(case: str, tmp_path: Path, tiny_bert: Path) -> None:
    table, expected = CASES[case]
    by_init = found_by_init(tmp_path, table)
    by_training, _ = found_by_training(tmp_path, tiny_bert, table, None)
    for found in (by_init, by_training):
        assert {check: (one.rows, one.of) for check, one in found.items()} == expected
        assert all(1 <= len(one.examples) <= 3 for one in found.values())
    texts = [{check: one.text for check, one in found.items()} for found in (by_init, by_training)]
    assert texts[0] == texts[1]


def test_examples_name_the_rows(tmp_path: Path, tiny_bert: Path) -> None:
    table = with_rows([TEXTS[5], TEXTS[7], TEXTS[8]], ["delivery", "delivery", "delivery"])
    copies, conflicts = (found_by_init(tmp_path, table)[name].examples for name in ("copies", "conflicts"))
    assert copies == ("in.csv:60 of in.csv:5", "in.csv:61 of in.csv:7")
    assert conflicts == ("in.csv:62 'delivery' but in.csv:8 'billing'",)
    found, _ = found_by_training(tmp_path, tiny_bert, table, None)
    assert found["copies"].examples[0] == "in.csv.parquet:60 of in.csv.parquet:5"


def test_a_validation_table_is_compared_and_copies_are_left_out(tmp_path: Path, tiny_bert: Path) -> None:
    table = with_rows(TEXTS[:6], CLEAN["label"].to_pylist()[:6])
    other = with_rows(["new"], ["billing"]).slice(58)
    found, facts = found_by_training(tmp_path, tiny_bert, table, other, validation="other.csv", deduplicate=True)
    assert facts["rows"] == {"training": 60, "validation": 3}
    assert (found["both_sides"].rows, found["both_sides"].of) == (2, 3)
    assert found["both_sides"].examples[0] == "other.csv.parquet:0 = in.csv.parquet:58"
    assert "which are left out" in found["copies"].text


def test_folds_and_a_single_text(tmp_path: Path, tiny_bert: Path) -> None:
    table = with_rows(["rare 1", "rare 2"], ["rare"] * 2)
    found, _ = found_by_training(tmp_path, tiny_bert, table, None, validation={"fold": 1, "folds": 3})
    assert found["folds"].examples == ("'rare' 2",)
    same = CLEAN.set_column(0, "text", [["late"] * 60])
    found, _ = found_by_training(tmp_path, tiny_bert, same, None)
    assert {"constant", "copies", "conflicts", "both_sides"} == found.keys()
    assert found["constant"].text == "column 'text' has one value in all 60 rows"


def test_init_checks_other_columns(tmp_path: Path) -> None:
    keys = [f"T-{number % 58}" for number in range(60)]
    table = CLEAN.append_column("Ticket ID", [keys]).append_column("lang", [["en"] * 60])
    found = found_by_init(tmp_path, table.append_column("n", [np.arange(60) % 50]))
    assert found.keys() == {"ids", "constant"}
    assert (found["ids"].rows, found["ids"].examples) == (2, ("'T-0' 2 times", "'T-1' 2 times"))
    assert "'lang'" in found["constant"].text


def test_a_summary_of_the_version_before_has_no_findings() -> None:
    assert findings_of({}) == ()
