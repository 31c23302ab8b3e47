"""Write a model folder atomically, with a model card for people and for the hub."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchlake import atomic_io
from torchlake.config.task_spec import GENERATIVE, TASK_FILE, TaskSpec, as_columns, spec_to_json
from torchlake.errors import TorchlakeError
from torchlake.failpoints import failpoint
from torchlake.models.config import NO_TOKEN, OWN_MODEL_TYPE
from torchlake.models.folders import BASE_RECORD
from torchlake.outputs.staging.folders import exchange

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

SHOWN_LABELS = 50


@dataclass(frozen=True, kw_only=True)
class About:
    """What a model card says about a task, and how its weights are written."""

    auto_class: str = "AutoModelForSequenceClassification"
    "transformers' Auto class; empty for a task's own module."
    hub_task: str = "text-classification"
    generation: Mapping[str, Any] | None = None
    "What generation_config.json says about a model that writes texts."
    adapter: bool = False
    "Whether the folder holds an adapter in place of weights."
    write_weights: "Callable[[Path, Mapping[str, Any], Any], None] | None" = None
    "Writes the state dict and the configuration into a folder, in place of the two usual ways."


def save_model_folder(
    folder: Path,
    model_or_state: "torch.nn.Module | Mapping[str, torch.Tensor]",
    config: "PretrainedConfig | None",
    tokenizer: "PreTrainedTokenizerFast | None",
    spec: TaskSpec,
    *,
    card: Mapping[str, Any],
    about: About = About(),
    beside: Path | None = None,
    adapter: Path | None = None,
    site: str = "model",
) -> None:
    """Write a model folder atomically, replacing an older one.

    `model_or_state` is the model, or its full state dict by name (`config.architectures` then names the class). `card`
    fills the model card: any of base, metrics ({name: number, or {value, low, high}}), data, seconds, steps. The folder
    `beside` is copied into it under its name; the files of the folder `adapter` take the place of weights. A module
    that is not of transformers is written as one safetensors file.
    Raises StorageError after removing the incomplete folder.
    """
    about = replace(about, adapter=adapter is not None)
    with new_folder(folder, site=site, format=1) as temporary:
        with quiet():
            if adapter is not None:
                _save_beside_adapter(temporary, adapter, config, about.generation)
            elif about.write_weights is not None:
                about.write_weights(temporary, untied_state(model_or_state), config)
            elif about.auto_class:
                _save_pretrained(temporary, model_or_state, config, about.generation)
            else:
                _save_own(temporary, model_or_state, config)
            if about.auto_class.endswith("ForSequenceClassification"):
                _name_padding(temporary / "config.json", tokenizer)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
        atomic_io.write_json(temporary / TASK_FILE, spec_to_json(spec), site=f"{site}.task")
        atomic_io.write_bytes(temporary / "README.md", model_card(spec, card, about).encode(), site=f"{site}.card")
        if beside is not None:
            shutil.copytree(beside, temporary / beside.name)


@contextmanager
def new_folder(folder: Path, *, site: str, **manifest: Any) -> Iterator[Path]:
    """Yield an empty folder that, with a manifest, atomically replaces `folder` when the block ends.

    If the block raises, the incomplete folder is removed. Raises StorageError if it cannot be written.
    """
    folder = Path(folder)
    atomic_io.remove(atomic_io.stale_temporaries(folder))
    temporary = atomic_io.temporary_path(folder)
    try:
        failpoint(f"{site}.write")
        temporary.mkdir(parents=True)
        yield temporary
        written = [path for path in temporary.rglob("*") if path.is_file()]
        atomic_io.set_default_modes(written)
        for path in written:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        # The base's place may be edited; its hash decides.
        atomic_io.write_manifest(temporary, site=f"{site}.manifest", without=(BASE_RECORD,), **manifest)
        _put_in_place(temporary, folder, site)
    except TorchlakeError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and atomic_io.error_number(error) is None:
            raise
        raise atomic_io.storage_error(error, folder) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _name_padding(file: Path, tokenizer: Any) -> None:
    """Let a tokenizer pad with the token that a classifier's head skips, in transformers, too; null if it skips
    none."""
    config = atomic_io.read_json(file)
    for part in (config, config.get("text_config") or {}):
        token = part.get("pad_token_id")
        if token in getattr(tokenizer, "added_tokens_decoder", ()):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token)
        elif token == NO_TOKEN:
            part["pad_token_id"] = None
            atomic_io.write_json(file, config, site="model.config")


def _save_pretrained(folder: Path, model_or_state: Any, config: Any, generation: Mapping[str, Any] | None) -> None:
    import torch
    import transformers

    model, state = model_or_state, {}
    if isinstance(model_or_state, Mapping):
        with torch.device("meta"):
            model = getattr(transformers, (config.architectures or [""])[0])(config)
        state = {"state_dict": dict(model_or_state)}
    if generation is not None:
        model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder, **state)


def _save_beside_adapter(folder: Path, adapter: Path, config: Any, generation: Mapping[str, Any] | None) -> None:
    """Write the configuration of the whole model, and copy the files of an adapter."""
    import transformers

    config.save_pretrained(folder)
    if generation is not None:
        transformers.GenerationConfig(**generation).save_pretrained(folder)
    for path in adapter.iterdir():
        shutil.copyfile(path, folder / path.name)


def _save_own(folder: Path, model_or_state: Any, config: Any) -> None:
    """Write the weights of a task's own module, and the configuration of the encoder in it, if there is one.

    `architectures` is empty, so that transformers does not take the weights for those of the encoder alone.
    """
    save_weights(folder, model_or_state)
    values = {"model_type": OWN_MODEL_TYPE} if config is None else config.to_dict()
    atomic_io.write_json(folder / "config.json", {**values, "architectures": []}, site="model.config")


def save_weights(folder: Path, model_or_state: Any) -> None:
    """Write model.safetensors, tied tensors once."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in untied_state(model_or_state).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def untied_state(model_or_state: Any) -> "Mapping[str, torch.Tensor]":
    """Return the state dict of a model, or the given one; tied tensors occur once."""
    from torchlake.checkpoints.format import untied

    return untied(model_or_state if isinstance(model_or_state, Mapping) else model_or_state.state_dict())


