"""Store frames and streams that are scored into an output beside it, until the job ends.

The folder `.NAME.input` beside the output has its own lease: one process at a time stores rows there. It is removed
when the job ends, even with an error. A process that is killed leaves it; the same rows then make the same file, so
that the job resumes. Cost: one copy of the rows on disk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchlake.outputs.staging import folders as staging
from torchlake.outputs.staging.state import make_temporary_root
from torchlake.storage.lease import acquire
from torchlake.tables.sources import streams


@contextmanager
def spooled(source: Any, output: Path) -> Iterator[Any]:
    """Yield `source` with a path in place of each frame in memory and each stream, alone or in a list.

    The files are input.parquet, or input-0.parquet and so on in a list; row ids have these names. Raises TableError
    when a stream fails, Locked when another process stores the rows of this output, StorageError when the disk is full.
    """
    if not streams.is_stored_first(source):
        yield source
        return
    folder = output.with_name(f".{output.name}.input")
    make_temporary_root(folder)
    staging.vacuum(folder)
    lease = acquire(folder, name=str(output))
    try:
        if isinstance(source, list | tuple):
            yield [_stored(one, folder / f"input-{number}.parquet") for number, one in enumerate(source)]
        else:
            yield _stored(source, folder / "input.parquet")
    finally:
        staging.remove_leased(folder, lease)


def _stored(source: Any, path: Path) -> Any:
    if not streams.is_stored_first(source):
        return source
    streams.store(source, path)
    return streams.Stored(path, type(source).__name__)
