"""One recipe of training MiniLM, for torchlake and for trainers written by hand: fp32, linear after a tenth of warm-up.

`embedding_training.py` and `task_accuracy.py` train each contender by it, in a process of its own.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import minilm

LONGEST = 128
"Tokens of a row."


@dataclass(frozen=True)
class Recipe:
    """Where the results go, and the numbers that both sides share."""

    output: str
    batch: int
    rate: float
    steps: int
    seed: int


def by_torchlake(recipe: Recipe, data: dict[str, Any], task: str) -> tuple[Path, float]:
    """The folder of the trained model, and the seconds of the steps."""
    import torchlake as tl

    shutil.rmtree(recipe.output, ignore_errors=True)
    model = {"base": str(minilm()), "task": task, "max_length": LONGEST}
    train = {"batch_size": recipe.batch, "learning_rate": recipe.rate, "max_steps": recipe.steps, "epochs": 10}
    train |= {"warmup": 0.1, "precision": "fp32", "seed": recipe.seed, "weight_decay": 0.0}
    train |= {"checkpoint_every": "1000steps"}
    run = tl.train(run=recipe.output, data={"key": "id", "validation": None, **data}, model=model, train=train)
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return run.path / "model", sum(line["seconds"] for line in lines if "grad_norm" in line)


def arguments(recipe: Recipe, kind: Any) -> Any:
    """The arguments of transformers' trainer, or of one made from it, as its class `kind`."""
    return kind(
        output_dir=recipe.output,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.rate,
        max_steps=recipe.steps,
        warmup_steps=recipe.steps // 10,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        seed=recipe.seed,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )


def sentence_model() -> Any:
    """MiniLM in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm()), device="cpu")
    model.max_seq_length = LONGEST
    return model


def by_sentence_transformers(recipe: Recipe, model: Any, columns: dict[str, list[Any]], loss: Any) -> float:
    """Train a model on columns in their order, with its loss; returns the seconds of the steps."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments(recipe, SentenceTransformerTrainingArguments),
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
    )
    return float(trainer.train().metrics["train_runtime"])
