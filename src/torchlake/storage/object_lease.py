"""One writer at a time in an object store: a lease, changed only by conditional writes.

It works like `lease.py` on a file system: the object names the writer and has a random token; a thread renews
it. A lease whose process is dead (same machine), or that was not renewed in time by the store's own clock, is taken
over. A writer that was suspended meanwhile finds another token. The commit itself is conditional too, so the lease only
saves two writers from computing the same rows; it is not what prevents duplicate rows. Cost: a request per quarter of a
lease.
"""

import json
import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from torchlake.errors import StorageError
from torchlake.storage.lease import check_holder, held_by, next_lease, writer_of
from torchlake.storage.liveness import is_running
from torchlake.storage.objects import Found, ObjectFolder

NAME = "lease.json"
PROBE = "lease.clock"


class ObjectLease:
    """A lease in the folder `state`, renewed by a thread until `stop`; see `acquire_object`."""

    def __init__(self, state: ObjectFolder, mine: dict[str, Any], found: Found) -> None:
        self._state, self._mine, self._version = state, mine, found.version
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="torchlake-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if another writer has taken over."""
        check_holder(_parsed(self._state.read(NAME)), self._mine, self._state.location)

    def stop(self) -> None:
        """Stop renewing."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Allow the next writer to start at once; a lease that was taken over stays as it is."""
        self.stop()
        with suppress(StorageError):
            self._write({"released": True})

    def renew(self) -> bool:
        """Renew the lease once; return False if another writer has taken over."""
        return self._write({"renewed": time.time()})

    def _renew(self) -> None:
        while not self._stopped.wait(self._mine["lease_s"] / 4):
            with suppress(StorageError):  # the store may answer again before the lease expires
                if not self.renew():
                    return

    def _write(self, fields: dict[str, Any]) -> bool:
        """Change the lease; return False if it is another writer's."""
        with self._lock:
            while True:
                # The nonce makes every renewal different. With equal content, `replace` could not tell a write that
                # was refused from an earlier one whose answer was lost.
                value = {**self._mine, **fields, "nonce": secrets.token_hex(4)}
                written = self._state.replace(NAME, _bytes(value), self._version, site="lease")
                # Read the version for the next renewal; the token shows whether it is still this writer's lease.
                found = self._state.read(NAME)
                if found is None or _parsed(found).get("token") != self._mine["token"]:
                    return False
                self._version = found.version
                if written:
                    self._mine = value
                    return True
                # The lease is still ours, but its version is not the one that this process knew: an earlier renewal
                # succeeded, and its answer was lost. Write again on top of that version.


def acquire_object(state: ObjectFolder, lease_s: float, *, name: str) -> ObjectLease:
    """Become the only writer of the output `name`. Raises Locked naming the active writer."""
    while True:
        found = state.read(NAME)
        current = _parsed(found)
        if found is not None and _is_live(state, found, current):
            raise held_by(current, name)
        mine = next_lease(current, lease_s)
        # Both writes are conditional, so of two writers that find the same expired lease only one gets it. The other
        # one reads again, and finds a live lease.
        if found is None:
            written = state.write_new(NAME, _bytes(mine), site="lease")
        else:
            written = state.replace(NAME, _bytes(mine), found.version, site="lease")
        if written and (found := state.read(NAME)) is not None and _parsed(found).get("token") == mine["token"]:
            return ObjectLease(state, mine, found)


def _is_live(state: ObjectFolder, found: Found, lease: dict[str, Any]) -> bool:
    if not lease or lease.get("released"):
        return False
    if is_running(writer_of(lease)) is False:
        return False
    # Both times come from the store's clock, so machines whose clocks differ by hours cannot end a live lease. Without
    # an answer the lease counts as live: a needless wait costs a retry, a wrong takeover ends the other writer's job.
    state.write(PROBE, secrets.token_hex(4).encode(), site="lease.clock")
    now = state.read(PROBE)
    return now is None or (now.modified - found.modified).total_seconds() <= lease["lease_s"]


def _parsed(found: Found | None) -> dict[str, Any]:
    """Return the lease; empty if there is none or it is damaged."""
    try:
        value = json.loads(found.content) if found is not None else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) and "token" in value else {}


def _bytes(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()
