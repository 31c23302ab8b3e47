"""`evaluate` for pairs of answers: how often a model's implicit reward prefers the better one, and by how much.

    prepare with the model -> its log-probabilities of both answers ┐
    prepare with the reference ----------------------------------> ┴ rewards -> accuracy, margin, with intervals

The rewards are those of training (`tasks/preference.py`). The log-probabilities are computed by the chunk job that
computes those of the reference for a training, so on every engine, and the numbers are those of its validation.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchlake import plugins
from torchlake.config.sections.preference import PreferenceOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.data import loading
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, UsageError
from torchlake.evaluation.perplexity import errors_of
from torchlake.evaluation.result import Evaluation
from torchlake.metrics import bootstrapped
from torchlake.models.folders import base_folder, model_hash
from torchlake.outputs.staging.spool import spooled
from torchlake.preparation.prepare import prepare
from torchlake.preparation.reference import Reference, check_same_vocabulary
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import ReadOptions
from torchlake.tasks.preference import reward_metrics, rewards

RESAMPLES = 200
ANSWERS = ("chosen", "rejected")
DEFAULTS = PreferenceOptions().model_dump()
"The settings by which a model is measured that did not learn from pairs."


def pairs_spec(spec: TaskSpec, text: Any, inputs: Mapping[str, Any] | None) -> TaskSpec | None:
    """Return the task of training for a model of text generation that is to be measured on pairs; None for another.

    `inputs` name the columns of the answers, `text` that of the prompt, in place of those of the training table.
    """
    given = inputs or {}
    named = {name: given.get(name, spec.preference.get(name)) for name in ANSWERS}
    if spec.task != "text_generation" or given.keys() - set(ANSWERS) or None in named.values():
        return None
    asked = spec.preference.get("text", "") if text is None else text
    return replace(
        spec,
        task="preference",
        problem="preference",
        text=asked,
        inputs=named,
        preference={**DEFAULTS, **spec.preference},
    )


def measure_preferences(
    model: Path,
    table: Any,
    spec: TaskSpec,
    *,
    reference: str | Path | None,
    engine: Engine | None,
    options: ReadOptions,
) -> Evaluation:
    """Measure the pairs of answers of a table.

    `reference`: a model folder or a name, in place of the one that the model learned with. Raises UsageError if it is
    not known, DataError if it has changed or has another tokenizer, or if no row is usable.
    """
    models = [Reference(folder=str(model))]
    if spec.preference["loss"] != "orpo":
        models.append(Reference(folder=str(_reference(model, spec, reference))))
    engine, sums = engine or Local(), []
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as scratch:
        with spooled(table, Path(scratch, "rows")) as rows:
            for number, one in enumerate(models):
                prepared, cache = Path(scratch, f"tokens_{number}"), Path(scratch, f"cache_{number}")
                chosen: dict[str, Any] = {"bad_rows": "drop", "options": options, "reference": one}
                record = prepare(rows, prepared, tokenizer=model, spec=spec, engine=engine, **chosen)
                loading.build_cache(prepared, cache)
                tokens = loading.open_tokens(cache)
                sums.append(np.array(tokens.others["reference"]))
        every = np.arange(len(tokens))
        targets = plugins.load("tasks", spec.task).pair_targets(tokens.arrays, every, every, spec)
        errors = errors_of(committed_files(prepared))
    if len(sums[0]) != len(sums[-1]):
        raise DataError("the table has changed while it was evaluated")
    targets[:, :2] = sums[-1]
    both = rewards(sums[0], targets, spec).astype(np.float64)
    margins = both[:, 0] - both[:, 1]
    metrics = bootstrapped(lambda some: reward_metrics(margins[some]), len(margins), resamples=RESAMPLES)
    failed = sum(errors.values())
    return Evaluation(rows=record["rows"], failed=failed, errors=errors, metrics=metrics, resamples=RESAMPLES)


def _reference(model: Path, spec: TaskSpec, given: str | Path | None) -> Path:
    """Return the folder of the reference."""
    named = given if given is not None else spec.preference.get("reference")
    if named is None:
        raise UsageError(
            f"{model}: the reward of an answer is relative to a reference, and the model did not learn from pairs. "
            "Name one, such as its base (reference=, --reference)."
        )
    try:
        folder = base_folder(str(named))
    except DataError as error:
        if given is not None:
            raise
        raise DataError(f"the model learned with the reference {named}: {error} Or name it (reference=).") from error
    assert folder is not None, "it has a name"
    if given is None and model_hash(folder) != spec.preference.get("reference_hash"):
        raise DataError(
            f"{folder}: the files of this reference are not those that {model} learned with. Name the folder of the "
            "original (reference=, --reference)."
        )
    check_same_vocabulary(folder, model, "reference")
    return folder
