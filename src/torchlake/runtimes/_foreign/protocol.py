"""Frames between torchlake and an engine's process, for both sides; the standard library only.

    length of the header (4 bytes, little-endian) | header (JSON) | `ids` int32 values | `logprobs` float32 values

The header's `ids` and `logprobs` are the numbers of values that follow. Its `type` is, to the engine

    hello     protocol, model, tokenizer, adapter, device, devices, length     the first frame, once
    add       row, options, ids: the prompt
    ping      answered between two steps
    stop      ends the process

and from it

    ready     protocol, versions, limits: open (rows at once), length, vocabulary     or refused: protocol, reason
    done      row, reason (end, stop, length), ids, logprobs; with `end` the last id is the token that ended the text
    failed    row, reason
    pong      open: the number of rows

A server is `serve` of this file with an engine. It reads and writes inherited pipes, whose numbers are its arguments,
so that what an engine prints does no harm.
"""

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

VERSION = 1
LENGTH = struct.Struct("<I")
MOST_HEADER, MOST_VALUES = 16 << 20, 1 << 26
"The longest header and the most values of a frame; a longer one is damaged."
READ_BYTES = 1 << 20

Frame = tuple[dict[str, Any], bytes, bytes]
"The header, the bytes of the ids, and those of the log-probabilities."


class BrokenFrame(Exception):
    """A frame that is not one of the protocol."""


def pack(header: dict[str, Any], ids: Any = (), logprobs: Any = ()) -> bytes:
    """Return a frame; `ids` and `logprobs` are sequences of numbers, fastest as an `array.array`."""
    text = json.dumps({**header, "ids": len(ids), "logprobs": len(logprobs)}).encode()
    values = [array.array(kind, some).tobytes() for kind, some in (("i", ids), ("f", logprobs)) if len(some)]
    return b"".join((LENGTH.pack(len(text)), text, *values))


class Frames:
    """Bytes in, frames out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, content: bytes) -> list[Frame]:
        """Return the frames that are complete with `content`. Raises BrokenFrame."""
        self._bytes += content
        found: list[Frame] = []
        place = 0
        while (frame := self._next(place)) is not None:
            place = frame[0]
            found.append(frame[1])
        del self._bytes[:place]
        return found

    def _next(self, place: int) -> tuple[int, Frame] | None:
        start = place + LENGTH.size
        if len(self._bytes) < start:
            return None
        (length,) = LENGTH.unpack_from(self._bytes, place)
        if length > MOST_HEADER:
            raise BrokenFrame(f"a header of {length} bytes")
        if len(self._bytes) < start + length:
            return None
        text = bytes(self._bytes[start : start + length])
        try:
            header = json.loads(text.decode())
            ids, logprobs = header["ids"], header["logprobs"]
            if type(header["type"]) is not str or type(ids) is not int or type(logprobs) is not int:
                raise ValueError
            if not (0 <= ids <= MOST_VALUES and 0 <= logprobs <= MOST_VALUES):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise BrokenFrame(f"a header that cannot be read: {text[:200]!r}") from None
        middle = start + length + 4 * ids
        end = middle + 4 * logprobs
        if len(self._bytes) < end:
            return None
        return end, (header, bytes(self._bytes[start + length : middle]), bytes(self._bytes[middle:end]))


class Pipes:
    """The server's side: blocking, one thread. Exits when the other side has."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._in, self._out, self._frames = incoming, outgoing, Frames()

    def receive(self, *, wait: bool) -> list[Frame]:
        """Return the frames that have arrived; with `wait` at least one."""
        found: list[Frame] = []
        while not found and (wait or select.select([self._in], [], [], 0)[0]):
            content = os.read(self._in, READ_BYTES)
            if not content:
                leave()
            found += self._frames.feed(content)
        return found

    def send(self, content: bytes) -> None:
        """Write frames."""
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._out, view) :]
        except BrokenPipeError:
            leave()


def leave() -> NoReturn:
    """End this process and all others of its group: an engine has processes of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def ids_of(content: bytes) -> list[int]:
    """Return the values of ids, a list of integers."""
    return array.array("i", content).tolist()


def serve(open_engine: Callable[[dict[str, Any]], Any], versions: Callable[[bool], dict[str, str]]) -> None:
    """Serve one torchlake process until it ends; with the argument `--versions` or `--import` print a JSON object.

    `versions(imported)` returns the versions of the engine, with `imported` after it was imported. `open_engine(hello)`
    returns the engine, or raises: its error is the reason of the refusal. An engine has

        versions, limits     those of the frame `ready`
        add(row, ids, options)     raises ValueError or TypeError for a row that it cannot write
        busy     whether rows are open
        step() -> [(row, reason, ids, logprobs)]     the rows that have ended; reason `failed: ...` for an error
    """
    if sys.argv[1] in ("--versions", "--import"):
        print(json.dumps({"protocol": VERSION, "versions": versions(sys.argv[1] == "--import")}))
        return
    incoming, outgoing, parent = map(int, sys.argv[1:4])
    _die_with(parent)
    for number in (incoming, outgoing):
        os.set_inheritable(number, False)
    pipes = Pipes(incoming, outgoing)
    hello = pipes.receive(wait=True)[0][0]  # no other frame comes before the answer
    try:
        if hello["protocol"] != VERSION:
            raise ValueError(f"it speaks protocol {VERSION}")
        engine = open_engine(hello)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        pipes.send(pack({"type": "refused", "protocol": VERSION, "reason": reason[:4000]}))
        raise
    pipes.send(pack({"type": "ready", "protocol": VERSION, "versions": engine.versions, "limits": engine.limits}))
    number_open = 0
    while True:
        answers = []
        for header, ids, _ in pipes.receive(wait=not engine.busy):
            if header["type"] == "add":
                try:
                    engine.add(header["row"], ids_of(ids), header["options"])
                    number_open += 1
                except (ValueError, TypeError) as error:
                    answers.append(pack({"type": "failed", "row": header["row"], "reason": str(error)[:500]}))
            elif header["type"] == "ping":
                answers.append(pack({"type": "pong", "open": number_open}))
            elif header["type"] == "stop":
                leave()
        for row, reason, ids, logprobs in engine.step() if engine.busy else ():
            number_open -= 1
            if reason.startswith("failed: "):
                answers.append(pack({"type": "failed", "row": row, "reason": reason[8:508]}))
            else:
                answers.append(pack({"type": "done", "row": row, "reason": reason}, ids, logprobs))
        if answers:
            pipes.send(b"".join(answers))


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends; exit if that has happened."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
