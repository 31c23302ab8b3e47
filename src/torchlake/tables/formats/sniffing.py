"""Recognize how a CSV file is written from its beginning: the character between fields, and the encoding.

An encoding is guessed only for text that is mostly ASCII, as in Western European languages: in others, bytes that are
not UTF-8 may be of many encodings.
"""

import codecs
import csv
import io
from collections.abc import Sequence
from itertools import islice

from torchlake.tables.formats.streams import Dialect, open_stream

SNIFFED_BYTES = 4 << 20
SNIFFED_RECORDS = 100
MARKS = (",", ";", "\t", "|")


def recognized(file: str, given: Dialect) -> dict[str, str]:
    """Return the options of `Dialect` that differ from `given`, which keeps its own; empty if the file fits it."""
    with open_stream(file, Dialect()) as stream:
        head = stream.read(SNIFFED_BYTES)
    found = {} if "encoding" in given.given else _encoding(head)
    text = head.decode(found.get("encoding", given.encoding), "replace")
    if given.delimiter is None:
        own = given.delimiter_of(file)
        best = max((own, *MARKS), key=lambda mark: _fit(text, mark, given.quote))
        found |= {} if best == own else {"delimiter": best}
    return found


def delimiter_hint(names: Sequence[str], wanted: str) -> str:
    """Return what to do about a CSV file whose header has several names in one, such as id;text;label; else nothing."""
    header = ",".join(names)
    found = [
        mark
        for mark in MARKS[1:]
        if mark in header and (len(names) == 1 or wanted in [one.strip('" ') for one in header.split(mark)])
    ]
    if not found:
        return ""
    shell, yaml = ("delimiter=$'\\t'", "\\t") if found[0] == "\t" else (f"'delimiter={found[0]}'", found[0])
    in_job = f'data.csv: {{delimiter: "{yaml}"}}'
    return f" Its fields seem to be separated by {found[0]!r}: give --csv {shell}, in a job {in_job}."


def _encoding(head: bytes) -> dict[str, str]:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return {"encoding": "utf-16"}
    decoded = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    bad, high = decoded.count("\ufffd"), sum(byte >= 0x80 for byte in head) if not decoded.isascii() else 0
    if 2 * bad <= high or 4 * high > len(head):  # UTF-8 with damaged rows, or another alphabet
        return {}
    windows = any(0x80 <= byte < 0xA0 for byte in head)
    return {"encoding": "cp1252" if windows else "latin-1"}


def _fit(text: str, mark: str, quote: str) -> tuple[float, int]:
    """Return the share of records with as many fields as the header, and that number; zeros if it is one."""
    try:
        records = list(islice(csv.reader(io.StringIO(text), delimiter=mark, quotechar=quote), SNIFFED_RECORDS))
    except csv.Error:
        return 0.0, 0
    width = len(records[0]) if records else 0
    return (sum(len(one) == width for one in records if one) / len(records), width) if width > 1 else (0.0, 0)
