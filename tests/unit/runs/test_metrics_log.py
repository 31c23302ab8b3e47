import json
import logging
import math
import threading
from pathlib import Path

from torchlake.runs import metrics_log


def write(path: Path, *lines: metrics_log.Line) -> None:
    with metrics_log.metrics_file(path) as file:
        for line in lines:
            metrics_log.write_line(file, line)


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": 1e-300, "note": "é"}]
    write(path, lines[0])
    write(path, lines[1])
    assert metrics_log.read_metrics(path) == lines


def test_a_file_that_grows_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()

    def write_in_pieces() -> None:
        with open(path, "ab", buffering=0) as file:
            for step in range(300):
                text = json.dumps({"step": step, "note": "\u2028"}, ensure_ascii=False).encode() + b"\n"
                for start in range(0, len(text), 5):
                    file.write(text[start : start + 5])

    thread = threading.Thread(target=write_in_pieces)
    thread.start()
    while thread.is_alive():
        steps = [line["step"] for line in metrics_log.read_metrics(path)]
        assert steps == [*range(len(steps))]
    thread.join()
    assert len(metrics_log.read_metrics(path)) == 300


def test_what_is_not_finite_is_seen_and_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": math.nan, "grad_norm": -math.inf})
    text = path.read_text()
    assert '"nan"' in text
    assert json.loads(text, parse_constant=lambda word: 1 / 0)["grad_norm"] == "-inf"
    (line,) = metrics_log.read_metrics(path)
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == -math.inf


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    validations = [{"step": step, "validation_loss": 1.0} for step in (2, 4)]
    steps = [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4, 5)]
    write(path, *steps[:2], validations[0], *steps[2:4], validations[1], steps[4])
    metrics_log.truncate_metrics(path, 4, 2)
    assert metrics_log.read_metrics(path) == [*steps[:2], validations[0], *steps[2:4]]
    metrics_log.truncate_metrics(path, 0, 0)
    assert metrics_log.read_metrics(path) == []


def test_a_torn_last_line_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    assert metrics_log.read_metrics(path) == [{"step": 1}]
    metrics_log.truncate_metrics(path, 9, 9)
    assert path.read_text() == '{"step": 1}\n'


def test_a_run_that_never_began_has_no_metrics(tmp_path: Path) -> None:
    metrics_log.truncate_metrics(tmp_path / "metrics.jsonl", 0, 0)
    assert metrics_log.read_metrics(tmp_path / "metrics.jsonl") == []


def test_logs_are_json_lines_with_their_rank_and_traceback(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank_3.jsonl"
    log = logging.getLogger("torchlake.somewhere")
    with metrics_log.log_file(path, rank=3):
        log.info("saved %d", 7)
        try:
            raise KeyError("é")
        except KeyError:
            log.exception("failed")
    log.warning("not in the file any more")
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert (first["rank"], first["level"], first["logger"], first["message"]) == (3, "INFO", log.name, "saved 7")
    assert "KeyError: 'é'" in second["traceback"]
