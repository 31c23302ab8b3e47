"""Check the options of input and output that every chunk job of the Python API has. None of them changes a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torchlake.config.arguments import plain_numbers
from torchlake.config.options import ReadArguments
from torchlake.errors import UsageError
from torchlake.outputs.target import TargetOptions, target_options
from torchlake.tables.chunks import RowCost
from torchlake.tables.sources._options import ReadOptions, read_options


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of the output folder and its input."""

    max_error_rate: float = 0.5
    "Share of failed rows above which nothing is published."
    chunk_rows: int | RowCost | None = None
    "Maximum rows of a chunk, or what rows cost; None: it depends on the table's size."
    overwrite: bool = False
    accept_new_input: bool = False
    accept_removed_input: bool = False
    on_bad_file: Literal["error", "quarantine"] = "error"
    incremental: bool = False
    commit_id: str | None = None
    "The caller's name of the commit; None: it is named by the input and the settings."
    read: ReadOptions = field(default_factory=ReadOptions)
    target: TargetOptions = field(default_factory=TargetOptions)


def output_options(given: Mapping[str, Any]) -> OutputOptions:
    """Return the options of input and output among the arguments of a function."""
    given, names = plain_numbers(given), {one.name for one in fields(OutputOptions)}
    read = read_options({name: value for name, value in given.items() if name in ReadArguments.__annotations__})
    options = {name: value for name, value in given.items() if name in names}
    target = target_options({one.name: given[one.name] for one in fields(TargetOptions) if one.name in given})
    if options.get("overwrite") and target.mode not in ("create", "overwrite"):
        raise UsageError(f"overwrite replaces the output, but mode {target.mode} adds to it; give only one of them.")
    if options.get("incremental") and (options.get("overwrite") or target.mode in ("overwrite", "replace-where")):
        raise UsageError("incremental adds what is new: use mode create or append, and leave out overwrite.")
    if options.get("incremental") and read.asked.keys() & {"sample", "limit"}:
        raise UsageError("incremental reads every new row: leave out sample and limit.")
    if options.get("commit_id") == "" or (options.get("commit_id") and options.get("incremental")):
        raise UsageError("commit_id names one commit: give a name, and leave out incremental, which makes its own.")
    if options.get("overwrite"):
        target = replace(target, mode="overwrite")
    return OutputOptions(**options, read=read, target=target)
