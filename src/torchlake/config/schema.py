"""The JSON Schema of a job file: editors check the file and complete its keys with it, and show what each setting does.

The schema accepts every file that `load_job` accepts. It may accept more: the loader also checks values against each
other, and numbers that are written as texts.
"""

from typing import Any

from torchlake.config.job import Job

# pydantic leaves these keywords as they are where a checked number may also be null.
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, with a description of every setting."""
    schema = _tidied(Job.model_json_schema())
    for name, field in Job.model_fields.items():
        # YAML reads a section whose keys are all commented out as null.
        choices = [schema["properties"][name]] + ([] if field.is_required() else [{"type": "null"}])
        schema["properties"][name] = {"description": field.description, "anyOf": choices}
    return {"$schema": DIALECT, "title": "torchlake job", **schema}


def _tidied(value: Any) -> Any:
    """The schema without pydantic's titles (they repeat the names) and the defaults of whole sections; descriptions on
    one line.
    """
    if isinstance(value, list):
        return [_tidied(item) for item in value]
    if not isinstance(value, dict):
        return value
    whole_section = "$ref" in value
    kept = {
        BOUNDS.get(key, key): _tidied(item)
        for key, item in value.items()
        if not (key == "title" and isinstance(item, str)) and not (key == "default" and whole_section)
    }
    if isinstance(kept.get("description"), str):
        kept["description"] = " ".join(kept["description"].split())
    return kept
