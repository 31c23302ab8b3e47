"""An option is declared once: its help has the default of the Python function, and what would be ignored is refused."""

import inspect
import re
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.cli.app import program
from torchlake.cli.main import main
from torchlake.errors import PortTaken, UsageError
from torchlake.jobs.options import OutputOptions
from torchlake.models.generation import GenerationOptions
from torchlake.reporting import live
from torchlake.scoring.endpoint.options import endpoint_job
from torchlake.scoring.options.given import split_options
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.rows import ScoringSettings
from torchlake.serving.options import ServeOptions

COMMANDS: dict[str, Any] = program.commands  # type: ignore[attr-defined]
SCORING = (ScoringSettings, OutputOptions, GenerationOptions)
GROUPS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("predict", "rank", "evaluate", "optimize"), SCORING),
    "serve": (ServeOptions,),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"plan": tl.plan, "tune": tl.tune, "optimize": tl.optimize}


def default_of(command: str, option: str) -> Any:
    """The default of an option in Python; `inspect.Parameter.empty` if it has none there."""
    named: dict[str, Any] = {}
    for group in GROUPS.get(command, ()):
        named |= {one.name: one.default for one in fields(group)}
    if command in FUNCTIONS:
        named |= {name: one.default for name, one in inspect.signature(FUNCTIONS[command]).parameters.items()}
    return named.get(option, inspect.Parameter.empty)


def test_the_defaults_in_the_help_are_those_of_the_python_functions() -> None:
    found = 0
    for name, command in COMMANDS.items():
        for param in command.params:
            shown = re.search(r"\(default: (\d+(?:\.\d+)?)\)", param.help or "")
            default = default_of(name, param.name)
            if shown and default not in (None, inspect.Parameter.empty):
                assert float(shown[1]) == default, (name, param.name)
                found += 1
    assert found > 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    return SimpleNamespace(embedder=tiny.build_embedder(folder / "e"), t5=tiny.build_encoder_decoder(folder / "t"))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("embedder", {"text_pair": "other"}, "text_pair: feature_extraction reads no pairs of texts"),
        ("embedder", {"inputs": {"negative": "other"}}, "feature_extraction has no input 'negative'"),
        ("t5", {"chat": True}, "chat: for conversations, and text2text_generation reads text"),
    ],
)
def test_what_a_task_would_ignore_is_refused(
    models: SimpleNamespace, kind: str, options: dict[str, Any], words: str
) -> None:
    scoring, generation, _ = split_options(options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        scoring_settings(getattr(models, kind), None, generation, **scoring)


def test_texts_are_not_continued(tiny_gpt2: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="continue_final_message: for conversations"):
        tl.predict(tiny_gpt2, tmp_path / "t.parquet", tmp_path / "out", continue_final_message=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tl.rank("m", "t", "o", partition_by="a"), "partition_by: not for rank, which writes a Parquet folder"),
        (lambda: tl.rank("m", "t", "o", token_counts=True), "unexpected keyword argument 'token_counts'"),
        (lambda: tl.evaluate("m", "t", logprobs=True), "logprobs: evaluate measures one answer of each row"),
        (lambda: tl.evaluate("m", "t", tokens=2), "unexpected keyword argument 'tokens'"),
        (lambda: tl.map(len, "t", "o", schema={}, seed=3), "seed: of a sample of the rows"),  # type: ignore[arg-type]
        (lambda: tl.optimize("m", "t", n=2), "n: optimize measures one text"),
        (lambda: tl.optimize("m", "t", tokens=2), "unexpected keyword argument 'tokens'"),
        (lambda: tl.compare("a", "b", key="id"), "key: it names the rows of a table"),
        (
            lambda: tl.serve("m", engine=SimpleNamespace(serve=0), options=ServeOptions(drain_delay=3.0)),
            "drain_delay: of torchlake's own server",
        ),
    ],
)
def test_what_a_function_would_ignore_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((UsageError, TypeError), match=words):
        call()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plan job.yaml --max-cost 3", "--max-cost: for the plan of requests (--runtime http); leave it out."),
        ("plan job.yaml --runtime eager", "--runtime: for the plan of requests (--runtime http); leave it out."),
        ("plan t.csv --runtime http --flops 3T", "--flops: for the plan of a training; leave it out."),
        (
            "predict m t.csv -",
            "OUTPUT is a folder, URL or table; answers are printed with torchlake predict MODEL - alone.",
        ),
        ("predict m t.csv out --stop-token-ids a,b", "--stop-token-ids: expected a whole number, got 'a'"),
        ("predict m t.csv out --row-timeout 1e9", "--row-timeout: must be at most 1000000, got 1e9"),
        ("predict t.csv out --runtime http --profile", "--profile: for a model folder; leave it out."),
        ("try m --host 0.0.0.0", "--host: try is for this machine, without a token; use serve for others."),
        ("compare a b --by 1", "--by is for --fail-if-worse: name a metric."),
        ("report run --port 80", "--port is for --serve."),
    ],
)
def test_what_a_command_would_ignore_is_refused(words: str, shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 64
    assert capfd.readouterr().err == f"error: {shown}\n"


@pytest.mark.parametrize("also", [[], ["--watch"]])
def test_ctrl_c_ends_a_report_that_is_shown(also: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []

    def watch(run: str) -> Path:
        watched.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr("torchlake.reporting.report.report", Path)
    monkeypatch.setattr(live, "served", lambda run, port: nullcontext("an address"))
    monkeypatch.setattr(live, "watch", watch)
    assert main(["report", "run", "--serve", *also]) == 0
    assert watched == ["run"]


def test_a_port_of_the_report_that_is_taken_is_no_fault(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken"), live.served(tmp_path, port):
            pass


@pytest.mark.parametrize("option", ["tools", "json_schema", "chat_template", "grammar"])
def test_a_file_that_an_option_names_and_that_is_missing_is_named(option: str) -> None:
    asked = {option: "missing.json" if option != "chat_template" else "missing.jinja"}
    with pytest.raises(UsageError, match=rf"^{option}: missing.\w+: cannot be read: No such file or directory$"):
        endpoint_job(
            {"endpoint": "https://h/v1", "model_name": "m", **asked}, text=None, key=None, columns=(), engine=None
        )
