"""Text generation with a causal language model (GPT, Llama and similar): text in, its continuation out.

Training: each row ends with the tokenizer's end token, and rows are concatenated into blocks (`data/packing.py`). A
long row continues in the next block. Attention crosses row boundaries within a block, as in GPT training; masks for
each row would rule out the fast kernels. Conversations and completions are packed whole (`data/bins.py`), so that an
answer follows its own question only; see `_whole_rows.py`. The loss covers every token, or only answers
(`next_answer_token`).

Scoring: a prompt is a row without an end token. It is never truncated; a prompt that leaves no room for the answer
becomes an error row.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import Problem, TaskSpec
from torchlake.data.features import Features, text_features
from torchlake.errors import DataError
from torchlake.tables.arrays import from_strings, is_blank, is_text, nulls_as_empty
from torchlake.tasks import EXTRA, NO_TARGET, PROMPT, TEXT, Inputs
from torchlake.tasks._chat import NAMES, is_chat, looks_like_chats, names_of, read_chats, render_chats
from torchlake.tasks._null_rows import NULL_INPUT
from torchlake.tasks._whole_rows import TYPES, whole_rows
from torchlake.tasks._writing import WritingTask

if TYPE_CHECKING:
    from torch import nn

PROBLEMS: dict[str, Problem] = {"all": "next_token", "assistant": "next_answer_token", "last": "next_answer_token"}
"The problems, by `data.learn`."
ROWS_AT_ONCE = 1_000

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]
"values (T,) int32, offsets (B+1,) int64, cut (B,) int64: tokens removed from each row."


def tokenize(tokenizer: Any, texts: Sequence[str], *, chat: bool = False) -> Tokens:
    """Tokenize prompts into one flat array; `chat`: they are rendered conversations.

    An empty prompt becomes one token: the tokenizer's begin token, or its end token if it has none.
    """
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def open_ended(ids: list[int]) -> list[int]:
        return (ids[:-1] if ids and ids[-1] == end and not chat else ids) or [begin]

    return flat(map(open_ended, _encoded(tokenizer, texts, chat)))


def documents(tokenizer: Any, texts: Sequence[str], *, chat: bool = False) -> Tokens:
    """Tokenize training texts into one flat array, each complete and followed by one end token."""
    end = tokenizer.eos_token_id
    return flat(ids if ids and ids[-1] == end else [*ids, end] for ids in _encoded(tokenizer, texts, chat))


def flat(rows: Iterable[list[int]]) -> Tokens:
    """Concatenate complete rows of token ids."""
    lengths = [0]

    def counted(row: list[int]) -> list[int]:
        lengths.append(len(row))
        return row

    values = np.fromiter(chain.from_iterable(map(counted, rows)), dtype=np.int32)
    return values, np.cumsum(lengths, dtype=np.int64), np.zeros(len(lengths) - 1, dtype=np.int64)


def _encoded(tokenizer: Any, texts: Sequence[str], chat: bool) -> Iterator[list[int]]:
    """Yield the token ids of every text. A chat template adds the special tokens of a conversation itself."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    for first in range(0, len(texts), ROWS_AT_ONCE):
        rows = texts[first : first + ROWS_AT_ONCE]
        yield from (each.ids for each in backend.encode_batch_fast(rows, add_special_tokens=not chat))


