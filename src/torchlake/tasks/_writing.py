"""What the tasks that write texts share: the loss of each next token, and the columns of written texts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import INPUT_IDS
from torchlake.errors import UsageError
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models import write
from torchlake.models.generation import END, STUCK, decoded, settings_of, special_marks, stop_place, without_reasoning
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
MARK_TOKENS = 24
"More than the tokens of any mark of reasoning, and of the space after it."
TEXT, REASONING = pa.field("generated_text", pa.string()), pa.field("reasoning", pa.string())
PROMPT_TOKENS = pa.field("prompt_tokens", pa.int32())
COUNTS = (PROMPT_TOKENS, pa.field("generated_tokens", pa.int32()), pa.field("finish_reason", pa.string()))
MEAN, EACH = pa.field("logprob", pa.float32()), pa.field("token_logprobs", pa.list_(pa.float32()))


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
        """Return the generated text, the numbers of tokens, and the finish reason: "stop" or "length".

        Also the reasoning if the chat template has marks of it, log-probabilities if they are asked for, and with a
        structure the probabilities of its choices, or the columns of its schema.
        """
        reasoning = [] if options.marks is None else [REASONING]
        logprobs = {None: [], "mean": [MEAN], "tokens": [MEAN, EACH]}[options.logprobs]
        written, own = [TEXT, *reasoning, *COUNTS, *logprobs], _own_fields(options.structure)
        taken = {field.name for field in written} & {field.name.lower() for field in own}
        if taken:
            raise UsageError(
                f"json_columns: a property of the schema is {min(taken)!r}, a column of every written text. Rename it."
            )
        return pa.schema([*written, *own])

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
        structure, schema = options.structure, self.output_schema(spec, options)
        lengths = None if options.features is None else options.features.lengths
        if structure is not None and structure.choices:
            return _chosen(answers, processor, structure, lengths, schema), {}
        columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        for row, answer in enumerate(answers):
            written = answer[answer >= 0]
            text = decoded(processor, written, marked=True, exact=structure is not None)
            stop = options.own[row].stop if options.own else options.stop
            place = stop_place(text, stop if structure is None else ())
            found: dict[str, Any] = {"reasoning": None, "generated_tokens": len(written)}
            text = text[:place]
            for mark in {*special_marks(processor).values()} - {*(options.marks or ())}:
                text = text.replace(mark, "")
            if options.marks is not None and structure is None:
                begun = _begun(processor, options, row)
                found["reasoning"], text = without_reasoning(text, options.marks, begun=begun)
            found["generated_text"] = text
            found["finish_reason"] = "length" if place is None and END not in answer else "stop"
            found["prompt_tokens"] = None if lengths is None else lengths[row]
            if options.logprobs is not None:
                found["token_logprobs"] = each = options.written[row]
                found["logprob"] = None if each is None else each.mean() if len(each) else 0.0
            for name in found.keys() & columns.keys():
                columns[name].append(found[name])
        if structure is None:
            return pa.table(columns, schema=schema), {}
        return _fitted(columns, structure, schema, stuck=np.flatnonzero((answers == STUCK).any(axis=1)).tolist())


def _fitted(
    columns: Mapping[str, list[Any]], structure: Structure, schema: pa.Schema, *, stuck: Sequence[int]
) -> tuple[pa.Table, dict[int, str]]:
    """Return the columns with those of the structure, and the errors of texts that do not fit it to the end."""
    reasons = zip(columns["finish_reason"], columns["generated_tokens"], strict=True)
    errors = {row: CUT.format(count) for row, (reason, count) in enumerate(reasons) if reason == "length"}
    errors |= dict.fromkeys(stuck, NO_TOKEN)
    made = {
        name: values for name, values in columns.items() if name not in {one.name for one in _own_fields(structure)}
    }
    table = pa.table(made, schema=pa.schema([schema.field(name) for name in made]))
    if structure.columns:
        own, bad = json_columns(columns["generated_text"], pa.schema(_own_fields(structure)))
        errors = bad | errors
        for field, column in zip(own.schema, own.columns, strict=True):
            table = table.append_column(field, column)
    return table, errors


def _own_fields(structure: Structure | None) -> list[pa.Field]:
    """Return the columns that a structure adds."""
    if structure is None:
        return []
    return list(json_schema_of(structure.schema)) if structure.columns else probability_fields(structure.choices)


def _chosen(
    answers: np.ndarray, processor: Any, structure: Structure, lengths: np.ndarray | None, schema: pa.Schema
) -> pa.Table:
    """Return the columns of answers that are choices; `lengths` (B,) are those of the prompts."""
    texts, probabilities = read_answers(answers, structure.choices)
    counts = dict(zip(structure.choices, map(len, tokens_of(structure.choices, processor)), strict=True))
    found: dict[str, Any] = {
        "generated_text": texts,
        "reasoning": [None] * len(texts),
        "prompt_tokens": [None] * len(texts) if lengths is None else lengths,
        "generated_tokens": [counts[text] for text in texts],
        "finish_reason": ["stop"] * len(texts),
    }
    shares = dict(zip((one.name for one in _own_fields(structure)), probabilities.T, strict=True))
    return pa.table({name: shares[name] if name in shares else found[name] for name in schema.names}, schema=schema)


def _begun(tokenizer: Any, options: ColumnOptions, row: int) -> bool | None:
    """Return whether a row's prompt leaves reasoning open, or has closed it; None: neither.

    A prompt ends with a mark, but for space. The beginning of an answer that is continued has it anywhere after the
    prompt's last added token, which is that of a role.
    """
    if options.features is None or options.marks is None:
        return None
    ids: Any = options.features.arrays[INPUT_IDS]
    own = ids.values[ids.offsets[row] : ids.offsets[row + 1]]
    if options.continues:
        roles = {token for token, each in tokenizer.added_tokens_decoder.items() if str(each) not in options.marks}
        last = next((place for place in range(len(own) - 1, -1, -1) if int(own[place]) in roles), -1)
        opened, closed = map(tokenizer.decode(own[last + 1 :]).rfind, options.marks)
        return None if opened == closed else opened > closed
    text = tokenizer.decode(own[-MARK_TOKENS:]).rstrip()
    return next((first for first, mark in zip((True, False), options.marks, strict=True) if text.endswith(mark)), None)
