"""Rewrite pydantic's errors as sentences: where, what was given, what is allowed, the nearest key."""

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from torchlake.config.yaml import Location, dotted, quote
from torchlake.redaction import redacted

if TYPE_CHECKING:  # scoring uses these words, too, and does without pydantic
    from pydantic import BaseModel

TEXT = "a string"
RANKS = "a number of processes (4, or [2, 8] for the fewest and the most)"
EXPECTED = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_": "a number",
    "bool_": "true or false",
    "string_too_long": "a single character",
    "too_long": "a single character",
    "string_": TEXT,
    "path_": "a path",
    "list_": "a list",
    "tuple_": "a list",
    "union_tag_": "a path, or a list of paths",
    "model_": "a mapping of keys",
    "dict_": "a mapping of keys",
    "mapping_": "a mapping of keys",
}
"Words for the value that was expected, by the beginning of the name of pydantic's error."
BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
TRAINER_NAMES = {
    "per_device_train_batch_size": "train.batch_size, the rows of a step over all ranks",
    "train_batch_size": "train.batch_size, the rows of a step over all ranks",
    "per_device_eval_batch_size": "train.micro_batch_tokens, the padded tokens that a rank processes at once",
    "gradient_accumulation_steps": "train.micro_batch_tokens, from which the number of micro-batches follows",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "lr": "train.learning_rate",
    "max_grad_norm": "train.clip_norm",
    "label_smoothing_factor": "train.label_smoothing",
    "optim": "train.optimizer",
    "adam_beta1": "train.betas, such as [0.9, 0.999]",
    "adam_beta2": "train.betas, such as [0.9, 0.999]",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup, a share of all steps",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "gradient_checkpointing": "train.activation_checkpointing",
    "torch_compile": "train.compile",
    "save_strategy": 'train.checkpoint_every, such as "10min", "200steps" or "epoch"',
    "save_steps": 'train.checkpoint_every, such as "200steps"',
    "save_total_limit": "train.keep_checkpoints",
    "eval_strategy": 'train.validate_every, "epoch" or such as "200steps"',
    "evaluation_strategy": 'train.validate_every, "epoch" or such as "200steps"',
    "eval_steps": 'train.validate_every, such as "200steps"',
    "load_best_model_at_end": "always so, if there is a validation",
    "metric_for_best_model": "train.metric",
    "early_stopping_patience": "train.patience",
    "group_by_length": "always so",
    "logging_steps": "always 1: metrics.jsonl in the run folder has every step",
    "output_dir": "the run folder (--run FOLDER, in Python run=)",
    "resume_from_checkpoint": "the same command again, which continues",
    "report_to": "track.mlflow, track.wandb or track.tensorboard",
    "max_seq_length": "model.max_length",
    "model_name_or_path": "model.base",
    "peft_config": "model.lora",
    "quantization_config": "model.quantize",
    "neftune_noise_alpha": "train.neftune",
    "predict_with_generate": "train.validate_writing",
    "train_file": "data.train",
    "validation_file": "data.validation",
}
"""Settings of transformers' `TrainingArguments`, of its example scripts and of PyTorch: what they are called here.

A value completes the sentence "here it is ..."; one that begins with a setting's dotted name is that setting. Names
that are the same here are not listed. The migration page shows the same table.
"""
NO_SECTIONS: "Mapping[str, type[BaseModel]]" = MappingProxyType({})


def sentence(
    problem: Any, origins: Mapping[Location, str], path: str | Path | None, sections: "Mapping[str, type[BaseModel]]"
) -> str:
    """Return one of pydantic's errors as a sentence.

    `origins` are the places that the values came from; `path` is the job file, for values without an origin; `sections`
    are the known keys.
    """
    location = tuple(part for part in problem["loc"] if not str(part).startswith("<"))
    known = [location[:length] for length in range(len(location), 0, -1) if location[:length] in origins]
    origin = origins[known[0]] if known else str(path) if path is not None else "job"
    return f"{origin}: {dotted(location)}: {explanation(problem, location, sections)}"


def expected(what: str, given: Any) -> str:
    """Return what is wrong with a value of the wrong type: expected a whole number, got 'many'."""
    return f"expected {what}, got {quote(given)}"


def one_of(choices: Sequence[Any], given: Any) -> str:
    """Return what is wrong with a value that is not among the choices, with the nearest one."""
    close = get_close_matches(str(given), list(map(str, choices)), n=1)
    before = ", ".join(map(repr, choices[:-1]))
    what = f"{before} or {choices[-1]!r}" if before else repr(choices[-1])
    return expected(what, given) + (f"; did you mean {close[0]}?" if close else "")


def nearest_settings(name: str, sections: "Mapping[str, type[BaseModel]]") -> list[str]:
    """Return the dotted names of settings called `name`; if there are none, of the one with the nearest name."""
    every = [setting for section, model in sections.items() for setting in _settings(model, section)]
    exact = [setting for setting in every if f".{setting}".endswith(f".{name}")]
    if exact:
        return exact
    if setting := re.match(r"\w+\.\w+", TRAINER_NAMES.get(name, "")):
        return [setting[0]] if setting[0] in every else []
    by_last = {setting.rpartition(".")[2]: setting for setting in reversed(every)}
    return [by_last[close] for close in get_close_matches(name, by_last, n=1, cutoff=0.8)]


def _settings(model: "type[BaseModel]", prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}.{name}"
        for nested in _models_in(field.annotation):
            yield from _settings(nested, f"{prefix}.{name}")


def _models_in(annotation: Any) -> "Iterator[type[BaseModel]]":
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def explanation(problem: Any, location: Location = (), sections: "Mapping[str, type[BaseModel]]" = NO_SECTIONS) -> str:
    """Return what is wrong with the value of one of pydantic's errors, and what is expected."""
    kind, context = problem["type"], problem.get("ctx", {})
    given = redacted(problem["input"], dotted(location))
    if kind == "extra_forbidden":
        return f"unknown key{_nearest(location, sections)}"
    if kind == "missing":
        return "missing; it has no default"
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        bound = f"{context[name]:.15g}" if isinstance(context[name], float) else context[name]
        return f"must be {words} {bound}, got {given}"
    if kind == "literal_error":
        return one_of([literal_eval(one) for one in re.findall(r"'[^']*'|-?\d+", context["expected"])], given)
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "the list is empty; name at least one"
    what = next((words for start, words in EXPECTED.items() if kind.startswith(start)), "another value")
    in_quotes = what == TEXT and isinstance(given, int | float)
    return expected(what, given) + (" (put it in quotes)" if in_quotes else "")


def _nearest(location: Location, sections: "Mapping[str, type[BaseModel]]") -> str:
    """Return a hint for an unknown key: the nearest key of its section, else of another section."""
    key = str(location[-1])
    if key in TRAINER_NAMES:
        return f"; here it is {TRAINER_NAMES[key]}"
    section = sections.get(str(location[0])) if len(location) == 2 else None
    fields = list(section.model_fields) if section else list(sections) if len(location) == 1 else ["fraction"]
    if close := get_close_matches(key, fields, n=1):
        return f"; did you mean {close[0]}?"
    everywhere = {field: f"{name}.{field}" for name, model in sections.items() for field in model.model_fields}
    if close := get_close_matches(key, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[close[0]]}?"
    return f"; known are {', '.join(fields)}"
