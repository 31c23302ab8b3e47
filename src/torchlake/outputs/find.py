"""Find the target of an output, write through it, and read what is committed there.

`committed` gives the records, for `verify`; `open` gives the rows.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torchlake import plugins
from torchlake.errors import TableError, UsageError
from torchlake.outputs.begin import Earlier, earlier_write, transaction
from torchlake.outputs.records import commits_of, parts_of, read_record
from torchlake.outputs.staging.state import temporary_folder
from torchlake.outputs.target import Logged, Target, TargetOptions, as_table
from torchlake.outputs.transaction import Transaction, WriteRequest
from torchlake.redaction import redacted
from torchlake.storage.errors import library_errors
from torchlake.storage.urls import is_url
from torchlake.tables.record import URL_AS_PATH, local_output
from torchlake.tables.sources.files import local_path


def output_text(output: str | Path) -> str:
    """Return an output as text: a path, a URL or the name of a table. A `Path` of a URL has lost a slash."""
    text = URL_AS_PATH.sub(r"\1://", local_path(output))
    if "\0" in text:
        raise UsageError(f"{text!r}: is not a name: it has a null character.")
    if not text.strip("/"):
        raise UsageError(f"{text!r}: cannot be an output. Give the path of a folder, a URL or the name of a table.")
    return text


def target_module(output: str | Path, format: str | None = None) -> ModuleType:
    """Return the sink for an output, in the requested format, else the format of what exists there.

    Raises UsageError if no sink can write to it.
    """
    text = output_text(output)
    kinds = [plugins.load("targets", name) for name in _order()]
    found: ModuleType | None = next((kind for kind in kinds if kind.recognizes(text, format)), None)
    if found is None:
        raise UsageError(
            f"{redacted(text)}: cannot be written as {format}. Iceberg tables have a name in a catalog "
            "(iceberg:catalog.namespace.table); Parquet and Delta have a path or URL."
        )
    return found


def _order() -> list[str]:
    """Return the plug-ins, with the local folder last because it accepts every path."""
    return sorted(plugins.names("targets"), key=lambda name: (name in ("folder", "object_folder"), name))


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output of any kind, to write to."""

    text: str
    target: Target

    @property
    def place(self) -> Path:
        """A local path that stands for the output: input that must be stored first is stored beside it."""
        if self.target.staged:
            return local_output(self.text)  # as the caller names it: relative, or a link
        root, table = self.target.root, as_table(self.target)
        if root and not is_url(root):
            return Path(root)
        return temporary_folder(root or (table.address if table else self.text))

    @property
    def shared_folder(self) -> Path | None:
        """A folder that an engine's processes can reach; None for an output that is not in a local folder (yet)."""
        if not self.target.root or is_url(self.target.root):
            return None
        folder = self.place.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def path(self) -> Path | str:
        """The output as the caller names it: a folder's path, else a URL or a table's name."""
        return self.place if self.target.staged else self.target.shown

    def earlier(self) -> Earlier:
        """Return what is known about the interrupted write, or about the output itself."""
        return earlier_write(self.target)

    def latest_record(self) -> dict[str, Any]:
        """Return the record of torchlake's last commit; empty if there is none."""
        name = self.target.snapshot().latest
        return {} if name is None else read_record(self.target, name) or {}

    def begin(self, request: WriteRequest) -> AbstractContextManager[Transaction]:
        """Write the result of a plan, exactly once; see `transaction`."""
        return transaction(self.target, request)

    def refuse_input(self, files: Sequence[str]) -> None:
        """Raise UsageError if an input file is inside the output, which would replace it or add to it."""
        root = self.target.root
        if not root:
            return
        inside = f"{root.rstrip('/')}/" if is_url(root) else f"{os.path.realpath(root)}/"
        for file in files:
            if (file if is_url(file) else os.path.realpath(file)).startswith(inside):
                raise UsageError(
                    f"{self.path}: contains the input file {file}, which the output would replace or add to. Give "
                    "another output."
                )


def output_of(output: str | Path, options: TargetOptions | None = None) -> Output:
    """Return an output of any kind.

    Raises UsageError if no sink can write to it, MissingExtra when its library is not installed, OutputError and
    StorageError when it cannot be opened.
    """
    options, text = options or TargetOptions(), output_text(output)
    return Output(text=text, target=target_module(output, options.format).open_target(text, options))


def folder_output(output: str | Path) -> Output:
    """Return a local Parquet folder as an output. Raises UsageError for a URL."""
    text = os.fspath(output)
    return Output(text=text, target=plugins.load("targets", "folder").open_target(text, TargetOptions()))


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The rows of one commit of an output."""

    record: dict[str, Any]
    plan: dict[str, Any]
    "Of the commit, as JSON, like the record."
    folder: str
    "The path or URL where the parts in the record are."
    logged: Mapping[str, Logged]
    "What a table's log says about the parts, by their names."
    live: frozenset[str] | None
    "Names of the parts that a table still has; None if the output must have all parts and nothing else."


class CommittedRows(NamedTuple):
    """What torchlake committed to an output."""

    commits: list[Committed]
    notes: list[str]


def committed(output: str | Path) -> CommittedRows:
    """Return what torchlake committed to an output. Raises TableError when there is nothing."""
    target, notes, found = output_of(output).target, [], []
    snapshot, table = target.snapshot(), as_table(target)
    known = {} if table is None else table.logged(snapshot)
    for name in commits_of(target, snapshot):
        record, plan = read_record(target, name), read_record(target, name, plan=True)
        if record is None or plan is None:
            continue
        live = target.live(snapshot, record)
        if live or live is None or not record["parts"]:
            kept = None if live is None else frozenset(live)
            folder = parts_of(target, record)
            own = f"/{folder.rpartition('/')[2]}/"
            logged = {f"/{path}".rpartition(own)[2]: one for path, one in known.items() if own in f"/{path}"}
            found.append(Committed(record=record, plan=plan, folder=folder, live=kept, logged=logged))
        else:
            notes.append(f"commit {name[:16]}: the table no longer has rows in any of its files.")
    if not found and not notes:
        raise TableError(
            f"{output}: not a finished torchlake output: it has no commit, or the records or rows of its "
            "commits were deleted."
        )
    return CommittedRows(found, notes)


def open(output: str | Path) -> Any:
    """Return the committed rows of an output as a `pyarrow.dataset.Dataset`, and no others.

        tl.open("scored/").to_table(filter=pc.field("label") == "good")

    `output` is a Parquet folder, local or in an object store, a Delta table or an Iceberg table's name. Raises
    TableError or OutputError when nothing is committed there.
    """
    text = output_text(output)
    with library_errors(redacted(text), "Write it again with overwrite, or restore it."):
        return target_module(output).open_dataset(text)
