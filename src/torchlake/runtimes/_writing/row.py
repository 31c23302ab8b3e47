"""A row that is written: its prompt, options, and the tokens so far; and how it ends.

A stop string stays in the tokens: `tasks/_writing.py` cuts it off the text.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchlake.models.generation import END, NON_FINITE, STUCK, GenerationOptions, decoded, stop_place
from torchlake.runtimes import Ended, Text
from torchlake.runtimes._writing.grammar import Guide, guide_of


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
    guide: Guide | None = field(init=False, default=None)
    "What the text may continue with; None: with all tokens."
    reason: str | None = None
    "Why it has ended; None: it has not."
    slot: int = -1
    "Its place in a cache,"
    filled: int = 0
    "how many of its tokens are there or in the shared beginning,"
    shared: int = 0
    "and how many of them in the shared beginning."
    drawn: np.ndarray = field(init=False)
    "(W,) float64 in (0, 1), for sampling; none at temperature 0."

    def __post_init__(self) -> None:
        self.drawn = draws(self.prompt, self.options)
        self.ends = (*self.ends, *self.options.stop_token_ids)
        if self.options.logprobs is not None and self.logprobs is None:
            self.logprobs = []
        self._last: int | None = None
        if self.options.structure is not None:
            self.guide = guide_of(self.options.structure, self.tokenizer, self.ends, self.tokens)
        self._end()

    def take(self, token: int) -> None:
        """Add the next token, END or NON_FINITE included; sets `reason` if the text ends there."""
        if token in (NON_FINITE, STUCK) or token in self.ends:
            self.reason, self._last = "stop", token if token < 0 else END
            self._note()
        else:
            self.tokens.append(token)
            self._note()
            if self.guide is not None:
                self.guide.take(token)
            self._end()

    def _note(self) -> None:
        if self.logprobs is not None and self._last != NON_FINITE:
            self.logprobs.append(self.logprob)

    def _end(self) -> None:
        """Set `reason` if the text ends after its last token."""
        stop = self.options.stop
        if self.guide is not None and self.guide.complete:
            self.reason, self._last = "stop", END  # without a step for the end token, which is certain
            if self.logprobs is not None:
                self.logprobs.append(0.0)
        elif (
            stop
            and self.guide is None
            and self.tokens
            and stop_place(decoded(self.tokenizer, self.tokens, marked=True), stop) is not None
        ):
            self.reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"

    def force(self, least: int = 1) -> None:
        """Write the tokens that the grammar leaves no choice for, if there are `least` or more.

        The model reads them together, without a pass for each.
        """
        if self.guide is None or self.logprobs is not None or self.reason is not None:
            return  # the log-probabilities of tokens need their scores
        if len(self.guide.forced()) >= least:
            while self.reason is None and (forced := self.guide.forced()):
                self.take(forced[0])

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
