"""How a function becomes a command: its arguments, its options, its help, and its work once all was parsed."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args

import typer

from torchlake import plugins
from torchlake.cli.display import Outcome
from torchlake.cli.help import Command, OptionGroup
from torchlake.cli.options import General, as_given, declared, parameters
from torchlake.errors import UsageError

Work = Callable[..., Outcome]

app = typer.Typer(
    name="torchlake",
    cls=OptionGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune and score Hugging Face and PyTorch models where your tables live.\n\nExample: torchlake demo",
)


def argument(value: str, help: str) -> Any:
    """Return an argument of a command: what is given, such as MODEL, and its help."""
    return typer.Argument(metavar=value, help=help)


ModelFolder = Annotated[str, argument("MODEL", "Model folder written by train.")]
SETTINGS = (
    f"Values of model.task: {', '.join(plugins.names('tasks'))}.\n\n"
    f"Values of train.strategy: auto, {', '.join(plugins.names('strategies'))}."
)


def command(example: str, *groups: str | type, **about: Any) -> Callable[[Work], Work]:
    """Make a function a command; `declared` are its options, as `options.parameters` takes them.

    The function takes the arguments and, if it has options, `given`. Parsing returns it with these, and `main.py` calls
    it: errors and signals of the work are not those of the parser.
    """

    def register(work: Work) -> Work:
        signature = inspect.signature(work)
        arguments = [one for name, one in signature.parameters.items() if name != "given"]
        options = declared(*groups, General)

        def parsed(**values: Any) -> Callable[[], Outcome]:
            own = {one.name: values.pop(one.name) for one in arguments}
            for one in arguments:
                shown, value = get_args(one.annotation)[1].metavar, own[one.name]
                if "" in (value if isinstance(value, list) else [value]) and not shown.startswith("--"):
                    raise UsageError(f"{shown}: is empty. Give one.")  # it would be the current folder
            given = {"given": as_given(values, options)} if "given" in signature.parameters else {}
            return partial(work, **own, **given)

        parsed.__module__, shown = work.__module__, parameters(options)
        parsed.__signature__ = signature.replace(parameters=[*arguments, *shown])  # type: ignore[attr-defined]
        text = f"{work.__doc__}\n\n\b\nExample:\n  torchlake {example}"
        name = about.pop("name", work.__name__.strip("_"))
        app.command(name, cls=Command, help=text, **about)(parsed)
        return work

    return register


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Declare the options before the command; `cli.main` handles --version."""
