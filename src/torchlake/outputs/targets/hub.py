"""Datasets of the Hugging Face Hub, `hf://datasets/OWNER/NAME[@BRANCH][/FOLDER]`: one commit has rows and record.

    data/<commit>/*.parquet                              the rows
    .torchlake/commit.json   .torchlake/plan.json        the record; `datasets` and the viewer ignore the folder

Parts wait in a folder of this machine, $HF_HOME/torchlake, which workers on other machines must share. The commit names
its parent, so the Hub refuses it if another one was made since. If the answer to a commit is lost,
`outputs/transaction.py` looks whether the record in the repository is the commit's.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import atomic_io
from torchlake.errors import DataError, OutputError, StorageError, UsageError
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.records import FOLDER
from torchlake.outputs.target import Change, CommitUnknown, Conflict, TargetOptions, refuse_table_options
from torchlake.redaction import redacted
from torchlake.storage.errors import first_line, storage_failure
from torchlake.storage.folders import LocalFolder
from torchlake.tables.record import is_record, recorded_schema

_NAME = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.+))?")
RECORD, PLAN = ".torchlake/commit.json", ".torchlake/plan.json"
REFUSED = (400, 401, 403, 404, 422)


@dataclass(frozen=True, kw_only=True)
class HubSnapshot:
    """A revision of the repository."""

    version: str
    "The git revision."
    sizes: Mapping[str, int]
    "Sizes of the files below the folder, by their names in it."
    record: dict[str, Any] | None

    @property
    def latest(self) -> str | None:
        """The commit of the record."""
        return None if self.record is None else str(self.record["commit"])


@dataclass(frozen=True, kw_only=True)
class HubTarget:
    """A folder of a dataset's repository as an output."""

    shown: str
    root: str
    "The folder on this machine."
    repo: str
    revision: str
    folder: str
    "The folder in the repository: empty, or ending with a slash."
    options: TargetOptions
    partition_by: tuple[str, ...] = ()
    reusable: bool = False
    staged: bool = False

    def snapshot(self) -> HubSnapshot:
        """Return the newest version; its record and plan are stored on this machine."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        with self._errors():
            version = HfApi().dataset_info(self.repo, revision=self.revision).sha
            assert version is not None
            try:
                tree = HfApi().list_repo_tree(
                    self.repo, self.folder.rstrip("/") or None, recursive=True, revision=version, repo_type="dataset"
                )
                sizes = {one.path.removeprefix(self.folder): one.size for one in tree if isinstance(one, RepoFile)}
            except EntryNotFoundError:
                sizes = {}
            record = json.loads(self._content(RECORD, version)) if RECORD in sizes else None
            if record is not None and not (is_record(record) and "commit" in record):
                raise DataError(f"{self.shown}/{RECORD}: not a commit record of this version")
            if record is not None and not (Path(self.root) / f"{FOLDER}/{record['commit']}.json").is_file():
                local, name = LocalFolder(Path(self.root)), f"{FOLDER}/{record['commit']}"
                Path(self.root).mkdir(parents=True, exist_ok=True)
                local.write(f"{name}.plan.json", self._content(PLAN, version), site="hub.plan")
                local.write(f"{name}.json", json.dumps(record, indent=1).encode(), site="hub.record")
        return HubSnapshot(version=version, sizes=sizes, record=record)

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return a folder of this commit."""
        return PartFolder(location=f"{self.root}/{self.folder}data/{commit[:16]}")

    def check(self, snapshot: HubSnapshot, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError for a folder with other rows."""
        if self.options.mode == "create" and (rows := _rows(snapshot)):
            raise OutputError(
                f"{self.shown}: has rows that this job did not write, such as {rows[0]}. Replace them with mode "
                "overwrite, or give another output."
            )

    def has(self, snapshot: HubSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether the record is of this commit and, if it is given, its files are all, each with its size."""
        if snapshot.latest != commit:
            return False
        return record is None or {name: snapshot.sizes[name] for name in _rows(snapshot)} == _recorded(record)

    def live(self, snapshot: HubSnapshot, record: Mapping[str, Any]) -> set[str]:
        """Return the parts that are there, each one downloaded."""
        from huggingface_hub import hf_hub_download

        found = set()
        for name, size in _recorded(record).items():
            if name in snapshot.sizes:
                here = Path(self.root) / self.folder / name
                if not (here.is_file() and here.stat().st_size == size):
                    with self._errors():
                        where: Any = {"repo_type": "dataset", "revision": snapshot.version, "local_dir": self.root}
                        hf_hub_download(self.repo, f"{self.folder}{name}", **where)
                found.add(name.rpartition("/")[2])
        return found

    def commit(self, snapshot: HubSnapshot, change: Change) -> Mapping[str, Any]:
        """Upload the parts, then make one commit on top of this version."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
        from huggingface_hub.errors import HfHubHTTPError

        parts, plan = self.part_folder(change.id, change.schema).location, f"{FOLDER}/{change.id}.plan.json"
        files: dict[str, Any] = {f"data/{change.id[:16]}/{one.name}": f"{parts}/{one.name}" for one in change.files}
        files |= {RECORD: json.dumps(change.record, indent=1).encode(), PLAN: (Path(self.root) / plan).read_bytes()}
        added = [CommitOperationAdd(f"{self.folder}{name}", content) for name, content in files.items()]
        gone = [CommitOperationDelete(f"{self.folder}{name}") for name in _rows(snapshot) if name not in files]
        with self._errors():
            HfApi().preupload_lfs_files(
                self.repo, added, repo_type="dataset", revision=self.revision, free_memory=False
            )
        try:
            HfApi().create_commit(
                self.repo,
                [*added, *gone],
                commit_message=f"Write {change.record['rows']:,} rows with torchlake",
                commit_description=f"torchlake commit {change.id}",
                repo_type="dataset",
                revision=self.revision,
                parent_commit=snapshot.version,
            )
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (409, 412):  # another commit is on top of `parent_commit`
                raise Conflict(_first_line(error)) from error
            if status in REFUSED:
                raise StorageError(f"{self.shown}: the Hub refused the commit: {_first_line(error)}.") from error
            raise CommitUnknown(_first_line(error)) from error
        except Exception as error:  # of the HTTP library
            raise CommitUnknown(_first_line(error)) from error
        # huggingface_hub drops files that the repository's .gitignore matches, with a log line only. The record would
        # then list files that are not there.
        if not set(files) <= set(self.snapshot().sizes):
            raise OutputError(
                f"{self.shown}: the Hub left out files of the commit. Check whether a .gitignore matches them."
            )
        shutil.rmtree(parts, ignore_errors=True)
        return change.record

    def _content(self, name: str, version: str) -> bytes:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(self.repo, f"{self.folder}{name}", repo_type="dataset", revision=version)
        return Path(path).read_bytes()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the Hub into OutputError and StorageError."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            yield
        except (OutputError, DataError):
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise OutputError(
                f"{self.shown}: the Hub has no such dataset or branch, or HF_TOKEN has no access. Create it: "
                f"hf repos create {self.repo} --repo-type dataset"
            ) from error
        except Exception as error:  # of the HTTP library
            raise storage_failure(self.shown, error) from error


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is a URL of the Hub."""
    return format in (None, "parquet") and output.startswith("hf://")


def open_target(output: str, options: TargetOptions) -> HubTarget:
    """Return the dataset at a URL, which must exist. Raises UsageError for options that the Hub does not support."""
    from huggingface_hub import constants

    match = _NAME.fullmatch(output.rstrip("/"))
    if match is None:
        raise UsageError(
            f"{redacted(output)}: write a dataset as hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME/FOLDER."
        )
    refuse_table_options(output, options, kind="a dataset")
    revision, folder = match["revision"] or constants.DEFAULT_REVISION, match["folder"] or ""
    root = Path(constants.HF_HOME) / "torchlake" / atomic_io.digest([constants.ENDPOINT, output.rstrip("/")])[:16]
    return HubTarget(
        shown=output.rstrip("/"),
        root=str(root),
        repo=match["repo"],
        revision=revision,
        folder=f"{folder}/" if folder else "",
        options=options,
    )


def open_dataset(output: str) -> Any:
    """Return the committed rows as a pyarrow dataset. Raises OutputError when nothing is committed."""
    import pyarrow.dataset as ds

    from torchlake.storage.urls import filesystem_of

    target = open_target(output, TargetOptions())
    snapshot = target.snapshot()
    if snapshot.record is None:
        raise OutputError(f"{output}: has no committed rows yet.")
    filesystem, top = filesystem_of(f"hf://datasets/{target.repo}@{snapshot.version}")
    files = [f"{top}/{target.folder}{name}" for name in _recorded(snapshot.record)]
    return ds.dataset(files, schema=recorded_schema(snapshot.record), format="parquet", filesystem=filesystem)


def _rows(snapshot: HubSnapshot) -> list[str]:
    """Return the files with rows."""
    return sorted(name for name in snapshot.sizes if name.endswith(".parquet"))


def _recorded(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a record's files, by their names in the repository."""
    return {f"data/{record['commit'][:16]}/{part['name']}": part["bytes"] for part in record["parts"]}


def _first_line(error: Exception) -> str:
    return str(redacted(first_line(error)))
