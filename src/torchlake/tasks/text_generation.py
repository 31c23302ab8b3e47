"""One text in, the text that follows it out: a causal language model (GPT, Llama and their like).

Learning: each row is closed by the tokenizer's end token, and rows are laid end to end in blocks (`data/packing.py`).
Nothing is cut off a long row; it goes on in the next block. A token attends to all before it in its block, also to
those of the rows before its own, as in the training of the GPTs: the end token tells where a text begins, and masks for
each row would cost the fast kernels. Of a conversation every token is learned, or the assistant's turns alone
(`next_answer_token`): the rest is read, and adds nothing to the loss. Such conversations are packed whole
(`data/bins.py`), so that an answer has its question before it and nothing else; one that is longer than a block is cut.

Asking: a prompt is a row as the tokenizer gives it, without an end token after it, because the text is to go on. It is
never cut; one that leaves no room for the answer is an error row.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.metrics import DIRECTIONS
from torchlake.models.generation import END, NOTHING, decoded, stop_place
from torchlake.models.load import Problem, TaskSpec
from torchlake.tasks._chat import answers, is_chat, marks_answers, rendered

if TYPE_CHECKING:
    import torch

__all__ = [
    "AUTO_CLASS",
    "DEFAULT_METRIC",
    "DIRECTIONS",
    "FORWARD",
    "NO_TARGET",
    "PACKED",
    "PROBLEMS",
    "answers",
    "conversations",
    "documents",
    "flat",
    "is_chat",
    "loss_metrics",
    "loss_sum",
    "marks_answers",
    "num_targets",
    "output_columns",
    "output_schema",
    "rendered",
    "targets",
    "tokenize",
]

AUTO_CLASS = "AutoModelForCausalLM"
PACKED = True
# A key-value cache is for answers; in training it would keep every layer's keys and values in vain.
FORWARD = {"use_cache": False}
PROBLEMS: dict[str, Problem] = {"all": "next_token", "assistant": "next_answer_token"}
DEFAULT_METRIC: dict[Problem, str] = dict.fromkeys(PROBLEMS.values(), "perplexity")

NO_TARGET = -100
ROWS_AT_ONCE = 1_000
ANSWERS = pa.schema({"generated_text": pa.string(), "generated_tokens": pa.int32(), "finish_reason": pa.string()})

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]
"values (T,) int32, offsets (B+1,) int64, cut (B,) int64: tokens that a row has lost."


def tokenize(tokenizer: Any, texts: Sequence[str], spec: TaskSpec, *, chat: bool = False) -> Tokens:
    """Token ids of all prompts in one flat array; `chat` says that they are rendered conversations.

    A prompt without any token begins with the token that begins or, where there is none, ends a text.
    """
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def open_ended(ids: list[int]) -> list[int]:
        return (ids[:-1] if ids and ids[-1] == end and not chat else ids) or [begin]

    return flat(map(open_ended, _encoded(tokenizer, texts, chat)))


def documents(tokenizer: Any, texts: Sequence[str], spec: TaskSpec, *, chat: bool = False) -> Tokens:
    """The same of texts to learn from: each whole, and closed by one end token."""
    end = tokenizer.eos_token_id
    return flat(ids if ids and ids[-1] == end else [*ids, end] for ids in _encoded(tokenizer, texts, chat))


def conversations(tokenizer: Any, rows: Iterable[list[int]], spec: TaskSpec) -> Tokens:
    """Conversations as `answers` gives them, end to end, each cut to a block on the side that the tokenizer names."""
    at_start = tokenizer.truncation_side == "left"
    whole = list(rows)
    kept = [row[-spec.max_length :] if at_start else row[: spec.max_length] for row in whole]
    values, offsets, cut = flat(kept)
    return values, offsets, cut + [len(row) - len(rest) for row, rest in zip(whole, kept, strict=True)]


def flat(rows: Iterable[list[int]]) -> Tokens:
    """Rows of token ids end to end, whole."""
    lengths = [0]

    def counted(row: list[int]) -> list[int]:
        lengths.append(len(row))
        return row

    values = np.fromiter(chain.from_iterable(map(counted, rows)), dtype=np.int32)
    return values, np.cumsum(lengths, dtype=np.int64), np.zeros(len(lengths) - 1, dtype=np.int64)


def _encoded(tokenizer: Any, texts: Sequence[str], chat: bool) -> Iterator[list[int]]:
    """The token ids of every text. A template has put its own special tokens into a conversation."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    for first in range(0, len(texts), ROWS_AT_ONCE):
        rows = texts[first : first + ROWS_AT_ONCE]
        yield from (each.ids for each in backend.encode_batch_fast(rows, add_special_tokens=not chat))


def targets(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """For each token (B, L) int64 the one after it, which it is to predict; NO_TARGET where there is none to learn."""
    following = np.full(ids.shape, NO_TARGET, dtype=np.int64)
    following[:, :-1] = np.where(mask[:, 1:].astype(bool) & (ids[:, 1:] >= 0), ids[:, 1:], NO_TARGET)
    return following


def loss_sum(logits: "torch.Tensor", targets: "torch.Tensor", spec: TaskSpec) -> "torch.Tensor":
    """The cross entropy summed over all targets, in fp32. `logits` (B, L, V); `targets` (B, L) int64."""
    from torch.nn import functional

    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )


def num_targets(lengths: np.ndarray, spec: TaskSpec) -> int:
    """What the summed loss of blocks of so many tokens (B,) is divided by: all tokens but the first of each block."""
    return int(lengths.sum()) - len(lengths)


def loss_metrics(loss: float) -> dict[str, float]:
    """The perplexity: how many tokens, equally likely, would leave as much doubt as the mean loss says there is."""
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


def output_schema(spec: TaskSpec, all_probabilities: bool) -> pa.Schema:
    """The text, how many tokens the model wrote for it, and why it ended: "stop" or "length"."""
    return ANSWERS


def output_columns(answers: np.ndarray, tokenizer: Any, stop: Sequence[str]) -> pa.Table:
    """The prediction columns of the answers (B, W) int32, rows in order.

    A text is cut before a stop string; its tokens are counted, and the model's end token is not.
    """
    texts, counts, reasons = [], [], []
    for answer in answers:
        written = answer[(answer != NOTHING) & (answer != END)]
        text = decoded(tokenizer, written)
        place = stop_place(text, stop)
        texts.append(text[:place])
        counts.append(len(written))
        reasons.append("length" if place is None and END not in answer else "stop")
    return pa.table([texts, counts, reasons], schema=ANSWERS)
