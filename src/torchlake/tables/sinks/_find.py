"""Find the sink for an output, and write through it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torchlake import plugins
from torchlake.config.redaction import redacted
from torchlake.errors import UsageError
from torchlake.tables.output.commit import WriteTransaction
from torchlake.tables.output.compatibility import planned_inputs, recorded_fingerprint
from torchlake.tables.record import URL_AS_PATH, local_output
from torchlake.tables.sinks._begin import Earlier, earlier_write, table_transaction
from torchlake.tables.sinks._interface import SinkOptions, Target
from torchlake.tables.sinks._records import read_record
from torchlake.tables.sinks._state import temporary_folder
from torchlake.tables.sinks._write import TableWrite, WriteRequest
from torchlake.tables.sources.files import local_path
from torchlake.tables.storage.urls import is_url

Write = WriteTransaction | TableWrite


def output_text(output: str | Path) -> str:
    """Return an output as text: a path, a URL or the name of a table. A `Path` of a URL has lost a slash."""
    return local_path(URL_AS_PATH.sub(r"\1://", os.fspath(output)))


def sink_of(output: str | Path, format: str | None = None) -> ModuleType:
    """Return the sink for an output, in the requested format, else the format of what exists there.

    Raises UsageError if no sink can write to it.
    """
    text = output_text(output)
    kinds = [plugins.load("sinks", name) for name in _order()]
    found: ModuleType | None = next((kind for kind in kinds if kind.recognizes(text, format)), None)
    if found is None:
        raise UsageError(
            f"{redacted(text)}: cannot be written as {format}. Iceberg tables have a name in a catalog "
            "(iceberg:catalog.namespace.table); Parquet and Delta have a path or URL."
        )
    return found


def _order() -> list[str]:
    """Return the plug-ins, with the local folder last because it accepts every path."""
    return sorted(plugins.names("sinks"), key=lambda name: (name in ("folder", "object_folder"), name))


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output of any kind, to write to."""

    text: str
    sink: ModuleType
    options: SinkOptions
    target: Target | None
    "None for a local folder."

    @property
    def place(self) -> Path:
        """A local path that stands for the output: input that must be stored first is stored beside it."""
        if self.target is None:
            return local_output(self.text)
        root = self.target.root
        return Path(root) if root and not is_url(root) else temporary_folder(root or self.text)

    @property
    def shared_folder(self) -> Path | None:
        """A folder that an engine's processes can reach; None for an output that is not in a local folder (yet)."""
        if self.target is not None and (not self.target.root or is_url(self.target.root)):
            return None
        folder = self.place.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def path(self) -> Path | str:
        """The output as the caller names it: a folder's path, else a URL or a table's name."""
        return self.place if self.target is None else self.target.shown

    def earlier(self) -> Earlier:
        """Return what is known about the interrupted write, or about the output itself."""
        if self.target is None:
            return Earlier(recorded_fingerprint(self.text), planned_inputs(self.text))
        return earlier_write(self.target)

    def latest_record(self) -> dict[str, Any]:
        """Return the record of torchlake's last commit to a table; empty if there is none."""
        assert self.target is not None, "of a table"
        name = self.target.latest(self.target.snapshot())
        return {} if name is None else read_record(self.target, name) or {}

    @contextmanager
    def begin(self, request: WriteRequest) -> Iterator[Write]:
        """Write the result of a plan, exactly once; see `write_transaction`."""
        if self.target is None:
            with self.sink.begin(self.text, self.options, request) as write:
                yield write
        else:
            with table_transaction(self.target, self.options, request) as table:
                yield table

    def refuse_input(self, files: Sequence[str]) -> None:
        """Raise UsageError if an input file is inside the output, which would replace it or add to it."""
        root = str(self.place) if self.target is None else self.target.root
        if not root:
            return
        inside = f"{root.rstrip('/')}/" if is_url(root) else f"{os.path.realpath(root)}/"
        for file in files:
            if (file if is_url(file) else os.path.realpath(file)).startswith(inside):
                raise UsageError(
                    f"{self.path}: contains the input file {file}, which the output would replace or add to. Give "
                    "another output."
                )


def output_of(output: str | Path, options: SinkOptions | None = None) -> Output:
    """Return an output of any kind.

    Raises UsageError if no sink can write to it, MissingExtra when its library is not installed, OutputError and
    StorageError when it cannot be opened.
    """
    options = options or SinkOptions()
    sink, text = sink_of(output, options.format), output_text(output)
    target = sink.open_target(text, options) if hasattr(sink, "open_target") else None
    return Output(text=text, sink=sink, options=options, target=target)
