"""What does scoring a table on Spark cost, by hand and by torchlake, and how soon does a launched rank run?

On one session of this machine, warm: the seed's notebook (a pandas UDF over rows padded to 128), the same as an Arrow
UDF, Spark's own `predict_batch_udf` and MLflow's `spark_udf` with batches padded to their longest row, torchlake inside
a query (`predict` of a DataFrame) and as a chunk job, and that job on the local engine with as many cores. From stored
table to stored table, in turn, best of the rounds. Then the chunk job against the local engine on four times the rows,
each less its own seconds for a table of 64 rows; 10,000 chunks without work; and the seconds from a call until its
ranks run, beside TorchDistributor.
The file is not called spark.py because its neighbor could not be ray.py, which `import ray` would find.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from _common import SCRATCH, finish, parser
from _on_engines import (
    Contender,
    beyond_start,
    empty_chunks,
    in_turn,
    launch_row,
    model_of,
    peer,
    ranks_begin,
    set_up,
    table_of,
)
from pyspark.ml.functions import predict_batch_udf
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

import torchlake as tl

NAMES = ["label", "score"]
PREDICTED = StructType([StructField("label", StringType()), StructField("score", DoubleType())])


def pandas_udf_of(model: str) -> Any:
    """The notebook's function: the model is loaded once per task."""

    def classify(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        score = peer("seed", model)
        for texts in batches:
            yield pd.DataFrame(score(texts.tolist()))

    return pandas_udf(classify, PREDICTED)


def arrow_udf_of(model: str) -> Any:
    """The same function over Arrow arrays, without pandas."""
    from pyspark.sql.functions import arrow_udf

    def classify(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        score = peer("seed", model)
        for texts in batches:
            yield pa.StructArray.from_arrays([pa.array(column) for column in score(texts.to_pylist()).values()], NAMES)

    classify.__annotations__ = {"batches": Iterator[pa.Array], "return": Iterator[pa.Array]}
    return arrow_udf(classify, PREDICTED)


def batch_udf_of(model: str) -> Any:
    """Spark's function for models: it keeps the model, and batches of 32 rows are its own."""

    def load() -> Callable[[np.ndarray], dict[str, np.ndarray]]:
        score = peer("dynamic padding", model)
        return lambda texts: score(texts.tolist())

    return predict_batch_udf(load, return_type=PREDICTED, batch_size=32)


def saved_for_mlflow(model: str) -> Path:
    """The model as MLflow stores one that is a Python class."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    class Reviews(mlflow.pyfunc.PythonModel):
        def load_context(self, context: Any) -> None:
            self.score = peer("dynamic padding", model)

        def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
            return pd.DataFrame(self.score(model_input["text"].tolist()))

    folder = SCRATCH / "on-spark-mlflow"
    shutil.rmtree(folder, ignore_errors=True)
    signature = ModelSignature(inputs=Schema([ColSpec("string", "text")]))
    mlflow.pyfunc.save_model(folder, python_model=Reviews(), signature=signature, pip_requirements=[])
    return folder


def contenders_of(session: SparkSession, model: Path, source: Path, processes: int) -> dict[str, Contender]:
    def by_udf(make: Callable[[], Any], output: Path) -> None:
        frame = session.read.parquet(str(source))
        scored = frame.select("id", make()("text").alias("predicted"))
        scored.select("id", "predicted.*").write.parquet(str(output))

    def by_frame(output: Path) -> None:
        scored = tl.predict(model, session.read.parquet(str(source)))
        scored.select("id", "label", "score").write.parquet(str(output))

    def by_chunks(engine: Any, output: Path) -> None:
        tl.predict(model, source, output, key="id", engine=engine)

    contenders: dict[str, Contender] = {
        "pandas UDF, padded to 128": partial(by_udf, partial(pandas_udf_of, str(model))),
        "Arrow UDF, padded to 128": partial(by_udf, partial(arrow_udf_of, str(model))),
        "predict_batch_udf": partial(by_udf, partial(batch_udf_of, str(model))),
    }
    try:
        from mlflow.pyfunc import spark_udf

        make = partial(
            spark_udf, session, str(saved_for_mlflow(str(model))), result_type=PREDICTED, env_manager="local"
        )
        contenders["mlflow.pyfunc.spark_udf"] = partial(by_udf, make)
    except ImportError as error:
        print(f"mlflow.pyfunc.spark_udf takes no part: {error}")
    return contenders | {
        "torchlake, DataFrame": by_frame,
        "torchlake, chunk job": partial(by_chunks, tl.Spark(session, processes=processes)),
        "torchlake, chunk job, local": partial(by_chunks, tl.Local(processes=processes)),
    }


def main() -> None:
    options_parser = parser(__doc__, rows=4264, rounds=2, processes=2, launches=3)
    options_parser.add_argument("--model", help="a model folder (default: what accuracy.py left, else MiniLM's shape)")
    options = options_parser.parse_args()
    set_up()
    ranks, model, source = options.processes, model_of(options.model), table_of(options.rows)
    engine = tl.Spark(master=f"local[{ranks},4]")
    session = engine.session.get()
    session.range(ranks).count()  # the first job of a session is slower
    rows = in_turn(contenders_of(session, model, source, ranks), options.rounds, options.rows)
    jobs = {"torchlake, chunk job": tl.Spark(session, processes=ranks), "local": tl.Local(processes=ranks)}
    rows += [
        beyond_start("torchlake, chunk job, 4 x the rows", jobs, model, 4 * options.rows, options.rounds),
        empty_chunks("10,000 chunks without work", tl.Spark(session), options.rounds),
    ]
    distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    rows += [
        launch_row("launch: TorchDistributor", partial(distributor.run, ranks_begin), options.launches, ranks),
        launch_row("launch: torchlake", partial(engine.launch, ranks_begin, processes=ranks), options.launches, ranks),
    ]
    session.stop()
    note = (
        f"{options.rows:,} reviews, {model.name}, local[{ranks},4], {ranks} processes of one thread, best of "
        f"{options.rounds} (launches: of {options.launches}); ratio to the first, agreement with the local engine"
    )
    finish("on_spark", rows, as_json=options.json, note=note, keep=options.rows == 4264)


if __name__ == "__main__":
    main()
