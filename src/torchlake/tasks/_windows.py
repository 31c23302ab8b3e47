"""Long rows as windows: each as long as the model can read, and overlapping the one before.

    a row's tokens     [CLS] a b c d [SEP] [CLS] c d e f [SEP] [CLS] e f g [SEP]        size 6, stride 2
    which window counts       a b c             d e               f g                  half of each overlap

The windows of a row are stored one after the other, all but the last of `size` tokens. A batch of rows with several
windows is padded to a multiple of `size`, and the model, after `attach`, computes each window as a separate row; its
outputs are side by side again. So a long row is still one row to the rest of torchlake. Overlaps cost their share of
the forward pass. `WindowedTask` is the common part of such tasks.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged, offsets_of, pad
from torchlake.data.features import INPUT_IDS, Array, Features, from_arrow
from torchlake.errors import DataError
from torchlake.tasks import TOKEN_TYPES, BaseTask

if TYPE_CHECKING:
    from torch import nn

MASK = "attention_mask"
ROWS_AT_ONCE = 1_000
PLACES = ("starts", "ends")
"Arrays of the features: where each token's part of the text starts and ends; -1 for tokens that are not part of it."
SOURCE = "source"
"An array of the features: each row's text or list of words, as JSON."


class WindowedTask(BaseTask):
    """A task that marks parts of texts of any length, by the tokens of their windows."""

    kept_back = PLACES

    def target_type(self, spec: TaskSpec) -> pa.DataType:
        """Return the type of targets: one number for each token."""
        return pa.list_(pa.int32())

    def encode_labels(self, array: pa.Array, spec: TaskSpec) -> pa.Array:
        """Return the labels as they are; their numbers depend on the tokens. Raises DataError for an invalid one."""
        for row, reason in self.bad_labels(array, spec).items():
            raise DataError(f"the label column {spec.label!r}, row {row} of {len(array)}: {reason}")
        return array

    def collate(
        self, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the tokens (B, L) of the rows' windows, and their places in the texts."""
        tokens = {name: arrays[name] for name in (INPUT_IDS, TOKEN_TYPES) if name in arrays}
        batch = super().collate(tokens, rows, processor, spec)
        for name in PLACES:
            batch[name], _ = pad(ragged(arrays, name), rows, -1)
        return pad_windows(batch, spec.max_length, processor.pad_token_id)

    def text_lengths(self, batch: Mapping[str, np.ndarray], spec: TaskSpec) -> np.ndarray:
        """Return the tokens before the padding; rows of several windows are padded to whole windows."""
        longest, size = batch[MASK].shape[1], spec.max_length
        lengths = batch[MASK][:, :size].sum(axis=1).clip(min=1)
        several = (batch["starts"][:, size:] != -1).any(axis=1)
        found: np.ndarray = np.where(several, longest, lengths)
        return found

    def base_model(self, base: Path | None, spec: TaskSpec, *, empty: bool = False) -> "nn.Module":
        """Return the model that training starts from, which reads windows."""
        model = super().base_model(base, spec, empty=empty)
        attach(model, spec.max_length)
        return model

    def load_model(self, folder: Path, spec: TaskSpec, **options: Any) -> "nn.Module":
        """Return a trained model, which reads windows."""
        model = super().load_model(folder, spec, **options)
        attach(model, spec.max_length)
        return model


def ragged(arrays: Mapping[str, Array], name: str) -> Ragged:
    """Return one of the arrays, which has a number of values for each row."""
    array = arrays[name]
    assert isinstance(array, Ragged), f"rows of {name} have any length"
    return array


def stored_texts(rows: Sequence[Any]) -> Array:
    """Return texts or lists of words as the array SOURCE."""
    return from_arrow(pa.array([json.dumps(row) for row in rows], pa.large_string()).cast(pa.large_binary()))


