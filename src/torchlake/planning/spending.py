"""Estimate what a job by an endpoint takes before it starts: requests, tokens, cost and hours, from a sample of rows.

Prompts are counted by a tokenizer, else guessed from their characters. Of answers only the limit is known, so their
tokens are from none to `max_new_tokens` for each row, and half of it is the estimate. An interval has both: the
deviation of the sample's mean (95 %), and the answers.

The same of a model that writes itself: its time is known if `optimize` has measured its speed. The estimate takes texts
as long as those that were measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchlake.config.arguments import plain_numbers
from torchlake.config.options import ReadArguments
from torchlake.display import Shown, count, shown
from torchlake.errors import UsageError
from torchlake.models.folders import model_folder
from torchlake.models.tokenizer import load_tokenizer
from torchlake.runtimes._http.requests import Prompt
from torchlake.scoring.endpoint.job import EndpointJob
from torchlake.scoring.endpoint.options import endpoint_job
from torchlake.scoring.endpoint.rows import MESSAGE_TOKENS, guess_tokens, read_prompts
from torchlake.scoring.endpoint.usage import CHARACTERS
from torchlake.scoring.options.given import split_options
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.rows import RowReader, runtime_name
from torchlake.scoring.table_work import Scoring
from torchlake.tables import chunks
from torchlake.tables.sources._options import read_options
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import open_table

Z = 1.96


class Between(NamedTuple):
    """An estimate with its interval."""

    low: float
    estimate: float
    high: float

    def shown(self, digits: int = 0) -> str:
        """Return it in words."""
        about, low, high = (f"{each:,.{digits}f}" for each in (self.estimate, self.low, self.high))
        return about if low == high else f"about {about} ({low} to {high})"


@shown
@dataclass(frozen=True, kw_only=True)
class SpendingPlan:
    """What a job by an endpoint takes."""

    rows: int
    sampled: int
    requests: int
    "Rows that are asked, by the share of those in the sample."
    prompt_tokens: Between
    generated_tokens: Between
    cost: Between | None
    "None without prices."
    hours: Between | None
    "By the limits of requests and tokens per minute; None without them."
    assumptions: tuple[str, ...]

    def _shown(self) -> Shown:
        tokens = f"{self.prompt_tokens.estimate + self.generated_tokens.estimate:,.0f} tokens"
        cost = "" if self.cost is None else f", cost {self.cost.estimate:,.2f}"
        return f"{count(self.requests, 'request')}, about {tokens}{cost}", []


@shown
@dataclass(frozen=True, kw_only=True)
class WritingPlan:
    """What a job of a model that writes takes."""

    rows: int
    sampled: int
    prompts: int
    "Rows that are written for, by the share of those in the sample."
    prompt_tokens: Between
    most_tokens: int
    "Tokens to write at most."
    runtime: str
    tokens_per_s: float | None
    "Tokens per second that `optimize` measured, of all its processes; None: not measured."
    hours: Between | None

    def _shown(self) -> Shown:
        hours = "" if self.hours is None else f", {self.hours.shown(2)} hours"
        return f"{count(self.prompts, 'prompt')}, at most {self.most_tokens:,} tokens{hours}", []


def plan_endpoint(
    table: StoredTable,
    *,
    text: str | Sequence[str] | None = None,
    tokenizer: str | Path | None = None,
    sample_rows: int = 2000,
    **options: Any,
) -> SpendingPlan:
    """Return what `predict(None, table, output, ...)` with these options would take; nothing is sent.

    `tokenizer` is a model folder, or a name on the Hub; without one, tokens are guessed from characters. Raises as
    `predict` for mistakes in the options and the table.
    """
    options = plain_numbers(options)
    work = endpoint_job(options, text=text, key=None, columns=(), engine=None)
    read = read_options({name: value for name, value in options.items() if name in ReadArguments.__annotations__})
    source = open_table(table, columns=(), options=read)
    work.fit(source)
    picked, _, plan = chunks.sample_rows(source, work.settings.columns)
    picked = picked.take(chunks.evenly_spaced(len(picked), min(len(picked), sample_rows)))
    prompts, _ = read_prompts(picked, {}, work.settings)
    share = len(prompts) / len(picked) if len(picked) else 0.0
    requests = round(share * plan.rows)
    tokens_of = guess_tokens if tokenizer is None else _counting(tokenizer)
    lengths = np.array([tokens_of(prompt) for prompt, _ in prompts.values()] or [0.0])
    prompt = _around_mean(lengths, requests)
    most = float(requests * work.settings.endpoint.most_tokens)
    generated = Between(0.0, most / 2, most)
    way = f"the tokenizer of {tokenizer}"
    if tokenizer is None:
        way = f"their characters, {CHARACTERS} for a token: a guess"
    limit = work.settings.endpoint.most_tokens
    assumed = [f"prompts: {way}", *([f"answers: from none to {limit:,} tokens, half of that on average"] * bool(limit))]
    price = work.settings.price
    cost = None if price is None else Between(*map(price.cost, prompt, generated))
    if price is None:
        assumed.append("cost: not known without prices (price)")
    elif price.cached < price.input:
        assumed.append("cost: no prompt is in the endpoint's cache; what is there costs less")
    return SpendingPlan(
        rows=plan.rows,
        sampled=len(picked),
        requests=requests,
        prompt_tokens=prompt,
        generated_tokens=generated,
        cost=cost,
        hours=_hours(work, requests, prompt, generated),
        assumptions=tuple(assumed),
    )


def plan_writing(
    model: str | Path,
    table: StoredTable,
    *,
    text: str | Sequence[str] | None = None,
    runtime: str | None = None,
    sample_rows: int = 2000,
    **options: Any,
) -> WritingPlan:
    """Return what `predict(model, table, output, ...)` with these options would take; no weights are loaded.

    Raises as `predict` for mistakes in the options and the table, and UsageError for a model that does not write.
    """
    options = plain_numbers(options)
    scoring, generation, _ = split_options(options)  # type: ignore[arg-type]
    settings, spec, choice = scoring_settings(model, runtime, generation, text=text, **scoring)
    if settings.generation is None:
        raise UsageError(f"{model}: {spec.task} writes nothing. A plan of a training: torchlake plan job.yaml.")
    work = Scoring(settings=settings, spec=spec, choice=choice, engine=None)
    read = read_options({name: value for name, value in options.items() if name in ReadArguments.__annotations__})
    source = open_table(table, columns=work.columns, options=read)
    work.fit(source)
    picked, _, plan = chunks.sample_rows(source, work.columns)
    picked = picked.take(chunks.evenly_spaced(len(picked), min(len(picked), sample_rows)))
    ready = RowReader(settings=work.settings).read(picked, {})
    prompts = round(plan.rows * len(ready.rows) / max(1, len(picked)))
    most = prompts * settings.samples * settings.generation.max_new_tokens
    hours = None
    if choice.tokens_per_s and choice.rows_per_s:
        longest = most / choice.tokens_per_s / 3600
        hours = Between(0.0, min(longest, prompts * settings.samples / choice.rows_per_s / 3600), longest)
    return WritingPlan(
        rows=plan.rows,
        sampled=len(picked),
        prompts=prompts,
        prompt_tokens=_around_mean(np.asarray(ready.features.lengths, np.float64), prompts),
        most_tokens=most,
        runtime=runtime_name(choice.runtime),
        tokens_per_s=choice.tokens_per_s,
        hours=hours,
    )


def _around_mean(lengths: np.ndarray, rows: int) -> Between:
    """Return the sum over `rows` rows, by the lengths (N,) of some of them, or of all."""
    known = not 1 < len(lengths) < rows
    mean = float(lengths.mean()) if len(lengths) else 0.0
    around = 0.0 if known else Z * float(lengths.std(ddof=1)) / math.sqrt(len(lengths))
    return Between(*(max(0.0, rows * each) for each in (mean - around, mean, mean + around)))


def facts_of(done: SpendingPlan) -> dict[str, str]:
    """Return a plan as facts for display."""
    sampled = "all looked at" if done.sampled == done.rows else f"{done.sampled:,} looked at"
    return {
        "table": f"{done.rows:,} rows, {sampled}",
        "requests": f"{done.requests:,}",
        "prompts": f"{done.prompt_tokens.shown()} tokens",
        "answers": f"{done.generated_tokens.shown()} tokens",
        **({} if done.cost is None else {"cost": done.cost.shown(4)}),
        "time": "not known without requests or tokens per minute"
        if done.hours is None
        else f"{done.hours.shown(2)} hours",
    }


def facts_of_texts(done: WritingPlan, model: str | Path, table: StoredTable) -> dict[str, str]:
    """Return a plan as facts for display."""
    sampled = "all looked at" if done.sampled == done.rows else f"{done.sampled:,} looked at"
    unknown = f"not known; to measure it: torchlake optimize {model} --sample {table}"
    return {
        "table": f"{done.rows:,} rows, {sampled}; {done.prompts:,} to write for",
        "prompts": f"{done.prompt_tokens.shown()} tokens",
        "texts": f"at most {done.most_tokens:,} tokens",
        "speed": unknown if done.tokens_per_s is None else f"{done.tokens_per_s:,.1f} tokens/s by {done.runtime}",
        "time": "not known without the speed" if done.hours is None else f"{done.hours.shown(2)} hours",
    }


def _counting(name: str | Path) -> Callable[[Prompt], float]:
    """Return a function that counts the tokens of a prompt."""
    tokenizer = load_tokenizer(model_folder(name))

    def tokens_of(prompt: Prompt) -> float:
        texts = [prompt] if isinstance(prompt, str) else [str(one.get("content") or "") for one in prompt]
        tokens = sum(len(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in texts)
        return float(tokens + (0 if isinstance(prompt, str) else MESSAGE_TOKENS * len(texts)))

    return tokens_of


def _hours(work: EndpointJob, requests: int, prompt: Between, generated: Between) -> Between | None:
    """Return the hours at the job's limits."""
    limits = work.settings.limits
    if limits.requests_per_minute is None and limits.tokens_per_minute is None:
        return None
    by_requests = requests / limits.requests_per_minute if limits.requests_per_minute else 0.0
    rate = limits.tokens_per_minute or math.inf
    return Between(*(max(by_requests, (p + g) / rate) / 60 for p, g in zip(prompt, generated, strict=True)))
