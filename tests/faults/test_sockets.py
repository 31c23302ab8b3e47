"""Case 54h: training on two ranks listens on 127.0.0.1 only; one rank, and chunk jobs, listen on nothing."""

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

import forked
from sweeps import sweep
from torchlake import plugins
from torchlake.engines.local import Local

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
LISTEN = "0A"


def listening() -> list[str]:
    """The addresses on which this process listens, as the kernel writes them (127.0.0.1 is 0100007F)."""
    mine = set()
    for link in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{link}").removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in mine:
                found.append(fields[1].split(":")[0])
    return found


def _listening_in_a_group() -> list[list[str]]:
    from torchlake import distributed

    with distributed.process_group(60.0) as group:
        import torch.distributed as dist

        distributed.barrier(group, "testing")
        if group.world_size == 1:
            return [listening()]
        every: list[list[str]] = [[] for _ in range(group.world_size)]
        dist.all_gather_object(every, listening())
        return every


def test_two_ranks_listen_on_this_machine_alone() -> None:
    with forked.children_are_forked():
        addresses = Local().launch(_listening_in_a_group, processes=2)
    assert any(addresses), "the oracle sees the store of rank 0"
    assert {address for rank in addresses for address in rank} == {"0100007F"}


@pytest.mark.slow
def test_one_rank_listens_on_nothing() -> None:
    assert Local().launch(_listening_in_a_group) == [[]]


@pytest.mark.parametrize("name", sweep(plugins.names("engines"), quick={"local", "ray"}))
def test_a_chunk_job_listens_on_nothing(name: str, request: pytest.FixtureRequest) -> None:
    """Neither its workers nor the driver, besides what the engine itself had before."""
    if name != "local":
        request.getfixturevalue(name)
    engine = getattr(plugins.load("engines", name), name.title())(processes=2)
    assert list(engine.run_chunks(_make_listener, [0, 1])) == [[], []], "Ray's and Spark's own sockets are made first"
    before = sorted(listening())
    with closing(engine.run_chunks(_make_listener, range(4))) as results:
        assert next(results) == []
        assert sorted(listening()) == before
        assert list(results) == [[]] * 3


def _make_listener():
    return lambda chunks: (listening() for _ in chunks)
