"""One torchlake runtime in a process of its own, driven as `predict` drives it; see `_contender.py`.

A turn is text to probabilities: tokenize, sort by length, batch, forward, original order. Reading and writing tables
is `end_to_end.py`'s question.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _contender import Score, serve

from torchlake import plugins
from torchlake.models.spec import load_spec
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import BATCH_TOKENS, Scorer

BATCH_CHOICES = (256, 512)
NOT_TUNED = ("compiled", "zentorch")  # each size of a batch may cost a compilation


class Refused(Exception):
    """The runtime cannot run here; the message is its reason."""


def main() -> None:
    serve(lambda setup: {"prepare": prepare, "score": load}[setup["group"]](setup))


def settings_of(model: str | Path, runtime: str, batch_tokens: int | None = None) -> ScoringSettings:
    """What `predict(model, ..., runtime=runtime, all_probabilities=True)` gives its workers."""
    return ScoringSettings(
        model=str(model),
        runtime=runtime,
        text="text",
        keep=(),
        key=None,
        prefix="",
        all_probabilities=load_spec(model).label is not None,
        null="error",
        row_timeout_s=600.0,
        batch_tokens=batch_tokens,
    )


def read_texts(scorer: Scorer, texts: Sequence[str]) -> Any:
    """What the scorer reads of a table with these texts: their tokens, ready to be scored."""
    return scorer.read(pa.table({scorer.spec.text: pa.array(texts, pa.string())}), {})


def prepare(setup: dict[str, Any]) -> Mapping[str, Score]:
    """Export and calibrate, where the runtime does so; its memory is not the scoring process's."""
    runtime, folder = plugins.load("runtimes", setup["runtime"]), Path(setup["model"])
    task = load_spec(folder).task
    reason = runtime.never.get(task) or runtime.refusal(folder)
    if reason is None and runtime.tasks is not None and task not in runtime.tasks:
        reason = f"it computes {', '.join(runtime.tasks)} only"
    if reason:
        raise Refused(reason)
    if hasattr(runtime, "prepare"):
        from torchlake.runtimes import _exports
        from torchlake.scoring.scorer import prepare_runtime

        if _exports.current(folder, setup["runtime"], task) is None:
            settings = settings_of(setup["model"], setup["runtime"], None)
            prepare_runtime(settings, setup["runtime"], pa.table({settings.text: setup["texts"]}))
    return {}


def load(setup: dict[str, Any]) -> Mapping[str, Score]:
    """The loaded runtime, warm, with the batch size that suits it on training rows, as `optimize` would choose it."""
    scorer = Scorer(settings=settings_of(setup["model"], setup["runtime"], setup.get("batch_tokens")))
    score = partial(score_texts, scorer)
    if setup.get("batch_tokens") or setup["runtime"] in NOT_TUNED:
        score(setup["texts"])
        return {"score": score, **in_two_steps(scorer)}
    warm = setup["texts"][::2]
    score(warm[::4])
    seconds = {}
    for batch_tokens in (scorer.batch_tokens, *BATCH_CHOICES):
        scorer.batch_tokens = batch_tokens
        began = time.perf_counter()
        score(warm)
        seconds[batch_tokens] = time.perf_counter() - began
    scorer.batch_tokens = min(seconds, key=lambda size: seconds[size] * (0.98 if size == BATCH_TOKENS["cpu"] else 1))
    return {"score": score, **in_two_steps(scorer)}


def in_two_steps(scorer: Scorer) -> Mapping[str, Score]:
    """The same as two ways of scoring: `tokenize` keeps the tokens of its texts, `forward` scores what was kept."""
    kept: dict[str, Any] = {}

    def tokenize(texts: list[str]) -> tuple[np.ndarray, int]:
        kept["work"] = read_texts(scorer, texts)
        return np.zeros((0, 0)), 0

    def forward(texts: list[str]) -> tuple[np.ndarray, int]:
        scorer.score(kept["work"])
        return np.zeros((0, 0)), 0

    return {"tokenize": tokenize, "forward": forward}


def score_texts(scorer: Scorer, texts: list[str]) -> tuple[np.ndarray, int]:
    """Probabilities (N, C) or vectors (N, D), and the padded tokens handed to the forward pass."""
    before = scorer.padded_tokens
    scored = scorer.score(read_texts(scorer, texts))
    assert scored["error"].null_count == len(texts), scored["error"].drop_null()[0]
    if "embedding" in scored.column_names:
        vectors = scored["embedding"].combine_chunks().flatten().to_numpy()
        return vectors.reshape(len(texts), -1), scorer.padded_tokens - before
    columns = [scored[name].to_numpy() for name in scored.column_names if name.startswith("prob_")]
    return np.stack(columns, axis=1), scorer.padded_tokens - before


if __name__ == "__main__":
    main()
