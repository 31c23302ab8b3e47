"""What tests let processes of a cluster do, in a module that is quick to import there."""

import os
import sys
from collections.abc import Callable, Iterator


def own_pid() -> Callable[[Iterator[int]], Iterator[int]]:
    return lambda chunks: (os.getpid() for _ in chunks)


def print_bytes() -> str:
    """Print a line that is no text, and last words without an end; the rank comes back."""
    rank = os.environ["RANK"]
    sys.stdout.buffer.write(f"rank {rank} ".encode() + b"\xff\xfe\n")
    sys.stdout.flush()
    os.write(2, b"last words without an end")
    return rank
