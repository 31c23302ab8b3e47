"""The command line's options are a promise: a change here is a change of the interface."""

from pathlib import Path
from typing import Any

import pytest

from sweeps import sweep
from torchlake import plugins
from torchlake.cli.app import program
from torchlake.cli.main import main
from torchlake.errors import UsageError

ALWAYS = {"--json", "--quiet", "--verbose"}
ROWS = frozenset({"--where", "--sample", "--limit"})
TABLES = frozenset({"--input", "--csv"})
COLUMNS = frozenset({"--text", "--text-pair", "--inputs"})
SAMPLING = (
    frozenset({"--max-new-tokens", "--temperature", "--top-k", "--top-p", "--language", "--stop"})
    | {"--min-p", "--min-new-tokens", "--num-beams", "--stop-token-ids"}
    | {"--repetition-penalty", "--presence-penalty", "--frequency-penalty"}
)
STRUCTURE = frozenset({"--json-schema", "--regex", "--grammar"})
WRITING = SAMPLING | {
    "--prompt",
    "--system",
    "--examples",
    "--tools",
    "--chat",
    "--chat-template",
    "--template-option",
    "--continue",
}
ANSWERS = frozenset({"--n", "--explode", "--seed-by", "--logprobs"}) | {
    *("--json-schema", "--json-columns", "--regex", "--choices", "--grammar"),
}
ENDPOINT = frozenset(
    {"--endpoint", "--model-name", "--key-env", "--api", "--request-option", "--insecure-endpoint"}
) | {
    *("--concurrency", "--requests-per-minute", "--tokens-per-minute", "--max-retries", "--batch-api"),
    *("--price", "--max-cost", "--max-tokens-total"),
}
LOADING = frozenset(
    {
        "--text-pair",
        "--task",
        "--task-option",
        "--runtime",
        "--all-probabilities",
        "--null",
        "--max-length",
        "--batch-tokens",
    }
)
OPTIONS = {
    "init": frozenset({"--text", "--text-pair", "--label", "--model", "--output", "--force"}) | ROWS | TABLES,
    "schema": frozenset(set()),
    "train": frozenset({"--set", "--processes", "--engine", "--run", "--folds", "--mlflow", "--wandb", "--tensorboard"})
    | COLUMNS
    | ROWS,
    "tune": frozenset({"--space", "--trials", "--seed", "--no-prune", "--set", "--processes", "--engine", "--run"})
    | ROWS,
    "predict": frozenset(
        {
            "--profile",
            "--task",
            "--task-option",
            "--embedding",
            "--key",
            "--columns",
            "--all-probabilities",
            "--token-counts",
            "--prefix",
            "--runtime",
            "--engine",
            "--processes",
            "--max-error-rate",
            "--null",
            "--row-timeout",
            "--batch-tokens",
            "--gpus-per-process",
            "--chunk-rows",
            "--overwrite",
            "--format",
            "--mode",
            "--incremental",
            "--commit-id",
            "--partition-by",
            "--add-columns",
            "--target-file-size",
            "--accept-new-input",
            "--accept-removed-input",
            "--on-bad-file",
            "--set",
            "--max-new-tokens",
            "--max-length",
            "--language",
            "--temperature",
            "--top-k",
            "--top-p",
            "--stop",
            "--runtime-python",
            "--seed",
            "--chat",
        }
    )
    | COLUMNS
    | ROWS
    | TABLES
    | WRITING
    | ANSWERS
    | ENDPOINT,
    "evaluate": frozenset({"--label", "--reference", "--runtime", "--engine", "--processes", "--set", "--seed"})
    | {"--report", "--key", "--slice", "--no-texts", "--label-hints", "--overwrite", "--task", "--choices"}
    | STRUCTURE
    | COLUMNS
    | ROWS
    | TABLES
    | WRITING,
    "compare": frozenset({"--table", "--key", "--report", "--fail-if-worse", "--by"}),
    "rank": frozenset(
        {
            "--query",
            "--document",
            "--relevant",
            "--seed",
            "--key",
            "--columns",
            "--max-error-rate",
            "--runtime",
            "--engine",
            "--processes",
            "--set",
            "--batch-tokens",
            "--chunk-rows",
        }
    )
    | {"--on-bad-file", "--accept-new-input", "--accept-removed-input", "--overwrite", "--target-file-size"}
    | {"--row-timeout", "--task", "--task-option", "--null", "--max-length", "--gpus-per-process"}
    | ROWS
    | TABLES,
    "optimize": frozenset(
        {
            "--sample",
            "--where",
            "--limit",
            "--label",
            "--max-drop",
            "--min-agreement",
            "--budget",
            "--runtimes",
            "--rows",
            "--engine",
            "--processes",
            "--set",
        }
    )
    | {"--task"}
    | COLUMNS
    | TABLES
    | SAMPLING
    | STRUCTURE,
    "plan": frozenset(
        {
            "--set",
            "--processes",
            "--gpu-memory",
            "--flops",
            "--bandwidth",
            "--latency",
            "--sample-rows",
        }
    )
    | ROWS
    | ENDPOINT
    | {"--runtime", "--text", "--tokenizer", "--prompt", "--system", "--chat", "--max-new-tokens"},
    "launch": frozenset({"--processes", "--gpus-per-process", "--engine", "--set"}),
    "serve": LOADING
    | frozenset(
        {
            "--host",
            "--port",
            "--processes",
            "--name",
            "--max-body",
            "--max-rows",
            "--max-requests",
            "--max-queued-tokens",
            "--queue-timeout",
            "--row-timeout",
            "--read-timeout",
            "--drain-delay",
            "--drain-timeout",
            "--no-truncate",
            "--reload",
            "--api-key-file",
            "--open-metrics",
            "--allow-origin",
            "--engine",
            "--set",
        }
    ),
    "try": LOADING | frozenset({"--host", "--port"}),
    "verify": frozenset({"--processes", "--engine", "--set"}),
    "export": frozenset({"--format", "--pooling"}),
    "report": frozenset({"--watch", "--serve", "--port"}),
    "doctor": frozenset({"--runtime", "--runtime-python"}),
    "runtime-env": frozenset(set()),
    "demo": frozenset({"--folder", "--rows", "--task"}),
    "version": frozenset(set()),
}
ARGUMENTS = {
    "init": ["table"],
    "train": ["job"],
    "tune": ["job"],
    "predict": ["model", "table", "output"],
    "rank": ["model", "table", "output"],
    "evaluate": ["model", "table"],
    "compare": ["models"],
    "optimize": ["model"],
    "plan": ["job", "table"],
    "launch": ["target", "arguments"],
    "verify": ["output"],
    "export": ["model", "folder"],
    "serve": ["model"],
    "try": ["model"],
    "report": ["run"],
    "runtime-env": ["runtime", "path"],
}
COMMANDS: dict[str, Any] = program.commands  # type: ignore[attr-defined]


