"""What the tasks that write texts share: the loss of each next token, and the columns of written texts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models import write
from torchlake.models.generation import END, NOTHING, decoded, settings_of, stop_place
from torchlake.tasks import NO_TARGET, BaseTask, ColumnOptions
from torchlake.tasks._completions import turn_end

if TYPE_CHECKING:
    import torch

ANSWERS = pa.schema({"generated_text": pa.string(), "generated_tokens": pa.int32(), "finish_reason": pa.string()})


class WritingTask(BaseTask):
    """A language model of transformers, whose answers are written tokens."""

    generates = True
    measures_outputs = False
    # Training does not use the key-value cache; it would only hold memory.
    forward_options = {"use_cache": False}

    def save_model(
        self, folder: Path, model_or_state: Any, config: Any, processor: Any, spec: TaskSpec, **card: Any
    ) -> None:
        """Write a model folder, with the settings of the base's generation_config.json; its texts end as in training,
        too."""
        base = Path(processor.name_or_path)
        own, ends = settings_of(base), self.end_tokens(base, processor, spec)
        own["eos_token_id"] = ends if len(ends) > 1 else processor.eos_token_id
        about = write.About(auto_class=self.auto_class, hub_task=self.hub_task, generation=own)
        write.save_model_folder(folder, model_or_state, config, processor, spec, about=about, **card)

    def end_tokens(self, base: Path, tokenizer: Any, spec: TaskSpec) -> list[int]:
        """Return the tokens that end the texts of a model that is trained from `base`, and a turn of its template."""
        named = settings_of(base).get("eos_token_id", [])
        turn = turn_end(tokenizer) if spec.whole else None
        ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id, turn}
        return sorted(ends - {None})

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
        """Return the generated text, its number of tokens, and the finish reason: "stop" or "length"."""
        return ANSWERS

    def output_columns(
        self, answers: np.ndarray, processor: Any, spec: TaskSpec, options: ColumnOptions = ColumnOptions()
    ) -> pa.Table:
        """Return the prediction columns of the answers (B, W) int32, in row order.

        Text is cut before a stop string; the count includes the stop string's tokens but not the end token.
        """
        texts, counts, reasons = [], [], []
        for answer in answers:
            written = answer[(answer != NOTHING) & (answer != END)]
            text = decoded(processor, written)
            place = stop_place(text, options.stop)
            texts.append(text[:place])
            counts.append(len(written))
            reasons.append("length" if place is None and END not in answer else "stop")
        return pa.table([texts, counts, reasons], schema=ANSWERS)
