"""`POST /invocations`: rows of named columns in, the columns of `predict` out, in MLflow's format, for every task.

JSON (`dataframe_split`, `dataframe_records`, `instances`, `inputs`), CSV with a header, or Parquet. It is also the
route of SageMaker, Databricks and, with `instances`, of Vertex AI and KServe.
"""

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import TableError, TorchlakeError
from torchlake.scoring.options.call import CallOptions
from torchlake.scoring.options.table import checked_input
from torchlake.scoring.values import array_of
from torchlake.serving.exchange import Refused, ServedRequest, parse_json, reply
from torchlake.tables.arrays import from_strings, is_text
from torchlake.tables.formats.lines import BadRecord, CountedLines, csv_records, header_of
from torchlake.tables.formats.streams import BOM, Dialect
from torchlake.tasks import NUMBER, TEXT
from torchlake.tasks._inputs import columns_of

OPTIONS = ("params", "parameters")
PARQUET = ("application/vnd.apache.parquet", "application/x-parquet")
CLIENT_ERRORS = {
    "null_input": (400, "Empty"),
    "too_long": (422, "Validation"),
    **dict.fromkeys(("bad_utf8", "unknown_token", "no_tokens", "question_too_long"), (422, "Tokenizer")),
}
"The status, and TEI's name, of the errors of rows that are the client's."
PUBLIC = {*CLIENT_ERRORS, "corrupt_image", "image_too_large", "unknown_range", "timeout"}
"Reasons whose words say nothing of what the row holds; others may be an exception's."
IMAGE = "image"
"The input whose values are images: base64 in JSON and CSV, never a path or URL."


class InvocationsBody(BaseModel):
    """The body of /invocations: exactly one of its fields, each with rows or columns."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1, "maxProperties": 1})

    dataframe_split: dict[Literal["columns", "data", "index"], list[Any]]
    dataframe_records: list[dict[str, Any]]
    instances: list[dict[str, Any] | str]
    inputs: list[dict[str, Any] | str] | dict[str, list[Any]]


FORMS = tuple(InvocationsBody.model_fields)
SCHEMA = {
    "application/json": {"schema": {**InvocationsBody.model_json_schema(), "required": []}},
    "text/csv": {"schema": {"type": "string"}},
    PARQUET[0]: {"schema": {"type": "string", "format": "binary"}},
}


async def invocations(request: Request) -> Response:
    """Return a row of predictions, or with an error, for each row of the request."""
    used: ServedRequest = request.scope["torchlake"]
    spec, options = used.model.spec, used.service.options
    read = {"": _from_json, "application/json": _from_json, "text/csv": _from_csv}
    read |= dict.fromkeys(PARQUET, _from_parquet)
    if used.content_type not in read:
        raise Refused(415, f"content-type: expected application/json, text/csv or {PARQUET[0]}")
    columns = read[used.content_type](used.body, spec, options.max_rows)
    table, unreadable = _as_table(columns, spec)
    try:
        checked_input(used.model._settings, spec, table.schema, "the request")
    except TorchlakeError as error:
        raise Refused(400, str(error)) from None
    view = CallOptions(truncate=options.truncate)
    answers = await used.score(table.select(list(spec.input_columns)), unreadable, view)
    predictions = answers.to_pylist()
    for row in predictions:
        row["error"] = row["error"] and without_data(row["error"], spec)
    return reply({"predictions": predictions})


def without_data(error: str, spec: TaskSpec) -> str:
    """Return a row's error without words of the row, which `predict` writes and a server must not repeat."""
    reason = error.partition(":")[0]
    if reason == "bad_number":
        places = (f"{reason}: {name!r}" for name in spec.input_columns)
        return next((place for place in places if error.startswith(f"{place} is ")), reason)
    return error if reason in PUBLIC else reason


def _check_rows(number: int, limit: int) -> None:
    if number > limit:
        raise Refused(413, f"{number:,} rows; the limit is {limit:,} (--max-rows)")


