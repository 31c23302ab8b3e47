"""The options of `predict` as they are given: names, types, ranges. Nothing is read."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchlake.config.arguments import plain_numbers, refuse_unknown
from torchlake.config.options import EndpointArguments, JobArguments, PredictOptions, PromptArguments, ReadArguments
from torchlake.errors import UsageError
from torchlake.jobs.options import OutputOptions, output_options
from torchlake.models.generation import GenerationOptions
from torchlake.models.structured.structure import STRUCTURE_OPTIONS
from torchlake.scoring.rows import ScoringSettings

PROMPTS = tuple(PromptArguments.__annotations__)
COMMON_NAMES = {"template": "prompt", "chat_template_kwargs": "template_options"}
"What other libraries call some of the options."


def split_options(given: PredictOptions) -> tuple[dict[str, Any], dict[str, Any], OutputOptions]:
    """Split into the fields of `ScoringSettings`, of `GenerationOptions`, and the options of input and output.

    A `seed` applies to the sample of rows, and to the sampling of tokens if there is any.
    Raises TypeError for an unknown option, UsageError for a value out of range.
    """
    named = plain_numbers(with_common_names(given))
    refuse_unknown("predict", named, PredictOptions.__annotations__)
    if of_endpoints := sorted(name for name in EndpointArguments.__annotations__ if named.get(name)):
        raise UsageError(f"{', '.join(of_endpoints)}: for the runtime 'http', which has no model folder.")
    names = [{one.name for one in fields(group)} for group in (ScoringSettings, GenerationOptions)]
    names[0] |= {"task"}
    names[1] |= set(STRUCTURE_OPTIONS)
    scoring, generation = ({name: named[name] for name in named if name in own} for own in names)
    if named.get("sample") is not None and not named.get("temperature"):
        generation.pop("seed", None)
    scoring["prompts"] = {name: named[name] for name in PROMPTS if name in named}
    return scoring, generation, output_options(named)


def with_common_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by their names here, also those that other libraries call otherwise. Raises UsageError."""
    named = {COMMON_NAMES.get(name, name): value for name, value in given.items()}
    if len(named) < len(given):
        twice = next(name for name in COMMON_NAMES if name in given)
        raise UsageError(f"{twice}: the same as {COMMON_NAMES[twice]}; leave one of them out.")
    return named


def refuse_for_frames(given: Mapping[str, Any], native: str | None) -> None:
    """Raise UsageError for options of an output, or of a job that starts processes: a frame has neither.

    A frame in memory is checked for its share of failed rows; a lazy one of an engine (`native`) is not counted.
    """
    taken = {"max_error_rate", *ReadArguments.__annotations__} - ({"max_error_rate"} if native else set())
    refused = [name for name in JobArguments.__annotations__ if given.get(name) and name not in taken]
    if refused:
        raise UsageError(f"{', '.join(refused)}: for a stored table and its output; a frame comes back as a frame.")
