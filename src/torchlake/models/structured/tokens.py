"""A model folder's tokenizer as llguidance reads it: the bytes of every token, special tokens, and the end tokens.

llguidance reads byte-level and SentencePiece-like tokenizers from tokenizer.json. Vocabularies of pieces without bytes
(T5, mBART) are given to it token by token; such a tokenizer removes the space before its first word, so texts may begin
with one more space. WordPiece and others whose text is not that of its tokens, one after the other, are refused.
"""

import json
import re
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
BYTE = re.compile("<0x([0-9A-F]{2})>")
PROBE = '{"a": 1}'


def token_bytes(tokenizer: Any, *, ends: Sequence[int]) -> "LLTokenizer":
    """Return llguidance's form of a tokenizer, with the model's end tokens.

    Raises UsageError for a tokenizer whose text is not the sequence of its tokens' bytes.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    folder = tokenizer.name_or_path
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise UsageError(f"{folder}: structured answers need a tokenizer.json, and its tokenizer has none.")
    backend.no_padding()
    backend.no_truncation()
    known = [end for end in ends if end < backend.get_vocab_size(with_added_tokens=True)]
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = [one["type"] for one in decoder.get("decoders", [decoder] if decoder else [])]
    if "Metaspace" in kinds:
        made = LLTokenizer(TokenizerWrapper(_Pieces(backend, known)), eos_token=known)
    elif {"ByteLevel", "ByteFallback"} & set(kinds):
        made = LLTokenizer(backend.to_str(), eos_token=known)
    else:
        raise UsageError(
            f"{folder}: structured answers need a tokenizer whose text is the sequence of its tokens, byte-level or "
            f"SentencePiece; this one is {' and '.join(kinds) or 'without a decoder'}."
        )
    probe = backend.encode(PROBE, add_special_tokens=False).ids
    read = made.decode_bytes(probe).decode("utf-8", "replace").lstrip()
    if tokenizer.unk_token_id not in probe and read != PROBE:
        raise UsageError(f"{folder}: structured answers need the bytes of all tokens, and {PROBE} is read as {read!r}.")
    return made


class _Pieces:
    """What llguidance asks of a tokenizer: the bytes of all tokens, and the tokens of an answer."""

    bos_token_id = None

    def __init__(self, backend: Any, ends: Sequence[int]) -> None:
        number_of = range(backend.get_vocab_size(with_added_tokens=True))
        added = backend.get_added_tokens_decoder()
        pieces = [backend.id_to_token(number) for number in number_of]
        self.eos_token_id = ends[0]
        self.special_token_ids = [
            number for number in number_of if pieces[number] is None or (number in added and added[number].special)
        ]
        self.tokens = [_bytes_of(piece or f"<{number}>") for number, piece in enumerate(pieces)]
        special = set(self.special_token_ids)
        self._ids = {text: number for number, text in enumerate(self.tokens) if number not in special}
        self._longest = max(map(len, self._ids), default=1)

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


def _bytes_of(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return piece.replace(SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


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
    tokens = token_bytes(load_tokenizer(folder), ends=ends)
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
