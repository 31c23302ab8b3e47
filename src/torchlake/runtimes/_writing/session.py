"""Texts with refilling: a row that has ended gives its place to another one at the next step.

    add -> fill: the prompt but its last token -> decode: a token of every row -> choose -> ended rows give their slots

A row's tokens are at positions of their own in its slot, so rows of any length are decoded together. Tokens that are
known already (a prompt, what an earlier attempt has written, what a grammar forces) are filled in, all at once, without
scores. Beginnings that rows share are computed once (`prefix.py`), and one of them is read by all rows from one place
(`attention.py`).

For causal models whose cache holds keys and values of every token. `session_of` tries it on the model itself; other
models are written by `static.py`, as are rows longer than a sliding window and beams.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchlake.errors import ran_out_of_memory
from torchlake.models.generation import NON_FINITE, GenerationOptions
from torchlake.runtimes import EMPTY, Report, Text
from torchlake.runtimes._writing.attention import reading, share_attention
from torchlake.runtimes._writing.cache import Slots, ordinary_window
from torchlake.runtimes._writing.choosing import choose, look_ahead
from torchlake.runtimes._writing.prefix import BLOCK, Beginnings, leader
from torchlake.runtimes._writing.row import Row
from torchlake.runtimes._writing.static import AGREEMENT, StaticWriter, padded

FILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"Tokens of a pass over prompts, padding included."
TRIED = 32
"The most tokens of a row on which a model is tried."
SHARED = 64
"The least tokens of a beginning that rows read from one place; shorter ones are copied."
COMPUTED = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"}
"The settings of a model's generation_config.json that change no score."


class RefillingWriter:
    """A Writer that refills. Rows for which it is not made go to `static`; the others wait for its batches."""

    refills = True

    def __init__(
        self, model: Any, static: StaticWriter, layers: int, window: int | None, shared: int | None = None
    ) -> None:
        self._model, self._static, self._window = model, static, window
        self._least = shared
        "The least tokens of a beginning that is kept once; None: the model cannot read one."
        self._slots, self._beginnings = Slots(layers), Beginnings()
        self._running: list[Row] = []
        "The row of each slot."
        self._last: Row | None = None
        "The row that ended last, if no row is running: its beginning is still in the first slot."
        self._added: list[Row] = []
        self._rows: dict[int, Row] = {}
        "All of them, by number."
        known = inspect.signature(model.forward).parameters
        self._positions = "position_ids" in known
        self._no_head = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._fill_tokens = FILL_TOKENS["cpu" if model.device.type == "cpu" else "cuda"]

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that have not ended."""
        return [*self._rows, *self._static.rows]

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row."""
        if self._apart(ids, options):
            self._static.add(row, ids, options, begun)
        else:
            self._rows[row] = self._static.row_of(row, ids, options, begun)
            self._added.append(self._rows[row])

    def shared(self, ids: np.ndarray, options: GenerationOptions) -> int:
        """Return how many first tokens of a row need no place of its own."""
        return 0 if self._apart(ids, options) else self._slots.shared(ids)

    def _apart(self, ids: np.ndarray, options: GenerationOptions) -> bool:
        longer = self._window is not None and len(ids) + options.max_new_tokens > self._window
        return longer or options.num_beams > 1

    def text(self, row: int) -> Text:
        """Return what is written of a row that has not ended."""
        return self._rows[row].text if row in self._rows else self._static.text(row)

    def step(self, report: Report) -> None:
        """Write a token of every row."""
        try:
            if self._static.rows:
                self._static.step(report)
                return
            with torch.inference_mode():
                done = self._admit()
                for row in self._running:  # the tokens that it got without a pass, but for the last one
                    if len(row) - row.filled > 1:
                        self._fill(row.slot, [row.known[row.filled : -1]], row.filled, row.shared)
                        row.filled = len(row) - 1
                if self._running:
                    for row, token in zip(self._running, choose(self.scores(), self._running).tolist(), strict=True):
                        row.take(token)
                        # A pass for one row pays if it saves more tokens than the batch has rows: the weights are read
                        # once for a pass, whatever it computes.
                        row.force(least=len(self._running) + 1)
                done += self._release()
                look_ahead(self._running)
            for row in done:
                del self._rows[row.number]
            report([row.ended for row in done])
        except BaseException:
            self._running, self._added, self._rows, self._beginnings, self._last = [], [], {}, Beginnings(), None
            self._slots = Slots(len(self._slots.cache))  # after a lack of memory, not even the cache is kept
            self._static.clear()
            raise

    def _admit(self) -> list[Row]:
        """Give the new rows slots, and fill them with all tokens but the last. Returns those that have ended before."""
        ended = [row for row in self._added if row.reason is not None]
        rows = sorted((row for row in self._added if row.reason is None), key=len, reverse=True)
        self._added = []
        if rows:
            self._share(rows)
            for row in rows:
                row.shared = self._slots.shared(row.prompt)
            longest = max(len(row.prompt) + row.limit - row.shared for row in (*rows, *self._running))
            kept = self._running or ([] if self._last is None else [self._last])
            width = min(longest, max((row.filled - row.shared for row in kept), default=0))
            self._slots.reserve(len(self._running) + len(rows), longest, len(kept), width)
        while rows:
            alike, first = leader(rows)
            found = {row.number: self._found(row) for row in rows}
            if first is not None and alike > found[first.number][0]:
                some = [first]  # the others copy from it
            else:
                width, shared = found[rows[0].number][0], rows[0].shared
                # In such a pass each row has a copy of the shared beginning, in one layer at a time.
                most = max(1, self._fill_tokens // max(1, len(rows[0]) - width, shared // 16))
                some = [row for row in rows if (found[row.number][0], row.shared) == (width, shared)][:most]
            self._enter(some, [found[row.number] for row in some])
            entered = {row.number for row in some}
            rows = [row for row in rows if row.number not in entered]
        return ended

    def _share(self, rows: Sequence[Row]) -> None:
        """Compute the longest beginning that at least half of the new rows have, unless another one is read."""
        (length, first), known = leader(rows), [self._slots.shared(row.prompt) for row in rows]
        if self._least is None or first is None or length < self._least or any(row.shared for row in self._running):
            return
        own = self._slots.shared(first.prompt)
        if length <= own or own < max(known):  # rows may be here only because they share what is there
            return
        if self._last is not None and self._last.shared:  # what its slot has comes after what is replaced
            self._beginnings.remove(self._last)
            self._last = None
        self._slots.share(first.prompt[:length])
        self._forward(first.prompt[None, :length], np.arange(length)[None], **self._no_head)
        self._slots.keep_finite()

    def _found(self, row: Row) -> tuple[int, Row | None]:
        """Return how many first tokens of a new row are computed, and the row to copy those from that are not in the
        shared beginning."""
        length, source = self._beginnings.find(row.prompt)
        if source is None or source.shared != row.shared or length <= row.shared:
            return row.shared, None
        return length, source

    def _enter(self, rows: Sequence[Row], found: Sequence[tuple[int, Row | None]]) -> None:
        """Put rows into the next slots; all have as many first tokens in the shared beginning, and copy as many from
        the row that was found for each."""
        slot, offset, shared = len(self._running), found[0][0], rows[0].shared
        if offset > shared:
            self._slots.copy([source.slot for _, source in found if source is not None], slot, offset - shared)
        if self._last is not None:  # its slot is taken
            self._beginnings.remove(self._last)
            self._last = None
        self._fill(slot, [row.known[offset:-1] for row in rows], offset, shared)
        for row in rows:
            row.slot, row.filled = len(self._running), len(row) - 1
            self._running.append(row)
            self._beginnings.add(row)

    def _fill(self, slot: int, tokens: Sequence[np.ndarray], offset: int, shared: int) -> None:
        """Compute keys and values of tokens of the rows in the slots from `slot`, which have `offset` tokens already,
        `shared` of them in the shared beginning."""
        ids, _ = padded(tokens, 0, left=False)
        if ids.shape[1]:
            self._slots.fill(slot, len(ids), offset - shared, ids.shape[1], shared)
            self._forward(ids, np.tile(np.arange(offset, offset + ids.shape[1]), (len(ids), 1)), **self._no_head)

    def scores(self) -> torch.Tensor:
        """Return the scores (B, V) of every row's next token, from its last one."""
        shared = np.array([row.shared for row in self._running], np.int64)
        ends = np.array([row.filled for row in self._running], np.int64) - shared
        ids = np.array([[(row.tokens or row.prompt)[-1]] for row in self._running], np.int64)
        mask = self._slots.decode(ends, shared, self._model.device)
        out = self._forward(ids, (ends + shared)[:, None], attention_mask=mask)
        for row in self._running:
            row.filled += 1
        return out[:, -1]

    def _forward(self, ids: np.ndarray, positions: np.ndarray, **given: Any) -> torch.Tensor:
        device = self._model.device
        own = {"position_ids": torch.from_numpy(positions).to(device)} if self._positions else {}
        cache = {"past_key_values": self._slots.cache, "use_cache": True}
        try:
            scores: torch.Tensor = self._model(torch.from_numpy(ids).to(device), **own, **cache, **given).logits
            if reading.get():
                raise RuntimeError("the attention has not read the shared beginning")
        finally:
            reading.set(())
        return scores

    def _release(self) -> list[Row]:
        """Take out the rows that have ended, and return them. The last ones get their slots."""
        done = [row for row in reversed(self._running) if row.reason is not None]
        for row in done:
            finite = row.text.tokens[-1:].tolist() != [NON_FINITE]
            if not finite:
                self._slots.clean(row.slot)
            last = self._running.pop()
            if finite and not self._running:
                self._last = row
            else:
                self._beginnings.remove(row)
            if last is not row:
                self._slots.copy([last.slot], row.slot, last.filled - last.shared)
                last.slot = row.slot
                self._running[row.slot] = last
        return done


