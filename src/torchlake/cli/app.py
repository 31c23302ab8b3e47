"""The program with all its commands."""

from torchlake.cli.command import app
from torchlake.cli.commands import demo, measuring, scoring, serving, tools, training

MODULES = [each.__name__ for each in (training, scoring, measuring, serving, tools, demo)]
"In the order of the help."
__all__ = ["app"]
app.registered_commands.sort(key=lambda one: MODULES.index(one.callback.__module__))
