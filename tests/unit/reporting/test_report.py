"""The report of a run: self-contained, escaped, without secrets, readable at every stage of a run."""

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

from html_page import Page
from torchlake.config.job import job_to_yaml, load_job
from torchlake.errors import DataError
from torchlake.redaction import redacted
from torchlake.reporting import figures, live
from torchlake.reporting import report as reporting
from torchlake.reporting.report import report

pytestmark = pytest.mark.usefixtures("page_libraries")


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
    assert page.tags.count("figure") == 2
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
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert not re.search(r"https?:|url\((?!#)|@import", content)
    assert "default-src 'none'" in content.replace("&#39;", "'")
    assert "prefers-color-scheme:dark" in content
    assert 'name="viewport"' in content


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_that_has_hardly_begun(tmp_path: Path, count: int) -> None:
    folder = make_run(tmp_path / "new", [step(number) for number in range(1, count + 1)])
    page = Page(report(folder).read_text())
    assert f"at step {count}, not complete" in page.text
    assert ("No step yet." in page.text) == (count == 0)


def test_a_chart_of_one_point_has_each_tick_once(tmp_path: Path) -> None:
    drawn = report(make_run(tmp_path / "one", [step(27, 0.5), {"step": 27, "validation_loss": 0.6}])).read_text()
    labels = re.findall(r"<text ([^>]*)>([^<]+)</text>", drawn)
    assert len(labels) == len(set(labels))
    assert [text for _, text in labels].count("27") == 1


def test_losses_and_scores_do_not_share_an_axis(tmp_path: Path) -> None:
    lines = [step(number) for number in (1, 2)]
    lines += [{"step": number, "validation_macro_f1": 0.9, "validation_ece": 0.1} for number in (1, 2)]
    page = Page(report(make_run(tmp_path / "two", lines)).read_text())
    assert page.text.index("higher is better") < page.text.index("lower is better")
    assert page.tags.count("figure") == 3


def test_one_validation_is_a_table_not_a_chart(tmp_path: Path) -> None:
    lines = [step(number) for number in range(1, 28)]
    page = Page(report(make_run(tmp_path / "one", [*lines, {"step": 27, "validation_accuracy": 0.9}])).read_text())
    assert page.tags.count("figure") == 1
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
def test_a_curve_has_few_points(points: list[tuple[int, float]]) -> None:
    thinned = reporting._thinned(sorted(points))
    assert 1 <= len(thinned) <= reporting.CURVE_POINTS


def test_a_picture_is_small_follows_the_style_and_says_what_is_seen() -> None:
    points = {name: [(step, (step * 7919 % 101) / 10) for step in range(200)] for name in ("training", "a$b$")}
    found = figures.picture("Loss", "it falls", figures.lines(points, x="step", y="", per_epoch=50, smooth=True))
    assert found is not None
    assert len(found["svg"]) < 30_000
    assert ">epoch<" in found["svg"]
    assert "a$b$" in found["svg"]
    assert not re.search(r"#0[1-4]0", found["svg"])
    assert {*re.findall(r"var\(--(\w+)\)", found["svg"])} <= set(figures.COLORS)
    again = figures.picture("Loss", "it falls", figures.lines(points, x="step", y="", per_epoch=50, smooth=True))
    assert again == found
    assert (figures.png(figures.lines(points, x="step", y="")) or b"").startswith(b"\x89PNG")


def test_ticks_of_a_small_range_differ() -> None:
    draw = figures.lines({"loss": [(1, 0.00012), (2, 0.00047)]}, x="step", y="")
    drawn = figures.picture("Loss", "", draw)
    assert drawn is not None
    ticks = [one for one in re.findall(r"<text[^>]*>\s*([^<]*?)\s*</text>", drawn["svg"]) if one.startswith("0.0")]
    assert len({*ticks}) == len(ticks) > 3


def test_without_matplotlib_the_page_says_how_to_get_pictures(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    page = Page(report(finished).read_text())
    assert "figure" not in page.tags
    assert "torchlake[report]" in page.text
    assert "0.9091" in page.text


def test_a_watched_page_is_written_until_the_run_is_complete(finished: Path) -> None:
    over = threading.Event()
    (finished / "result.json").rename(finished / "later.json")
    watching = threading.Thread(target=live.watch, args=(finished,), kwargs={"every_s": 0.01, "over": over})
    watching.start()
    while not (finished / "report.html").exists():
        assert watching.is_alive()
    (finished / "later.json").rename(finished / "result.json")
    watching.join(30)
    assert not watching.is_alive()
    assert "complete" in Page((finished / "report.html").read_text()).text


def test_the_server_has_the_pages_of_one_run_for_this_machine(finished: Path) -> None:
    report(finished)
    with live.served(finished) as address:
        assert address.startswith("http://127.0.0.1:")
        with urlopen(address) as answer:
            assert answer.read() == (finished / "report.html").read_bytes()
        for path, host, status in (("job.yaml", None, 404), ("../secret", None, 404), ("", "evil.example", 403)):
            request = Request(address + path, headers={} if host is None else {"Host": host})
            with pytest.raises(HTTPError, match=str(status)):
                urlopen(request)


def test_the_server_has_the_pages_of_the_folds(tmp_path: Path) -> None:
    page = tmp_path / "fold_2" / "eval" / "eval.html"
    page.parent.mkdir(parents=True)
    page.write_text("the rows of fold 2")
    page.with_name("rows.parquet").write_text("not a page")
    with live.served(tmp_path) as address:
        with urlopen(f"{address}fold_2/eval/eval.html") as answer:
            assert answer.read() == page.read_bytes()
        for path in ("fold_3/eval/eval.html", "fold_2/eval/rows.parquet", "fold_2/../fold_2/eval/eval.html"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(address + path)
