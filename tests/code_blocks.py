"""The code blocks of a Markdown page, run in order in one folder, as a reader would run them.

yaml      written to the file that its first line names (`# job.yaml`), else checked as sections of a job
python    run in one namespace per page, or written to the file that its first line names (`# train.py`)
bash      `torchlake` commands run in this process, `pip install` is checked against what is installed, `git clone` and
          `make` against the repository, and any other command runs in bash; `#` begins a comment
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import yaml

from torchlake.cli.app import program
from torchlake.cli.main import main
from torchlake.config.job import load_job

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LANGUAGES = ("bash", "python", "yaml")
REQUIRED = {"data": {"train": "t.parquet"}, "model": {"base": "roberta-base"}}
"The settings that a job needs; a block of YAML may leave them out."
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:yaml|py))\b")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def head(self) -> str:
        """Its first line, by which lists of blocks name it."""
        return self.text.partition("\n")[0].strip()

    @property
    def file(self) -> str | None:
        """The file that its first line names."""
        match = FILE.match(self.head)
        return match[1] if match else None


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page in a language that is run or checked."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, match.start()) + 1, match[2], match[3])
        for match in FENCE.finditer(text)
        if match[2] in LANGUAGES
    ]


def check_block(block: Block) -> None:
    """Check a block without running it: commands are parsed, Python is compiled, YAML is a valid job."""
    if block.language == "yaml":
        _check_yaml(block, block.text)
    elif block.language == "python":
        compile(block.text, f"{block.page}:{block.line}", "exec")
    for line, words in _commands(block.text) if block.language == "bash" else ():
        if words[0] == "torchlake":
            work = program.main(words[1:], prog_name="torchlake", standalone_mode=False)
            assert callable(work), f"{block.page}:{block.line}: {line}"


def run_block(block: Block, namespace: dict[str, Any], places: Mapping[str, str]) -> None:
    """Run a block in the current folder; `places` are texts to replace, such as folders that only a cluster has."""
    text = block.text
    for found, replacement in places.items():
        text = text.replace(found, replacement)
    if block.language == "yaml":
        _check_yaml(block, text)
    if block.file is not None:
        path = Path(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.name == ".pyiceberg.yaml":
            from pyiceberg import catalog
            from pyiceberg.utils.config import Config

            catalog._ENV_CONFIG = Config()  # else read once, when pyiceberg is imported
    elif block.language == "python":
        exec(compile(text, f"{block.page}:{block.line}", "exec"), namespace)
    elif block.language == "bash":
        for line, words in _commands(text):
            _run_line(line, words, f"{block.page}:{block.line}: {line}")


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a block in bash, each with its words."""
    lines = text.replace("\\\n", " ").splitlines()
    return [(line, words) for line in lines if (words := shlex.split(line, comments=True))]


def _check_yaml(block: Block, text: str) -> None:
    """Raise ConfigError if the sections in a block are not valid."""
    values = yaml.safe_load(text)
    if "." in next(iter(values)) or (block.file or "").startswith((".", "prices")):
        return  # a search space, which `tune` reads, another library's configuration, or prices of an endpoint
    sections = {name: {**REQUIRED.get(name, {}), **values.get(name, {})} for name in {*REQUIRED, *values}}
    load_job(None, **sections)


def _run_line(line: str, words: list[str], where: str) -> None:
    if words[0] == "torchlake":
        assert main(words[1:]) == 0, where
    elif words[:2] == ["pip", "install"]:
        _check_requirements([word for word in words[2:] if not word.startswith("-")], where)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), where
    elif words[:2] == ["git", "clone"]:
        assert words[2:] == [PROJECT["urls"]["Source"], "&&", "cd", "torchlake"], where
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["bash", "-euc", line], check=True, env={**os.environ, "PATH": path})


def _check_requirements(requirements: list[str], where: str) -> None:
    """Each is installed, or torchlake with extras that exist."""
    extras = PROJECT["optional-dependencies"]
    for requirement in requirements:
        if requirement == ".":
            continue
        match = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement)
        assert match, where
        if match[1] == "torchlake":
            assert set((match[2] or "demo").split(",")) <= extras.keys(), where
        else:
            assert distribution(match[1]), where
