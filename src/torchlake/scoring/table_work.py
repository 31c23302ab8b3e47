"""The work of `predict` as a table job: its columns, its fingerprint, its chunks and their provenance."""

import platform
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.models.generation import settings_of
from torchlake.outputs.transaction import Transaction
from torchlake.processes.hardware import cpu_class
from torchlake.scoring.options.job import (
    products_of,
    say_if_optimizing_pays,
    with_export,
    with_time,
    with_versions,
)
from torchlake.scoring.options.table import checked_input, refuse_collisions, with_table
from torchlake.scoring.rows import ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import RuntimeChoice
from torchlake.scoring.workers.chunks import ScoredChunk, start_chunks
from torchlake.scoring.workers.output import output_schema
from torchlake.scoring.workers.tables import with_ranges
from torchlake.tables.chunks import first_rows
from torchlake.tables.plan import Chunk
from torchlake.tables.table import Table


@dataclass(kw_only=True)
class Scoring:
    """The work of `predict`; see `jobs/work.py`. The settings are completed by what is found in the input."""

    settings: ScoringSettings
    spec: TaskSpec
    choice: RuntimeChoice
    engine: Engine | None
    name: str = "predict"
    fitted: bool = False

    @property
    def key(self) -> str | None:
        return self.settings.key

    @property
    def columns(self) -> tuple[str, ...]:
        named = () if self._finds_columns else (*self.settings.keep, *self.spec.input_columns)
        return tuple(dict.fromkeys(named))

    @property
    def _finds_columns(self) -> bool:
        """Whether the columns depend on the table, and it has not been seen."""
        return not self.fitted and plugins.load("tasks", self.spec.task).generates

    @property
    def environment(self) -> dict[str, str]:
        """The versions, and the class of CPU, that may change the last digits of a score."""
        versions = {name: version(name) for name in ("torchlake", "torch", "transformers")}
        return {**versions, "python": platform.python_version(), "cpu": cpu_class().name}

    def fit(self, source: Table) -> pa.Schema:
        if self._finds_columns:
            self.settings, self.spec = with_table(
                self.settings, self.spec, source.schema, lambda column: first_rows(source, [column])
            )
        self.fitted = True
        self.settings = checked_input(self.settings, self.spec, source.schema, source.source)
        schema = output_schema(self.settings, self.spec, source.schema)
        refuse_collisions(schema.names, schema.names)
        return schema

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        runner = self.engine or Local()
        settings = with_versions(with_export(self.settings, runner), runner)
        settings = replace(settings, products=products_of(self.settings, earlier))
        self.settings, made = with_time(with_ranges(settings, source, earlier, runner), self.spec, earlier)
        return made

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[ScoredChunk, None, None]:
        if len(items) == len(out.plan.chunks):
            say_if_optimizing_pays(self.choice, self.settings, sum(chunk.rows for chunk, _ in items))
        return start_chunks(out, items, self.settings, self.spec, self.engine, self.choice.threads)

    def provenance(self, out: Transaction, made: Sequence[ScoredChunk], seconds: float) -> dict[str, Any]:
        tokens, padded = sum(chunk.tokens for chunk in made), sum(chunk.padded_tokens for chunk in made)
        could = sum(chunk.rows for chunk in made)
        writes = self.settings.generation is not None
        own = {"generation_config": settings_of(Path(self.settings.model))} if writes else {}
        ran = ", ".join(sorted({chunk.runtime for chunk in made} - {""}))
        return {
            "model": self.settings.model,
            "engine": "local" if self.engine is None else type(self.engine).__name__.lower(),
            "runtime": ran or runtime_name(self.choice.runtime),
            "runtime_by": self.choice.why,
            "batch_tokens": self.settings.batch_tokens,
            "threads": self.choice.threads,
            "gpus_per_process": self.settings.gpus_per_process,
            **own,
            **self.environment,
            "rows_scored": sum(chunk.rows for chunk in out.pending),
            "seconds": round(seconds, 3),
            "forward_seconds": round(sum(chunk.seconds for chunk in made), 3),
            "distinct": round(sum(chunk.distinct for chunk in made) / could, 4) if could else 1.0,
            "waiting_seconds": round(sum(chunk.waited for chunk in made), 3),
            "tokens": tokens,
            "padding": round(1 - tokens / padded, 4) if padded else 0.0,
            "errors": [example for chunk in made for example in chunk.examples][:20],
        }
