"""Words to look at: those whose tag the model contradicts, by confident learning over words (cleanlab's token form).

The labels of a text become tags of its words, as in training. In memory are some 60 bytes a word, and all probabilities
up to `CLEANLAB_NUMBERS`.
"""

import warnings
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.evaluation.sections.hints import CLEANLAB_NUMBERS
from torchlake.evaluation.sections.rows import errors_and_usable

SUGGESTED = pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32(), "label": pa.string()}))
START, END, TAG, SAID = range(4)
"The numbers of a word."


def word_hints(
    parts: Iterable[pa.Table], labels: pa.ChunkedArray, spec: TaskSpec, prefix: str
) -> tuple[str, dict[str, pa.Array]]:
    """Return how words were judged, and of each row `label_quality`, that of its least likely tag, `label_issue`, and
    `suggested`, the words to look at with the tag that the model expects; null for rows that failed."""
    first, fits, chances = 0, True, list[np.ndarray]()
    sizes, words, own = [], [], []
    for part in parts:
        known = labels.slice(first, len(part)).combine_chunks()
        first += len(part)
        usable = errors_and_usable(part, known, spec, prefix)[1]
        scored = part[f"{prefix}words"].combine_chunks().filter(usable)
        starts, ends, lists = scored.flatten().flatten()
        given = np.asarray(lists.flatten().to_numpy()).reshape(len(starts), len(spec.labels))
        counts = np.zeros(len(part), dtype=np.int64)
        counts[usable.to_numpy(zero_copy_only=False)] = scored.value_lengths().to_numpy()
        places = np.stack([starts.to_numpy(), ends.to_numpy()])
        tags = _tags(known.filter(usable), scored.offsets.to_numpy(), places, spec)
        words.append(np.stack([*places, tags, given.argmax(axis=1)]))
        own.append(given[np.arange(len(tags)), tags].astype(np.float64))
        sizes.append(counts)
        fits = fits and sum(one.size for one in chances) + given.size <= CLEANLAB_NUMBERS
        chances = [*chances, given] if fits else []
    every = np.concatenate(words, axis=1)
    how, quality, issue = _judged(every, np.concatenate(chances) if fits else None, np.concatenate(own))
    return how, _of_rows(every, np.concatenate(sizes), quality, issue, spec)


def _tags(labels: pa.Array, offsets: np.ndarray, places: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Return the number of each word's tag, (W,) int64."""
    from torchlake.tasks._spans import tags_of
    from torchlake.tasks.token_classification import true_spans

    numbers, found = {str(tag): place for place, tag in enumerate(spec.labels)}, list[int]()
    for row, start, stop in zip(labels.to_pylist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        found += [numbers[tag] for tag in tags_of(true_spans(row, spec), *places[:, start:stop])]
    return np.array(found, dtype=np.int64)


def _judged(words: np.ndarray, chances: np.ndarray | None, own: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    """Return how words were judged, the quality of each tag, and which are to look at."""
    why = "more words and tags than cleanlab is given" if chances is None else ""
    if chances is not None and len(np.unique(words[TAG])) < 2:
        why = "fewer than two tags occur"
    if why or find_spec("cleanlab") is None:
        return "the probability of the tag" + (f" ({why})" if why else ""), own, words[SAID] != words[TAG]
    from cleanlab import filter, rank

    # What the functions of cleanlab.token_classification call, after they have made lists of lists flat.
    exact = np.asarray(chances, dtype=np.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "May not flag all label issues")  # of tags with a word or none
        issue = filter.find_label_issues(words[TAG], exact, n_jobs=1)
    quality = rank.get_label_quality_scores(words[TAG], exact)
    return f"confident learning over words (cleanlab {version('cleanlab')})", quality, issue


def _of_rows(
    words: np.ndarray, sizes: np.ndarray, quality: np.ndarray, issue: np.ndarray, spec: TaskSpec
) -> dict[str, Any]:
    row, read = np.repeat(np.arange(len(sizes)), sizes), sizes > 0
    least, listed = np.full(len(sizes), np.inf), np.zeros(len(sizes), dtype=np.int64)
    np.minimum.at(least, row, quality)
    np.add.at(listed, row, issue)
    some = words[:, issue]
    labels = pa.array([str(tag) for tag in spec.labels]).take(pa.array(some[SAID]))
    spans = pa.StructArray.from_arrays(
        [pa.array(some[START], pa.int32()), pa.array(some[END], pa.int32()), labels], fields=list(SUGGESTED.value_type)
    )
    offsets = np.concatenate([[0], np.cumsum(listed)])
    edges = pa.array(offsets.astype(np.int32), mask=np.append(listed == 0, False))
    return {
        "label_quality": pa.array(least, mask=~read),
        "label_issue": pa.array(listed > 0, mask=~read),
        "suggested": pa.ListArray.from_arrays(edges, spans),
    }
