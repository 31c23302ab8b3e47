"""Measures runtimes that write: tokens per second on the user's prompts, and how well texts agree with `eager`'s.

    prompts -> texts, at several batch sizes                    tokens per second, with the user's options
    eager's texts -> their log-probabilities by the runtime     the change per token, in nats

Two runtimes may write different texts and be equally good: after the first token that differs, everything differs, and
it differs where two tokens were almost equally likely. So a runtime of 8 or 16 bits is judged by how likely it finds
eager's texts; the share of equal texts decides for those that compute in fp32.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS
from torchlake.engines import Engine
from torchlake.errors import TorchlakeError
from torchlake.optimization.measure import (
    DROPPING,
    RuntimeTrial,
    Stopped,
    barrier,
    read_rows,
    run_guarded,
    score,
    write_rows,
)
from torchlake.runtimes import Ended, Report, Writer
from torchlake.scoring.scorer import Scorer

TRIED_TOKENS = {"cpu": (8192, 2048, 32768), "cuda": (65536, 16384, 262144)}
"The default first: the others are tried as far as the time allows."
ROWS = 32
"Prompts to measure on by default: an answer takes as long as thousands of classifications."
MIN_ROWS = 16
"Processes share the prompts, but each gets at least this many."
MAX_SHARE = 0.3
"Another batch size is not tried if it would take more than this share of the time that is left."
EXACT = 1e-3
"Runtimes of a lower TOLERANCE compute in fp32: their texts have to be equal."
MAX_NATS = 0.01
"The largest change of the log-probability of a token, on average."


@dataclass(frozen=True, kw_only=True)
class MeasuredTexts:
    """The measurements of one process."""

    rows: np.ndarray
    "(M,) positions in the sample."
    texts: list[str | None]
    "None where a row failed."
    prompts: list[np.ndarray]
    answers: list[np.ndarray]
    "Token ids of the prompts and of the texts, without an end token; empty where a row failed."
    log_probs: np.ndarray | None
    "(M,) the summed log-probability of the reference's tokens; None: the runtime cannot tell."
    errors: dict[int, str]
    by_batch_tokens: dict[int, float]
    "Tokens per second of all processes together, for each batch size that was tried."
    batch_tokens: int
    tokens_per_s: float
    rows_per_s: float
    device: str


@dataclass(frozen=True, kw_only=True)
class TextAgreement:
    """A runtime's texts compared with eager's, on the prompts for which eager has one."""

    rows: int
    failed: int
    agreement: float
    "Share of the texts that are equal."
    common: float
    "Mean share of each text that is equal up to the first difference."
    nats: float | None
    "The mean change of the log-probability of a token of eager's texts; None: the runtime cannot tell."


@dataclass(frozen=True, kw_only=True)
class ReferenceTexts:
    """Eager's texts of N prompts."""

    texts: list[str | None]
    tokens: np.ndarray
    "(N,) their numbers of tokens."
    log_probs: np.ndarray
    "(N,)"


def measure_texts(engine: Engine, trial: RuntimeTrial, reference: Path) -> list[MeasuredTexts] | Stopped:
    """Run the trial's processes at the same time; `reference` is the file of `write_reference`, if it exists."""
    work = plugins.carried(trial.settings.spec.task, partial(_measure, trial, str(reference)))
    return run_guarded(engine, work, Path(trial.folder), trial.processes, trial.deadline_s)


def write_reference(path: Path, measured: Sequence[MeasuredTexts], rows: int) -> ReferenceTexts:
    """Write eager's texts of `rows` prompts to a file for the other runtimes, and return them. Raises TorchlakeError
    if there is none."""
    texts: list[str | None] = [None] * rows
    prompts, answers = ([np.zeros(0, np.int64)] * rows for _ in range(2))
    log_probs = np.zeros(rows)
    for one in measured:
        for place, row in enumerate(one.rows.tolist()):
            texts[row], prompts[row], answers[row] = one.texts[place], one.prompts[place], one.answers[place]
            log_probs[row] = 0.0 if one.log_probs is None else one.log_probs[place]
    if all(text is None for text in texts):
        raise TorchlakeError(f"eager could write for no row of the sample: {next(iter(measured[0].errors.values()))}")
    write_rows(path, pa.table({"prompt": prompts, "answer": answers}))
    return ReferenceTexts(texts=texts, tokens=np.array([len(each) for each in answers]), log_probs=log_probs)


def compare_texts(measured: Sequence[MeasuredTexts], reference: ReferenceTexts) -> TextAgreement:
    """Compare a runtime's texts with eager's."""
    own: dict[int, str | None] = {}
    change, tokens, known = 0.0, 0, True
    for one in measured:
        known &= one.log_probs is not None
        for place, row in enumerate(one.rows.tolist()):
            if reference.texts[row] is None or row in own:
                continue
            own[row] = one.texts[place]
            if one.log_probs is not None:
                change += float(one.log_probs[place] - reference.log_probs[row])
                tokens += int(reference.tokens[row])
    pairs = [(reference.texts[row] or "", text) for row, text in own.items()]
    return TextAgreement(
        rows=len(pairs),
        failed=sum(text is None for _, text in pairs),
        agreement=float(np.mean([text == expected for expected, text in pairs])),
        common=float(np.mean([_common(expected, text or "") for expected, text in pairs])),
        nats=change / tokens if known and tokens else None,
    )