def _from_json(body: bytes, spec: TaskSpec, limit: int) -> dict[str, Any]:
    """Return the values of each column."""
    given = parse_json(body)
    if not isinstance(given, dict):
        raise Refused(400, f"the body must be a JSON object with one of {', '.join(FORMS)}")
    options = [name for name in OPTIONS if given.get(name)]
    if options:
        raise Refused(
            400, f"{options[0]}: not supported; give the options of predict to torchlake serve", field=options[0]
        )
    names = [name for name in given if name not in OPTIONS]
    if len(names) != 1 or names[0] not in FORMS:
        # The names of known forms only: another key may be part of the data.
        found = ", ".join(name for name in names if name in FORMS) or "none of them"
        raise Refused(400, f"the body must have exactly one of {', '.join(FORMS)}, and nothing else; it has {found}")
    (form,), value = names, given[names[0]]
    if form == "dataframe_split":
        return _split(value, limit)
    if isinstance(value, dict) and form == "inputs":
        return _columns(value, limit)
    if not isinstance(value, list):
        raise Refused(400, f"{form}: expected a list of rows", field=form)
    _check_rows(len(value), limit)
    if form == "dataframe_records" or (value and isinstance(value[0], dict)):
        return _records(form, value, spec)
    if len(spec.input_columns) > 1:
        wanted = ", ".join(spec.input_columns)
        raise Refused(400, f"{form}: this model reads several columns; each row must be an object with {wanted}")
    wrong = next((row for row, each in enumerate(value) if isinstance(each, dict)), None)
    if wrong is not None:
        raise Refused(400, f"{form}, row {wrong}: an object, where the rows before it are single values", field=form)
    return {spec.input_columns[0]: value}


def _records(form: str, value: list[Any], spec: TaskSpec) -> dict[str, Any]:
    wrong = next((row for row, each in enumerate(value) if not isinstance(each, dict)), None)
    if wrong is not None:
        raise Refused(400, f"{form}, row {wrong}: expected an object with the columns of the row", field=form)
    # As in a frame: a column that some rows lack is null there, and one that all lack is missing.
    known = {name for row in value for name in row} if value else set(spec.input_columns)
    return {name: [row.get(name) for row in value] for name in spec.input_columns if name in known}


def _columns(value: dict[str, Any], limit: int) -> dict[str, Any]:
    sizes = {len(each) if isinstance(each, list) else -1 for each in value.values()}
    if len(sizes) != 1 or -1 in sizes:
        raise Refused(400, "inputs: expected a list of values for each column, all of the same length", field="inputs")
    _check_rows(sizes.pop(), limit)
    return value


def _split(value: Any, limit: int) -> dict[str, Any]:
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    names, data, form = given.get("columns", ()), given.get("data", ()), "dataframe_split"
    lists = isinstance(names, list) and isinstance(data, list) and given.keys() <= {"columns", "data", "index"}
    if not lists or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise Refused(400, f"{form}: expected columns, a list of different names, and data, a list of rows", field=form)
    index = given.get("index")
    if index is not None and (not isinstance(index, list) or len(index) != len(data)):
        raise Refused(400, f"{form}: expected as many values in index as rows in data", field=form)
    _check_rows(len(data), limit)
    wrong = next((row for row, each in enumerate(data) if not isinstance(each, list) or len(each) != len(names)), None)
    if wrong is not None:
        raise Refused(400, f"{form}, row {wrong}: expected a list of {len(names)} values", field=form)
    return {name: [row[at] for row in data] for at, name in enumerate(names)}


def _from_csv(body: bytes, spec: TaskSpec, limit: int) -> dict[str, Any]:
    """Return the columns of a CSV with a header; values are text. It is parsed as `predict` parses a file."""
    lines, dialect = CountedLines(io.BytesIO(body.removeprefix(BOM))), Dialect()
    expected = "expected UTF-8 with a header, commas and double quotes"
    try:
        header = header_of("text/csv", lines, dialect)
    except TableError:  # its words are about files, and may repeat data: the first line of a body without a header
        raise Refused(400, f"text/csv: the first line must name each column once; {expected}") from None
    rows: list[list[str]] = []
    for record in csv_records(lines, "text/csv", dialect, len(header)):
        if isinstance(record, BadRecord):
            raise Refused(400, f"text/csv, row {len(rows)}: {record}; {expected}")
        rows.append(record)
        _check_rows(len(rows), limit)
    return {name: [row[at] for row in rows] for at, name in enumerate(header)}


def _from_parquet(body: bytes, spec: TaskSpec, limit: int) -> dict[str, Any]:
    """Return the columns of a Parquet file. Its claims are checked first: a small file may hold gigabytes."""
    try:
        file = pq.ParquetFile(io.BytesIO(body))
        _check_rows(file.metadata.num_rows, limit)
        names = [name for name in spec.input_columns if name in file.schema_arrow.names]
        groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
        most, size = 64 * max(len(body), 1 << 20), sum(group.total_byte_size for group in groups)
        parts = [group.column(at) for group in groups for at in range(group.num_columns)]
        read = [part for part in parts if any(f"{part.path_in_schema}.".startswith(f"{name}.") for name in names)]
        size += sum(64 * part.num_values for part in read)  # a list of one row may have millions
        if size > most:
            raise Refused(413, f"the Parquet file holds {size:,} bytes, more than 64 times its size")
        # First with strings in dictionaries, to know their length: one long value may stand in every row.
        strings = [part.path_in_schema for part in read if part.physical_type == "BYTE_ARRAY"]
        kept: dict[str, Any] = {"read_dictionary": strings, "arrow_extensions_enabled": False}  # arrow.json is a string
        table = pq.read_table(io.BytesIO(body), columns=names, use_threads=False, **kept)
        for name in names:
            if sum(_bytes_of_strings(chunk) for chunk in table[name].chunks) > most:
                raise Refused(413, f"{name}: its values are much larger than the body")
        table = pq.read_table(io.BytesIO(body), columns=names, use_threads=False)
        return {name: _values(table[name]) for name in names}
    except (pa.ArrowException, OSError, ValueError, KeyError):
        raise Refused(400, f"{PARQUET[0]}: this is not a Parquet file that can be read") from None


