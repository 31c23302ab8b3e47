"""What the tasks that write texts share: the loss of each next token, and the columns of written texts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models import write
from torchlake.models.generation import END, STUCK, decoded, settings_of, stop_place
from torchlake.models.structured.choices import probability_fields, read_answers, tokens_of
from torchlake.models.structured.structure import Structure
from torchlake.tables.chunks import RowCost
from torchlake.tasks import NO_TARGET, BaseTask, ColumnOptions
from torchlake.tasks._completions import turn_end
from torchlake.tasks._json_columns import json_columns, json_schema_of

if TYPE_CHECKING:
    import torch

CUT = "length: the text was cut after {} tokens; raise max_new_tokens"
NO_TOKEN = "no_token: the tokenizer, or what the model suppresses, leaves no token that continues the text"
ANSWERS = pa.schema({"generated_text": pa.string(), "generated_tokens": pa.int32(), "finish_reason": pa.string()})


class WritingTask(BaseTask):
    """A language model of transformers, whose answers are written tokens."""

    generates = True
    chunk_rows: int | RowCost | None = RowCost()
    measures_outputs = False
    # Training does not use the key-value cache; it would only hold memory.
    forward_options = {"use_cache": False}

    def save_model(
        self, folder: Path, model_or_state: Any, config: Any, processor: Any, spec: TaskSpec, **card: Any
    ) -> None:
        """Write a model folder, with the settings of the base's generation_config.json; its texts end as in training,
        answers with the end token of a turn."""
        base = Path(processor.name_or_path)
        own, ends = settings_of(base), self.end_tokens(base, processor, spec)
        own["eos_token_id"] = ends if len(ends) > 1 else processor.eos_token_id
        about = write.About(auto_class=self.auto_class, hub_task=self.hub_task, generation=own)
        write.save_model_folder(folder, model_or_state, config, processor, spec, about=about, **card)

    def end_tokens(self, base: Path, tokenizer: Any, spec: TaskSpec) -> list[int]:
        """Return the tokens that end the texts of a model that is trained from `base`, and the turns of answers."""
        named = settings_of(base).get("eos_token_id", [])
        turn = turn_end(tokenizer) if spec.whole or spec.preference else None
        ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
        return sorted(ends if turn is None else {*ends, turn})

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the cross entropy summed over all targets, in fp32. `outputs` (B, L, V); `targets` (B, L)."""
        from torch.nn import functional

        assert targets is not None, "every token is a target"
        return functional.cross_entropy(
            outputs.float().flatten(0, 1), targets.long().flatten(), ignore_index=NO_TARGET, reduction="sum"
        )

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Return the perplexity, exp of the mean loss."""
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def output_schema(self, spec: TaskSpec, options: ColumnOptions = ColumnOptions()) -> pa.Schema:
        """Return the generated text, its number of tokens, and the finish reason: "stop" or "length"; with a structure,
        the probabilities of its choices, or the columns of its schema."""
        return pa.schema([*ANSWERS, *_own_fields(options.structure)])

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the prediction columns of the answers (B, W) int32, in row order.

        Text is cut before a stop string; the count includes the stop string's tokens but not the end token.
        """
        return self.answer_columns(answers, processor, spec, options)[0]

    def answer_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> tuple[pa.Table, dict[int, str]]:
        """Return `output_columns`, and the errors of texts that do not fit their structure to the end."""
        structure = options.structure
        if structure is not None and structure.choices:
            return _chosen(answers, processor, structure), {}
        texts, counts, reasons = [], [], []
        for answer in answers:
            written = answer[answer >= 0]
            text = decoded(processor, written, exact=structure is not None)
            place = stop_place(text, options.stop)
            texts.append(text[:place])
            counts.append(len(written))
            reasons.append("length" if place is None and END not in answer else "stop")
        table = pa.table([texts, counts, reasons], schema=ANSWERS)
        if structure is None:
            return table, {}
        errors = {row: CUT.format(counts[row]) for row, reason in enumerate(reasons) if reason == "length"}
        errors |= dict.fromkeys(np.flatnonzero((answers == STUCK).any(axis=1)).tolist(), NO_TOKEN)
        if structure.columns:
            columns, bad = json_columns(texts, pa.schema(_own_fields(structure)))
            errors = bad | errors
            for field, column in zip(columns.schema, columns.columns, strict=True):
                table = table.append_column(field, column)
        return table, errors


def _own_fields(structure: Structure | None) -> list[pa.Field]:
    """Return the columns that a structure adds."""
    if structure is None:
        return []
    return list(json_schema_of(structure.schema)) if structure.columns else probability_fields(structure.choices)


def _chosen(answers: np.ndarray, processor: Any, structure: Structure) -> pa.Table:
    texts, probabilities = read_answers(answers, structure.choices)
    sizes = {
        text: len(one) for text, one in zip(structure.choices, tokens_of(structure.choices, processor), strict=True)
    }
    counts, reasons = [sizes[text] for text in texts], ["stop"] * len(texts)
    schema = pa.schema([*ANSWERS, *_own_fields(structure)])
    return pa.table([texts, counts, reasons, *probabilities.T], schema=schema)
