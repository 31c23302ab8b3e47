"""`predict` without a model folder: the work of a chunk job whose rows an endpoint answers.

    options -> EndpointJob -> table_job: plan, workers with a journal, one commit

What changes an answer is in the fingerprint: endpoint, model, options, columns and prices, never the key. Speed and
limits are not, so the same command with a higher limit continues.
"""

import platform
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.display import count
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.errors import LimitReached, UsageError
from torchlake.jobs.options import OutputOptions
from torchlake.jobs.table_job import workspace_of
from torchlake.jobs.worker.read_ahead import WrittenChunk
from torchlake.outputs.transaction import Transaction
from torchlake.scoring.endpoint.budget import Amount, open_account
from torchlake.scoring.endpoint.rows import EndpointSettings, output_schema
from torchlake.scoring.endpoint.usage import sums_of
from torchlake.scoring.endpoint.worker import UnfinishedChunk, make_endpoint_worker
from torchlake.scoring.options.table import refuse_collisions
from torchlake.tables.chunks import RowCost, first_rows
from torchlake.tables.plan import Chunk, chunk_label
from torchlake.tables.table import Table
from torchlake.tables.table import check_columns as require_columns
from torchlake.tasks import TEXT
from torchlake.tasks._inputs import check_column, check_columns
from torchlake.tasks._prompts import check_prompt_columns
from torchlake.tasks._row_options import OPTIONS, find_options

RUNTIME = "http"
WRITES, EMBEDS = "text_generation", "feature_extraction"
ROW_COST = RowCost(row_s=0.3)
"Chunks of at most 1,000 rows: what a kill repeats is little, and each process gets many."
MEMORY = 400 << 20
ROWS_AHEAD, MOST_AHEAD = 2048, 32
"Rows that a process reads ahead, so that it always has open requests, and chunks at most."
ROUNDS = 8
"Times that each process takes chunks, so that the last ones end at about the same time."
RATES = "rates"


