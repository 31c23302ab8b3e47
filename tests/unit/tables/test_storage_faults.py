"""Writing to an object store that fails: lost answers, conflicts that are none, and stores that stay broken."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import s3_server
from fault_proxy import FaultProxy, between
from s3_server import BUCKET
from sweeps import sweep
from torchlake.errors import LeaseLost, StorageError, Unavailable
from torchlake.storage import objects
from torchlake.storage.errors import storage_errors
from torchlake.storage.lease import NAME, Lease, acquire
from torchlake.storage.objects import ObjectFolder

TRANSIENT: list[dict[str, Any]] = [
    {"answer": 500},
    {"answer": 503, "times": 2},
    {"answer": 409},
    {"answer": None},
    {"answer": 500, "passed": True},
    {"answer": 409, "passed": True},
    {"answer": None, "passed": True},
    {"answer": 412, "passed": True},
]
"One or two answers; the last four are of requests that the store has done."
SOME = sweep(TRANSIENT, quick=[TRANSIENT[1], TRANSIENT[5], TRANSIENT[6]])


@pytest.fixture(scope="module")
def shared() -> Iterator[FaultProxy]:
    with s3_server.serving() as server, between(server) as proxy:
        yield proxy


@pytest.fixture
def store(shared: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setattr(objects, "RETRIES", 2)
    for name, value in shared.behind.environment.items():
        monkeypatch.setenv(name, value)
    shared.clear()
    yield shared
    shared.clear()


@pytest.fixture
def folder(store: FaultProxy, tmp_path: Path) -> ObjectFolder:
    return ObjectFolder(f"s3://{BUCKET}/{tmp_path.name}")


def puts(store: FaultProxy, name: str) -> int:
    return sum(method == "PUT" and path.endswith(name) for method, path in store.requests)


@pytest.mark.parametrize("how", TRANSIENT, ids=str)
def test_an_object_is_created_although_an_answer_is_wrong(
    store: FaultProxy, folder: ObjectFolder, how: dict[str, Any]
) -> None:
    fault = store.fail("PUT", "/x$", **how)
    assert folder.write_new("x", b"mine", site="test")
    assert fault.hit == how.get("times", 1)
    assert folder.content("x") == b"mine"
    assert not folder.write_new("x", b"other", site="test")
    assert folder.write_new("x", b"mine", site="test")
    assert folder.content("x") == b"mine"


@pytest.mark.parametrize("how", SOME, ids=str)
def test_an_object_is_replaced_although_an_answer_is_wrong(
    store: FaultProxy, folder: ObjectFolder, how: dict[str, Any]
) -> None:
    folder.write("x", b"first", site="test")
    first = folder.read("x")
    assert first is not None
    fault = store.fail("PUT", "/x$", **how)
    assert folder.replace("x", b"mine", first, site="test")
    assert fault.hit == how.get("times", 1)
    assert folder.content("x") == b"mine"
    assert not folder.replace("x", b"other", first, site="test")
    folder.delete(["x"])
    assert not folder.replace("x", b"other", first, site="test")
    assert folder.content("x") is None


def test_a_lost_success_that_another_writer_has_replaced_is_not_ours(store: FaultProxy, folder: ObjectFolder) -> None:
    """The first answer is lost, and before the client asks again another writer replaces the object."""
    folder.write("x", b"first", site="test")
    first = folder.read("x")
    assert first is not None
    fault = store.fail("PUT", "/x$", answer=503)
    store.server.put(f"{folder.location.partition(BUCKET)[2][1:]}/x", b"of another writer")
    assert not folder.replace("x", b"mine", first, site="test")
    assert fault.hit == 1
    assert folder.content("x") == b"of another writer"


@pytest.mark.parametrize(
    ("answer", "said"),
    [(409, "refused to create it"), (412, "but it does not exist"), (503, "503|SlowDown"), (500, "500")],
)
def test_a_store_that_stays_broken_is_an_error(store: FaultProxy, folder: ObjectFolder, answer: int, said: str) -> None:
    store.fail("PUT", "/x$", answer=answer, times=10**6)
    with pytest.raises(StorageError, match=said) as error:
        folder.write_new("x", b"mine", site="test")
    assert f"{folder.location}/x: " in str(error.value)
    assert "Run the same command again" in str(error.value)
    assert puts(store, "/x") <= 30
    assert folder.content("x") is None


def test_missing_permission_names_the_credentials(store: FaultProxy, folder: ObjectFolder) -> None:
    store.fail("PUT", "/x$", answer=403, times=10**6)
    with pytest.raises(StorageError, match=r"Credentials come from AWS_ACCESS_KEY_ID"):
        folder.write("x", b"mine", site="test")
    assert puts(store, "/x") == 1, "permission does not come by asking again"


@pytest.mark.parametrize("how", [{"answer": 500}, {"answer": None}, {"answer": 503, "times": 2}], ids=str)
def test_reading_and_listing_ask_again(store: FaultProxy, folder: ObjectFolder, how: dict[str, Any]) -> None:
    for name in ("a", "b/c"):
        folder.write(name, name.encode(), site="test")
    fault = store.fail("GET", "/a$", **how)
    assert folder.content("a") == b"a"
    listing = store.fail("GET", r"list-type", **how)
    assert folder.sizes() == {"a": 1, "b/c": 3}
    assert folder.sizes("b") == {"b/c": 3}
    assert fault.hit == listing.hit == how.get("times", 1)
    assert folder.content("none") is None


def test_damage_is_replaced_unless_another_writer_did(store: FaultProxy, folder: ObjectFolder) -> None:
    folder.write("x", b"damaged", site="test")
    folder.replace_damaged("x", b"damaged", b"mine", site="test")
    assert folder.content("x") == b"mine"
    folder.replace_damaged("x", b"damaged", b"late", site="test")
    folder.replace_damaged("none", b"damaged", b"late", site="test")
    assert folder.sizes() == {"x": 4}
    assert folder.content("x") == b"mine"


def test_more_objects_than_one_request_takes_are_deleted(store: FaultProxy, folder: ObjectFolder) -> None:
    for number in range(12):
        folder.write(f"{number}", b"", site="test")
    folder.delete([*(f"none-{number}" for number in range(1500)), *map(str, range(12))])
    assert folder.sizes() == {}


def held(folder: ObjectFolder) -> dict[str, Any]:
    return dict(json.loads(folder.content(NAME) or b"{}"))


@pytest.fixture
def lease(folder: ObjectFolder) -> Iterator[Lease]:
    """One that is renewed only when the test asks for it."""
    lease = acquire(folder, 3600.0, name="out")
    yield lease
    lease.stop()


@pytest.mark.parametrize("how", SOME, ids=str)
def test_a_lease_is_acquired_and_renewed_although_an_answer_is_wrong(
    store: FaultProxy, folder: ObjectFolder, how: dict[str, Any]
) -> None:
    store.fail("PUT", NAME, **how)
    lease = acquire(folder, 3600.0, name="out")
    lease.check()
    for _ in range(3):
        store.fail("PUT", NAME, **how)
        lease.renew()
        lease.check()
    lease.release()
    assert held(folder)["released"]


def test_a_renewal_whose_success_was_never_heard_of_does_not_end_the_lease(
    store: FaultProxy, folder: ObjectFolder, lease: Lease
) -> None:
    fault = store.fail("PUT", NAME, answer=500, passed=True, times=10**6)
    store.fail("GET", NAME, answer=500, nth=2, times=10**6)
    with pytest.raises(StorageError):
        lease.renew()
    assert fault.hit
    store.clear()
    lease.renew()
    lease.check()


def test_a_lease_that_was_taken_over_is_not_renewed(folder: ObjectFolder, lease: Lease) -> None:
    other = json.dumps({**held(folder), "token": "another", "host": "elsewhere", "pid": 7}).encode()
    folder.write(NAME, other, site="test")
    for late in (lease.renew, lease.check):
        with pytest.raises(LeaseLost, match="taken over by pid 7 on elsewhere"):
            late()
    lease.release()
    assert folder.content(NAME) == other


def test_requests_are_few(store: FaultProxy, folder: ObjectFolder) -> None:
    """A part is one request."""
    assert folder.write_new("part", b"rows", site="part")
    assert [(method, re.sub(r"\?.*", "", path)) for method, path in store.requests] == [
        ("PUT", f"/{folder.location.partition('://')[2]}/part")
    ]


def test_a_null_byte_in_the_name_of_a_file_is_an_error_of_ours(tmp_path: Path) -> None:
    """A damaged log may have one; Python raises a ValueError."""
    with pytest.raises(Unavailable, match=r"part\\0.parquet: embedded null byte"), storage_errors("part\0.parquet"):
        (tmp_path / "part\0.parquet").stat()