def without_texts(features: Features) -> Features:
    """Return the features of rows that are trained on, which needs no texts."""
    unused = Ragged(np.zeros(0, np.uint8), np.zeros(len(features) + 1, np.int64))
    return replace(features, arrays={**features.arrays, SOURCE: unused})


def texts_of(features: Features | None, rows: int) -> list[Any]:
    """Return each row's text or list of words; empty ones without features."""
    if features is None:
        return [""] * rows
    source = ragged(features.arrays, SOURCE)
    return [json.loads(each.tobytes()) for each in np.split(source.values, source.offsets[1:-1])]


@dataclass(frozen=True)
class Windows:
    """The tokens of rows, flat, in windows."""

    lengths: np.ndarray
    "(N,) int64, tokens of each row, overlaps and special tokens included."
    ids: np.ndarray
    "(T,) int32"
    types: np.ndarray
    "(T,) uint8, 0 for the first text of a pair, 1 for the second."
    words: np.ndarray
    "(T,) int32, each token's word in its text; -1 for special tokens, and for blanks between words."
    starts: np.ndarray
    "(T,) int32, each token's first character in its text."
    ends: np.ndarray
    "(T,) int32, one past its last character."
    counts: np.ndarray
    "(T,) bool, whether this window decides about the token; False for special tokens, and for one of two copies."
    sequences: np.ndarray
    "(T,) int8, 0 or 1 for the text that a token belongs to, -1 for special tokens."

    def ragged(self, values: np.ndarray) -> Ragged:
        """Return one of the arrays, by row."""
        return Ragged(values, offsets_of(self.lengths))

    def edges_of_words(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places (W,) of the first and the last token of every word, of tokens that a window decides on."""
        places = np.flatnonzero(self.counts)
        rows, words = np.repeat(np.arange(len(self.lengths)), self.lengths)[places], self.words[places]
        new = np.ones(len(places) + 1, dtype=bool)
        new[1:-1] = (words[1:] != words[:-1]) | (rows[1:] != rows[:-1])
        return places[new[:-1]], places[new[1:]]


def encode(
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    size: int,
    stride: int,
    pretokenized: bool = False,
    strategy: str = "longest_first",
) -> Windows:
    """Tokenize texts, lists of words or pairs of texts into windows.

    `strategy` "only_second" cuts the second texts of pairs into windows, each beside the whole first text.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    blank = " " if pretokenized and _glues_words(backend) else ""
    whole = not pretokenized and _leaves_blanks(backend)
    backend.enable_truncation(size, stride=stride, strategy=strategy, direction="right")
    lengths = np.zeros(len(texts), dtype=np.int64)
    pieces: list[tuple[np.ndarray, ...]] = []
    for first in range(0, len(texts), ROWS_AT_ONCE):
        some = texts[first : first + ROWS_AT_ONCE]
        if blank:
            some = [[blank + word if place and word else word for place, word in enumerate(words)] for words in some]
        for row, encoding in enumerate(backend.encode_batch(some, is_pretokenized=pretokenized), start=first):
            windows = [encoding, *encoding.overflowing]
            parts = _between_blanks(texts[row]) if whole and isinstance(texts[row], str) else None
            for place, window in enumerate(windows):
                arrays = _window(window, place, len(windows), stride, overlapping=int(1 in window.sequence_ids))
                pieces.append(arrays if parts is None else _cut_at_blanks(*arrays, parts=parts))
                lengths[row] += len(window.ids)
    backend.no_truncation()
    empty = [np.zeros(0, kind) for kind in (np.int32, np.uint8, np.int32, np.int32, np.int32, bool, np.int8)]
    return Windows(lengths, *(np.concatenate(each) for each in zip(empty, *pieces, strict=True)))


def _glues_words(backend: Any) -> bool:
    """Return whether a list of words has the tokens of its text only if the blanks are put before the words.

    So do byte-level tokenizers, such as RoBERTa's, without `add_prefix_space`: a word's token has the blank before it.
    """
    text, words, spaced = (
        backend.encode(each, is_pretokenized=isinstance(each, list), add_special_tokens=False).ids
        for each in ("a a", ["a", "a"], ["a", " a"])
    )
    return bool(words != text and spaced == text)


def _leaves_blanks(backend: Any) -> bool:
    """Return whether words by `word_ids` have blanks in them: for Llama and Gemma, a string is one word."""
    text = "a a" if backend.normalizer is None else backend.normalizer.normalize_str("a a")
    return backend.pre_tokenizer is None or len(backend.pre_tokenizer.pre_tokenize_str(text)) < 2


def _between_blanks(text: str) -> np.ndarray:
    """Return (3, P + 1) of the parts of a string between blanks: the start with the space before it, the start, the
    end; and a last one that no token reaches."""
    parts = [(part.start(), part.start(1), part.end()) for part in re.finditer(r" ?(\S+)", text)]
    return np.array([*parts, (np.iinfo(np.int32).max,) * 3], dtype=np.int32).T


def _cut_at_blanks(*arrays: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the arrays of one window with the parts of its text between blanks as words.

    A space belongs to the word after it, also as a token, and is not counted as its start. Other blanks are in no word.
    """
    ids, types, _, starts, ends, counts, sequences = arrays
    spaced, first, last = parts
    words = np.searchsorted(last, starts, side="right")
    words = np.where((sequences >= 0) & (ends > spaced[words]), words, -1).astype(np.int32)
    starts = np.where(words >= 0, np.maximum(starts, first[words]), starts)
    return ids, types, words, starts, ends, counts & (words >= 0), sequences


def _window(window: Any, place: int, of: int, stride: int, *, overlapping: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of one window in the order of `Windows`; `overlapping` is the text that is cut into windows."""
    sequences = np.array([-1 if one is None else one for one in window.sequence_ids], dtype=np.int8)
    words = np.array([-1 if one is None else one for one in window.word_ids], dtype=np.int32)
    spans = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    counts = sequences >= 0
    cut = np.flatnonzero(sequences == overlapping)
    if place > 0:
        counts[cut[: stride // 2]] = False
    if place < of - 1 and stride:
        counts[cut[len(cut) - (stride - stride // 2) :]] = False
    ids, types = np.array(window.ids, dtype=np.int32), np.array(window.type_ids, dtype=np.uint8)
    return ids, types, words, spans[:, 0], spans[:, 1], counts, sequences


def pad_windows(batch: Mapping[str, np.ndarray], size: int, pad_id: int) -> dict[str, np.ndarray]:
    """Return the batch (B, L); if it has rows of several windows, padded to an L that is a multiple of `size`."""
    width = batch[MASK].shape[1]
    if width <= size:
        return dict(batch)
    more = -width % size
    fill = {"input_ids": pad_id, "starts": -1, "ends": -1}
    padded = {
        name: np.pad(each, ((0, 0), (0, more)), constant_values=fill.get(name, 0)) for name, each in batch.items()
    }
    padded[MASK][:, ::size] = 1  # attention needs a token to attend to, also in a window of padding
    return padded


def attach(model: "nn.Module", size: int) -> None:
    """Let a model of transformers compute rows of several windows; its outputs are (B, L, ...) as its inputs (B, L)."""
    forward: Callable[..., Any] = model.forward

    def windowed(**batch: Any) -> Any:
        ids = batch["input_ids"]
        if ids.shape[1] <= size:
            return forward(**batch)
        rows = ids.shape[0]
        inside = {
            name: each.reshape(-1, size) if getattr(each, "ndim", 0) == 2 else each for name, each in batch.items()
        }
        answer = forward(**inside)
        for name, each in list(answer.items()):
            # Encoder-decoders also return states and caches, which belong to windows.
            if hasattr(each, "shape") and tuple(each.shape[:2]) == (len(inside["input_ids"]), size):
                answer[name] = each.reshape(rows, ids.shape[1], *each.shape[2:])
        return answer

    model.forward = windowed
