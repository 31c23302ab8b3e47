"""Seats without an engine: shells that are plain processes here, so that they can be killed, doubled and lied to."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil
import pytest

from pids import gone, note, pid, wait_for
from torchlake.engines import _seats, _shell
from torchlake.engines._chunks import hand_out
from torchlake.engines._crossing import LOST, pack
from torchlake.engines._ranks import run_ranks
from torchlake.engines._seats import Seats, group_variables
from torchlake.engines._shell import Address, Facts, sit
from torchlake.errors import RankFailed

_SHELL = (
    "import sys; from torchlake.engines._shell import sit; "
    "sit((sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]), int(sys.argv[4]))"
)


class Processes:
    """A placement: every seat is filled by as many processes as `twins` says, and not filled again."""

    def __init__(self, seats: int, *, together: bool = False, twins: int = 1) -> None:
        self.seats, self.together = seats, together
        self.runs = 0
        self.shells: list[subprocess.Popen[bytes]] = []
        self._twins = twins

    def run(self, address: Address, key: bytes) -> None:
        self.runs += 1
        mine = [self.sit(address, key, seat) for seat in range(self.seats) for _ in range(self._twins)]
        for shell in mine:
            shell.wait()

    def sit(self, address: Address, key: bytes, seat: int) -> "subprocess.Popen[bytes]":
        words = [address[0], str(address[1]), key.hex(), str(seat)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        shell = subprocess.Popen([sys.executable, "-c", _SHELL, *words], env=environment)
        self.shells.append(shell)
        return shell

    def cancel(self) -> None:
        for shell in self.shells:
            shell.kill()
            shell.wait()


def work(placement: Any, make_worker: Callable[[], Any], chunks: int, workers: int) -> Iterator[Any]:
    seats = Seats(placement, host="127.0.0.1")
    return hand_out(pack(make_worker), list(range(chunks)), [{}] * workers, seats)


def test_a_shell_that_is_killed_is_placed_again_and_its_chunk_runs_again(tmp_path: Path) -> None:
    placement = Processes(1)
    with closing(work(placement, lambda: _stops_at_two(tmp_path), 5, 1)) as results:
        assert [next(results), next(results)] == [0, 1]
        child = pid(tmp_path, "worker")
        placement.shells[0].send_signal(signal.SIGKILL)
        wait_for(lambda: gone(child))
        (tmp_path / "go").touch()
        assert sorted(results) == [2, 3, 4]
    assert placement.runs == 2


def test_a_twin_waits_and_takes_the_seat_over(tmp_path: Path) -> None:
    placement = Processes(1, twins=2)
    with closing(work(placement, lambda: _stops_at_two(tmp_path), 5, 1)) as results:
        assert [next(results), next(results)] == [0, 1]
        (sitting,) = [shell for shell in placement.shells if psutil.Process(shell.pid).children(recursive=True)]
        child = pid(tmp_path, "worker")
        sitting.send_signal(signal.SIGKILL)
        wait_for(lambda: gone(child))
        (tmp_path / "go").touch()
        assert sorted(results) == [2, 3, 4]
    assert placement.runs == 1
    assert [shell.wait() for shell in placement.shells if shell is not sitting] == [0]


def test_what_is_said_to_a_lost_child_does_not_reach_its_successor(tmp_path: Path) -> None:
    placement = Processes(1, twins=2)
    with Seats(placement, host="127.0.0.1") as seats:
        lost = seats.start(0, "worker", pack(lambda: _stops_at_two(tmp_path)), {})
        assert [seats.events.get(timeout=60)[1] for _ in range(2)] == ["ready", "pull"]
        (sitting,) = [shell for shell in placement.shells if psutil.Process(shell.pid).children(recursive=True)]
        sitting.send_signal(signal.SIGKILL)
        assert seats.events.get(timeout=60) == (lost, "exit", LOST)
        lost.send(0)
        successor = seats.start(0, "worker", pack(_squares), {})
        assert [seats.events.get(timeout=60)[:2] for _ in range(2)] == [(successor, "ready"), (successor, "pull")]
        lost.send(5)
        successor.send(3)
        assert seats.events.get(timeout=60) == (successor, "result", 9)


def test_a_lost_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    placement = Processes(2, together=True)
    seats = Seats(placement, host="127.0.0.1")

    def start() -> None:
        places = seats.taken(60)
        assert len({place.port for place in places}) == 2
        for rank, variables in enumerate(group_variables(places, threads=1)):
            seats.start(rank, "rank", pack(_rank_that_stays, tmp_path), variables)

    def kill_the_shell_of_rank_1() -> None:
        parent = psutil.Process(pid(tmp_path, "rank1")).parent()
        pid(tmp_path, "rank0")
        assert parent is not None
        parent.kill()

    killer = threading.Thread(target=kill_the_shell_of_rank_1)
    killer.start()
    with pytest.raises(RankFailed, match="rank 1 was lost with the process that had started it") as caught:
        run_ranks(start, 2, seats, grace_s=5)
    killer.join()
    assert (caught.value.rank, caught.value.signal) == (1, None)
    wait_for(lambda: all(gone(pid(tmp_path, f"rank{rank}")) for rank in (0, 1)))


def test_when_the_launcher_is_gone_nothing_is_left(tmp_path: Path) -> None:
    placement = Processes(1)
    results = work(placement, lambda: _stops_at_two(tmp_path), 5, 1)
    assert next(results) == 0
    child = pid(tmp_path, "worker")
    results.close()
    wait_for(lambda: gone(child))
    assert [shell.wait(30) for shell in placement.shells] == [0]


def test_shells_that_never_come_end_the_job() -> None:
    class Broken(Processes):
        def run(self, address: Address, key: bytes) -> None:
            self.runs += 1
            raise ModuleNotFoundError("No module named 'torchlake'")

    placement = Broken(2)
    with pytest.raises(RankFailed, match="No module named 'torchlake'"):
        list(work(placement, _squares, 3, 2))
    assert placement.runs == _seats.MOST_BARREN


def test_ranks_that_find_no_place_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_seats, "LEAVE_S", 0.5)

    class Half(Processes):
        def run(self, address: Address, key: bytes) -> None:
            self.sit(address, key, 0).wait()
            threading.Event().wait()

    seats = Seats(Half(2, together=True), host="127.0.0.1")
    with seats, pytest.raises(RankFailed, match="1 of 2 processes could be placed within 1 s"):
        wait_for(lambda: len(seats._links) == 1)
        seats.taken(1)


def test_who_does_not_know_the_key_gets_no_seat() -> None:
    heard: list[str] = []

    class Strangers(Processes):
        def run(self, address: Address, key: bytes) -> None:
            with socket.create_connection(address) as silent, socket.create_connection(address) as rude:
                rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with pytest.raises(RankFailed, match="cannot reach the launcher") as caught:
                    sit(address, b"not the key", 0)
                heard.append(str(caught.value))
                with Client(address) as unkeyed:
                    assert unkeyed.recv_bytes().startswith(b"#CHALLENGE#")
                    unkeyed.send(("hello", None))
                    with pytest.raises((EOFError, OSError)):
                        while unkeyed.recv_bytes():
                            pass
                silent.close()
                super().run(address, key)

    assert list(work(Strangers(1), _squares, 3, 1)) == [0, 1, 4]
    assert len(heard) == 1


def test_other_versions_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_seats, "version", lambda name: "99.0")
    with pytest.raises(RankFailed, match=r"has torchlake .* and this machine torchlake 99.0"):
        list(work(Processes(1), _squares, 3, 1))


def test_a_launcher_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(RankFailed, match="cannot reach the launcher at 127.0.0.1") as caught:
            sit(closed.getsockname(), b"key", 0)
    assert "open that way" in str(caught.value)


def test_ranks_of_one_machine_follow_each_other_and_see_its_gpus() -> None:
    hosts = [("10.0.0.1", ("0",)), ("10.0.0.1", ("1",)), ("10.0.0.2", ("0", "1"))]
    places = [
        Facts(seat=n, address=host, port=9000 + n, interface="eth0", gpus=gpus, host=host, python="3", torchlake="1")
        for n, (host, gpus) in enumerate(hosts)
    ]
    made = group_variables(places, threads=4)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [[one[name] for name in names] for one in made] == [
        ["0", "0", "2", "0", "3", "0,1"],
        ["1", "1", "2", "0", "3", "0,1"],
        ["2", "0", "1", "1", "3", "0,1"],
    ]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in made} == {("10.0.0.1", "9000")}
    assert LOST < -64, "no signal"


def test_output_of_any_bytes_is_passed_on_in_whole_lines() -> None:
    heard: list[tuple[Any, ...]] = []
    with _shell._captured(lambda *message: heard.append(message)) as (out, _):
        os.write(out, b"one\ntw")
        os.write(out, b"o\n\xff\xfe")
    assert b"".join(data for _, stream, data in heard if stream == 1) == b"one\ntwo\n\xff\xfe\n"
    assert all(data.endswith(b"\n") for _, _, data in heard)


def _squares() -> Callable[[Iterator[int]], Iterator[int]]:
    return lambda chunks: (chunk * chunk for chunk in chunks)


def _stops_at_two(folder: Path) -> Callable[[Iterator[int]], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        note(folder, "worker")
        for chunk in chunks:
            if chunk == 2:
                wait_for((folder / "go").exists)
            yield chunk

    return worker


def _rank_that_stays(folder: Path) -> None:
    note(folder, f"rank{os.environ['RANK']}")
    threading.Event().wait()
