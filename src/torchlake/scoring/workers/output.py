"""The rows that a scorer computes, and the columns that they become: the key, copied columns, and the predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import joined as joined_features
from torchlake.data.features import joined_outputs
from torchlake.jobs.worker.texts import Prompt
from torchlake.models.generation import NON_FINITE, NOTHING
from torchlake.runtimes import Ended, Text
from torchlake.scoring.rows import ReadyRows, ScoringSettings
from torchlake.tables.arrays import from_numpy, from_strings
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import SAMPLE, Chunk
from torchlake.tasks._writing import PROMPT_TOKENS

NUMBER = pa.field(SAMPLE, pa.int32())
NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(kw_only=True)
class ScoredRows:
    """Rows that are scored together with others, or alone."""

    work: ReadyRows
    errors: dict[int, str]
    "The errors of rows, {number in the part: reason}"
    found: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    "Rows (B,) and their outputs (B, ...)."
    texts: dict[int, Text] = field(default_factory=dict)
    "The texts of rows that are written."
    same: np.ndarray = field(default_factory=lambda: NO_ROWS)
    "(M,) int64, the place of the row that is computed for each of `work.rows`."
    prompts: list[Prompt] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    "The numbers that the rows still to be written have in the writer;"
    first: int = 0
    "the first row has this one."

    def end(self, row: int, result: Ended | str) -> None:
        """Take the text of a row, or the reason why it has none; rows are numbered as in the writer."""
        self.left.remove(row)
        if isinstance(result, str):
            self.errors[row - self.first] = result
        else:
            self.texts[row - self.first] = result.text

    @property
    def written(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows (B,) that have texts, and their tokens (B, W) int32."""
        out = np.full((len(self.texts), max(1, *(len(one.tokens) for one in self.texts.values()))), NOTHING, np.int32)
        for place, one in enumerate(self.texts.values()):
            out[place, : len(one.tokens)] = one.tokens
        return np.array(list(self.texts), np.int64), out


def assembled(
    part: ScoredRows, settings: ScoringSettings, spec: TaskSpec, task: Any, processor: Any, *, raw: bool
) -> pa.Table:
    """Return the task's prediction columns, `truncated` and `error` for all rows of `part.work`, in their order.

    `raw`: with the model's outputs, not probabilities.
    """
    if part.texts:
        rows, out = part.written
        part.errors |= non_finite_rows(rows, out)
        part.found.append((rows, out))
    work, found, errors = part.work, part.found, part.errors
    same = work.rows[part.same]
    # A row that equals a failed one was not computed: it fails for the same reason.
    if errors:
        errors |= {int(row): errors[one] for row, one in zip(work.rows, same.tolist(), strict=True) if one in errors}
    options = settings.column_options
    rows = np.concatenate([rows for rows, _ in found]) if found else np.zeros(0, dtype=np.int64)
    # A non-finite row is in `found` and in `errors`; the error wins.
    kept = np.flatnonzero(~np.isin(rows, list(errors)))
    # Batches ran in order of length. From here on rows are in the order of the chunk again.
    kept = kept[np.argsort(rows[kept])]
    scored = rows[kept]
    if len(scored):
        answers = joined_outputs([out for _, out in found])[kept]
        answers = answers if raw else task.answers(answers, spec)
        if task.kept_back or task.generates:
            places = np.searchsorted(work.rows, scored)
            options = replace(
                options,
                features=work.features.take(places),
                written=[_logprobs(part.texts[row]) for row in scored.tolist()] if options.logprobs else (),
                own=[work.options[place] for place in places] if work.options else (),
            )
        columns, wrong = task.answer_columns(answers, processor, spec, options)
        kept_errors = {int(scored[place]): reason for place, reason in wrong.items()}
        pairs = zip(work.rows.tolist(), same.tolist(), strict=True)
        errors = errors | {row: kept_errors[one] for row, one in pairs if one in kept_errors}
    else:
        columns = task.output_schema(spec, options).empty_table()
    # -1 becomes null: rows with an error keep their place, so the output has exactly one row for each input row.
    position = np.full(work.count, -1, dtype=np.int64)
    position[scored] = np.arange(len(scored))
    position[work.rows] = position[same]
    table = columns.take(from_numpy(position, null=position < 0))
    table = table.rename_columns([settings.prefix + name for name in table.column_names])
    if settings.token_counts:
        tokens = np.full(work.count, -1, dtype=np.int32)
        tokens[work.rows] = work.features.lengths
        counts = from_numpy(tokens, null=tokens < 0)
        table = table.append_column(pa.field(f"{settings.prefix}tokens", pa.int32()), counts)
    return with_errors(table, work, errors)


def with_errors(table: pa.Table, work: ReadyRows, errors: Mapping[int, str]) -> pa.Table:
    """Return the table with the columns `truncated` and `error` of all rows."""
    truncated = np.zeros(work.count, dtype=bool)
    truncated[work.rows] = work.features.cut > 0
    table = table.append_column("truncated", from_numpy(truncated))
    return table.append_column("error", from_strings([errors.get(row) for row in range(work.count)]))


