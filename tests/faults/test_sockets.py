"""Case 54h: training on two ranks listens on 127.0.0.1 and nowhere else; one rank, and scoring, listen on nothing."""

import os
import sys
from pathlib import Path

import pytest

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

    with distributed.joined(60.0) as group:
        import torch.distributed as dist

        distributed.barrier(group, "testing")
        if group.world_size == 1:
            return [listening()]
        every: list[list[str]] = [[] for _ in range(group.world_size)]
        dist.all_gather_object(every, listening())
        return every


def test_two_ranks_listen_on_this_machine_alone() -> None:
    addresses = Local().launch(_listening_in_a_group, processes=2)
    assert any(addresses), "the oracle sees the store of rank 0"
    assert {address for rank in addresses for address in rank} == {"0100007F"}


def test_one_rank_listens_on_nothing() -> None:
    assert Local().launch(_listening_in_a_group) == [[]]


def test_workers_listen_on_nothing() -> None:
    assert list(Local().run_chunks(_make_listener, [0, 1], processes=2)) == [[], []]


def _make_listener():
    return lambda chunks: (listening() for _ in chunks)
