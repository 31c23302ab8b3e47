"""Help texts with options in groups and lines that fit the terminal.

Typer's plain help has no groups, truncates the commands' summaries, and shows types instead of meanings; its rich help
takes 0.1 s to load. Every argument and option has its own `metavar`.
"""

import shutil
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from torchlake.config.options import LOGPROBS

WIDEST = 110
NARROW = 60
"Below this width, descriptions are under the options, not beside them."


class Command(TyperCommand):
    """A command that shows its options by `rich_help_panel`, in the order of declaration."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, on which --logprobs may stand alone."""
        alone = [
            word == "--logprobs" and after not in LOGPROBS for word, after in zip(args, [*args, ""][1:], strict=True)
        ]
        words = [f"{word}={LOGPROBS[0]}" if default else word for word, default in zip(args, alone, strict=True)]
        return super().parse_args(ctx, words)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(_metavar(one) if one.required else f"[{_metavar(one)}]" for one in arguments)]

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Set the formatter's width to that of the terminal and write the usage line."""
        _set_width(formatter)
        super().format_usage(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each group."""
        _write_options(self.get_params(ctx), formatter)


class OptionGroup(TyperGroup):
    """The program: its options, and a line for each command."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Set the formatter's width to that of the terminal and write the usage line."""
        _set_width(formatter)
        super().format_usage(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        _write_options(self.get_params(ctx), formatter)
        lines = [(name, _first_sentence(command.help or "")) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


def _write_options(params: Iterable[Any], formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if param.hidden:
            continue
        is_argument = param.param_type_name == "argument"
        group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "General"
        names = _metavar(param) if is_argument else ", ".join(sorted(param.opts, key=len))
        value = "" if is_argument or getattr(param, "is_flag", False) else f" {_metavar(param)}"
        required = " [required]" if param.required and not is_argument else ""
        groups.setdefault(group, []).append((f"{names}{value}", f"{param.help or ''}{required}"))
    general = groups.pop("General", [])
    for group, rows in [*groups.items(), ("General", general)]:
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows, col_max=30 if formatter.width >= NARROW else 2)


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _set_width(formatter: Any) -> None:
    formatter.width = min(shutil.get_terminal_size().columns, WIDEST) - 1


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].partition(". ")[0].rstrip(".") + "."