def _logprobs(text: Text) -> np.ndarray | None:
    """Return the log-probabilities (W,) of the tokens, without that of the end."""
    return None if text.logprobs is None else text.logprobs[: int((text.tokens >= 0).sum())]


def non_finite_rows(rows: np.ndarray, out: np.ndarray) -> dict[int, str]:
    """Return the errors of rows, because NaN among the scores would spread to every mean that is computed from them."""
    flat = out.reshape(len(out), -1)
    bad = (flat == NON_FINITE if np.issubdtype(out.dtype, np.integer) else ~np.isfinite(flat)).any(axis=1)
    return dict.fromkeys(rows[bad].tolist(), "non_finite: the model gave NaN or infinity")


def output_schema(settings: ScoringSettings, spec: TaskSpec, source: pa.Schema) -> pa.Schema:
    """Return the schema of the scored table."""
    task = plugins.load("tasks", spec.task)
    predicted = task.output_schema(spec, settings.column_options)
    if settings.samples > 1 and not settings.explode:
        predicted = [_listed(column) for column in predicted]
    kept = [source.field(name).remove_metadata().with_nullable(True) for name in settings.keep]
    keys = [pa.field("row_id", pa.string())] if settings.key is None else kept[:1]
    return pa.schema(
        [
            *keys,
            *([NUMBER] if settings.explode else []),
            *(kept if settings.key is None else kept[1:]),
            *(column.with_name(settings.prefix + column.name) for column in predicted),
            *([pa.field(f"{settings.prefix}tokens", pa.int32())] if settings.token_counts else []),
            pa.field("truncated", pa.bool_()),
            pa.field("error", pa.string()),
        ]
    )


def joined(works: Sequence[ReadyRows]) -> ReadyRows:
    """Concatenate the work of consecutive rows."""
    if len(works) == 1:
        return works[0]
    starts = np.cumsum([0, *(work.count for work in works)])
    return ReadyRows(
        int(starts[-1]),
        np.concatenate([start + work.rows for start, work in zip(starts, works, strict=False)]),
        joined_features([work.features for work in works if len(work.rows)] or [works[0].features]),
        {int(start) + row: why for start, work in zip(starts, works, strict=False) for row, why in work.errors.items()},
        [one for work in works for one in work.options],
    )


def output_of(table: pa.Table, settings: ScoringSettings, chunk: Chunk, predictions: pa.Table) -> pa.Table:
    """Return key (or row id), copied columns and predictions as one table."""
    columns = {"row_id": row_ids(chunk)} if settings.key is None else {settings.key: table[settings.key]}
    if settings.explode:
        columns[SAMPLE] = predictions[SAMPLE]
    columns |= {name: table[name] for name in settings.keep}
    if settings.explode:
        again = from_numpy(np.arange(len(table)).repeat(settings.samples))
        columns = {name: each if name == SAMPLE else each.take(again) for name, each in columns.items()}
    return pa.table({**columns, **{name: predictions[name] for name in predictions.column_names}})


def folded(predictions: pa.Table, settings: ScoringSettings) -> pa.Table:
    """Return the predictions of rows that have several answers: lists of a row's, or all with their numbers.

    A row of lists has the first error of its answers, and then no answer, but for texts that do not fit a structure.
    """
    samples = settings.samples
    if settings.explode:
        numbers = from_numpy(np.tile(np.arange(samples, dtype=np.int32), len(predictions) // samples))
        return predictions.add_column(0, NUMBER, numbers)
    if samples == 1:
        return predictions
    rows = len(predictions) // samples
    reasons = predictions["error"].to_pylist()
    first = [next(filter(None, reasons[row * samples : (row + 1) * samples]), None) for row in range(rows)]
    lost = np.array([reason is not None for reason in first], bool)
    if settings.generation is not None and settings.generation.structure is not None:
        texts = predictions[f"{settings.prefix}generated_text"].is_null().to_numpy()
        lost &= texts.reshape(rows, samples).all(axis=1)
    known = from_numpy(np.arange(rows), null=lost)
    columns: dict[str, Any] = {}
    for column in predictions.schema:
        each = predictions[column.name].combine_chunks()
        if column.name in ("truncated", *(settings.prefix + name for name in (PROMPT_TOKENS.name, "tokens"))):
            columns[column.name] = each.take(from_numpy(np.arange(rows) * samples))
        elif column.name != "error":
            offsets = from_numpy(np.arange(rows + 1, dtype=np.int32) * samples)
            columns[column.name] = pa.ListArray.from_arrays(offsets, each).take(known)
    return pa.table({**columns, "error": from_strings(first)})


def _listed(column: pa.Field) -> pa.Field:
    return column if column.name == PROMPT_TOKENS.name else column.with_type(pa.list_(column.type))
