"""The options that change the prediction columns of a task."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchlake.data.features import Features
from torchlake.models.structured.structure import Structure

if TYPE_CHECKING:
    from torchlake.models.generation import GenerationOptions


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Options of `predict` that change its columns."""

    all_probabilities: bool = False
    "Whether to add a column for each class."
    stop: Sequence[str] = ()
    "Strings that end a generated text."
    marks: tuple[str, str] | None = None
    "What is before and after reasoning in a generated text; None: it is not looked for."
    continues: bool = False
    "Whether texts may continue a message, in whose reasoning they may begin."
    structure: Structure | None = None
    "What a generated text has to fit."
    embedding: str = "float32"
    "The form of vectors: float32, int8 or binary."
    ranges: Sequence[Sequence[float]] = ()
    "The lowest and the highest value (2, D) of each number of a vector, for int8."
    features: Features | None = None
    "The features of the rows, if the task keeps arrays back or writes."
    logprobs: str | None = None
    "`mean` or `tokens`: the log-probabilities of written texts that get a column."
    written: Sequence[np.ndarray | None] = ()
    "Those of the tokens (W,) of each row's text; None if the runtime has none."
    own: Sequence["GenerationOptions"] = ()
    "The options of each row's text; empty: they are the job's."
