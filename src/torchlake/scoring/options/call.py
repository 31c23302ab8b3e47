"""What one call of a loaded model may do otherwise than the model was loaded for."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.scoring.rows import RowReader
from torchlake.scoring.scorer import Scorer


@dataclass(frozen=True)
class CallOptions:
    """What is different for one call from what the model was loaded for."""

    task_options: Mapping[str, Any] = field(default_factory=dict)
    all_probabilities: bool | None = None
    raw: bool = False
    "Whether answers are the model's outputs, not probabilities."
    prompt: str | None = None
    "The prompt of an embedding model in place of its default."
    truncation_side: str | None = None
    truncate: bool = True
    "Whether longer rows are truncated; if not, they are errors."

    @property
    def kind(self) -> str:
        """What calls have in common that share batches."""
        return repr((sorted(self.task_options.items()), self.all_probabilities, self.raw))


AS_LOADED = CallOptions()


def scorer_of(scorer: Scorer, view: CallOptions) -> Scorer:
    """Return a scorer with the same weights that answers in another way."""
    made = copy.copy(scorer)
    made.spec, made.raw = spec_of(scorer.spec, view), view.raw
    if view.all_probabilities is not None:
        made.settings = replace(scorer.settings, all_probabilities=view.all_probabilities)
    return made


def reader_of(reader: RowReader, view: CallOptions) -> RowReader:
    """Return a reader with the same tokenizer that reads in another way."""
    made = copy.copy(reader)
    made.spec = spec_of(reader.spec, view)
    side, processor = view.truncation_side, reader.processor
    if side is not None and is_dataclass(processor) and not isinstance(processor, type):
        made.processor = replace(processor, truncation_side=side)
    elif side is not None or view.prompt is not None:
        made.processor = copy.copy(processor)
        if side is not None:
            made.processor.truncation_side = side
        if view.prompt is not None:
            made.processor.how = replace(processor.how, prompt=view.prompt)
    return made


def spec_of(spec: TaskSpec, view: CallOptions) -> TaskSpec:
    """Return the task with the options of a call. Raises UsageError for those that it does not have."""
    if not view.task_options:
        return spec
    task = plugins.load("tasks", spec.task)
    return replace(spec, options=task.checked_options({**spec.options, **view.task_options}, UsageError))
