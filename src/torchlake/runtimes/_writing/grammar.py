"""Grammars while texts are written: which tokens a row's text may continue with.

    tokens of all rows -> their matchers, in a thread beside the model -> masks of the next step (B, V), in bits

A grammar is compiled once per process; each row has a matcher, a cheap copy. Where the grammar leaves one way to
continue, the token of the tokenizer's own spelling is taken (llguidance's fast-forward tokens), so the words of a
schema are spelled as in the texts that the model has learned. The state of a matcher depends on the row's tokens alone.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from torchlake.models.structured.structure import Structure, compiled
from torchlake.models.structured.tokens import removes_space, token_bytes


class Grammar:
    """A compiled grammar, and the threads that compute masks."""

    def __init__(self, structure: Structure, tokenizer: Any, ends: tuple[int, ...]) -> None:
        import torch
        from llguidance import LLExecutor, LLMatcher

        self.tokens = token_bytes(tokenizer, ends=ends)
        self.matcher = LLMatcher(self.tokens, compiled(structure, space=removes_space(tokenizer)), log_level=0)
        self._executor = LLExecutor(torch.get_num_threads())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, guides: Sequence["Guide"]) -> None:
        """Begin to compute the masks of some rows; `Guide.bits` waits for them."""
        done = self._thread.submit(self._masks, guides)
        for place, guide in enumerate(guides):
            guide.computed = done, place

    def _masks(self, guides: Sequence["Guide"]) -> np.ndarray:
        """Return the bits of the allowed tokens, (B, V/32) int32."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        masks: np.ndarray = allocate_token_bitmask(len(guides), self.tokens.vocab_size)
        free = []
        for place, guide in enumerate(guides):
            forced = guide.forced()
            if forced:
                masks[place] = 0
                masks.view(np.uint32)[place, forced[0] // 32] = np.uint32(1 << forced[0] % 32)
            else:
                free.append((guide.matcher, place))
        if free:
            fill_next_token_bitmask_par(self._executor, free, masks)
        for matcher, place in free:
            if matcher.is_error():
                masks[place] = 0
        return masks


class Guide:
    """What a row's text may continue with."""

    def __init__(self, grammar: Grammar, begun: Sequence[int]) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.computed: tuple[Future[np.ndarray], int] | None = None
        self.complete = False
        "Whether nothing but an end may follow."
        self._look()
        for token in begun:
            self.take(token)

    def take(self, token: int) -> None:
        """Follow the text with its next token; a special one, such as a language that is forced, is not part of it."""
        self.computed = None
        if not self.grammar.tokens.is_special_token(token):
            self.matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        # Not later: the thread that computes masks uses the matcher.
        self.complete = bool(self.matcher.is_stopped() and not self.matcher.is_error())

    def forced(self) -> list[int]:
        """Return the tokens of the only way to continue."""
        found: list[int] = self.matcher.compute_ff_tokens()
        return found

    @property
    def bits(self) -> np.ndarray:
        """The bits of the tokens that may come next, (V/32,) int32; all 0: there is none."""
        if self.computed is None:
            self.grammar.start([self])
        assert self.computed is not None, "it was started"
        done, place = self.computed
        bits: np.ndarray = done.result()[place]
        return bits


def guide_of(structure: Structure, tokenizer: Any, ends: Sequence[int], begun: Sequence[int]) -> Guide:
    """Return the guide of a row whose text begins with some tokens."""
    return Guide(_grammar_of(structure, tokenizer, tuple(ends)), begun)


@lru_cache(maxsize=8)
def _grammar_of(structure: Structure, tokenizer: Any, ends: tuple[int, ...]) -> Grammar:
    return Grammar(structure, tokenizer, ends)


def start(guides: Sequence[Guide]) -> None:
    """Begin to compute the next masks of rows, beside the model."""
    for grammar in {guide.grammar for guide in guides}:
        grammar.start([guide for guide in guides if guide.grammar is grammar])


def allowed(guides: Sequence[Guide], width: int) -> np.ndarray:
    """Return the tokens that may come next, (B, width) bool; a model may have more logits than tokens."""
    start([guide for guide in guides if guide.computed is None])
    bits = np.stack([guide.bits for guide in guides]).view(np.uint8)
    masks = np.unpackbits(bits, axis=1, bitorder="little").view(bool)
    found: np.ndarray = masks[:, :width]
    return found if found.shape[1] == width else np.pad(found, ((0, 0), (0, width - found.shape[1])))
