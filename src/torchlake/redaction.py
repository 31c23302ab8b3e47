"""Remove secrets from what is written or shown, by the name of a value and by the form of the value.

A name is split into words: `spark.ssl.keyStorePassword` is "spark ssl key store password". SECRET matches words that
name a credential, ABOUT words after them that show that the value is not the credential itself, as in
`credentials.provider`. The names are those of Spark, Hadoop (S3A, ABFS, WASB, GCS), fsspec, MLflow, Hugging Face and
environment variables. Cost: logs pass at 5 MB/s.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

REDACTED = "[redacted]"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SECRET = re.compile(
    r"\b(?:\w*passw(?:or)?d|(?:store|ssl|user|db|bind|proxy) pass|passphrase"
    r"|(?:admin|db|login|root|sql|user) pwd|\w*secrets?|\w*credentials?"
    r"|authorization|signature|jwt|sas|saskey|\w*keyfile|conn(?:ection)? ?str(?:ing)?"
    r"|(?:access|account|api|auth|customer|encryption|license|master|private|secret|service|session|shared|signing|ssh"
    r"|storage|subscription) ?keys?"
    r"|(?:storage|fs|filesystem|s3) (?:options|opts|kwargs) key|\w*token|(?:access|auth|hadoop|oauth|refresh) tokens"
    r"|(?:zk|zookeeper) auth)\b"
)
ABOUT = re.compile(
    r"\b(?:acl|algorithm|alias|binding|bits|cache|caching|class|count|enabled?|endpoint|expires|expiry|fallback|fetch"
    r"|files?|interval|length|lifetime|max|min|mode|paths?|period|port|providers?|regex|renew|renewal|resolver|retry"
    r"|rolling|size|timeout|ttl|types?|uri|url|validity|version)\b"
)
TEXT_TOKEN = re.compile(
    r"\b(?:additional|audio|begin|bos|cls|end|eos|first|image|last|mask|next|pad|padding|per|sep|special|start|stop|unk"
    r"|video) token\b"
)
# A storage account or container may have any name, even a word in ABOUT.
OF_AZURE = re.compile(r"(?i)fs\.azure\.(?:account\.key(?![a-z])|sas\.[^.]+\.[^.]+\.(?:blob|dfs|file)\.)")
AZURE_ACCOUNT = re.compile(r"(?i)\.[\w-]+\.(?:blob|dfs|file)\.(?:core|fabric|storage)\.[\w.]+$")
PLAIN = frozenset({"", "true", "false", "none", "null"})
"Values that are never secrets."

# user:password@host; in Azure's URLs the part before @ is a container.
USER = re.compile(r"\b(?!(?:abfss?|wasbs?)://[^:/\s@]+@)(\w+://)([^/\s@]+)@")
SECRETS = (
    (USER, rf"\1{REDACTED}@"),
    (
        re.compile(r"(?i)([?&;](?:[\w-]*(?:token|sig|signature|key|secret|password|credential))=)[^&;\s]+"),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|dapi|xox[abp]-|ya29\.)[A-Za-z0-9_-]{10,}"), REDACTED),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{30,}"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic) [a-z0-9+/=._-]{8,}"), rf"\1 {REDACTED}"),
)
ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<name>[A-Za-z][\w.-]{2,200})(?P<between>["']?\s?[=:]\s?)(?P<value>"[^"]*"|'[^']*'|[^\s,;&'"}]+)"""
)


def redacted(value: Any, key: str = "") -> Any:
    """Return `value` with every secret replaced; `key` is the dotted name of `value`."""
    if isinstance(value, Mapping):
        return {name: redacted(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        return REDACTED if value.lower() not in PLAIN and is_secret(key) else _without_secrets(value)
    return value


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a setting, option or variable of this name is a credential."""
    if OF_AZURE.search(name):
        return True
    words = " ".join(WORD.findall(AZURE_ACCOUNT.sub("", name))).lower()
    found = [match.end() for match in SECRET.finditer(TEXT_TOKEN.sub("", words))]
    return bool(found) and not ABOUT.search(TEXT_TOKEN.sub("", words), found[-1])


def _without_secrets(text: str) -> str:
    for pattern, replacement in SECRETS:
        text = pattern.sub(replacement, text)
    pieces, done, start = [], 0, 0
    while match := ASSIGNED.search(text, start):
        # The value of a harmless name may contain another name, as in "refused: password=x".
        start = match.start("value")
        if match["value"].strip("\"'").lower() not in PLAIN and is_secret(match["name"]):
            quote = match["value"][0] if match["value"][0] in "\"'" else ""
            pieces += [text[done:start], f"{quote}{REDACTED}{quote}"]
            done = start = match.end()
    return "".join([*pieces, text[done:]])
