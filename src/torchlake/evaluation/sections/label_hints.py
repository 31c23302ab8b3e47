"""Labels to look at: rows whose label the model contradicts, by confident learning (cleanlab), called with
probabilities only.

Without cleanlab rows are ranked by the probability of their label, which is most of the effect. Hints are worth
something only on rows that the model was not trained on: `refuse_trained` looks at the run that the model is from, and
`trained_on` finds single rows with the inputs of a training row.

The labels of spans become tags of words, as in training, which are judged over all words (cleanlab's token form). In
memory are some 60 bytes a word, and all probabilities up to `CLEANLAB_NUMBERS`.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.config.task_spec import TaskSpec
from torchlake.data.copies import is_shared
from torchlake.data.loading import HASHES
from torchlake.errors import UsageError
from torchlake.evaluation.sections.labels import targets_of
from torchlake.evaluation.sections.rows import among_all, errors_and_usable
from torchlake.labels.encoding import label_array
from torchlake.tables.hashes import Words, combined
from torchlake.tables.record import COMMIT, committed_files

KINDS = ("classes", "labels", "spans")
SUGGESTED = pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32(), "label": pa.string()}))
START, END, TAG, SAID = range(4)
"The numbers of a word."
CLEANLAB_NUMBERS = 50_000_000
"Probabilities up to which cleanlab judges: it takes several times their memory."
Columns = Mapping[str, np.ndarray | pa.Array]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Import and call cleanlab without what it warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook without ipywidgets
        warnings.filterwarnings("ignore", "May not flag all label issues")  # of classes with a row or none
        yield


def refuse_trained(model: Path, tables: Any) -> None:
    """Raise UsageError if a table is the one that the model was trained on."""
    job_file = model.resolve().parent / "job.yaml"
    if not job_file.is_file() or not isinstance(tables, str | Path | list | tuple):
        return
    given = {os.path.realpath(one) for one in ([tables] if isinstance(tables, str | Path) else tables)}
    trained = load_job(job_file).data.train
    stored = {os.path.realpath(one) for one in ([trained] if isinstance(trained, str) else trained or [])}
    if both := sorted(given & stored):
        raise UsageError(
            f"label_hints: {both[0]} is the table that {model} was trained on, and hints on rows that were trained on "
            "are worthless: the model has learned their labels. Train with --folds 5: the page of each fold "
            "(fold_1/eval/eval.html and so on) has the hints for rows that this fold did not train on."
        )


def training_hashes(model: Path) -> list[Path]:
    """Return the files with the hashes of the training rows, which the run of a model keeps; empty without them."""
    prepared = model.resolve().parent / "prepared" / "train"
    return committed_files(prepared) if (prepared / COMMIT).is_file() else []


def trained_on(files: Sequence[Path], asked: Words) -> np.ndarray:
    """Return which inputs, by their hashes (N,), are those of a training row, (N,) bool. Memory: 8 bytes for each."""
    ordered, found = np.unique(asked), [np.zeros(0, np.uint64)]
    for file in files:
        with pq.ParquetFile(file) as stored:
            for batch in stored.iter_batches(1 << 20, columns=[HASHES, "error"]):
                words = inputs_of(batch[HASHES].filter(batch["error"].is_null()))
                found.append(np.unique(words[is_shared(words, ordered)]))
    return is_shared(asked, np.concatenate(found))


def inputs_of(hashes: pa.FixedSizeListArray) -> Words:
    """Return the hash (N,) of the inputs of each row of token Parquet, which has those of its columns and target."""
    return combined(hashes.flatten().to_numpy().reshape(len(hashes), hashes.type.list_size)[:, :-1])


def hints_of(
    scored: pa.Table, labels: pa.ChunkedArray, spec: TaskSpec, kind: str, prefix: str
) -> tuple[str, dict[str, pa.Array]]:
    """Return how labels were judged, and the columns of `label_hints` for all rows, null where a row failed."""
    known, task = labels.combine_chunks(), plugins.load("tasks", spec.task)
    usable = pc.and_(scored["error"].combine_chunks().is_null(), task.encode_labels(known, spec).is_valid())
    names = [name for name in scored.column_names if name.startswith(prefix)]
    plain = scored.select(names).rename_columns([name.removeprefix(prefix) for name in names])
    how, columns = label_hints(plain.filter(usable), known.filter(usable), spec, kind)
    return how, {name: among_all(one, usable) for name, one in columns.items()}


def label_hints(predicted: pa.Table, labels: pa.Array, spec: TaskSpec, kind: str) -> tuple[str, dict[str, Any]]:
    """Return how labels were judged, and of each row `label_quality` (0 to 1), `label_issue` and `suggested`.

    `predicted` has all probabilities; every row has a label.
    """
    chances, targets = plugins.load("tasks", spec.task).read_answers(predicted, spec), targets_of(labels, spec)
    classes = label_array(spec)
    if kind == "classes":
        said = chances.argmax(axis=1)
        seen = len(np.unique(targets))
        own, suggested, wrong = chances[np.arange(len(targets)), targets], classes.take(pa.array(said)), said != targets
    else:
        positive = targets.reshape(len(chances), -1) > 0
        seen = int(positive.any(axis=0).sum())
        own = np.where(positive, chances, 1 - chances).min(axis=1)
        wrong, suggested = ((chances >= 0.5) != positive).any(axis=1), predicted["label"].combine_chunks()
    why = None
    if chances.size > CLEANLAB_NUMBERS:
        why = "more rows and classes than cleanlab is given"
    elif seen < 2:
        why = "fewer than two labels occur"
    elif kind == "labels" and positive.all(axis=0).any():
        why = "one label is in every row"
    if why or find_spec("cleanlab") is None:
        how = "the probability of the label" + (f" ({why})" if why else "")
        own = own.astype(np.float64)
        return how, {"label_quality": own, "label_issue": wrong, "suggested": suggested}
    chances = chances.astype(np.float64)
    with _without_warnings():
        from cleanlab import filter, multilabel_classification, rank

        if kind == "classes":
            issue = filter.find_label_issues(targets, chances, n_jobs=1)
            quality = rank.get_label_quality_scores(targets, chances)
        else:
            lists = [np.flatnonzero(row).tolist() for row in positive]
            issue = multilabel_classification.filter.find_label_issues(lists, chances, n_jobs=1)
            quality = multilabel_classification.get_label_quality_scores(lists, chances)
    how = f"confident learning (cleanlab {version('cleanlab')})"
    return how, {"label_quality": quality, "label_issue": issue, "suggested": suggested}


def word_hints(
    parts: Iterable[pa.Table], labels: pa.ChunkedArray, spec: TaskSpec, prefix: str
) -> tuple[str, dict[str, pa.Array]]:
    """Return how the tags of words were judged, and of each row `label_quality`, that of its least likely tag,
    `label_issue`, and `suggested`, the words to look at with the tag that the model expects; null for failed rows."""
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
    # What the functions of cleanlab.token_classification call, after they have made lists of lists flat.
    exact = np.asarray(chances, dtype=np.float64)
    with _without_warnings():
        from cleanlab import filter, rank

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
