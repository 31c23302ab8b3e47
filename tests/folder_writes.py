"""A write to a local folder in one call, with the fields of `WriteRequest` as arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake.outputs.find import folder_output
from torchlake.outputs.targets.folder import LocalFolderTarget
from torchlake.outputs.transaction import Transaction, WriteRequest
from torchlake.tables.plan import InputFile


@contextmanager
def write_transaction(
    output: str | Path, *, target_file_size: int | None = None, **request: Any
) -> Iterator[Transaction]:
    place = folder_output(output)
    assert isinstance(place.target, LocalFolderTarget)
    options = replace(place.target.options, target_file_size=target_file_size)
    place = replace(place, target=replace(place.target, options=options))
    with place.begin(WriteRequest(**{"schema": pa.schema([]), **request})) as write:
        yield write


def planned_inputs(output: str | Path) -> list[InputFile]:
    """The input files of the interrupted write, else of the output."""
    return list(folder_output(output).earlier().inputs)
