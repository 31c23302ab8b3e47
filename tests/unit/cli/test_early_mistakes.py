"""A mistake in the words of a command, in a job file or in a table's columns is found before torch is imported."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import tiny

SCRIPT = """
import json, sys
from torchlake.cli.main import main
for name, words in json.load(sys.stdin).items():
    code = main([*words, "--json"])
    print(json.dumps([name, code, sorted({"torch", "transformers", "sklearn"} & set(sys.modules))]), flush=True)
"""


def cases(folder: Path, model: Path, pairs: Path) -> dict[str, tuple[list[str], int, str]]:
    """By name: the words of a command, its exit status, and what its message has."""
    rows = str(folder / "rows.parquet")
    job = ["--set", f"data.train={rows}", "--set", "model.base=no/such_model"]
    found: dict[str, tuple[list[str], int, str]] = {}
    for command, more in {
        "train": ["--run", str(folder / "run")],
        "plan": [],
        "tune": ["--space", str(folder / "space.yaml"), "--trials", "2", "--run", str(folder / "tuning")],
    }.items():
        file = str(folder / "job.yaml")
        words = [command, file, *job, *more]
        mistakes: dict[str, tuple[list[str], int, str]] = {
            "job file": ([command, str(folder / "jobb.yaml"), *more], 65, "did you mean"),
            "table": ([*words, "--set", "data.train=none.parquet"], 65, "data.train: "),
            "validation": ([*words, "--set", "data.validation=none.parquet"], 65, "data.validation: "),
            "text": ([*words, "--set", "data.text=txt"], 65, "Did you mean 'text'"),
            "label": ([*words, "--set", "data.label=lable"], 65, "Did you mean 'label'"),
            "key": ([*words, "--set", "data.key=idd"], 65, "It has: id, text, label"),
            "metric": ([*words, "--set", "train.metric=acuracy"], 65, "did you mean accuracy?"),
            "setting": ([*words, "--set", "train.epoch=3"], 65, "did you mean epochs?"),
            "type": ([*words, "--set", "train.epochs=many"], 65, "expected a whole number"),
            "strategy": ([*words, "--set", "train.strategy=fsdp", "--set", "data.text=txt"], 65, "'text'"),
            "ranks": ([*words, "--processes", "2", "--set", "data.text=txt"], 65, "'text'"),
            "option": ([*words, "--processes", "two"], 64, "expected a whole number"),
        }
        if command != "train":  # they read the job as `train` does
            mistakes = {name: mistakes[name] for name in ("job file", "table", "text", "metric", "setting", "option")}
        found |= {f"{command}: {name}": mistake for name, mistake in mistakes.items()}
    found["train: folds"] = (["train", str(folder / "jobb.yaml"), "--folds", "3"], 65, "did you mean")
    found["train: folds, text"] = (
        ["train", *job, "--folds", "3", "--run", str(folder / "folds"), "--set", "data.text=txt"],
        65,
        "'text'",
    )
    scoring = {
        "predict": [rows, str(folder / "out")],
        "rank": [rows, str(folder / "ranked"), "--query", "text", "--document", "text", "--relevant", "good"],
        "evaluate": [rows],
        "optimize": ["--sample", rows],
    }
    for command, given in scoring.items():
        words = [command, str(pairs if command == "rank" else model), *given]
        missing = [word.replace("rows.parquet", "none.parquet") for word in words]
        column = {"rank": "--document"}.get(command, "--text")
        found |= {
            f"{command}: model": ([command, str(folder / "no_model"), *given], 65, "no_model"),
            f"{command}: table": (missing, 65, "none.parquet"),
            f"{command}: column": ([*words, column, "txt"], 65, "txt"),
        }
        if command in ("predict", "rank"):
            found[f"{command}: key"] = ([*words, "--key", "idd"], 65, "idd")
        if command != "optimize":
            found[f"{command}: runtime"] = ([*words, "--runtime", "onx"], 64, "Did you mean 'onnx'?")
        if command in ("evaluate", "optimize"):
            found[f"{command}: label"] = ([*words, "--label", "lable"], 65, "lable")
    taken = ["--output", str(folder / "job.yaml")]
    found |= {
        "init: table": (["init", "none.parquet", *taken], 65, "none.parquet"),
        "init: text": (["init", rows, "--text", "txt"], 65, "txt"),
        "init: label": (["init", rows, "--label", "lable"], 65, "lable"),
        "init: output": (["init", rows, *taken], 64, "exists"),
        "verify: output": (["verify", "none"], 65, "none"),
        "report: run": (["report", "none"], 65, "none"),
        "export: model": (["export", "none", str(folder / "exported"), "--format", "onnx"], 65, "none"),
        "launch: script": (["launch", "none.py"], 64, "none.py"),
    }
    return found


def test_no_mistake_waits_for_torch(tmp_path: Path, tiny_bert: Path, tiny_model: Path) -> None:
    pairs = tiny.build_model(tmp_path / "pairs", encoder=tiny_bert, spec=replace(tiny.SPEC, text_pair="answer"))
    pq.write_table(tiny.reviews(20), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text("data: {train: t.parquet}\nmodel: {base: b}\n")
    (tmp_path / "space.yaml").write_text("train.batch_size: {choices: [8, 16]}\n")
    mistakes = cases(tmp_path, tiny_model, pairs)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps({name: words for name, (words, _, _) in mistakes.items()}),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    results, messages = lines[1::2], [line.get("error", line) for line in lines[::2]]
    wrong: list[Any] = []
    for (name, code, heavy), error in zip(results, messages, strict=True):
        _, expected, shown = mistakes[name]
        if code != expected or heavy or shown not in str(error.get("message")):
            wrong.append((name, code, heavy, error))
    assert len(results) == len(mistakes)
    assert not wrong, "\n".join(map(str, wrong))
