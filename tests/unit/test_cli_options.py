"""The command line's options are a promise: a change here is a change of the interface."""

from typing import Any

import pytest
import typer

from torchlake.cli import app

OPTIONS = {
    "train": frozenset({"--set", "--processes", "--engine", "--run", "--mlflow", "--tensorboard", "--json"}),
    "tune": frozenset({"--space", "--trials", "--set", "--processes", "--engine", "--run", "--json"}),
    "predict": frozenset(
        {
            "--text",
            "--key",
            "--columns",
            "--all-probabilities",
            "--prefix",
            "--runtime",
            "--engine",
            "--processes",
            "--max-error-rate",
            "--null",
            "--row-timeout",
            "--batch-tokens",
            "--chunk-rows",
            "--overwrite",
            "--accept-new-input",
            "--accept-removed-input",
            "--on-bad-file",
            "--set",
            "--max-new-tokens",
            "--temperature",
            "--top-k",
            "--top-p",
            "--stop",
            "--seed",
            "--chat",
            "--json",
        }
    ),
    "evaluate": frozenset({"--text", "--label", "--runtime", "--engine", "--processes", "--set", "--json"}),
    "optimize": frozenset(
        {
            "--sample",
            "--text",
            "--label",
            "--max-drop",
            "--min-agreement",
            "--budget",
            "--runtimes",
            "--processes",
            "--json",
        }
    ),
    "plan": frozenset(
        {
            "--set",
            "--processes",
            "--gpu-memory",
            "--flops",
            "--bandwidth",
            "--latency",
            "--sample-rows",
            "--json",
        }
    ),
    "launch": frozenset({"--processes", "--gpus-per-process", "--engine", "--set", "--json"}),
    "verify": frozenset({"--json"}),
    "report": frozenset({"--json"}),
    "doctor": frozenset({"--json"}),
    "demo": frozenset({"--folder", "--rows", "--json"}),
    "version": frozenset({"--json"}),
}
ARGUMENTS = {
    "train": ["job"],
    "tune": ["job"],
    "predict": ["model", "table", "output"],
    "evaluate": ["model", "table"],
    "optimize": ["model"],
    "plan": ["job"],
    "launch": ["target", "arguments"],
    "verify": ["output"],
    "report": ["run"],
}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_commands_are_these() -> None:
    assert set(COMMANDS) == set(OPTIONS)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_options_are_these(name: str) -> None:
    options = [param for param in COMMANDS[name].params if param.param_type_name == "option"]
    assert frozenset(word for option in options for word in option.opts) == OPTIONS[name]
    assert all(option.help for option in options)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_arguments_are_these(name: str) -> None:
    arguments = [param for param in COMMANDS[name].params if param.param_type_name == "argument"]
    assert [argument.name for argument in arguments] == ARGUMENTS.get(name, [])


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    assert f"Example: torchlake {name}" in COMMANDS[name].help
