"""Encoder-decoders: the loss and the texts are those of transformers, in any batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import from_arrow
from torchlake.errors import DataError, UsageError
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import load_spec
from torchlake.runtimes import write_all
from torchlake.runtimes.eager import open_writer
from torchlake.tasks.text2text_generation import task

SPEC = TaskSpec(
    task="text2text_generation",
    problem="text",
    labels=(),
    text="text",
    label="summary",
    max_length=32,
    options=dict(task.options),
)
KINDS = ("t5", "bart")


def examples(folder: Path, rows: int) -> tuple[Any, Any, pa.Array]:
    processor, table = task.load_processor(folder, SPEC, scoring=False), task_cases.verdicts(rows)
    inputs = {"text": table["text"].combine_chunks()}
    return (processor, *task.examples(inputs, table["summary"].combine_chunks(), processor, SPEC))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers(tmp_path: Path, kind: Any) -> None:
    folder = tiny.build_encoder_decoder(tmp_path, kind=kind)
    processor, made, learned = examples(folder, 8)
    rows, targets = np.arange(8), from_arrow(learned)
    batch = {name: torch.from_numpy(each) for name, each in task.collate(made.arrays, rows, processor, SPEC).items()}
    wanted = torch.from_numpy(task.collate_targets(targets, rows, SPEC))
    model = task.base_model(folder, SPEC).eval()
    with torch.inference_mode():
        ours = task.loss_sum(task.outputs(model(**batch, use_cache=False)), wanted, SPEC)
        theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=wanted).loss
    torch.testing.assert_close(ours / task.divisor(targets, SPEC), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_transformers_in_any_batch(tmp_path: Path, kind: Any) -> None:
    folder = tiny.build_encoder_decoder(tmp_path, kind=kind)
    processor = task.load_processor(folder, SPEC, scoring=True)
    made = task.features({"text": task_cases.verdicts(6)["text"].combine_chunks()}, processor, SPEC)
    options = GenerationOptions(max_new_tokens=5)
    writer = open_writer(folder, SPEC, device="cpu", options=options)
    prompts = [task.collate(made.arrays, np.array([row]), processor, SPEC)["input_ids"][0] for row in range(6)]
    together = write_all(writer, prompts, options)
    model = task.load_model(folder, SPEC)
    for row in range(6):
        np.testing.assert_array_equal(together[row], write_all(writer, prompts[row : row + 1], options)[0])
        ids = torch.from_numpy(prompts[row])[None]
        theirs = model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=1)[0, 1:]
        shown = together[row][together[row] >= 0]
        assert theirs[: len(shown)].tolist() == shown.tolist()


def test_labels_are_texts() -> None:
    assert task.find_labels(iter([pa.array(["x", None]), pa.array(["y"])])).rows == 2
    for array in (pa.array([1]), pa.array([["x"]])):
        with pytest.raises(DataError, match="the task learns texts"):
            task.find_labels(iter([array]))


def test_a_folder_says_that_it_is_an_encoder_decoder(tmp_path: Path) -> None:
    assert load_spec(tiny.build_encoder_decoder(tmp_path)).task == "text2text_generation"


def test_targets_that_are_cut_are_counted(tmp_path: Path) -> None:
    folder = tiny.build_encoder_decoder(tmp_path)
    processor, spec = (
        task.load_processor(folder, SPEC, scoring=False),
        replace(SPEC, options={**SPEC.options, "max_target_tokens": 6}),
    )
    wanted = ["good", "good bad good", "good bad good bad good", "good bad good bad good bad good"]
    made, learned = task.examples({"text": pa.array(wanted)}, pa.array(wanted), processor, spec)
    whole = [len(ids) for ids in processor(text_target=wanted)["input_ids"]]
    assert made.cut.tolist() == [max(0, length - 6) for length in whole]
    assert made.cut.max() > 0
    assert pc.list_value_length(learned).to_pylist() == [min(6, length) for length in whole]


@pytest.mark.slow
def test_verdicts_are_learned_and_written(tmp_path: Path) -> None:
    case = task_cases.CASES["text2text_generation"]
    train = {"max_steps": 200, "epochs": 50, "batch_size": 16, "learning_rate": 5e-3}
    runs.succeed(tmp_path / "run", case.sections(tmp_path, case.build(tmp_path / "base"), **train))
    model, table = tmp_path / "run" / "model", case.table(140).slice(96)
    scored = tl.predict(model, table, max_new_tokens=8)
    right = [one["generated_text"].strip() == one["summary"] for one in scored.to_pylist()]
    assert np.mean(right) > 0.9
    assert tl.evaluate(model, table).metrics["exact_match"].value == pytest.approx(np.mean(right))
    with pytest.raises(UsageError, match="no classes"):
        tl.predict(model, table, all_probabilities=True)
