"""The JSON Schema of a job file: editors use it to check the file, complete keys and show what each setting does.

The schema accepts every file that `load_job` accepts. It may accept more: the loader also checks values against each
other, and numbers that are written as strings.
"""

from typing import Any

from torchlake.config.job import Job

# Where a checked number may also be null, pydantic leaves these keywords as they are.
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, with a description of every setting."""
    schema = _tidied(Job.model_json_schema())
    for name, field in Job.model_fields.items():
        # In YAML, a section whose keys are all commented out is null.
        choices = [schema["properties"][name]] + ([] if field.is_required() else [{"type": "null"}])
        schema["properties"][name] = {"description": field.description, "anyOf": choices}
    return {"$schema": DIALECT, "title": "torchlake job", **schema}


def _tidied(value: Any) -> Any:
    """Return the schema with descriptions on one line.

    pydantic's titles, which repeat the names, and the defaults of whole sections are left out.
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
