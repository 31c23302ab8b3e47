"""A journal gives back what its attempts have kept, and nothing else: not what is torn, damaged or of another job."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import s3_server
from s3_server import BUCKET
from torchlake.errors import StorageError
from torchlake.jobs.worker import journal
from torchlake.jobs.worker.journal import Journal

PART = "part-00003-0123456789abcdef.parquet"
ROWS = 6
MARKS = {row: bytes([row + 1]) * journal.MARK for row in range(ROWS)}
Kept = tuple[int, bytes, bool]
"A row, bytes, and whether the row has ended; else the bytes are a piece."
KEPT = st.lists(st.tuples(st.integers(0, ROWS - 1), st.binary(min_size=1, max_size=9), st.booleans()), max_size=12)


def keep(one: Journal, kept: list[Kept]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Write to a journal, and return the rows that ended and the pieces of each row so far."""
    known: dict[int, bytes] = {}
    begun: dict[int, bytes] = {}
    for row, content, ended in kept:
        if ended:
            one.append(row, content)
            known[row] = content
        else:
            one.extend(row, len(begun.get(row, b"")), content)
            begun[row] = begun.get(row, b"") + content
    return known, begun


def read(location: Path | str, name: str = PART, marks: dict[int, bytes] | None = None) -> Journal:
    one = Journal(str(location), name, MARKS if marks is None else marks)
    one.close()
    return one


@given(attempts=st.lists(KEPT, min_size=1, max_size=4), at_once=st.booleans())
def test_the_next_attempt_knows_what_all_have_kept(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[list[Kept]], at_once: bool
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "rows"
    whole: dict[int, set[bytes]] = {}
    begun: dict[int, int] = {}
    opened = [Journal(str(folder), PART, MARKS) for _ in attempts if at_once]
    for kept in attempts:
        one = opened.pop() if at_once else Journal(str(folder), PART, MARKS)
        known, pieces = keep(one, kept)
        one.close()
        for row, content in known.items():
            whole.setdefault(row, set()).add(content)
        for row, content in pieces.items():
            begun[row] = max(begun.get(row, 0), len(content))
    last = Journal(str(folder), PART, MARKS)
    assert last.known.keys() == whole.keys()
    assert all(content in whole[row] for row, content in last.known.items())
    assert {row: len(content) for row, content in last.begun.items()} == {
        row: length for row, length in begun.items() if row not in whole
    }
    last.remove()
    assert list(folder.iterdir()) == []


def test_a_row_that_begins_again_replaces_what_was_kept(tmp_path: Path) -> None:
    one = Journal(str(tmp_path / "rows"), PART, MARKS)
    for offset, piece in ((0, b"abc"), (3, b"def"), (0, b"ab"), (2, b"x"), (9, b"lost")):
        one.extend(2, offset, piece)
    one.close()
    assert read(tmp_path / "rows").begun == {2: b"abx"}


@given(kept=KEPT.filter(bool), damage=st.data())
def test_what_is_torn_or_damaged_is_not_read(
    tmp_path_factory: pytest.TempPathFactory, kept: list[Kept], damage: st.DataObject
) -> None:
    """A file that ends anywhere, or has any byte changed: every row that is read is as it was kept, and a file that was
    only cut has all records before the cut."""
    folder = tmp_path_factory.mktemp("journal") / "rows"
    one = Journal(str(folder), PART, MARKS)
    file, sizes = next(folder.iterdir()), [0]
    for number in range(len(kept)):
        keep(one, kept[number : number + 1] if kept[number][2] else [])
        sizes.append(file.stat().st_size)
    one.close()
    content = file.read_bytes()
    ended = [row for row in kept if row[2]]
    if not content:
        return
    place = damage.draw(st.integers(0, len(content) - 1))
    file.write_bytes(content[:place])
    whole = sum(size <= place for size in sorted(set(sizes))) - 1
    assert read(folder).known == {row: bytes_ for row, bytes_, _ in ended[:whole]}
    file.write_bytes(
        content[:place] + bytes([content[place] ^ damage.draw(st.integers(1, 255))]) + content[place + 1 :]
    )
    found = read(folder).known
    assert all((row, bytes_, True) in kept for row, bytes_ in found.items())


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("part-00003-0123456789abcde0.parquet", MARKS),
        (PART, {row: b"other" + bytes([row] * 3) for row in range(ROWS)}),
        (PART, {row + ROWS: mark for row, mark in MARKS.items()}),
    ],
)
def test_another_job_or_changed_row_finds_nothing(tmp_path: Path, name: str, marks: dict[int, bytes]) -> None:
    """The part's name is a hash of model, options and chunk; a file under a wrong name fails its checksums."""
    one = Journal(str(tmp_path), PART, MARKS)
    keep(one, [(0, b"text", True), (1, b"piece", False)])
    one.close()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / file.name.replace(PART.partition(".")[0], name.partition(".")[0]))
    other = read(tmp_path, name, marks)
    assert (other.known, other.begun) == ({}, {})


def test_a_full_disk_is_named_and_costs_the_last_record_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchlake.failpoints._hits", {})
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "journal.write:3:enospc")
    one = Journal(str(tmp_path), PART, MARKS)
    keep(one, [(0, b"a", True), (1, b"b", True)])
    with pytest.raises(StorageError, match=r"rows: .*No space left.* bytes are free.*run the same command again"):
        one.append(2, b"c")
    one.close()
    assert read(tmp_path).known == {0: b"a", 1: b"b"}


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        Journal(str(tmp_path / "gone" / "rows"), PART, MARKS)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with s3_server.serving() as server:
        yield server


def test_in_a_bucket_records_are_kept_in_blocks(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses what it has kept since the last block."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(journal, "SYNC_S", 1e6)
    location = f"s3://{BUCKET}/out/_torchlake/staging/rows"
    killed = Journal(location, PART, MARKS)
    keep(killed, [(0, b"a", True), (1, b"half", False)])
    killed._sink.sync()
    keep(killed, [(2, b"lost", True)])
    following = Journal(location, PART, MARKS)
    assert (following.known, following.begun) == ({0: b"a"}, {1: b"half"})
    keep(following, [(1, b"half and all", True)])
    following.close()
    last = Journal(location, PART, MARKS)
    assert (last.known, last.begun) == ({0: b"a", 1: b"half and all"}, {})
    last.remove()
    assert read(location).known == {}
