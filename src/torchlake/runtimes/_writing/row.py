"""A row that is written: its prompt, options, and the tokens so far; and how it ends."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchlake.models.generation import END, NON_FINITE, GenerationOptions, decoded, stop_place
from torchlake.runtimes import Ended, Text

Mask = Callable[[Sequence[int]], np.ndarray | None]
"Returns which tokens may come next, (V,) bool, after those that are written; None: all."


@dataclass(kw_only=True)
class Row:
    """A row in a writer. Cost of stop strings: its text is decoded again at each step, some microseconds per token."""

    number: int
    prompt: np.ndarray
    "(L,) int64"
    options: GenerationOptions
    ends: Sequence[int]
    "Tokens that end the text."
    tokenizer: Any
    tokens: list[int]
    "Those that are written; the end token is none of them."
    limit: int
    "The most tokens of the text."
    reads_apart: bool = False
    "Whether an encoder reads the prompt: the text does not begin with it."
    logprobs: list[float] | None = None
    "The log-probability of each token, of the end token too; None: not asked for."
    logprob: float = 0.0
    "That of the next token, once it is chosen."
    mask: Mask | None = None
    reason: str | None = None
    "Why it has ended; None: it has not."
    slot: int = -1
    "Its place in a cache,"
    filled: int = 0
    "and how many of its tokens are there."
    drawn: np.ndarray = field(init=False)
    "(W,) float64 in (0, 1), for sampling; none at temperature 0."

    def __post_init__(self) -> None:
        self.drawn = draws(self.prompt, self.options)
        self.ends = (*self.ends, *self.options.stop_token_ids)
        if self.options.logprobs is not None and self.logprobs is None:
            self.logprobs = []
        self._last: int | None = None
        if len(self.tokens) >= self.limit:
            self.reason = "length"

    def take(self, token: int) -> None:
        """Add the next token, END or NON_FINITE included; sets `reason` if the text ends there."""
        if token == NON_FINITE or token in self.ends:
            self.reason, self._last = "stop", NON_FINITE if token == NON_FINITE else END
        else:
            self.tokens.append(token)
            stop = self.options.stop
            if stop and stop_place(decoded(self.tokenizer, self.tokens), stop) is not None:
                self.reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.reason = "length"
        if self.logprobs is not None and self._last != NON_FINITE:
            self.logprobs.append(self.logprob)

    def __len__(self) -> int:
        """Return the number of its tokens, those of the prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def known(self) -> np.ndarray:
        """All of its tokens, (L,) int64."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int64)])

    @property
    def text(self) -> Text:
        """What is written so far."""
        if self._last == NON_FINITE:
            return Text(tokens=np.array([NON_FINITE], np.int32))
        tokens = np.array([*self.tokens, *([] if self._last is None else [self._last])], np.int32)
        return Text(tokens=tokens, logprobs=None if self.logprobs is None else np.array(self.logprobs, np.float32))

    @property
    def ended(self) -> Ended:
        """The row as a writer reports it once it has a `reason`."""
        assert self.reason is not None, "it has not ended"
        return Ended(row=self.number, text=self.text, reason=self.reason)


def draws(prompt: np.ndarray, options: GenerationOptions) -> np.ndarray:
    """Return uniform random numbers in (0, 1), (W,) float64, determined by the prompt (L,) and the seed.

    They come from a counter-based generator keyed by a hash of both: in another batch, process or attempt they are the
    same.
    """
    if options.temperature == 0:
        return np.zeros(0)
    own = prompt.astype("<i8").tobytes()
    digest = hashlib.sha256(options.seed.to_bytes(8, "little") + own).digest()
    raw = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(options.max_new_tokens)
    drawn: np.ndarray = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    return drawn