def _bytes_of_strings(array: pa.Array) -> int:
    """Return how many bytes the strings of dictionaries have at most, also those in lists and structs."""
    if pa.types.is_dictionary(array.type):
        return len(array) * (pa.compute.max(pa.compute.binary_length(array.dictionary)).as_py() or 0)
    if pa.types.is_map(array.type):
        return _bytes_of_strings(array.keys) + _bytes_of_strings(array.items)
    if not pa.types.is_nested(array.type):
        return 0
    flat = array.flatten()  # a list for each field of structs
    return sum(map(_bytes_of_strings, flat)) if isinstance(flat, list) else _bytes_of_strings(flat)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values; what is not UTF-8 keeps its bytes as halves of surrogates, an error of its row."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not is_text(kind):
        return list(column.to_pylist())
    stored = column.cast(kind).cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", "surrogateescape") for value in stored]


def _as_table(columns: Mapping[str, Any], spec: TaskSpec) -> tuple[pa.Table, dict[int, str]]:
    """Return the model's columns as a table, and errors of rows whose values cannot be read. Raises Refused."""
    kinds = plugins.load("tasks", spec.task).inputs
    inputs = {column: name for name, each in columns_of(kinds, spec).items() for column in each}
    missing = [name for name in spec.input_columns if name not in columns]
    if missing:
        wanted = ", ".join(spec.input_columns)
        raise Refused(400, f"there is no column {missing[0]!r}; this model reads {wanted}", field=missing[0])
    errors: dict[int, str] = {}
    arrays = {}
    for name in spec.input_columns:
        values = columns[name]
        kind = kinds.get(inputs.get(name, ""), "")
        if inputs.get(name) == IMAGE:
            arrays[name] = _images(name, values, errors)
        elif kind == TEXT or all(value is None or isinstance(value, str) for value in values):
            arrays[name] = as_texts(values, errors, lambda row, name=name: f"row {row}, column {name!r}")  # type: ignore[misc]
        else:
            arrays[name] = _others(name, values, errors, number=kind == NUMBER)
    return pa.table(arrays), errors


def as_texts(values: Sequence[Any], errors: dict[int, str], where: Callable[[int], str]) -> pa.Array:
    """Return texts as an array; text that is not Unicode is an error of its row. Raises Refused for other values."""
    good: list[str | None] = []
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise Refused(400, f"{where(row)}: expected a string, got {_kind(value)}")
        if value is not None and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                errors[row], value = "bad_utf8", None
        good.append(value)
    return from_strings(good)


def _images(name: str, values: Sequence[Any], errors: dict[int, str]) -> pa.Array:
    found: list[bytes | None] = []
    for row, value in enumerate(values):
        if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
            value = value.get("bytes")  # a path would be a file of the server
        if isinstance(value, str):
            try:
                value = base64.b64decode("".join(value.split()), validate=True)  # `base64` breaks lines
            except (binascii.Error, ValueError):
                errors.setdefault(row, "corrupt_image: it is not base64")
                value = None
        if value is not None and not isinstance(value, bytes):
            raise Refused(400, f"row {row}, column {name!r}: expected an image in base64, got {_kind(value)}")
        found.append(value)
    return pa.array(found, pa.large_binary())


def _others(name: str, values: Sequence[Any], errors: dict[int, str], *, number: bool) -> pa.Array:
    wrong = next((row for row, value in enumerate(values) if number and isinstance(value, list | dict)), None)
    if wrong is not None:
        raise Refused(400, f"row {wrong}, column {name!r}: expected a number, got {_kind(values[wrong])}", field=name)
    if number and any(isinstance(value, str) for value in values):
        values = [value if value is None or isinstance(value, str) else str(value) for value in values]
    try:
        array, bad = array_of(values)
        errors.update(bad)
        return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        kinds = sorted({_kind(value) for value in values})
        raise Refused(
            400, f"column {name!r}: its values are not of one type ({', '.join(kinds)})", field=name
        ) from None


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
