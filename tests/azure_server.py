"""A server that speaks Azure Blob Storage (Azurite, from npm), on this machine, in a process of its own."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTAINER = "lake"
DEADLINE_S = 120.0
ACCOUNT = "devstoreaccount1"
# Azurite's documented account, which is the same everywhere.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def is_installed() -> bool:
    """Whether the server can be started."""
    return shutil.which("azurite-blob") is not None


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which clients find a server without containers; it stores its blobs in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["azurite-blob", "--blobHost=127.0.0.1", f"--blobPort={port}", f"--location={folder}"]
    process = subprocess.Popen(
        [*command, "--skipApiVersionCheck", "--silent"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended at once"
                assert time.monotonic() < until, "the server did not come up in time"
                time.sleep(0.05)
        address = f"http://127.0.0.1:{port}/{ACCOUNT}"
        yield {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={address};",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
        }
    finally:
        process.kill()
        process.wait()