def session_of(model: Any, static: StaticWriter) -> RefillingWriter | None:
    """Return a session for the model if its scores there are those of each row alone, else None."""
    if model.config.is_encoder_decoder or static.settings - COMPUTED:
        return None
    before = model.config._attn_implementation
    for shared in (SHARED, None):
        try:
            layers, window = ordinary_window(model)
            if not layers or (window is not None and window < TRIED):
                return None
            if shared is not None and not share_attention(model):
                continue
            if _agrees(RefillingWriter(model, static, layers, window, shared and BLOCK), model):
                return RefillingWriter(model, static, layers, window, shared)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            if ran_out_of_memory(error):
                raise
        model.set_attn_implementation(before)
    return None


@torch.inference_mode()
def _agrees(session: RefillingWriter, model: Any) -> bool:
    """Return whether rows of several lengths, some that share a beginning, and one that follows another have the scores
    that they have alone."""
    size = model.get_input_embeddings().weight.shape[0]
    tokens = (np.arange(3, TRIED) * 7 % size).astype(np.int64)
    prompts = [tokens[:20], tokens[:5], np.append(tokens[:17], tokens[2]), np.append(tokens[:18], tokens[3:5])]
    options = GenerationOptions(max_new_tokens=TRIED - 20)
    for added, ended in (([0, 1, 2], [0]), ([3], [1]), ([], [])):
        for number in added:
            session.add(number, prompts[number], options)
        session._admit()
        rows, scores = session._running, session.scores()
        for row, found in zip(rows, scores, strict=True):
            alone = model(torch.from_numpy(row.known)[None].to(model.device)).logits[0, -1].float()
            if not (alone - found).abs().max() <= AGREEMENT[model.dtype] * max(1.0, float(alone.abs().max())):
                return False
            row.tokens.append(int(alone.argmax()))
            row.reason = "length" if row.number in ended else None
        session._release()
    return True
