"""Preferences: a causal language model learns which of two answers to a prompt is better.

    prompt, chosen, rejected -> tokens of both -> log-probability of each answer -> loss of the pair

With the sums p of the log-probabilities of an answer's tokens, r those of the reference and n the number of tokens:

    dpo    -log sigmoid(beta d), d = (p - r) of the chosen - (p - r) of the rejected    DPOTrainer, loss_type sigmoid
    ipo    (d - 1 / (2 beta))^2, where each p - r is divided by its n                   DPOTrainer, loss_type ipo
    orpo   -beta log sigmoid(log odds of p / n) + cross entropy of prompt and chosen    ORPOTrainer

The formulas are those of TRL 1.16, averaged over the pairs of a batch; so is `sft_weight`, the weight of its loss_type
sft: the cross entropy over all tokens of the chosen answers of a batch. `label_smoothing` e is that of Mitchell (2023),
(1 - e) of the loss of the pair and e of that of the pair turned round; TRL 1.16 ignores it for sigmoid, and its robust
loss is another. As in TRL, dropout is off.

The reference's log-probabilities are columns of the prepared table (`preparation/reference.py`). The model folder is
one of text generation, which remembers the settings for `evaluate`.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.features import INPUT_IDS, Array, Features, text_features
from torchlake.data.pairs import SUMS
from torchlake.errors import TableError, UsageError
from torchlake.loss import UNWEIGHTED, Objective
from torchlake.models.folders import base_folder, model_hash
from torchlake.tables.arrays import is_text
from torchlake.tasks import ANY, EXTRA, Inputs
from torchlake.tasks._chat import is_chat, looks_like_chats, names_of
from torchlake.tasks._preference_pairs import tokenize_pairs
from torchlake.tasks.text_generation import TextGeneration, documents

if TYPE_CHECKING:
    import torch
    from torch import nn

SPLIT, REFERENCE, COUNTS = "split", "reference", "counts"
"Columns of token Parquet: tokens of the chosen one, the reference's log-probabilities, and the numbers of tokens."
Z95 = 1.959964


class Preference(TextGeneration):
    """A causal language model, which learns from pairs of answers."""

    inputs = {"text": ANY, "chosen": ANY, "rejected": ANY, "tools": EXTRA}
    optional = ("text", "tools")
    problems = {"all": "preference"}
    packs = False
    pairs = True
    measures_outputs = True
    chunk_rows = 256  # the reference computes them, too
    kept_back = ("answer_places", "answer_ids", "answer_slots", "answer_columns", "answer_targets")
    directions = {"loss": "lower", "reward_accuracy": "higher", "reward_margin": "higher"}
    default_metric = {"preference": "loss"}

    def find_columns(self, schema: pa.Schema, spec: TaskSpec, first: Callable[[str], pa.Table] | None) -> TaskSpec:
        """Return the task with the table's column of tools, if it has one.

        Raises TableError for columns of other types, UsageError for settings of conversations if the first rows have
        none.
        """
        setting = "data.system" if spec.rows.system else "data.messages" if spec.rows.messages else None
        columns = [name for name in spec.input_columns if name in schema.names and name != "tools"]
        for name in columns:
            kind = schema.field(name).type
            held = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (is_text(held) or pa.types.is_nested(held) or pa.types.is_null(held)):
                raise TableError(f"the column {name!r} holds {held}, not strings or conversations; name another.")
        if setting and first and not any(_holds_chats(first(name)[name], spec) for name in columns):
            raise UsageError(f"{setting}: {', '.join(columns)} hold text, not conversations. Remove the setting.")
        return spec if "tools" not in schema.names else replace(spec, inputs={"tools": "tools", **spec.inputs})

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the columns of pairs."""
        pair, counts = pa.list_(pa.float32(), 2), pa.list_(pa.int32(), 3)
        return {INPUT_IDS: pa.list_(pa.int32()), SPLIT: pa.int32(), REFERENCE: pair, COUNTS: counts}

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the tokens of pairs, the chosen one first; those of texts, if there are no answers."""
        if "chosen" not in inputs:
            return text_features(documents(processor, inputs["text"].to_pylist())), None
        found, cut, errors = tokenize_pairs(processor, inputs, spec.rows, spec.max_length)
        answers = [np.array(answer, np.int32) for pair in found for answer in pair]
        lengths = np.array([len(answer) for answer in answers], np.int64).reshape(-1, 2)
        predicted = np.array([(answer[1:] >= 0).sum() for answer in answers]).reshape(-1, 2)
        bare = np.array([len(answer) > 0 and answer[0] >= 0 for answer in answers[::2]], dtype=np.int64)
        offsets = offsets_of(lengths.sum(axis=1))
        arrays: dict[str, Array] = {
            INPUT_IDS: Ragged(np.concatenate([np.zeros(0, np.int32), *answers]), offsets),
            SPLIT: lengths[:, 0].astype(np.int32),
            REFERENCE: np.zeros(lengths.shape, np.float32),
            COUNTS: np.column_stack([predicted, bare]).astype(np.int32),
        }
        return Features(arrays=arrays, lengths=lengths.sum(axis=1), cut=np.array(cut, np.int64), errors=errors), None

    def pair_targets(self, arrays: Mapping[str, Array], rows: np.ndarray, of: np.ndarray, spec: TaskSpec) -> np.ndarray:
        """Return what the loss of the pairs `of` (B,) needs besides the outputs, (B, 5) float32.

        Two log-probabilities of the reference, two numbers of tokens, and the mean number of tokens of the cross
        entropy over `rows`, the whole batch: a sum over pairs divided by it is a mean over tokens.
        """
        counts, kind = np.asarray(arrays[COUNTS]), spec.preference["loss"]
        averaged = counts[of, :2] + counts[of, 2:] * (kind == "ipo")  # TRL counts the first token without a prompt
        learned = np.asarray(arrays[SPLIT])[rows] - 1 if kind == "orpo" else counts[rows, 0]
        mean = np.full((len(of), 1), max(1.0, float(learned.sum())) / max(1, len(rows)))
        return np.hstack([np.asarray(arrays[REFERENCE])[of], np.maximum(averaged, 1), mean]).astype(np.float32)

    def sums(self, answer: Any, batch: Mapping[str, np.ndarray], rows: int) -> "torch.Tensor":
        """Return the summed log-probabilities (B, 3), fp32, of both answers and of the prompt of B pairs.

        `answer` is what the model returned: its logits, or (n,) those of the predicted tokens.
        """
        import torch
        from torch.nn import functional

        from torchlake.distributed import to_device

        if not isinstance(answer, torch.Tensor):
            logits = self.outputs(answer).flatten(0, 1)
            places, ids = (to_device(batch[name], logits.device) for name in self.kept_back[:2])
            answer = -functional.cross_entropy(logits[places].float(), ids, reduction="none")
        slots, columns = (to_device(batch[name], answer.device) for name in self.kept_back[2:4])
        width = int(batch["answer_columns"].max(initial=0)) + 1
        table = answer.new_zeros(SUMS * rows, width).index_put((slots, columns), answer)
        # In float64, so that the width, which the other pairs decide, does not change the rounding.
        found: torch.Tensor = table.sum(dim=1, dtype=torch.float64).float().view(rows, SUMS)
        return found

    def loss_sum(
        self, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective = UNWEIGHTED
    ) -> "torch.Tensor":
        """Return the loss summed over pairs, in fp32. `outputs` (B, 3) as of `sums`, `targets` (B, 5)."""
        from torch.nn import functional

        assert targets is not None, "pairs have a reference"
        how, policy = spec.preference, outputs[:, :2]
        beta, smoothing, entropy = how["beta"], how["label_smoothing"], -outputs[:, 0] / targets[:, 4]
        scores, weight = policy - targets[:, :2], how["sft_weight"]
        losses: torch.Tensor
        if how["loss"] == "orpo":
            chosen, rejected = (policy / targets[:, 2:4]).unbind(1)
            odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
            losses, weight = -beta * functional.logsigmoid(odds), 1.0
            entropy = entropy - outputs[:, 2] / targets[:, 4]
        elif how["loss"] == "ipo":
            scores = scores / targets[:, 2:4]
            losses = (scores[:, 0] - scores[:, 1] - 1 / (2 * beta)) ** 2
        else:
            better = beta * (scores[:, 0] - scores[:, 1])
            losses = -functional.logsigmoid(better) * (1 - smoothing) - functional.logsigmoid(-better) * smoothing
        total: torch.Tensor = (losses + weight * entropy).sum()
        return total

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Return nothing: the loss is not one of tokens."""
        return {}

    def reduce_outputs(self, outputs: np.ndarray, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the implicit rewards (B, 2) of both answers."""
        if "answer_targets" not in batch:  # a rank without rows
            return np.zeros((0, 2), np.float32)
        return rewards(outputs[:, :2], batch["answer_targets"], spec)

    def metrics(self, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
        """Return the accuracy and the mean margin of rewards (N, 2), with intervals of 95 %: Wilson's, and a normal
        one."""
        margins, rows = answers[:, 0].astype(np.float64) - answers[:, 1], len(answers)
        found = reward_metrics(margins)
        share, middle = found["reward_accuracy"], found["reward_margin"]
        center, spread = share + Z95**2 / (2 * rows), math.sqrt(share * (1 - share) / rows + (Z95 / (2 * rows)) ** 2)
        low, high = ((center + sign * Z95 * spread) / (1 + Z95**2 / rows) for sign in (-1, 1))
        error = Z95 * float(margins.std()) / math.sqrt(rows)
        bounds = {"reward_accuracy": (low, high), "reward_margin": (middle - error, middle + error)}
        return found | {
            f"{name}_{end}": value
            for name, ends in bounds.items()
            for end, value in zip(("low", "high"), ends, strict=True)
        }

    def find_chunks(self, model: "nn.Module", row: np.ndarray, *, tokens: int) -> dict[str, Any] | None:
        """Return as JSON how the model can compute the log-probabilities of the predicted tokens alone, if it can."""
        return super().find_chunks(model, row, tokens=sys.maxsize)

    def complete(self, spec: TaskSpec, base: Path | None) -> TaskSpec:
        """Return the job's task, with the hash of the reference."""
        folder = base_folder(spec.preference["reference"])
        known = {} if folder is None else {"reference_hash": model_hash(folder)}
        return replace(spec, preference={**spec.preference, **known})

    def save_model(
        self, folder: Path, model_or_state: Any, config: Any, processor: Any, spec: TaskSpec, **card: Any
    ) -> None:
        """Write a model folder of text generation, with the settings and columns of the pairs."""
        columns = {name: spec.inputs[name] for name in ("chosen", "rejected")}
        written = replace(
            spec,
            task="text_generation",
            problem="next_token",
            text=spec.text or "text",
            inputs={},
            preference={**spec.preference, "text": spec.text, **columns},
        )
        super().save_model(folder, model_or_state, config, processor, written, **card)


def _holds_chats(column: pa.ChunkedArray, spec: TaskSpec) -> bool:
    names = names_of(spec.rows)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return looks_like_chats(column.to_pylist(), names) if is_text(kind) else is_chat(kind, names)


def rewards(sums: np.ndarray, targets: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Return the implicit rewards (B, 2) of summed log-probabilities (B, 2), as TRL does: beta times their distance
    from the reference, of orpo beta times their mean; `targets` (B, 5) as of `pair_targets`."""
    relative = sums / targets[:, 2:4] if spec.preference["loss"] == "orpo" else sums - targets[:, :2]
    return np.asarray(spec.preference["beta"] * relative, dtype=np.float32)


def reward_metrics(margins: np.ndarray) -> dict[str, float]:
    """Return the share of pairs (N,) whose chosen answer has the higher reward, and the mean difference."""
    return {"reward_accuracy": float((margins > 0).mean()), "reward_margin": float(margins.mean())}


def _log_of_rest(log: "torch.Tensor") -> "torch.Tensor":
    """Return log(1 - exp(x)) of x below 0, exact near both ends (Machler 2012)."""
    import torch

    near = log > -math.log(2)
    one, other = torch.where(near, log, -1.0), torch.where(near, -1.0, log)  # no NaN in the gradient of the other
    return torch.where(near, torch.log(-torch.expm1(one)), torch.log1p(-torch.exp(other)))


task = Preference()
