"""The program with all its commands."""

import typer

from torchlake.cli.command import app
from torchlake.cli.commands import demo, measuring, scoring, serving, tools, training

MODULES = [each.__name__ for each in (training, scoring, measuring, serving, tools, demo)]
"In the order of the help."
app.registered_commands.sort(key=lambda one: MODULES.index(one.callback.__module__))
program = typer.main.get_command(app)
"What parses arguments and runs a command, made once for all calls of `main` in a process."
