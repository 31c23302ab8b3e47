"""Jobs that write into an object store whose answers fail: each row once, or an error that says what to do."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import s3_server
from fault_proxy import FaultProxy, between
from sink_jobs import Output, source_rows, write_source
from sink_kinds import KINDS, Place
from sweeps import sweep
from torchlake.errors import AccessError, StorageError
from torchlake.storage import objects

ALL = list(range(7))
REMOTE = ["object_folder", "delta_on_s3"]
FAULTS: dict[str, dict[str, Any]] = {
    "500": {"answer": 500},
    "lost 500": {"answer": 500, "passed": True},
    "lost connection": {"answer": None, "passed": True},
    "no connection": {"answer": None},
    "409": {"answer": 409},
    "lost 409": {"answer": 409, "passed": True},
    "412": {"answer": 412},
    "lost 412": {"answer": 412, "passed": True},
    "503 twice": {"answer": 503, "times": 2},
}


@pytest.fixture(scope="module")
def store() -> Iterator[FaultProxy]:
    with s3_server.serving() as server, between(server) as proxy:
        yield proxy


@pytest.fixture(params=REMOTE)
def output(request: pytest.FixtureRequest, tmp_path: Path, store: FaultProxy) -> Iterator[Output]:
    """Jobs go through the proxy; the rows are read beside it."""
    store.clear()
    place = Place(folder=tmp_path, server=store.server, variables=store.behind.environment)
    yield Output(kind=KINDS[request.param], place=place)
    store.clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", source_rows(7))


def written(output: Output, source: Path, store: FaultProxy) -> int:
    """How many objects a job writes."""
    output.at("all").computed(source, target_file_size=2500)
    count = sum(method == "PUT" for method, _ in store.requests)
    store.clear()
    return count


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", sweep(FAULTS, quick={"lost 500", "lost 412"}))
def test_any_write_whose_answer_fails(output: Output, source: Path, store: FaultProxy, fault: str, every: int) -> None:
    """The job succeeds, or says what to do and succeeds when it is run again; no row is lost or doubled."""
    for number in range(1 + len(fault) % every, written(output, source, store) + 1, every):
        there = output.at(f"{number}")
        armed = store.fail("PUT", f"/{there.place.key}/", nth=number, **FAULTS[fault])
        said = there.run(source, target_file_size=2500) or {}
        assert armed.hit
        store.clear()
        if "error" in said:
            assert "StorageError: " in said["error"], (number, said)
            assert fault == "412", f"{number}: {said}"
            assert there.ids() in ([], ALL)
        else:
            assert there.ids() == ALL, number
        there.computed(source, target_file_size=2500)
        assert there.ids() == ALL, number
        assert there.computed(source, target_file_size=2500) == 0


@pytest.mark.parametrize(
    ("output", "answer", "what"),
    sweep(
        product(REMOTE, [500, 503, 409, 403], ["commit", "part"]),
        quick={("object_folder", 500, "commit"), ("delta_on_s3", 403, "part")},
    ),
    indirect=["output"],
)
def test_a_store_that_stays_broken_ends_the_job(
    output: Output, source: Path, store: FaultProxy, answer: int, what: str
) -> None:
    names = {"commit": r"/_delta_log/.*json|_torchlake/commit\.json", "part": r"part-00002"}
    store.fail("PUT", names[what], answer=answer, times=10**6)
    said = output.run(source) or {}
    refused = answer == 403
    assert said.get("error", "").startswith("AccessError: " if refused else "StorageError: "), said
    assert output.place.url in said["error"]
    assert ("Credentials come from" if refused else "again") in said["error"]
    assert output.ids() == []
    store.clear()
    assert output.computed(source) == (0 if what == "commit" else 2)
    assert output.ids() == ALL


@pytest.mark.parametrize("mode", sweep(["append", "overwrite"], quick={"append"}))
def test_a_lost_commit_that_another_writer_has_built_upon(
    tmp_path: Path, source: Path, store: FaultProxy, mode: str
) -> None:
    """The commit is made, its answer is lost, another writer commits, and only then is the table looked at."""
    place = Place(folder=tmp_path, server=store.server, variables=store.behind.environment)
    output = Output(kind=KINDS["delta_on_s3"], place=place)
    output.computed(source, version=1)
    other = output.kind.read(place)
    assert other is not None

    def append() -> None:
        assert output.kind.append is not None
        output.kind.append(place, other.slice(0, 1))

    first_id = other["id"][0].as_py()
    lost = store.fail("PUT", r"/_delta_log/0*2\.json", answer=503, passed=True, then=append)
    assert output.run(source, version=2, mode=mode) == {"computed": 4}
    assert lost.hit
    assert output.ids() == sorted([*ALL, first_id, *(ALL if mode == "append" else [])])
    assert output.run(source, version=2, mode=mode) == {"computed": 4 if mode == "overwrite" else 0}


@pytest.mark.parametrize("answer", [403, 500])
def test_a_number_in_a_name_is_no_answer_of_the_store(
    store: FaultProxy, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """A conflict (409) is tried again; names have hashes, in which any number may be."""
    for name, value in store.behind.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "RETRIES", 1)
    store.clear()
    store.fail("PUT", "part-409", answer=answer, times=10**6)
    with pytest.raises(AccessError if answer == 403 else StorageError, match=f"status code: {answer}"):
        objects.ObjectFolder("s3://lake/numbers").write_new("part-409", b"1", site="part")
    store.clear()