def model_card(spec: TaskSpec, card: Mapping[str, Any], about: About = About()) -> str:
    """Return the text of README.md.

    `card` may have base (the encoder's name), metrics ({name: number} or {name: {value, low, high}}), and further
    lines, such as data (a fingerprint), seconds, steps.
    """
    try:
        release = version("torchlake")
    except PackageNotFoundError:
        release = "from its source folder"
    auto_class = about.auto_class
    output = "text" if spec.problem in (*GENERATIVE, "text") else "number"
    front = {"library_name": "transformers", "pipeline_tag": about.hub_task, "tags": ["torchlake", spec.problem]}
    if "base" in card and not Path(str(card["base"])).is_absolute():  # a local path is useless on the hub
        front["base_model"] = str(card["base"]).partition("@")[0]
    labels = ", ".join(f"`{label}`" for label in spec.labels[:SHOWN_LABELS])
    if len(spec.labels) > SHOWN_LABELS:
        labels += f" and {len(spec.labels) - SHOWN_LABELS:,} more"
    facts = {
        "task": f"{spec.task} ({spec.problem})",
        "labels": labels or f"none: the output is a {output}",
        "columns": ", ".join(_columns(spec)),
        **_lengths(spec),
        **_units(spec),
        **{name: value for name, value in card.items() if name != "metrics"},
        "made with": f"torchlake {release}",
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    title = Path(str(card.get("base", "Model"))).name
    text = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {_cell(title)}, fine-tuned\n\n"
    text += "| | |\n|---|---|\n" + "\n".join(lines) + "\n"
    if metrics := card.get("metrics"):
        text += "\n| metric | value | 95 % interval |\n|---|---|---|\n"
        text += "\n".join(_metric_line(name, value) for name, value in metrics.items()) + "\n"
    if auto_class:
        images = auto_class.endswith("ForImageClassification")
        name, processor = ("processor", "AutoImageProcessor") if images else ("tokenizer", "AutoTokenizer")
        with_what, imports, made = "transformers", auto_class, f"model = {auto_class}.from_pretrained(folder)\n"
        if about.adapter:
            with_what, imports = "transformers and peft", f"AutoConfig, {auto_class}"
            made = (
                f"base = {auto_class}.from_pretrained({str(card.get('base'))!r}, "
                "config=AutoConfig.from_pretrained(folder))\n"
                "model = PeftModel.from_pretrained(base, folder)  # from peft import PeftModel\n"
            )
        text += (
            f"\nWith {with_what}:\n\n```python\n"
            f"from transformers import {imports}, {processor}\n"
            f"{made}{name} = {processor}.from_pretrained(folder)\n```\n"
        )
    return text + ("\nWith torchlake:\n\n```bash\ntorchlake predict FOLDER table.parquet scored/\n```\n")


def _columns(spec: TaskSpec) -> list[str]:
    """Return the columns of the inputs and the label, each with its name."""
    named = {"text": spec.text, "text pair": spec.text_pair, **spec.inputs, "label": spec.label}
    return [
        f"{name} {' '.join(f'`{column}`' for column in as_columns(columns))}"
        for name, columns in named.items()
        if columns
    ]


def _lengths(spec: TaskSpec) -> dict[str, str]:
    if spec.label is None:
        return {"trained on": f"blocks of {spec.max_length} tokens, texts concatenated"}
    if not spec.max_length:
        return {}
    return {"longest input": f"{spec.max_length} tokens; longer texts are truncated"}


def _units(spec: TaskSpec) -> dict[str, str]:
    if spec.mean is None or spec.deviation is None:
        return {}
    return {
        "units": f"prediction = output × {spec.deviation:.6g} + {spec.mean:.6g}: torchlake computes it, transformers "
        "gives the output"
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and reports of transformers; exceptions here contain the same information."""
    import torch
    from transformers.utils import logging

    # With accelerate installed, transformers imports DeepSpeed to write a model, which warns about detecting the
    # accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    reports: Any = logging
    verbosity, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(verbosity)
        if bars:
            reports.enable_progress_bar()


def _put_in_place(temporary: Path, folder: Path, site: str) -> None:
    """Rename to the final name; an older folder then has the temporary name."""
    atomic_io.sync_folder(temporary)
    failpoint(f"{site}.rename")
    if not folder.exists():
        os.rename(temporary, folder)
    elif not exchange(temporary, folder):
        # This file system cannot exchange names: between the two renames there is no model.
        older = atomic_io.temporary_path(folder)
        os.rename(folder, older)
        os.rename(temporary, folder)
        os.rename(older, temporary)
    atomic_io.sync_folder(folder.parent)
    failpoint(f"{site}.done")


def _metric_line(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"| {_cell(name)} | {value['value']:.4f} | {value['low']:.4f} to {value['high']:.4f} |"
    return f"| {_cell(name)} | {value:.4f} | |"


def _cell(value: Any) -> str:
    """Return a value as the text of one table cell: no line of its own, no other column, no HTML."""
    text = " ".join(str(value).split())  # at every kind of line end and blank
    return escape(text, quote=False).replace("|", "\\|")
