"""What the tasks that write texts share: the loss of each next token, and the columns of written texts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import INPUT_IDS, Features
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models import write
from torchlake.models.generation import END, NOTHING, decoded, settings_of, stop_place, without_reasoning
from torchlake.tables.chunks import RowCost
from torchlake.tasks import NO_TARGET, BaseTask, ColumnOptions
from torchlake.tasks._completions import turn_end

if TYPE_CHECKING:
    import torch

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
        """Return the generated text, the numbers of tokens, and the finish reason: "stop" or "length"; if the chat
        template has marks of reasoning, the reasoning too, and log-probabilities if they are asked for."""
        reasoning = [] if options.marks is None else [REASONING]
        logprobs = {None: [], "mean": [MEAN], "tokens": [MEAN, EACH]}[options.logprobs]
        return pa.schema([TEXT, *reasoning, *COUNTS, *logprobs])

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the prediction columns of the answers (B, W) int32, in row order.

        Text is cut before a stop string; the count includes the stop string's tokens but not the end token.
        """
        schema = self.output_schema(spec, options)
        columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        for row, answer in enumerate(answers):
            written = answer[(answer != NOTHING) & (answer != END)]
            text = decoded(processor, written, kept=options.marks or ())
            place = stop_place(text, options.own[row].stop if options.own else options.stop)
            found: dict[str, Any] = {"reasoning": None, "generated_tokens": len(written)}
            text = text[:place]
            if options.marks is not None:
                begun = options.features is not None and _ends_with(processor, options.features, row, options.marks[0])
                found["reasoning"], text = without_reasoning(text, options.marks, begun=begun)
            found["generated_text"] = text
            found["finish_reason"] = "length" if place is None and END not in answer else "stop"
            found["prompt_tokens"] = None if options.features is None else options.features.lengths[row]
            if options.logprobs is not None:
                found["token_logprobs"] = each = options.written[row]
                found["logprob"] = None if each is None else each.mean() if len(each) else 0.0
            for name in columns:
                columns[name].append(found[name])
        return pa.table(columns, schema=schema)


def _ends_with(tokenizer: Any, features: Features, row: int, mark: str) -> bool:
    """Return whether a row's prompt ends with a mark, except for space."""
    ids: Any = features.arrays[INPUT_IDS]
    last = ids.values[max(ids.offsets[row], ids.offsets[row + 1] - MARK_TOKENS) : ids.offsets[row + 1]]
    return bool(tokenizer.decode(last).rstrip().endswith(mark))