class TextGeneration(WritingTask):
    """A causal language model, which learns its texts and writes their continuations."""

    inputs = {"text": PROMPT, "completion": PROMPT, "tools": EXTRA, "options": EXTRA}
    "Strings or conversations; what follows them; the tools of each conversation; options of answers."
    optional: Collection[str] = ("completion", "tools", "options")
    has_labels = False
    problems = PROBLEMS
    auto_class = "AutoModelForCausalLM"
    hub_task = "text-generation"
    packs = True
    directions = {"loss": "lower", "perplexity": "lower"}
    default_metric = dict.fromkeys(PROBLEMS.values(), "perplexity")

    def load_processor(self, folder: Path | None, spec: TaskSpec, *, scoring: bool) -> Any:
        """Return the tokenizer. Raises DataError if it lacks the end token with which texts are learned to end."""
        tokenizer = super().load_processor(folder, spec, scoring=scoring)
        if not scoring and tokenizer.eos_token_id is None:
            raise DataError(
                f"{folder}: its tokenizer has no end token, which every text that is learned ends with. Name one as "
                "eos_token in tokenizer_config.json."
            )
        return tokenizer

    def holds_chats(self, kind: pa.DataType, spec: TaskSpec) -> bool:
        """Return whether a column of this type holds conversations; in columns of JSON text they are found by rows."""
        return is_chat(kind, names_of(spec.rows))

    def find_columns(self, schema: pa.Schema, spec: TaskSpec, first: Callable[[str], pa.Table] | None) -> TaskSpec:
        """Return the task with the table's columns of conversations and tools, and how its rows are packed.

        The columns are found by name if `spec` has the default ones. JSON text is found by the first rows; without
        them, `spec.rows.chat` says whether strings are JSON.
        """
        text, inputs, names = spec.text, dict(spec.inputs), names_of(spec.rows)
        if text in (TEXT, *NAMES) and text not in schema.names:
            text = next((name for name in NAMES if name in schema.names), text)
        kind = schema.field(text).type if isinstance(text, str) and text in schema.names else pa.null()
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        chat = is_chat(kind, names)
        written = not chat and is_text(plain) and (first is not None or spec.rows.chat)
        if written and first is not None:
            written = looks_like_chats(first(str(text))[text].to_pylist(), names)
        tools = inputs.get("tools", "tools")
        if (chat or written) and tools in schema.names:
            inputs["tools"] = tools
        elif tools == "tools":
            inputs.pop("tools", None)
        pack = spec.rows.pack or ("whole" if chat or written or "completion" in inputs else None)
        return replace(spec, text=text, inputs=inputs, rows=replace(spec.rows, chat=written, pack=pack))

    def feature_types(self, spec: TaskSpec) -> dict[str, pa.DataType]:
        """Return the types of the tokens and, for rows packed whole, of what `_whole_rows.py` says about them."""
        return {**super().feature_types(spec), **(TYPES if spec.whole else {})}

    def sample_inputs(self, spec: TaskSpec, texts: Sequence[str]) -> Inputs:
        """Return texts that are learned whole."""
        return {"text": from_strings(tuple(texts))}

    def features(self, inputs: Inputs, processor: Any, spec: TaskSpec, *, chat: bool = False) -> Features:
        """Return the tokens of prompts; `chat`: they are rendered conversations."""
        return text_features(tokenize(processor, inputs["text"].to_pylist(), chat=chat))

    def examples(
        self, inputs: Inputs, labels: pa.Array | None, processor: Any, spec: TaskSpec
    ) -> tuple[Features, pa.Array | None]:
        """Return the tokens of training texts or conversations, each with an end token."""
        if spec.whole:
            learn = "last" if spec.rows.last else "all" if spec.problem == "next_token" else "answers"
            return whole_rows(processor, inputs, spec.rows, spec.max_length, learn), None
        texts, errors = inputs["text"], dict[int, str]()
        chat = spec.rows.chat or is_chat(texts.type, names_of(spec.rows))
        if chat:
            named: Any = {"names": names_of(spec.rows), "system": spec.rows.system}
            tools = inputs["tools"].to_pylist() if "tools" in inputs else None
            requests, bad = read_chats(texts.to_pylist(), tools, **named)
            requests = {row: replace(each, want="whole") for row, each in requests.items()}
            texts, errors = render_chats(processor, requests, len(texts))
            errors |= bad
        blank = np.flatnonzero(np.asarray(is_blank(texts)))
        errors |= {row: NULL_INPUT for row in blank.tolist() if row not in errors}
        made = documents(processor, nulls_as_empty(texts).to_pylist(), chat=chat)
        return replace(text_features(made), errors=errors), None

    def targets(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the token after each token, (B, L) int64; NO_TARGET where there is nothing to learn."""
        following = np.full(ids.shape, NO_TARGET, dtype=np.int64)
        following[:, :-1] = np.where(mask[:, 1:].astype(bool) & (ids[:, 1:] >= 0), ids[:, 1:], NO_TARGET)
        return following

    def find_chunks(self, model: "nn.Module", row: np.ndarray, *, tokens: int) -> dict[str, Any] | None:
        """Return as JSON how the model can compute its loss without holding a micro-batch's logits; None if it cannot.

        See `_chunked_loss.find`. `row` (L,) int64: token ids; `tokens`: the largest number of one call. A task with a
        loss of its own needs the logits.
        """
        if not self.pairs and type(self).loss_sum is not WritingTask.loss_sum:
            return None
        import torch

        from torchlake.tasks import _chunked_loss

        after = _chunked_loss.find(model, torch.from_numpy(row)[None], dict(self.forward_options), tokens=tokens)
        return None if after is None else asdict(after)

    def chunk_loss(self, model: "nn.Module", found: dict[str, Any], *, compiled: bool) -> None:
        """Let the model return the loss of `loss_sum`, or of pairs the log-probability of each target, if called with
        `targets`; `found` is from `find_chunks`."""
        from torchlake.tasks import _chunked_loss

        _chunked_loss.attach(model, _chunked_loss.AfterHead(**found), compiled=compiled, each=self.pairs)

    def num_targets(self, lengths: np.ndarray, spec: TaskSpec) -> int:
        """Return the number of targets in blocks of these lengths (B,): every token except the first of each block."""
        return int(lengths.sum()) - len(lengths)


task = TextGeneration()
