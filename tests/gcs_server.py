"""A server that speaks the JSON interface of Google Cloud Storage, on this machine, in a process of its own."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError

BUCKET = "lake"
DEADLINE_S = 60.0


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """The variables with which clients find a server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen(
        [*command, "--in-memory", f"--default-bucket={BUCKET}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                urllib.request.urlopen(f"{address}/storage/v1/b/{BUCKET}", timeout=30).close()
                break
            except URLError:
                assert process.poll() is None, "the server ended at once"
                assert time.monotonic() < until, "the server did not come up in time"
                time.sleep(0.05)
        yield {"STORAGE_EMULATOR_HOST": address}
    finally:
        process.kill()
        process.wait()
