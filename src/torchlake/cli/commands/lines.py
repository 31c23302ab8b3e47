"""`predict MODEL -`: score the lines of standard input, one text a line.

    bytes that have arrived -> whole lines -> the model in this process -> one JSON object a line, flushed

A batch has the lines of one read, so an answer comes as soon as its line, and at most `READ_BYTES` and one line are in
memory. With an output, the lines are a table of one column that is stored beside the output and scored like any other.
"""

import json
import logging
import os
import select
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchlake.cli.display import Outcome
from torchlake.cli.options import General, Given, declared
from torchlake.display import count, plain
from torchlake.errors import DataError, TooManyErrors, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

STDIN = "-"
READ_BYTES = 1 << 20
WAIT_S = 0.5
MAX_LINE_BYTES = 1 << 26


def predict_lines(model: str, given: Given) -> Outcome:
    """Print an answer for each line of standard input. Raises TooManyErrors at the end if too many rows failed."""
    from torchlake.config.options import GenerationArguments
    from torchlake.scoring import in_process

    if given.as_json:
        raise UsageError("--json prints one object, and the answers are a JSON object for each line: leave it out.")
    options = {name: value for name, value in given.values.items() if name not in declared(General)}
    rate = options.pop("max_error_rate", 0.5)
    allowed = in_process.load.__annotations__.keys() | GenerationArguments.__annotations__.keys()
    for name in sorted(options.keys() - allowed):
        raise UsageError(f"{given.flags[name]} needs an OUTPUT; without one the answers are printed.")
    with in_process.load(model, **options) as loaded:
        _check_columns(model, loaded.spec.input_columns)
        rows, errors = 0, Counter[str]()
        for lines in read_lines():
            answers = loaded([line.decode("utf-8", "surrogateescape") for line in lines])
            rows += len(answers)
            errors.update(answer["error"].partition(":")[0] for answer in answers if answer["error"] is not None)
            printed = "".join(f"{json.dumps(plain(answer), ensure_ascii=False)}\n" for answer in answers)
            sys.stdout.buffer.write(printed.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in errors.most_common())
    log.info("%s%s", count(rows, "row"), f", of which {errors.total():,} with an error ({reasons})" if errors else "")
    if errors.total() > rate * rows:
        raise TooManyErrors(f"{errors.total():,} of {rows:,} lines failed ({reasons}); --max-error-rate is {rate}.")
    return Outcome(values={}, lines=())


def lines_as_table(model: str, options: Mapping[str, Any]) -> "pa.RecordBatchReader":
    """Return standard input as a stream of one column, that of the model's texts."""
    import pyarrow as pa

    from torchlake.models.folders import model_folder
    from torchlake.scoring.options.settings import known_spec

    columns = known_spec(model_folder(model), options.get("task")).input_columns
    _check_columns(model, columns)
    if named := options.keys() & {"text", "text_pair", "inputs"}:
        raise UsageError(f"--{min(named).replace('_', '-')}: a line of standard input has no columns; leave it out.")
    schema = pa.schema({columns[0]: pa.string()})
    # The bytes are not checked here: reading the stored table reports what is not UTF-8 as an error of its row.
    batches = (
        pa.record_batch([pa.array(lines, pa.binary()).view(pa.string())], schema=schema) for lines in read_lines()
    )
    return pa.RecordBatchReader.from_batches(schema, batches)


def read_lines() -> Iterator[list[bytes]]:
    """Yield the lines of standard input as they arrive, without line ends (LF or CRLF) and byte order mark."""
    if sys.stdin.isatty():
        log.info("reading one text a line; end with Ctrl-D")
    rest, number = b"", 0
    while arrived := _read(sys.stdin.fileno()):
        *lines, rest = (rest + arrived).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(f"standard input, line {number + len(lines) + 1:,}: longer than {MAX_LINE_BYTES:,} bytes.")
        if lines:
            yield _stripped(lines, first=number == 0)
            number += len(lines)
    if rest:
        yield _stripped([rest], first=number == 0)


def _read(number: int) -> bytes:
    # Ctrl-C in the moment before a call blocks does not interrupt it: Python acts when the call returns.
    while not select.select([number], [], [], WAIT_S)[0]:
        pass
    return os.read(number, READ_BYTES)


def _stripped(lines: list[bytes], *, first: bool) -> list[bytes]:
    lines = [line.removesuffix(b"\r") for line in lines]
    return [lines[0].removeprefix(b"\xef\xbb\xbf"), *lines[1:]] if first else lines


def _check_columns(model: str, columns: tuple[str, ...]) -> None:
    """Raise UsageError unless the model reads one column."""
    if len(columns) != 1:
        raise UsageError(
            f"{model}: reads the columns {', '.join(columns)}, and a line of standard input is one text. Score a table."
        )
