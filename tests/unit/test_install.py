"""What `make demo` and `make test` install: where torch comes from, and what is printed."""

import re
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import install  # noqa: E402


@pytest.fixture
def linux_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(install.shutil, "which", lambda name: None)


@pytest.fixture
def wheels(tmp_path: Path) -> Iterator[str]:
    """The address of a list of wheels."""
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("linux_without_gpu")
def test_torch_without_cuda_comes_from_its_own_list(monkeypatch: pytest.MonkeyPatch, wheels: str) -> None:
    monkeypatch.setattr(install, "CPU_WHEELS", wheels)
    assert install.torch_wheels({}) == (["--find-links", wheels], "0.9 GB")


@pytest.mark.usefixtures("linux_without_gpu")
def test_a_list_that_cannot_be_reached_costs_gigabytes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens there
        monkeypatch.setattr(install, "CPU_WHEELS", f"http://127.0.0.1:{closed.getsockname()[1]}/")
        links, size = install.torch_wheels({})
    assert links == []
    assert "4.7 GB with CUDA, because" in size


@pytest.mark.usefixtures("linux_without_gpu")
def test_what_pip_is_configured_with_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    options = install.pip_options()
    assert options["find-links"] == "/wheels"
    assert install.torch_wheels(options) == ([], "0.9 GB")


def test_a_step_is_one_line_and_a_failure_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    install.run("Installing nothing (0 GB)", [sys.executable, "-c", "print('WARNING: much')"])
    assert re.fullmatch(r"Installing nothing \(0 GB\) \.\.\. \d+ s\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"no such wheel(?s:.*)ended with status 3"):
        install.run("Installing it", [sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)"])
    assert capsys.readouterr().out == "Installing it ... failed\n"


def test_uv_is_fetched_unless_pip_is_configured_for_what_uv_reads_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $* > $0.asked\ntest -z $FAILS\n")
    python.chmod(0o755)
    assert install.fetch_uv(python, {"proxy": "http://127.0.0.1:1"}) is None
    assert not Path(f"{python}.asked").exists()
    assert install.fetch_uv(python, {"find-links": "/wheels"}) == str(tmp_path / "uv")
    assert Path(f"{python}.asked").read_text() == "-m pip install --quiet -c constraints.txt uv\n"
    monkeypatch.setenv("FAILS", "1")
    assert install.fetch_uv(python, {}) is None
