"""The types of tables that Python callers pass. Apart from `arguments.py`, because scoring does not load pydantic."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

StoredTable = str | Path | Sequence[str | Path]
"A file, folder, glob or URL, or a list of them."


class Frame(Protocol):
    """A pyarrow, pandas, polars or Spark frame, or a Ray Dataset: what has columns. Paths do not."""

    @property
    def columns(self) -> Any:
        """The columns, or their names."""


FrameT = TypeVar("FrameT", bound=Frame)
