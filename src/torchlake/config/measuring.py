"""The options of the functions that measure models: `evaluate` and `optimize`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torchlake.config.options import (
    ChoiceArguments,
    ColumnArguments,
    FilterArguments,
    Option,
    PromptArguments,
    ReadArguments,
    SamplingArguments,
    StructureArguments,
)

_output = partial(Option, "Output")


class EvaluateOptions(
    ReadArguments, SamplingArguments, StructureArguments, ChoiceArguments, PromptArguments, total=False
):
    """The options of `evaluate` besides columns and runtime: its rows, and how a model writes that is measured so.

    `report` and what follows are those of a folder with the rows that were measured.
    """

    chat: bool
    report: Annotated[str | Path, _output("FOLDER", "Write rows.parquet, eval.json and the page eval.html there.")]
    key: Annotated[str, _output("COLUMN", "Column of unique, non-null values that identify rows of the report.")]
    slices: Annotated[
        Sequence[str], _output("COLUMN", "Also measure the rows of each value of this column; repeatable.", "--slice")
    ]
    no_texts: Annotated[bool, _output(None, "Leave the input columns out of the report.")]
    label_hints: Annotated[bool, _output(None, "List labels that may be wrong (with cleanlab, if installed).")]
    overwrite: Annotated[bool, _output(None, "Replace the report of another model or table.")]


class OptimizeOptions(FilterArguments, ColumnArguments, SamplingArguments, StructureArguments, total=False):
    """The options of `optimize` about the model's inputs, the rows that are read, and how texts are written."""

    task: Any
    seed: int | None
