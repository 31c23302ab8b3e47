"""How accurate is the default recipe? MiniLM fine-tuned on Rotten Tomatoes, evaluated on its test table.

Nothing is tuned here: the job names the tables and the model, and everything else is the default. With --fresh 0 a run
that was interrupted continues, and a finished one is evaluated again.
"""

import shutil

from _common import SCRATCH, arguments, finish, minilm, reviews

import torchlake as tl


def main() -> None:
    options = arguments(__doc__, processes=1, fresh=1)
    data = reviews()
    run = SCRATCH / "accuracy-run"
    if options.fresh:
        shutil.rmtree(run, ignore_errors=True)
    trained = tl.train(
        run=run,
        data={"train": str(data / "train.parquet"), "validation": str(data / "validation.parquet")},
        model={"base": str(minilm())},
        engine=tl.Local(processes=options.processes),
    )
    evaluation = tl.evaluate(trained.model, data / "test.parquet")
    rows = [
        {"name": name, "value": metric.value, "low": metric.low, "high": metric.high}
        for name, metric in evaluation.metrics.items()
    ]
    note = f"{evaluation.rows} test rows, 95 % intervals; trained with {options.processes} process(es)"
    finish("accuracy", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
