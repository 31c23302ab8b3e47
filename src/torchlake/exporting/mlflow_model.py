"""A model folder as an MLflow model (the pyfunc flavor): loaded by MLflow, it returns the rows of `predict`.

MLflow stores the model folder as it is, and the name of this module, which loads it: no pickle, and no code from the
model. It needs torchlake where it is loaded.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from torchlake.config.arguments import check_arguments
from torchlake.config.options import PredictOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.engines.local import Local
from torchlake.errors import UsageError, need_library
from torchlake.models.safety import check_folder
from torchlake.scoring.frames import text_columns
from torchlake.scoring.options.job import with_export
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.options.table import added_columns, checked_input
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.workers.tables import make_table_worker
from torchlake.tables.sources.frames import to_arrow

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models.model import ModelInfo

OPTIONS = "predict"
"The entry of MLflow's model configuration with the options of `predict`."
MLFLOW_WARNINGS = ("Any type hint is inferred", "An input example was not provided")
"MLflow's warnings about its own types, and about a check that the exact signature makes needless: it loads the model."


def log_model(
    model: str | Path,
    *,
    name: str = "model",
    text: str | Sequence[str] | None = None,
    text_pair: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    all_probabilities: bool = False,
    prefix: str = "",
    runtime: str | None = None,
    null: Literal["error", "score"] = "error",
    batch_tokens: int | None = None,
    registered_model_name: str | None = None,
) -> "ModelInfo":
    """Log a model folder to MLflow as a pyfunc model, in the active run or a new one; return MLflow's ModelInfo.

        logged = tl.log_model("runs/reviews/model")
        mlflow.pyfunc.load_model(logged.model_uri).predict(frame)      # label, score, truncated, error

    The loaded model takes a pandas frame or a dictionary with the columns that the model reads, or, if it reads one
    column, a list of texts. It returns a pandas frame with the columns that `predict` adds, from the same computation.
    The options are those of `predict`, and are stored with the model. The machine that loads it needs torchlake, in the
    versions that MLflow records, and the package of the task if the task is not part of torchlake.

    Raises MissingExtra without MLflow, UsageError for an invalid option.
    """
    for library, extra in (("mlflow", "mlflow"), ("pandas", "frames")):
        need_library(library, extra, "log_model")
    options = {
        "text": text,
        "text_pair": text_pair,
        "inputs": inputs,
        "all_probabilities": all_probabilities,
        "prefix": prefix,
        "runtime": runtime,
        "null": null,
        "batch_tokens": batch_tokens,
    }
    settings, spec = _settings(model, options)
    check_folder(Path(settings.model))
    # Read at import, as in `reporting/tracking.py`: no telemetry, and allow a folder as store.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        for message in MLFLOW_WARNINGS:
            warnings.filterwarnings("ignore", f".*{message}")
        from mlflow import pyfunc

        logged: ModelInfo = pyfunc.log_model(
            name=name,
            loader_module=__name__,
            data_path=settings.model,
            model_config={OPTIONS: options},
            signature=_signature(settings, spec),
            pip_requirements=[f"{library}=={_release(library)}" for library in ("torchlake", "torch", "transformers")],
            registered_model_name=registered_model_name,
        )
    return logged


@dataclass(kw_only=True)
class PyfuncModel:
    """A loaded model, as MLflow calls it."""

    settings: ScoringSettings
    spec: TaskSpec
    worker: Any = field(init=False)

    def __post_init__(self) -> None:
        self.settings = with_export(self.settings, Local())
        self.worker = make_table_worker(self.settings)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> "pd.DataFrame":
        """Return the prediction columns for the rows of `model_input`, with the index of a pandas frame.

        Raises UsageError for `params` and for a list of rows of several columns, and TableError for an input that lacks
        a column.
        """
        import pandas as pd

        if params:
            raise UsageError(f"params: {', '.join(params)}: pass the options of predict to log_model instead.")
        if isinstance(model_input, str):
            model_input = [model_input]
        columns = list(self.spec.input_columns)
        if not isinstance(model_input, pd.DataFrame | Mapping):
            if len(columns) > 1:
                raise UsageError(f"This model reads several columns: pass a frame with {', '.join(columns)}.")
            model_input = {columns[0]: list(model_input)}
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        table = to_arrow(frame)
        checked_input(self.settings, self.spec, table.schema, "the input")
        added = [column.name for column in added_columns(self.settings, self.spec, table.schema)]
        predictions: pd.DataFrame = self.worker(table.select(columns)).select(added).to_pandas()
        predictions.index = frame.index
        return predictions


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> PyfuncModel:
    """Load the model folder at `path`; called by MLflow."""
    settings, spec = _settings(path, model_config[OPTIONS])
    return PyfuncModel(settings=settings, spec=spec)


def _settings(model: str | Path, options: Mapping[str, Any]) -> tuple[ScoringSettings, TaskSpec]:
    check_arguments(options, PredictOptions.__annotations__)
    others = {name: value for name, value in options.items() if name != "runtime"}
    settings, spec, _ = scoring_settings(model, options["runtime"], {}, **others)
    return settings, spec


def _signature(settings: ScoringSettings, spec: TaskSpec) -> Any:
    """Return MLflow's schema of the input columns (text, or any type) and of the prediction columns."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec
    from mlflow.types.schema import AnyType

    columns = added_columns(settings, spec, pa.schema([]))
    anything: Any = AnyType
    inputs: list[ColSpec | TensorSpec] = [
        ColSpec("string" if is_text else anything(), name) for name, is_text in text_columns(spec).items()
    ]
    outputs: list[ColSpec | TensorSpec] = [ColSpec(_type(column.type), column.name) for column in columns]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _type(kind: pa.DataType) -> Any:
    """Return MLflow's type of a column."""
    from mlflow.types.schema import Array, Object, Property

    if pa.types.is_list(kind):
        return Array(_type(kind.value_type))
    if pa.types.is_struct(kind):
        return Object([Property(each.name, _type(each.type)) for each in kind])
    names = {
        pa.string(): "string",
        pa.bool_(): "boolean",
        pa.int32(): "integer",
        pa.int64(): "long",
        pa.float32(): "float",
        pa.float64(): "double",
    }
    return names[kind]


def _release(library: str) -> str:
    """Return an installed version without its local part, as in 2.13.0+cpu, which an index does not have."""
    return version(library).partition("+")[0]