@dataclass(kw_only=True)
class EndpointJob:
    """The work of `predict` by an endpoint; see `jobs/work.py`. The settings are completed by the input's columns."""

    settings: EndpointSettings
    engine: Engine
    name: str = "predict"
    fitted: bool = False
    taken: Amount = field(default_factory=Amount)
    "By earlier increments of this call."

    @property
    def key(self) -> str | None:
        return self.settings.key

    @property
    def columns(self) -> tuple[str, ...]:
        return self.settings.columns if self.fitted else ()

    @property
    def environment(self) -> dict[str, str]:
        return {"torchlake": version("torchlake"), "python": platform.python_version()}

    def fit(self, source: Table) -> pa.Schema:
        settings, schema, where = self.settings, source.schema, source.source
        spec = settings.spec
        if settings.generation is not None:
            task = plugins.load("tasks", WRITES)
            chat = spec.rows.chat

            def first(name: str) -> pa.Table:
                return first_rows(source, [name])

            spec = task.find_columns(schema, spec, None if chat else first)
            spec = replace(spec, rows=replace(spec.rows, chat=chat or spec.rows.chat))
            spec = self._checked(spec, schema, where, task)
            own = find_options(schema, spec.inputs.get(OPTIONS), first)  # type: ignore[arg-type]
            inputs = {name: one for name, one in spec.inputs.items() if name != OPTIONS}
            spec = replace(spec, inputs=inputs if own is None else {**inputs, OPTIONS: own})
        else:
            check_columns(schema, {"text": TEXT}, spec, where)
        require_columns(where, settings.keep, schema)
        self.settings, self.fitted = replace(settings, spec=spec), True
        found = output_schema(self.settings, schema)
        refuse_collisions(found.names, found.names)
        return found

    def _checked(self, spec: TaskSpec, schema: pa.Schema, where: str, task: Any) -> TaskSpec:
        """Return the task of texts. Raises TableError and UsageError for its columns."""
        options, columns = self.settings.prompts, as_columns(spec.text)
        if options.prompt is not None:
            check_prompt_columns(schema, columns, where)
            spec = replace(spec, rows=replace(spec.rows, chat=False))
        elif len(columns) > 1:
            check_columns(schema, {"text": TEXT}, spec, where)
        elif not (columns[0] in schema.names and task.holds_chats(schema.field(columns[0]).type, spec)):
            check_column(schema, "text", columns[0], TEXT, where)
        elif self.settings.endpoint.api != "chat":
            raise UsageError(
                f"{where}: {columns[0]!r} holds conversations, and {self.settings.endpoint.api} read text; leave out "
                "api, or name a column of text."
            )
        return spec

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        settings, spec, endpoint = self.settings, self.settings.spec, self.settings.endpoint
        generation = settings.generation
        return {
            "format": 2,
            "runtime": RUNTIME,
            "endpoint": endpoint.url,
            "model": endpoint.model,
            "api": endpoint.api,
            "options": dict(endpoint.options),
            "choices": list(endpoint.choices),
            "text": spec.text if isinstance(spec.text, str) else list(spec.text),
            "inputs": dict(spec.inputs),
            "chat": spec.rows.chat,
            "prompts": settings.prompts.given(),
            "key": settings.key,
            "columns": list(settings.keep),
            "batch_api": settings.batch_api,
            "logprobs": generation and generation.logprobs,
            "json_columns": bool(generation and generation.structure and generation.structure.columns),
            "prefix": settings.prefix,
            "null": settings.null,
            "price": settings.price and asdict(settings.price),
        }

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[WrittenChunk, None, None]:
        processes = self.settings.limits.processes(self.engine.processes or 1, len(items))
        workspace, shared = workspace_of(out), None
        if isinstance(self.engine, Local) and processes > 1:
            shared = Path(workspace.journal, RATES)
            shared.unlink(missing_ok=True)  # of an earlier call: moments that were never used
        account = open_account(workspace.rows, create=True)
        fair = len(items) if processes == 1 else len(items) // (ROUNDS * processes)
        mean = sum(chunk.rows for chunk, _ in items) / max(1, len(items))
        settings = replace(
            self.settings,
            limits=self.settings.limits.of_process(processes, None if shared is None else str(shared)),
            budget=self.settings.budget.plus(self.taken, -1.0),
            workspace=workspace,
            chunks_ahead=max(1, min(MOST_AHEAD, int(ROWS_AHEAD / max(mean, 1)), fair)),
        )
        results = self.engine.run_chunks(
            partial(make_endpoint_worker, settings),
            items,
            resources=Resources(processes=processes, memory=MEMORY),
            name=f"predict {out.title}",
            label=chunk_label,
        )
        left, reached = 0, ""
        try:
            for one in results:
                if isinstance(one, UnfinishedChunk):
                    left, reached = left + one.left, one.reached
                else:
                    yield one
            self.taken = self.taken.plus(account.read())
            if left:
                raise self._reached(reached, out.plan.rows - left, left)
        finally:
            results.close()
            account.close()

    def _reached(self, name: str, done: int, left: int) -> LimitReached:
        """Return the error of a job that has spent what it may."""
        limit, used, digits, unit = (self.settings.budget.cost, self.taken.cost, 4, "")
        if name == "max_tokens_total":
            limit, used, digits, unit = (self.settings.budget.tokens, self.taken.tokens, 0, " tokens")
        more = f" (about {used / done * left:,.{digits}f} more)" if done else ""
        are = "is" if left == 1 else "are"
        return LimitReached(
            f"{name}={limit:,} is reached: {count(done, 'row')} took {used:,.{digits}f}{unit}, "
            f"and {count(left, 'row')} {are} left{more}. What is finished is kept: the same command with a higher "
            f"{name} continues."
        )

    def provenance(self, out: Transaction, made: Sequence[WrittenChunk], seconds: float) -> dict[str, Any]:
        # Of vectors the endpoint counts prompts only.
        counts = ["prompt_tokens", *(["generated_tokens", "cached_tokens"] if self.settings.generation else [])]
        counts += [] if self.settings.price is None else ["cost"]
        names = [one.name for one in (*out.done, *(one.part for one in made))]
        return {
            "endpoint": self.settings.endpoint.url,
            "model": self.settings.endpoint.model,
            "engine": type(self.engine).__name__.lower(),
            "runtime": RUNTIME,
            **self.environment,
            "rows_scored": sum(chunk.rows for chunk in out.pending),
            "seconds": round(seconds, 3),
            "usage": sums_of(out.parts, names, {name: self.settings.prefix + name for name in counts}),
            "errors": [example for chunk in made for example in chunk.examples][:20],
        }


def with_chunks(options: OutputOptions, *, batch_api: bool) -> OutputOptions:
    """Return the options with the chunks of a job by an endpoint; those of batches are large."""
    return replace(options, chunk_rows=options.chunk_rows or (None if batch_api else ROW_COST))
