"""Secrets taken out of what is shown: passwords in URLs, tokens, signatures."""

import re
from collections.abc import Mapping
from typing import Any

SECRET_KEYS = re.compile(r"(?i)passw|secret|credential|authorization|signature|api_?key|access_?key|(^|_)token$")
# A user, and a password; but Azure's URLs name a container there.
USER = re.compile(r"\b(?!(?:abfss?|wasbs?)://[^:/\s@]+@)(\w+://)([^/\s@]+)@")
SECRETS = (
    (USER, r"\1[redacted]@"),
    (
        re.compile(r"(?i)([?&;](?:[\w-]*(?:token|sig|signature|key|secret|password|credential))=)[^&;\s]+"),
        r"\1[redacted]",
    ),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|glpat-|dapi|xox[abp]-)[A-Za-z0-9_-]{10,}"), "[redacted]"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), "[redacted]"),
    (re.compile(r"(?i)\b(bearer|basic) [a-z0-9+/=._-]{8,}"), r"\1 [redacted]"),
)


def redacted(value: Any, key: str = "") -> Any:
    """`value` with everything that looks like a secret replaced, by its key's name or by its own shape."""
    if isinstance(value, Mapping):
        return {name: redacted(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        if SECRET_KEYS.search(key):
            return "[redacted]"
        for pattern, replacement in SECRETS:
            value = pattern.sub(replacement, value)
    return value
