"""The journal of a chunk whose rows take long: rows are kept as they end, so that the next attempt computes the others.

Each attempt at a chunk appends to a file of its own, and reads those of all attempts before it, dead or alive, on any
engine. A record is

    length (4 bytes) | keyed BLAKE2 of the rest (16) | kind (1), row (4), offset (4), mark of the row (8) | bytes

so a record that was torn by a kill, damaged, or made by another job is not read: the key is the part's name, a hash of
the input file, the chunk, the model and the options, and the mark is a hash of the row's own inputs. The records of a
row that has not ended are pieces of its result, each at its offset; one at offset 0 begins the row again.

On a file system each record is written at once, and synced every `SYNC_S` in case the machine is lost. In an object
store records wait up to `SYNC_S` and become an object. A chunk's files are removed when its part is written, and all of
them with the commit.
"""

import hashlib
import os
import secrets
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchlake.atomic_io import storage_error
from torchlake.errors import StorageError
from torchlake.failpoints import failpoint
from torchlake.storage.folders import Folder, folder_at
from torchlake.storage.urls import is_url

SYNC_S = 10.0
SUFFIX = ".rows"
CHECK, MARK = 16, 8
"Bytes of a checksum and of the hash of a row's inputs."
HEAD, BODY = struct.Struct("<I"), struct.Struct(f"<BII{MARK}s")
ENDED, PIECE = 0, 1


class Journal:
    """The journal of one attempt at the chunk whose part is `name`, in the folder or URL `location`.

    `marks` {row: hash of its inputs} are the rows of the chunk that are to be made. `known` {row: result} are those
    that an earlier attempt has finished, `begun` {row: first bytes of its result} others. Rows end in any order; one
    thread appends. Methods raise StorageError, also for what failed in the background since the last call.
    """

    def __init__(self, location: str, name: str, marks: Mapping[int, bytes]) -> None:
        self._folder, self._marks = folder_at(location), marks
        self._stem = name.partition(".")[0]
        self._key = hashlib.blake2b(name.encode()).digest()
        self.known: dict[int, bytes] = {}
        self.begun: dict[int, bytes] = {}
        self._files = sorted(_names(location, self._stem))
        for attempt in dict.fromkeys(map(_attempt, self._files)):
            self._learn(b"".join(_content(self._folder, one) for one in self._files if _attempt(one) == attempt))
        self._sink: _File | _Objects = (_Objects if is_url(location) else _File)(self._folder, self._stem)
        self._failed: StorageError | None = None
        self._ended = threading.Event()
        self._syncing = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._syncing.start()

    def append(self, row: int, result: bytes) -> None:
        """Keep the result of a row that has ended."""
        self._put(ENDED, row, 0, result)

    def extend(self, row: int, offset: int, piece: bytes) -> None:
        """Keep a piece of the result of a row that has not ended, after `offset` bytes kept by this attempt.

        A piece at offset 0 replaces what was kept.
        """
        self._put(PIECE, row, offset, piece)

    def close(self) -> None:
        """End this attempt, and keep what was appended for the next one."""
        self._stop()
        self._sink.sync()
        self._sink.close()

    def remove(self) -> None:
        """End this attempt, and remove its files and those it has read: the chunk's part is written."""
        self._stop()
        self._sink.close()
        failpoint("journal.remove")
        self._folder.delete([*self._files, *self._sink.names])

    def _stop(self) -> None:
        self._ended.set()
        self._syncing.join()

    def _put(self, kind: int, row: int, offset: int, content: bytes) -> None:
        if self._failed is not None:
            raise self._failed
        body = BODY.pack(kind, row, offset, self._marks[row]) + content
        self._sink.write(HEAD.pack(len(body)) + self._check(body) + body)

    def _check(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=CHECK, key=self._key).digest()

    def _learn(self, content: bytes) -> None:
        """Add the sound records of one attempt's file."""
        pieces: dict[int, bytes] = {}
        for body in _bodies(content):
            if body[0] != self._check(body[1]):
                continue
            kind, row, offset, mark = BODY.unpack_from(body[1])
            if self._marks.get(row) != mark:
                continue
            result = body[1][BODY.size :]
            if kind == ENDED:
                self.known[row] = result
            elif kind == PIECE and offset in (0, len(pieces.get(row, b""))):
                pieces[row] = pieces.get(row, b"")[:offset] + result
        self.begun |= {row: one for row, one in pieces.items() if len(one) > len(self.begun.get(row, b""))}
        self.begun = {row: one for row, one in self.begun.items() if row not in self.known}

    def _sync(self) -> None:
        while not self._ended.wait(SYNC_S):
            try:
                self._sink.sync()
            except StorageError as error:
                self._failed = error
                return


class _File:
    """A file that is appended to; a folder that is gone is an error, as for parts."""

    def __init__(self, folder: Folder, stem: str) -> None:
        self.names = [f"{stem}.{secrets.token_hex(6)}{SUFFIX}"]
        self._path = Path(folder.location, self.names[0])
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise storage_error(error, self._path) from error

    def write(self, record: bytes) -> None:
        try:
            failpoint("journal.write")
            written = os.write(self._file, record)
            while written < len(record):  # an error of the disk comes with the next call
                written += os.write(self._file, record[written:])
        except OSError as error:
            raise storage_error(error, self._path, len(record)) from error
        failpoint("journal.done")

    def sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise storage_error(error, self._path) from error

    def close(self) -> None:
        os.close(self._file)


class _Objects:
    """Objects of an attempt, numbered; each has the records since the one before."""

    def __init__(self, folder: Folder, stem: str) -> None:
        self.names: list[str] = []
        self._folder, self._stem = folder, f"{stem}.{secrets.token_hex(6)}"
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def write(self, record: bytes) -> None:
        with self._lock:
            self._waiting.append(record)

    def sync(self) -> None:
        with self._lock:
            block, self._waiting = b"".join(self._waiting), []
        if block:
            self.names.append(f"{self._stem}-{len(self.names):06d}{SUFFIX}")
            self._folder.write_new(self.names[-1], block, site="journal")

    def close(self) -> None:
        pass


def _names(location: str, stem: str) -> Iterator[str]:
    if is_url(location):
        names = list(folder_at(location).sizes())
    else:
        names = os.listdir(location) if os.path.isdir(location) else []
    return (name for name in names if name.startswith(f"{stem}.") and name.endswith(SUFFIX))


def _attempt(name: str) -> str:
    """Return the part of a file's name that all blocks of an attempt share."""
    return name.removesuffix(SUFFIX).rpartition(".")[2].partition("-")[0]


def _content(folder: Folder, name: str) -> bytes:
    return folder.content(name) or b""  # removed since it was listed


def _bodies(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the checksum and the body of each record, up to one that does not fit."""
    place = 0
    while place + HEAD.size + CHECK <= len(content):
        (length,) = HEAD.unpack_from(content, place)
        start = place + HEAD.size + CHECK
        place = start + length
        if length < BODY.size or place > len(content):
            return
        yield content[start - CHECK : start], content[start:place]
