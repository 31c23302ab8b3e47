"""Build hook: the description of the package is README.md with absolute links, because PyPI shows it by itself."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = "https://github.com/torchlake/torchlake/blob/main/"
FILES = "https://raw.githubusercontent.com/torchlake/torchlake/main/"
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")


class Readme(MetadataHookInterface):
    """Sets the field `readme`, which pyproject.toml lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text)}


def with_absolute_links(text: str) -> str:
    """Return Markdown whose relative links lead to the pages on GitHub, and whose pictures lead to their files."""
    return LINK.sub(lambda link: f"{link[1]}{link[2]}({FILES if link[1] else PAGES}{link[3]})", text)