def outside_texts(found: TextAgreement, *, exact: bool, min_agreement: float) -> str | None:
    """Return why these texts are outside the tolerance, or None; `exact`: of a runtime that computes in fp32."""
    if found.failed:
        return f"{found.failed:,} of {found.rows:,} rows failed"
    judged_by_texts = exact or found.nats is None
    if judged_by_texts and not found.agreement >= min_agreement:
        return f"{found.agreement:.2%} of the texts are equal"
    if found.nats is not None and not abs(found.nats) <= MAX_NATS:
        return f"the log-probability of eager's texts changes by {found.nats:+.4f} nats a token"
    return None


def _common(expected: str, text: str) -> float:
    """Return the share of the expected text up to the first character that differs."""
    places = (place for place, (ours, own) in enumerate(zip(text, expected, strict=False)) if ours != own)
    length = max(len(expected), len(text))
    return next(places, min(len(expected), len(text))) / length if length else 1.0


class _Recorder:
    """A writer that keeps the tokens of the texts that it writes."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.refills = writer, writer.refills
        self.found: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def step(self, report: Report) -> None:
        def told(ended: Sequence[Ended]) -> None:
            self.found |= {one.row: one.text.tokens for one in ended}
            report(ended)

        self._writer.step(told)


def _measure(trial: RuntimeTrial, reference: str, index: int) -> MeasuredTexts:
    scorer = Scorer(settings=trial.settings)
    assert scorer.writer is not None, "the task writes"
    recorder: Any = _Recorder(scorer.writer)
    scorer.writer = recorder
    table = read_rows(trial.rows)
    shares = max(1, min(trial.processes, len(table) // MIN_ROWS))
    rows = np.arange(index % shares, len(table), shares)
    mine, ready = table.take(pa.array(rows)), scorer.read(table, {})
    score(scorer, mine.slice(0, 2))  # the first pass loads libraries and allocates memory
    meet = partial(barrier, trial, index, lambda: score(scorer, mine.slice(0, 1)))
    meet("loaded", 0.0)
    most = trial.settings.generation.max_new_tokens if trial.settings.generation else 0
    needed = -(-len(table) // shares) * (int(ready.features.lengths.max(initial=1)) + most)
    rates: dict[int, float] = {}
    for size in TRIED_TOKENS[scorer.device]:
        if any(min(size, needed) == min(tried, needed) for tried in rates):
            continue  # the same batches
        scorer.batch_tokens = size
        before, start = scorer.written, time.perf_counter()
        scored = score(scorer, mine)
        seconds = time.perf_counter() - start
        rates[size] = meet(f"{size}", (scorer.written - before) / seconds)
        # Every process decides by the same numbers.
        spent = len(table) * most * trial.processes / shares / (max(rates.values()) or 1.0)
        slow = max(rates.values()) < trial.min_rate or rates[size] < DROPPING * max(rates.values())
        if slow or spent * len(rates) > MAX_SHARE * trial.deadline_s:
            break
    best = max(rates, key=lambda tokens: rates[tokens])
    written = {row: found[found >= 0] for row, found in recorder.found.items()}
    texts, errors = scored["generated_text"].to_pylist(), scored["error"].to_pylist()
    prompts = _prompts(scorer, mine)
    answers = [written.get(row, np.zeros(0, np.int32)).astype(np.int64) for row in range(len(mine))]
    del scorer.writer, recorder
    gc.collect()  # the model is loaded again
    return MeasuredTexts(
        rows=rows,
        texts=texts,
        prompts=prompts,
        answers=answers,
        log_probs=_log_probs(trial, scorer, rows, prompts, answers, reference),
        errors={int(rows[row]): reason for row, reason in enumerate(errors) if reason is not None},
        by_batch_tokens=rates,
        batch_tokens=best,
        tokens_per_s=rates[best],
        # A model may end every answer at once.
        rows_per_s=rates[best] * len(mine) / sum(map(len, answers)) if any(map(len, answers)) else len(mine) / seconds,
        device=scorer.device,
    )


def _prompts(scorer: Scorer, table: pa.Table) -> list[np.ndarray]:
    """Return the token ids of each row, none for a row that has an error."""
    ready = scorer.read(table, {})
    ids = ready.features.arrays[INPUT_IDS]
    assert isinstance(ids, Ragged), "rows have different lengths"
    found = [np.zeros(0, np.int64)] * len(table)
    for place, row in enumerate(ready.rows.tolist()):
        found[row] = ids.values[ids.offsets[place] : ids.offsets[place + 1]].astype(np.int64)
    return found


def _log_probs(
    trial: RuntimeTrial,
    scorer: Scorer,
    rows: np.ndarray,
    prompts: Sequence[np.ndarray],
    answers: Sequence[np.ndarray],
    reference: str,
) -> np.ndarray | None:
    """Return the summed log-probability of each text of the reference, or of the own ones if there is none yet."""
    runtime = trial.settings.runtime
    module = plugins.load("runtimes", runtime) if isinstance(runtime, str) else None
    if module is None or not hasattr(module, "load_log_probs"):
        return None
    if Path(reference).exists():
        table = read_rows(reference).take(pa.array(rows))
        prompts, answers = (
            [np.array(one, np.int64) for one in table[name].to_pylist()] for name in ("prompt", "answer")
        )
    log_probs = module.load_log_probs(Path(trial.settings.model), scorer.spec, device=scorer.device)
    places = [place for place, answer in enumerate(answers) if len(answer) and len(prompts[place])]
    found = np.zeros(len(rows))
    made = log_probs([prompts[place] for place in places], [answers[place] for place in places])
    found[places] = [float(one.sum()) for one in made]
    return found
