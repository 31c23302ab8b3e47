"""What a job may spend: one account for all its processes and calls, beside the journals of its rows.

    before a request    the most that it may take is added to the account, if the limits have room for that
    after its answer    it is replaced by what it took

What is not replaced stays: a request that was open when its process was killed, or whose answer was lost on its way,
may have been paid. So the account has at least what was paid, and stays within the limits, also in the next call.

The most of a request is the longest answer that it asks for and, for the prompt, a token for each byte of its messages,
and what the endpoint has added to prompts so far.
"""

import fcntl
import json
import logging
import math
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchlake.atomic_io import storage_error
from torchlake.errors import StorageError
from torchlake.failpoints import failpoint
from torchlake.redaction import redacted
from torchlake.runtimes._http.answers import Answer
from torchlake.runtimes._http.limits import changing
from torchlake.scoring.endpoint.usage import CHARACTERS, Price
from torchlake.storage.objects import Found, ObjectFolder
from torchlake.storage.urls import is_url

log = logging.getLogger(__name__)

ACCOUNT, OPEN = "spent", "spent.open"
SYNC_S = 10.0
AROUND = 16
"Tokens that an endpoint is expected to put around a prompt, until there is an answer."
NOT_PAID = ("http_", "content_filter", "batch: ")
"Errors of requests that the endpoint has refused, or has not begun."


@dataclass(frozen=True)
class Amount:
    """Money, and tokens of prompts and answers."""

    cost: float = 0.0
    tokens: float = 0.0

    def plus(self, other: "Amount", times: float = 1.0) -> "Amount":
        """Return the sum with `times` the other."""
        return Amount(self.cost + times * other.cost, self.tokens + times * other.tokens)


UNLIMITED = Amount(math.inf, math.inf)