def test_the_commands_are_these() -> None:
    assert set(COMMANDS) == set(OPTIONS)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_options_are_these(name: str) -> None:
    options = [param for param in COMMANDS[name].params if param.param_type_name == "option"]
    assert {word for option in options for word in option.opts} == OPTIONS[name] | ALWAYS
    assert all(option.help for option in options)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_arguments_are_these(name: str) -> None:
    arguments = [param for param in COMMANDS[name].params if param.param_type_name == "argument"]
    assert [argument.name for argument in arguments] == ARGUMENTS.get(name, [])


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    assert f"Example:\n  torchlake {name}" in COMMANDS[name].help


@pytest.mark.parametrize("columns", sweep([40, 60, 80, 120], quick={40, 120}))
@pytest.mark.parametrize("name", ["", *sorted(OPTIONS)])
def test_help_fits_and_shows_everything(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the example, which is there to be copied, may be longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*name.split(), "--help"]) == 0
    shown = capfd.readouterr().out
    lines = [line for line in shown.splitlines() if not line.startswith("    torchlake ")]
    assert max(map(len, lines)) < columns
    assert "..." not in shown.replace("ARGS...", "").replace("[ARGS]...", ""), "nothing is cut"
    words = " ".join(shown.split())
    for command in COMMANDS.values() if not name else []:
        assert f"{command.name} {command.help.splitlines()[0].partition('. ')[0].rstrip('.')}." in words
    for param in COMMANDS[name].params if name else []:
        assert f"{param.metavar or param.opts[0]}" in words
        assert " ".join(param.help.split()) in words


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_help_has_no_oddities(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capfd.readouterr().out
    for odd in ("[[", "]]", "{MODEL}", "<", " range>", "x>=", "(required)", "default: None"):
        assert odd not in shown
    for param in COMMANDS[name].params:
        is_flag = getattr(param, "is_flag", False)
        assert is_flag or (param.metavar and param.metavar not in ("TEXT_", "INTEGER")), f"{param.name}: what is given?"
        assert param.help.endswith(".") and param.help[0].isupper()  # noqa: PT018


def test_help_groups_the_options_of_predict(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--help"]) == 0
    groups = [line[:-1] for line in capfd.readouterr().out.splitlines() if line.endswith(":") and line[0].isupper()]
    assert groups == ["Arguments", "Input", "Output", "Execution", "Text generation", "Endpoint", "General"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train", "engines"),
        ("train", "tasks"),
        ("train", "strategies"),
        ("predict", "engines"),
        ("predict", "runtimes"),
        ("optimize", "runtimes"),
    ],
)
def test_help_names_the_plug_ins(name: str, kind: plugins.Kind, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert ", ".join(plugins.names(kind)) in " ".join(capfd.readouterr().out.split())


def test_required_options_are_marked_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    words = " ".join(capfd.readouterr().out.split())
    assert words.count("required") == 2
    assert "choices per setting. [required]" in words


def test_columns_are_those_of_the_python_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--text` once is a name, several times a list; `--inputs` is a mapping; `train` has settings of a job."""
    got: dict[str, Any] = {}

    def record(*_: Any, **given: Any) -> None:
        got.update(given)
        raise UsageError("enough")

    words = ["--text", "title", "--text", "body", "--text-pair", "answer"]
    words += ["--inputs", "numbers=stars", "--inputs", "numbers=age", "--inputs", "image=photo"]
    columns = {"text": ["title", "body"], "text_pair": "answer"}
    columns["inputs"] = {"numbers": ["stars", "age"], "image": "photo"}
    for name, arguments in {
        "scoring.predict": ["m", "t", "o"],
        "evaluation.evaluate": ["m", "t"],
        "optimization.optimize": ["m", "--sample", "t"],
    }.items():
        function = name.partition(".")[2]
        monkeypatch.setattr(f"torchlake.{name}.{function}", record)
        assert main([function, *arguments, *words]) == 64
        assert columns.items() <= got.items(), name
    monkeypatch.setattr("torchlake.training.train.train", record)
    assert main(["train", "job.yaml", *words]) == 64
    assert got["overrides"] == [
        'data.text=["title", "body"]',
        'data.text_pair="answer"',
        'data.inputs.numbers=["stars", "age"]',
        'data.inputs.image="photo"',
    ]


def test_an_input_without_a_column_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "m", "t", "o", "--inputs", "stars"]) == 64
    assert "--inputs stars: write it as key=value, such as image=photo" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("2024-01-31", "2024-01-31"),
        ("0.5", 0.5),
        ("1e-4", 1e-4),
        ("'1e-4'", "1e-4"),
        ("09123", "09123"),
        ("1e999", "1e999"),
        ("[good, bad]", ["good", "bad"]),
        ("{1: a}", {"1": "a"}),
        ("", None),
    ],
)
def test_a_value_of_an_option_is_plain_yaml(value: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}

    def record(*_: Any, **given: Any) -> None:
        got.update(given)
        raise UsageError("enough")

    monkeypatch.setattr("torchlake.scoring.predict.predict", record)
    assert main(["predict", "m", "t", "o", "--task-option", f"it={value}"]) == 64
    assert got["task_options"] == {"it": found}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("it={} is good", "not valid YAML"),
        ("it=0x_", "is not a valid int"),
        ("it={a: 1, a: 2}", "given twice"),
        ("it=" + "[" * 5000, "nested deeper"),
        ("it=@{file}", "larger than 1,048,576 bytes, the limit of a YAML file"),
        ("it=!!python/name:os.system", "the tag"),
        ("=1", "write it as name=value"),
    ],
)
def test_a_value_that_is_not_plain_yaml_is_named(
    value: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("a: 1\n# " + "é" * 600_000 + "\nb: 2\n")
    assert main(["predict", "m", "t", "o", "--task-option", value.replace("{file}", str(file))]) in (64, 65, 77)
    assert words in capfd.readouterr().err
