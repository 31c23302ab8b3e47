"""What does scoring a table on Ray cost, by hand and by torchlake, and how soon does a launched rank run?

On one Ray of this machine, warm: `map_batches` with a class that pads rows to 128, the same with transformers'
pipeline as Ray's documentation shows it, torchlake inside a pipeline (`predict` of a Dataset) and as a chunk job, and
that job on the local engine with as many cores. From stored table to stored table, in turn, best of the rounds. Then
the seconds from a call until its ranks run, beside TorchTrainer, and how many empty chunks a second go through a chunk
job. The file is not called ray.py because `import ray` would find it.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from _common import SCRATCH, finish, parser
from _on_engines import FILES, Contender, in_turn, launch_row, model_of, peer, ranks_begin, set_up, table_of
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import torchlake as tl

BATCH = 32


class Padded:
    """The seed's scoring as the kind of class that Ray Data makes once in every process."""

    def __init__(self, model: str) -> None:
        self.label = peer("seed", model)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"id": batch["id"], **self.label(batch["text"].tolist())}


class Pipeline:
    """transformers' pipeline, as Ray's documentation has it."""

    def __init__(self, model: str) -> None:
        from transformers import pipeline

        self.classify = pipeline("text-classification", model=model, device="cpu")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        answers = self.classify(batch["text"].tolist(), batch_size=BATCH, truncation=True)
        return {"id": batch["id"], **{name: [answer[name] for answer in answers] for name in ("label", "score")}}


def contenders_of(model: Path, source: Path, processes: int) -> dict[str, Contender]:
    def dataset() -> ray.data.Dataset:
        # A block for every file: left alone, Ray makes one of them all, which one process then scores.
        return ray.data.read_parquet(str(source), override_num_blocks=FILES)

    def by_class(scorer: type, output: Path) -> None:
        scored = dataset().map_batches(
            scorer,
            fn_constructor_args=(str(model),),
            batch_size=BATCH,
            compute=ray.data.ActorPoolStrategy(size=processes),
        )
        scored.write_parquet(str(output))

    def by_dataset(output: Path) -> None:
        scored = tl.predict(model, dataset(), engine=tl.Ray(processes=processes))
        scored.select_columns(["id", "label", "score"]).write_parquet(str(output))

    def by_chunks(engine: Any, output: Path) -> None:
        tl.predict(model, source, output, key="id", engine=engine)

    return {
        "map_batches, padded to 128": partial(by_class, Padded),
        "map_batches, pipeline": partial(by_class, Pipeline),
        "torchlake, Dataset": by_dataset,
        "torchlake, chunk job": partial(by_chunks, tl.Ray(processes=processes, cpus_per_process=1)),
        "torchlake, chunk job, local": partial(by_chunks, tl.Local(processes=processes)),
    }


def by_trainer(folder: str, ranks: int) -> None:
    """A launch by Ray Train."""
    TorchTrainer(
        lambda config: ranks_begin(config["folder"]),
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=False),
        run_config=RunConfig(storage_path=str(SCRATCH / "on-ray-train")),
    ).fit()


def empty_chunks_row(chunks: int, processes: int) -> dict[str, Any]:
    """What a chunk costs by itself: seconds for a job of chunks without work, with its start, and chunks per second."""
    began = time.perf_counter()
    done = sum(1 for _ in tl.Ray(processes=processes).run_chunks(lambda: iter, range(chunks), name="empty chunks"))
    seconds = time.perf_counter() - began
    assert done == chunks
    return {"name": f"{chunks:,} empty chunks: torchlake", "seconds": seconds, "chunks_per_s": chunks / seconds}


def main() -> None:
    options_parser = parser(__doc__, rows=4264, rounds=2, processes=2, launches=3)
    options_parser.add_argument("--model", help="a model folder (default: what accuracy.py left, else MiniLM's shape)")
    options = options_parser.parse_args()
    set_up()
    ranks, model, source = options.processes, model_of(options.model), table_of(options.rows)
    ray.init(
        address="local",  # not a cluster that happens to be here
        num_cpus=2 * ranks,  # by Ray's count: a fixed pool that takes every CPU leaves none for reading, and hangs
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _system_config={"worker_niceness": 0},  # the others' processes are not nice to the machine's users either
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = in_turn(contenders_of(model, source, ranks), options.rounds, options.rows)
    launch = partial(tl.Ray().launch, ranks_begin, processes=ranks)
    rows += [
        launch_row("launch: TorchTrainer", partial(by_trainer, ranks=ranks), options.launches, ranks),
        launch_row("launch: torchlake", launch, options.launches, ranks),
        empty_chunks_row(10_000, ranks),
    ]
    ray.shutdown()
    note = (
        f"{options.rows:,} reviews, {model.name}, {ranks} processes of one thread, best of "
        f"{options.rounds} (launches: of {options.launches}); ratio to the first, agreement with the local engine"
    )
    finish("on_ray", rows, as_json=options.json, note=note, keep=options.rows == 4264)


if __name__ == "__main__":
    main()