def _exceeded(limits: Amount, spent: Amount) -> str | None:
    """Return the limit that is exceeded."""
    if spent.tokens > limits.tokens:
        return "max_tokens_total"
    return "max_cost" if spent.cost > limits.cost else None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of a row, and what it may take."""

    body: bytes
    tokens: float
    "An estimate of those of the prompt."
    size: int
    "The bytes of the prompt."
    most: int
    "The most tokens of the answer; 0: the request does not say."


class FileAccount:
    """An account in a file, exact to the request: processes change it under a lock.

    It is synced every `SYNC_S`, in case the machine is lost. Its methods raise StorageError.
    """

    def __init__(self, folder: Path, *, create: bool) -> None:
        self._path, made = folder / ACCOUNT, os.O_CREAT if create else 0
        with self._errors():
            if create:
                folder.mkdir(exist_ok=True)
            self._sums, self._others = (os.open(folder / name, os.O_RDWR | made, 0o666) for name in (ACCOUNT, OPEN))
        self._close = weakref.finalize(self, _close, self._sums, self._others)
        self._synced = time.monotonic()

    def read(self) -> Amount:
        """Return what is in it."""
        with self._errors(), changing(self._sums, (0.0, 0.0)) as sums:
            return Amount(*sums)

    def change(self, by: Amount, limits: Amount = UNLIMITED) -> str | None:
        """Add an amount; return the limit that has no room for it, and then add nothing."""
        with self._errors(), changing(self._sums, (0.0, 0.0)) as sums:
            new = Amount(*sums).plus(by)
            if (full := _exceeded(limits, new)) is not None:
                return full
            sums[:] = (new.cost, new.tokens)
            if time.monotonic() > self._synced + SYNC_S:
                self._synced = time.monotonic()
                os.fsync(self._sums)
        return None

    def opened(self, *, any_open: bool) -> None:
        """Note whether this process has open requests: the kernel forgets it with the process."""
        with self._errors():
            fcntl.flock(self._others, fcntl.LOCK_SH if any_open else fcntl.LOCK_UN)

    def others_are_open(self) -> bool:
        """Return whether other processes have open requests, which may take less than their most; this one has none."""
        try:
            fcntl.flock(self._others, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self.opened(any_open=False)
        return False

    def flush(self) -> None:
        """Keep what is in it, although no request may follow."""
        with self._errors():
            os.fsync(self._sums)

    def close(self) -> None:
        """Close its files, as its end does."""
        self._close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, self._path) from error


class StoredAccount:
    """An account in an object store; see FileAccount.

    A process adds in advance what it needs for about `SYNC_S`, and `flush` takes out what it has not used: after a kill
    that stays.
    """

    def __init__(self, location: str, *, create: bool) -> None:
        self._folder = ObjectFolder(location)
        self._held = self._used = Amount()
        "Of the account: what this process has added, and of that what it needed."
        self._ahead, self._added = 1.0, 0.0
        if create:
            self._folder.write_new(ACCOUNT, _content(Amount()), site="account")

    def read(self) -> Amount:
        return _amount(self._read())

    def change(self, by: Amount, limits: Amount = UNLIMITED) -> str | None:
        used = self._used.plus(by)
        lacking = used.plus(self._held, -1.0)
        lacking = Amount(max(0.0, lacking.cost), max(0.0, lacking.tokens))
        if lacking != Amount() and (full := self._add(lacking, limits)) is not None:
            return full
        self._used = used
        return None

    def opened(self, *, any_open: bool) -> None:
        """Do nothing: an object store does not see that a process has ended."""

    def others_are_open(self) -> bool:
        return False

    def flush(self) -> None:
        with suppress(StorageError):  # then it stays
            while not self._write(self._read(), self._used.plus(self._held, -1.0)):
                pass
            self._held = self._used

    def close(self) -> None:
        """Do nothing."""

    def _add(self, lacking: Amount, limits: Amount) -> str | None:
        passed, self._added = time.monotonic() - self._added, time.monotonic()
        self._ahead = max(1.0, self._ahead * (2.0 if passed < SYNC_S / 2 else 0.5))
        while True:
            found = self._read()
            sums = _amount(found)
            if (full := _exceeded(limits, sums.plus(lacking))) is not None:
                return full
            room = limits.plus(sums, -1.0)  # a part of it: other processes need some, too
            more = Amount(
                max(lacking.cost, min(lacking.cost * self._ahead, room.cost / 4)),
                max(lacking.tokens, min(lacking.tokens * self._ahead, room.tokens / 4)),
            )
            if self._write(found, more):
                self._held = self._held.plus(more)
                return None

    def _read(self) -> Found:
        if (found := self._folder.read(ACCOUNT)) is None:
            raise StorageError(f"{redacted(self._folder.location)}: its account is gone: the job has ended elsewhere.")
        return found

    def _write(self, found: Found, more: Amount) -> bool:
        """Add to what was found; return False if it has changed since."""
        return self._folder.replace(ACCOUNT, _content(_amount(found).plus(more)), found, site="account")


def open_account(location: str, *, create: bool = False) -> FileAccount | StoredAccount:
    """Return the account in a folder or at a URL. Without `create` there has to be one. Raises StorageError."""
    return StoredAccount(location, create=create) if is_url(location) else FileAccount(Path(location), create=create)


class SpendingBudget:
    """What one process takes of the account at `location`; used by one thread."""

    def __init__(self, limits: Amount, price: Price | None, location: str) -> None:
        self._limits, self._price = limits, price
        self._account = open_account(location)
        self._open = 0
        self._around: int | None = None
        "The most tokens that a prompt had beyond its estimate; None before the first answer."
        self._guesses = False
        self._longest = 0.0
        "The tokens of the longest answer."
        self._full: str | None = None
        self.reached: str | None = None
        "The limit because of which a row was not asked; then no other one is."

    def set_aside(self, asked: Asked) -> Amount | None:
        """Add the most that a request may take to the account, and return it; None: there is no room."""
        if self.reached is not None:
            return None
        prompt = asked.size + (AROUND if self._around is None else self._around)
        most = self._amount(prompt, asked.most or self._longest, dearest=True)
        self.adopt(1)
        if (full := self._account.change(most, self._limits)) is not None:
            self._full = full
            self.adopt(-1)
            return None
        failpoint("account.set_aside")
        return most

    def adopt(self, requests: int) -> None:
        """Count requests as open, whose most is in the account."""
        before, self._open = self._open, self._open + requests
        if bool(before) != bool(self._open):
            self._account.opened(any_open=before == 0)

    def settle(self, most: Amount, asked: Asked, answer: Answer | None) -> None:
        """Replace the most of a request by what its answer took; None: there is none, and it may have been paid."""
        took = None if answer is None else self._took(asked, answer)
        if took is not None:
            self._account.change(took.plus(most, -1.0))
        self.adopt(-1)

    def may_get_room(self) -> bool:
        """Return whether open requests of other processes may make room for the last request."""
        return self.reached is None and self._account.others_are_open()

    def give_up(self) -> None:
        """Let no other request start, because there was no room for one."""
        self.reached = self._full or self.reached

    def flush(self) -> None:
        """Leave in the account what was taken and what is open; it may go on."""
        self._account.flush()

    def _took(self, asked: Asked, answer: Answer) -> Amount | None:
        """Return what an answer took, by an estimate if the endpoint does not count; None if that is not known."""
        prompt, written = answer.prompt_tokens, answer.generated_tokens
        if prompt is None and not answer.texts and answer.vector is None:
            return Amount() if (answer.error or "").startswith(NOT_PAID) else None
        if prompt is not None:
            self._around = max(self._around or 0, math.ceil(prompt - asked.tokens))
        elif not self._guesses:
            self._guesses = True
            log.warning(
                "the endpoint does not count tokens: what is spent is a guess, %d characters a token", CHARACTERS
            )
        generated = sum(map(len, answer.texts)) / CHARACTERS if written is None else written
        self._longest = max(self._longest, generated)
        return self._amount(asked.tokens if prompt is None else prompt, generated, answer.cached_tokens or 0)

    def _amount(self, prompt: float, generated: float, cached: float = 0, *, dearest: bool = False) -> Amount:
        if self._price is None:
            return Amount(0.0, prompt + generated)
        cached = prompt if dearest and self._price.cached > self._price.input else min(cached, prompt)
        return Amount(self._price.cost(prompt, generated, cached), prompt + generated)


def _close(*files: int) -> None:
    for one in files:
        os.close(one)


def _amount(found: Found) -> Amount:
    value = json.loads(found.content)
    return Amount(value["cost"], value["tokens"])


def _content(amount: Amount) -> bytes:
    # Equal content of two writers would count as written by both.
    return json.dumps({**asdict(amount), "writer": secrets.token_hex(8)}).encode()
