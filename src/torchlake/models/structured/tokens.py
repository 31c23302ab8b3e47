"""A model folder's tokenizer as llguidance reads it: the bytes of every token, special tokens, and the end tokens.

llguidance reads byte-level and SentencePiece-like tokenizers from tokenizer.json. Vocabularies of pieces without bytes
(T5, mBART) are given to it token by token; such a tokenizer removes the space before its first word, so texts may begin
with one more space. WordPiece and others whose text is not that of its tokens, one after the other, are refused.
"""

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.errors import UsageError
from torchlake.models.structured.choices import check_choices
from torchlake.models.structured.shortest import shortest_text
from torchlake.models.structured.structure import Structure, check_installed, compiled
from torchlake.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPACE = "\u2581"
"Stands for a space in SentencePiece's vocabularies."
PROBE = '{"a": 1}'


def token_bytes(folder: Path, *, ends: Sequence[int], size: int | None = None) -> "LLTokenizer":
    """Return llguidance's tokenizer of a model folder, with the model's end tokens.

    `size`: the model's number of logits, which may be larger than the vocabulary. Raises UsageError for a tokenizer
    whose text is not the sequence of its tokens' bytes.
    """
    from llguidance import LLTokenizer

    tokenizer = load_tokenizer(folder)
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise UsageError(f"{folder}: structured answers need a tokenizer.json, and its tokenizer has none.")
    backend.no_padding()
    backend.no_truncation()
    known = backend.get_vocab_size(with_added_tokens=True)
    stops = [end for end in ends if end < known]
    total = max(size or known, known)
    try:
        made = LLTokenizer(backend.to_str(), n_vocab=total, eos_token=stops)
    except ValueError as error:
        if "decoder type" not in str(error):
            raise
        made = _of_pieces(folder, backend, total, stops)
    return made


def _of_pieces(folder: Path, backend: Any, total: int, ends: Sequence[int]) -> "LLTokenizer":
    """Return the tokenizer of a vocabulary in which a piece is its text, with `SPACE` for a space."""
    from llguidance import LLTokenizer, TokenizerWrapper

    decoder = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        kind = decoder.get("type", "without a decoder")
        raise UsageError(
            f"{folder}: structured answers need a tokenizer whose text is the sequence of its tokens, byte-level or "
            f"SentencePiece; this one is {kind}."
        )
    return LLTokenizer(TokenizerWrapper(_Pieces(backend, total, ends)), eos_token=list(ends))


class _Pieces:
    """What llguidance asks of a tokenizer: the bytes of all tokens, and the tokens of an answer."""

    bos_token_id = None

    def __init__(self, backend: Any, total: int, ends: Sequence[int]) -> None:
        added = backend.get_added_tokens_decoder()
        self.eos_token_id = ends[0]
        self.special_token_ids = [number for number, one in added.items() if one.special]
        known = backend.get_vocab_size(with_added_tokens=True)
        pieces = [backend.id_to_token(number) or f"<{number}>" for number in range(known)]
        self.special_token_ids += [number for number in range(known) if backend.id_to_token(number) is None]
        self.tokens = [piece.replace(SPACE, " ").encode() for piece in pieces]
        self.tokens += [f"<{number}>".encode() for number in range(known, total)]
        self.special_token_ids += range(known, total)
        special = set(self.special_token_ids)
        self._ids = {text: number for number, text in enumerate(self.tokens) if number not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the longest token at each place; bytes without a token end the list."""
        rest, found = text.encode() if isinstance(text, str) else text, []
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((size for size in sizes if rest[:size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[rest[:size]])
            rest = rest[size:]
        return found


def removes_space(tokenizer: Any) -> bool:
    """Return whether decoding removes the space before the first word of an answer."""
    ids = tokenizer.convert_tokens_to_ids([SPACE + "a", SPACE])
    found = [number for number in ids if number is not None and number != tokenizer.unk_token_id]
    return any(not tokenizer.decode([number]).startswith(" ") for number in found)


def check_structure(structure: Structure, folder: Path, *, ends: Sequence[int], new_tokens: int) -> None:
    """Raise UsageError, before a model is loaded, for a structure that no text of at most `new_tokens` tokens fits.

    Raises MissingExtra without llguidance.
    """
    if structure.kind == "choices":
        check_choices(structure.choices, load_tokenizer(folder), new_tokens)
        return
    check_installed(structure)
    compiled(structure)
    tokens = token_bytes(folder, ends=ends)
    least = shortest_text(structure)
    if least is None:
        return
    text, ends_itself = least
    count = fewest_tokens(tokens, text)
    if count is None:
        raise UsageError(f"{structure.kind}: the tokenizer of {folder} has no tokens for {text.decode()[:200]!r}.")
    needed = count + (not ends_itself)  # else the end token is one more
    if needed > new_tokens:
        raise UsageError(
            f"{structure.kind}: the shortest text has {needed} tokens, and max_new_tokens is {new_tokens}. Raise "
            f"max_new_tokens to {needed} or more."
        )


def fewest_tokens(tokens: "LLTokenizer", text: bytes) -> int | None:
    """Return the fewest tokens that write an answer, or None if there are none."""
    known: set[bytes] = set()
    for number in range(tokens.vocab_size):
        if not tokens.is_special_token(number):
            known.add(tokens.decode_bytes([number]))
    longest = max(map(len, known))
    fewest: list[int | None] = [0]
    for stop in range(1, len(text) + 1):
        counts = [
            before + 1
            for start in range(max(0, stop - longest), stop)
            if (before := fewest[start]) is not None and text[start:stop] in known
        ]
        fewest.append(min(counts, default=None))
    return fewest[-1]
