"""The sections of a job: `data`, `model`, `train`, `engine` and `track`, each a frozen pydantic model.

In: plain mappings, from a job file or keyword arguments. Out: checked values; a wrong one is an error with its key.
Read `train.py` first. Every field has its description below it, which the reference and the JSON Schema show.
"""
