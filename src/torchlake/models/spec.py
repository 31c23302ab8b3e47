"""The task of a model folder: in task.json, in sentence-transformers' modules.json, or by the head in config.json."""

from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.config.model_files.cross_encoder import is_cross_encoder, with_pairs
from torchlake.config.model_files.embedding import MODULES, read_embedding
from torchlake.config.task_spec import TASK_FILE, Label, Problem, TaskSpec, spec_from_json
from torchlake.errors import DataError
from torchlake.models.config import (
    HEADS,
    Head,
    architectures_of,
    class_names,
    load_config,
    positions,
    read_head,
    tasks_of,
)
from torchlake.models.folders import model_folder
from torchlake.models.safety import check_folder
from torchlake.models.tokenizer import MAX_LENGTH, TOKEN_TYPES, load_pair_tokenizer, max_length

ZERO_SHOT = "zero_shot_classification"
"The task of classifiers of pairs that score any classes, without training on them."
EMBEDS = "feature_extraction"
"The task of encoders without a head."
OWN_PROBLEMS = {"token_classification": "spans", "question_answering": "answer"}
"Problems of tasks that have only one."
INPUTS = {"image_classification": ("image",), "question_answering": ("question", "context")}
"Inputs of tasks that do not read a `text`."
OWN_LABELS = {"question_answering": ("start", "end")}
"The outputs of heads whose number is not that of the classes in config.json."
WRITERS: dict[str, tuple[Problem, str | None]] = {
    "text_generation": ("next_token", None),
    "text2text_generation": ("text", "label"),
}
"The problem and the label column of tasks that write text."
PROBLEM_TYPES: dict[Problem, Any] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def load_spec(folder: str | Path, task: str | None = None) -> TaskSpec:
    """Return the task in task.json, or else the task of sentence-transformers' modules.json or of the head in
    config.json.

    `task` "feature_extraction" uses the encoder of a folder that has none of these, or has a head;
    "zero_shot_classification" uses any classifier. Raises DataError if none of this names a task.
    """
    folder = model_folder(folder)
    check_folder(folder)
    if task == ZERO_SHOT:
        length = max_length(folder)
        return TaskSpec(task=task, problem=task, labels=(), text="text", label=None, max_length=length)
    if (folder / TASK_FILE).exists():
        return spec_from_json(folder / TASK_FILE, atomic_io.read_json(folder / TASK_FILE))
    if task == EMBEDS or (task is None and (folder / MODULES).exists() and not is_cross_encoder(folder)):
        return _embedding_spec(folder)
    head = read_head(folder)
    of_head = _task_of(folder, head, task)
    if of_head in WRITERS:
        problem, label = WRITERS[of_head]
        length = max_length(folder)
        if of_head == "text_generation":
            length = min(length, MAX_LENGTH)  # of a block: prompts are not cut
        return TaskSpec(task=of_head, problem=problem, labels=(), text="text", label=label, max_length=length)
    problems = {name: problem for problem, name in PROBLEM_TYPES.items()}
    names = head.names
    problem = problems.get(head.problem_type or "", "regression" if len(names) == 1 else "single_label")
    problem = OWN_PROBLEMS.get(of_head, problem)
    if problem == "regression" and len(names) > 1:
        raise DataError(
            f"{folder / 'config.json'}: problem_type is regression, and the head has {len(names)} outputs. torchlake "
            "predicts one number a row. For classes, set problem_type to single_label_classification or "
            "multi_label_classification."
        )
    if problem == "single_label" and len(names) == 1:
        raise DataError(
            f"{folder / 'config.json'}: problem_type is single_label_classification, and the head has one output, so "
            "its class would always have the probability 1. Set problem_type to regression for the number itself, or "
            "to multi_label_classification for its sigmoid."
        )
    labels: tuple[Label, ...] = OWN_LABELS.get(of_head, ())
    if not labels and problem != "regression":
        labels = class_names(folder, names)
    inputs = INPUTS.get(of_head, ())
    spec = TaskSpec(
        task=of_head,
        problem=problem,
        labels=labels,
        text="" if inputs else "text",
        label="label",
        max_length=0 if of_head == "image_classification" else max_length(folder),
        inputs={name: name for name in inputs},
    )
    return with_pairs(spec, folder)


def _task_of(folder: Path, head: Head, task: str | None) -> str:
    """Return the task of a model's head, or the given one if config.json does not name a head. Raises DataError."""
    known, asked = tasks_of(head), task if task in HEADS else None
    possible = known or [name for name in HEADS if head.model_type in architectures_of(name)]
    if asked is not None and asked not in possible:
        if known:
            raise DataError(f"{folder}: its architecture {head.architecture} is for {known[0]}, not for {asked}")
        raise DataError(f"{folder}: transformers has no model of the type {head.model_type!r} for {asked}")
    chosen = asked or next(iter(known), None)
    if head.architecture and not known and (asked is None or _is_known(head.architecture)):
        raise DataError(
            f"{folder}: config.json has the architecture {head.architecture}, which neither classifies nor generates "
            f"text, and there is no {TASK_FILE}. Fine-tune it first (torchlake train), or name a fine-tuned model; for "
            f"the embeddings of an encoder give the task {EMBEDS}."
        )
    if chosen is None:
        raise DataError(
            f"{folder}: config.json has no architectures (the name of the model's class), and there is no {TASK_FILE}. "
            f"Give the task of the model: {', '.join([*possible, EMBEDS])}."
        )
    if chosen == "text2text_generation" and not load_config(folder).is_encoder_decoder:
        raise DataError(
            f"{folder}: a model of type {head.model_type!r} reads sounds, and torchlake has no task for them"
        )
    return chosen


def _is_known(architecture: str) -> bool:
    import transformers  # not above: neither the driver nor a worker of a common model needs this slow import

    return architecture in dir(transformers)


def _embedding_spec(folder: Path) -> TaskSpec:
    how = read_embedding(folder)
    limit = positions(folder)
    longest = max_length(folder) if how.max_length is None else min(how.max_length, limit or how.max_length)
    return TaskSpec(
        task=EMBEDS,
        problem=EMBEDS,
        labels=(),
        text="text",
        label=None,
        max_length=longest,
        dimensions=how.dimensions,
    )


def uses_token_types(folder: Path, *, pairs: bool = False) -> bool:
    """Return whether a model of pairs separates them by token types; `pairs`: it is one without task.json."""
    path = folder / TASK_FILE
    trained = path.exists() and spec_from_json(path, atomic_io.read_json(path)).text_pair is not None
    return (trained or pairs) and TOKEN_TYPES in load_pair_tokenizer(folder).model_input_names


def head_spec(folder: Path) -> TaskSpec | None:
    """Return the task that the head of a model folder was trained for; None if it has no head, or no names for its
    classes."""
    check_folder(folder)
    if not set(tasks_of(read_head(folder))) - WRITERS.keys():
        return None
    try:
        return load_spec(folder)
    except DataError:
        return None
