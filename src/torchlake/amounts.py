"""Amounts with a unit in options: bytes and operations per second."""

import math
import re

from torchlake.errors import UsageError

MIN_BYTES = 2**20
"Smaller numbers were probably meant in another unit."
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS |= {"KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}


def operations(value: str | float, name: str) -> float:
    """Parse operations per second: a positive number or a string such as "120T" or "1e14". Raises UsageError."""
    number, _ = _number_and_unit(value, name, "FLOP", '"120T" or "1e14"')
    return number


def size_in_bytes(value: str | float, name: str) -> float:
    """Parse bytes or bytes per second: a string with a unit, such as "80GiB" or "12.5GB", or a number from 1 MiB on.

    Raises UsageError with the option's `name`.
    """
    number, unit = _number_and_unit(value, name, "B", '"80GB" or "80GiB"')
    if (isinstance(value, str) and not unit) or (not isinstance(value, str) and value < MIN_BYTES):
        plain = str(value).strip()
        raise UsageError(f'{name}: {plain} has no unit; write "{plain}GB" or "{plain}GiB".')
    return number


def _number_and_unit(value: str | float, name: str, counted: str, examples: str) -> tuple[float, str]:
    """Parse a number of `counted` ("B" or "FLOP"); return it with its unit as written, "" if it has none."""
    text = str(value).strip().upper().removesuffix("/S")
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:E\+?\d+)?)\s*(([KMGTP]?I?)({counted})?)", text)
    if match is None or match[3] not in UNITS or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"{name}: {value!r} is not an amount. Write a number above 0 and a unit, such as {examples}.")
    return float(match[1]) * UNITS[match[3]], match[2]
