"""A package with a task of its own, as a user's would be: a text encoder beside numbers, and ways to get it wrong."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.tasks import NUMBER, TEXT, Features, Inputs, Task, load_encoder

KILLER = "terrible"
"A text with it ends the process that makes a batch of it, where a test asks for that."


class Fused(nn.Module):
    """An encoder's first token beside numbers, and one linear layer."""

    def __init__(self, encoder: nn.Module, numbers: int, outputs: int) -> None:
        super().__init__()
        self.encoder, self.config = encoder, encoder.config
        self.head = nn.Linear(encoder.config.hidden_size + numbers, outputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mean = (hidden * attention_mask[:, :, None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.head(torch.cat([mean, numbers.to(mean.dtype)], dim=1))


class TextAndNumbers(Task):
    """Classes or a number from a text and columns of numbers; a Huber loss for numbers."""

    inputs = {"text": TEXT, "numbers": NUMBER}

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        width = len(as_columns(spec.inputs["numbers"]))
        return {**super().feature_types(spec), "numbers": pa.list_(pa.float32(), width)}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        made = super().features(inputs, processor, spec)
        return replace(made, arrays={**made.arrays, "numbers": inputs["numbers"]})

    def build(self, folder: Path, spec: TaskSpec, *, weights: bool) -> nn.Module:
        width = len(as_columns(spec.inputs["numbers"]))
        return Fused(load_encoder(folder, weights=weights), width, max(1, len(spec.labels)))

    def loss_sum(self, outputs: torch.Tensor, targets: Any, spec: TaskSpec, objective: Any = None) -> torch.Tensor:
        if spec.problem != "regression":
            return super().loss_sum(outputs, targets, spec, objective)
        scaled = (targets - spec.mean) / spec.deviation
        return nn.functional.huber_loss(outputs.float().squeeze(-1), scaled, reduction="sum")


class Mean(nn.Module):
    """The mean of an encoder's tokens, and one linear layer."""

    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder, self.config = encoder, encoder.config
        self.head = nn.Linear(encoder.config.hidden_size, outputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.head((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))


class TextAlone(Task):
    """Classes from a text, by an encoder that padding may change."""

    inputs = {"text": TEXT}
    checks_padding = True

    def build(self, folder: Path, spec: TaskSpec, *, weights: bool) -> nn.Module:
        return Mean(load_encoder(folder, weights=weights), len(spec.labels))


class Perceptron(nn.Module):
    """Numbers to outputs, with a layer between them."""

    def __init__(self, numbers: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numbers, 8), nn.ReLU(), nn.Linear(8, outputs))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layers(numbers)


class OnlyNumbers(Task):
    """Classes from columns of numbers: no text, no tokenizer, no base model."""

    inputs = {"numbers": NUMBER}

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        return {"numbers": pa.list_(pa.float32(), len(as_columns(spec.inputs["numbers"])))}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec) -> Features:
        numbers = inputs["numbers"]
        one, none = np.ones(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
        return Features(arrays={"numbers": numbers}, lengths=one, cut=none)

    def build(self, folder: Path | None, spec: TaskSpec, *, weights: bool) -> nn.Module:
        return Perceptron(len(as_columns(spec.inputs["numbers"])), len(spec.labels))


class LosesRow(TextAndNumbers):
    def collate(self, arrays: Any, rows: Any, processor: Any, spec: TaskSpec, *, seed: int | None = None) -> Any:
        batch = super().collate(arrays, rows, processor, spec, seed=seed)
        return {**batch, "numbers": batch["numbers"][1:]}


class LossOfEachRow(TextAndNumbers):
    def loss_sum(self, outputs: torch.Tensor, targets: Any, spec: TaskSpec, objective: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


class OutputsOfAllRows(TextAndNumbers):
    def build(self, folder: Path, spec: TaskSpec, *, weights: bool) -> nn.Module:
        class Mean(Fused):
            def forward(self, **batch: torch.Tensor) -> torch.Tensor:
                return super().forward(**batch).mean(0)

        return Mean(load_encoder(folder, weights=weights), 2, max(1, len(spec.labels)))


class TooManyOutputs(TextAndNumbers):
    def build(self, folder: Path, spec: TaskSpec, *, weights: bool) -> nn.Module:
        return Fused(load_encoder(folder, weights=weights), 2, len(spec.labels) + 3)


class Detached(TextAndNumbers):
    def loss_sum(self, outputs: torch.Tensor, targets: Any, spec: TaskSpec, objective: Any = None) -> torch.Tensor:
        return super().loss_sum(outputs, targets, spec, objective).detach()


class NoModule(TextAndNumbers):
    def build(self, folder: Path, spec: TaskSpec, *, weights: bool) -> Any:
        return lambda **batch: None


class OtherMetrics(TextAndNumbers):
    """What `metrics` returns is given; it is chosen by `accuracy`."""

    default_metric = {"single_label": "accuracy"}
    directions = {"accuracy": "higher"}

    def __init__(self, found: Any) -> None:
        self.found = found

    def metrics(self, answers: Any, targets: Any, spec: TaskSpec) -> Any:
        return self.found


class Contrastive(TextAndNumbers):
    """Labels are ignored: every row's neighbor in the batch is its negative."""

    couples_rows = True

    def loss_sum(self, outputs: torch.Tensor, targets: Any, spec: TaskSpec, objective: Any = None) -> torch.Tensor:
        similar = nn.functional.normalize(outputs.float(), dim=1)
        return nn.functional.cross_entropy(similar @ similar.T, torch.arange(len(outputs)), reduction="sum")


class KillsCollating(TextAndNumbers):
    """Threads collate ahead, and a text with KILLER ends the process, with a line in the file $KILLED."""

    name = "text_and_numbers"
    collates_ahead = True

    def collate(self, arrays: Any, rows: Any, processor: Any, spec: TaskSpec, *, seed: int | None = None) -> Any:
        batch = super().collate(arrays, rows, processor, spec, seed=seed)
        if (batch["input_ids"] == processor.backend_tokenizer.token_to_id(KILLER)).any():
            with open(os.environ["KILLED"], "a", encoding="utf-8") as file:
                file.write("killed\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return batch
