"""The report of a run: self-contained, escaped, without secrets, readable at every stage of a run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.config.job import job_to_yaml, load_job
from torchlake.errors import DataError
from torchlake.redaction import redacted
from torchlake.reporting import page as report_page
from torchlake.reporting import report as reporting
from torchlake.reporting.report import report

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects tags, attributes and text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def step(number: int, loss: Any = None) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": (number - 1) // 50 + 1,
        "loss": 1 / number if loss is None else loss,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "rows": 32,
        "tokens": 640,
        "seconds": 0.1,
        "data_seconds": 0.01,
        "wait_seconds": 0.02,
        "peak_memory_bytes": 2**30,
        "mfu": 0.25,
    }


def make_run(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> Path:
    job = load_job(None, ["data.train=reviews.parquet", "model.base=encoder", *overrides])
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(job_to_yaml(job))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def finish(folder: Path, best: dict[str, Any]) -> None:
    checkpoint = folder / "checkpoints" / "step_00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 100, "world_size": 2, "best": best}))
    (checkpoint / "manifest.json").write_text(json.dumps({"files": {"model.safetensors": {"bytes": 2**21}}}))
    (folder / "checkpoints" / "step_00000050.torn").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "task.json").write_text(json.dumps({"task": "text_classification", "labels": ["bad", "good"]}))
    (folder / "result.json").write_text(json.dumps({"steps": 100, "metric": "macro_f1", "metrics": best["metrics"]}))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = []
    for number in range(1, 101):
        lines.append(step(number, "nan" if number == 7 else None))
        if number % 50 == 0:
            lines.append({"step": number, "validation_loss": 0.4, "validation_macro_f1": number / 110})
    folder = make_run(tmp_path / "reviews", lines)
    finish(folder, {"step": 100, "metrics": {"loss": 0.4, "accuracy": 0.92, "macro_f1": 0.9091}})
    return folder


def test_a_finished_run(finished: Path) -> None:
    path = report(finished)
    assert path == finished / "report.html"
    page = Page(path.read_text())
    for words in ("reviews", "complete", "0.9091", "validation", "2.0 MiB", "learning_rate", "bad, good", "numpy"):
        assert words in page.text
    assert page.tags.count("svg") == 2
    facts = json.loads((finished / "report.json").read_text())
    assert facts["complete"]
    assert facts["metrics"]["macro_f1"] == 0.9091
    assert facts["best_step"] == 100
    assert facts["progress"] == {
        "steps": 100,
        "epochs": 2,
        "seconds_in_steps": 10.0,
        "rows_per_s": 320.0,
        "tokens_per_s": 6400.0,
        "mfu": 0.25,
        "seconds_in_data": 1.0,
        "seconds_waited": 2.0,
        "peak_memory_bytes": 2**30,
        "steps_not_applied": 1,
    }
    assert facts["data"]["rows_in_epoch_1"] == 1600
    assert facts["data"]["tokens_per_row"] == 20.0
    assert facts["checkpoints"] == [{"step": 100, "bytes": 2**21, "world_size": 2}]
    assert [line["step"] for line in facts["validations"]] == [50, 100]


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(finished: Path) -> None:
    content = report(finished).read_text()
    page = Page(content)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?:|url\(|@import", content)
    assert "prefers-color-scheme:dark" in content
    assert 'name="viewport"' in content


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_that_has_hardly_begun(tmp_path: Path, count: int) -> None:
    folder = make_run(tmp_path / "new", [step(number) for number in range(1, count + 1)])
    page = Page(report(folder).read_text())
    assert f"at step {count}, not complete" in page.text
    assert ("No step yet." in page.text) == (count == 0)


def test_a_chart_of_one_point_has_each_label_once(tmp_path: Path) -> None:
    drawn = report(make_run(tmp_path / "one", [step(27, 0.5), {"step": 27, "validation_loss": 0.6}])).read_text()
    labels = re.findall(r"<text ([^>]*)>([^<]+)</text>", drawn)
    assert len(labels) == len(set(labels))
    assert [text for _, text in labels].count("27") == 1
    assert re.findall(r'middle">([^<]+)<', drawn) == ["27"]


def test_losses_and_scores_do_not_share_an_axis(tmp_path: Path) -> None:
    lines = [step(number) for number in (1, 2)]
    lines += [{"step": number, "validation_macro_f1": 0.9, "validation_ece": 0.1} for number in (1, 2)]
    page = Page(report(make_run(tmp_path / "two", lines)).read_text())
    assert page.text.index("higher is better") < page.text.index("lower is better")
    assert page.tags.count("svg") == 3


def test_one_validation_is_a_table_not_a_chart(tmp_path: Path) -> None:
    lines = [step(number) for number in range(1, 28)]
    page = Page(report(make_run(tmp_path / "one", [*lines, {"step": 27, "validation_accuracy": 0.9}])).read_text())
    assert page.tags.count("svg") == 1
    assert "Validations" in page.text


def test_settings_that_are_empty_take_no_room(finished: Path) -> None:
    page = report(finished).read_text()
    assert "<th>separator</th>" not in page
    assert "<th>batch_size</th>" in page


def test_a_loss_that_never_was_finite(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "nan", [step(1, "nan"), step(2, "inf"), {"step": 2, "validation_loss": "nan"}])
    report(folder)
    facts = json.loads((folder / "report.json").read_text())
    assert facts["progress"]["steps_not_applied"] == 2
    assert facts["losses"] == []


def test_every_text_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    folder = make_run(tmp_path / "<img src=x>", [step(1)], f"data.text={attack}", f"model.base='\"><b>{attack}'")
    (folder / "logs").mkdir()
    entry = {"time": "12:00", "level": "WARNING", "rank": 0, "message": attack}
    (folder / "logs" / "rank_0.jsonl").write_text(json.dumps(entry) + '\n{"torn')
    page = Page(report(folder).read_text())
    assert not {"script", "img", "b"} & (set(page.tags) - {"b"})
    assert page.tags.count("b") == page.text.count("per second") + 4  # the tiles' own
    assert attack in page.text


SECRETS = {
    "s3://user:hunter2pass@lake/in": "hunter2pass",
    "https://lake.example/in?sv=1&sig=s3cr3tS1gnature&x=1": "s3cr3tS1gnature",
    "https://lake.example/in?X-Amz-Signature=0123abcd&X-Amz-Security-Token=FwoGZ": "0123abcd",
    "token hf_abcdefghijklmnopqrstuv failed": "hf_abcdefghijklmnopqrstuv",
    "key AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "Authorization: Bearer abcdef.123456-xyz": "abcdef.123456-xyz",
    "dapi0123456789abcdef0123456789abcdef": "dapi0123456789abcdef",
}


@pytest.mark.parametrize(("text", "secret"), SECRETS.items())
def test_secrets_are_in_neither_file(tmp_path: Path, text: str, secret: str) -> None:
    folder = make_run(tmp_path / "run", [step(1)], f"data.train={json.dumps(text)}")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_0.jsonl").write_text(
        json.dumps({"time": "", "level": "ERROR", "rank": 0, "message": text})
    )
    report(folder)
    for name in ("report.html", "report.json"):
        content = (folder / name).read_text()
        assert "[redacted]" in content
        assert secret not in content


def test_values_under_a_secret_name_are_redacted_and_others_kept() -> None:
    value = {"password": "x", "hf_token": ["y"], "nested": {"api_key": "z"}, "key": "id", "micro_batch_tokens": 3}
    assert redacted(value) == {
        "password": "[redacted]",
        "hf_token": ["[redacted]"],
        "nested": {"api_key": "[redacted]"},
        "key": "id",
        "micro_batch_tokens": 3,
    }
    azure = "abfss://lake@account.dfs.core.windows.net/reviews"
    for harmless in ("s3://lake/reviews.parquet", azure, "a@b.example", "risk-averse-investor-profile", "a?year=2024"):
        assert redacted(harmless) == harmless


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        report(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12)), min_size=1, max_size=300))
def test_a_chart_stays_inside_its_frame(points: list[tuple[int, float]]) -> None:
    thinned = reporting._thinned(sorted(points))
    assert 1 <= len(thinned) <= reporting.CURVE_POINTS
    chart = report_page._chart("loss", [("training", thinned)])
    assert "nan" not in str(chart)
    for x, y in chart["lines"][0]["places"]:
        assert 0 <= x <= report_page.WIDTH
        assert 0 <= y <= report_page.HEIGHT


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_values(low: float, span: float) -> None:
    ticks = report_page._ticks(low, low + span)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 7
    slack = (ticks[-1] - ticks[0]) * 1e-6
    assert ticks[0] - slack <= low
    assert low + span <= ticks[-1] + slack
