"""CTranslate2 on CPUs in fp32: the model is converted once into the model folder (`_ctranslate2_export.py`).

It writes the texts of `eager`, except for rounding, 1.2 times as fast as `generate`; `ctranslate2_int8` 2.6 times.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import Forward, LogProbs, Writer, _ctranslate2, _ctranslate2_export

TOLERANCE = 1e-4
CALIBRATED = False
tasks: tuple[str, ...] | None = _ctranslate2_export.TASKS
never: dict[str, str] = {}
TOKEN_TYPES = False
NAME, KIND = "ctranslate2", "float32"
refusal = _ctranslate2_export.refusal
cannot_write = _ctranslate2.cannot_write


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Convert the model into its folder. Raises UsageError if that fails, StorageError, and the errors of
    `models.load_model`."""
    _ctranslate2_export.prepare(folder, spec, NAME, KIND)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the export for the scores of texts. Raises UsageError on a GPU, and without an export of these weights."""
    return _ctranslate2.Converted(folder, spec, NAME, KIND, device).scores


def load_log_probs(folder: Path, spec: TaskSpec, *, device: str) -> LogProbs:
    """Load the export for the log-probabilities of answers. Raises the errors of `load`."""
    return _ctranslate2.Converted(folder, spec, NAME, KIND, device).log_probs


def open_writer(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """Load the export for text generation. Raises the errors of `load`."""
    return _ctranslate2.ConvertedWriter(_ctranslate2.Converted(folder, spec, NAME, KIND, device), options)
